"""Launch greedy and coupled verification: from the target's logits to accepted paths and next tokens.

There are two launches for any trees: the target's choice after every root and node, split over the vocabulary; then one program
per row that merges the splits and walks the tree. Nothing crosses to the host, and no softmax or noise is written to memory.
Definitions: `random_bits.gumbel`, `argmax` with the lowest id first, `reference.accepted_nodes`.
"""

# pyright: reportCallIssue=false

from __future__ import annotations

import numpy as np
import torch

from ..drafts import Drafts, RowStreams, upload_drafts, upload_streams
from ..launching import as_bytes, ceil_div, next_power_of_two
from .triton_kernels import choices_kernel, walk_kernel

BLOCK = 4096  # ids per tile of a program: 128 lanes
MOST_STEPS = 4  # the most tiles of a program
_PROGRAMS = 1056  # wanted at least: an H100 has 132 multiprocessors, and each runs 8 or more programs of 128 threads


def split_vocabulary(num_rows: int, vocab_size: int, block: int) -> tuple[int, int]:
    """How many programs share a row of logits, and how many blocks each reads: 1, 2 or 4, because loops are unrolled.

    Few rows are split until the GPU is full.
    """
    blocks = max(ceil_div(vocab_size, block), 1)
    steps = MOST_STEPS
    while steps > 1 and num_rows * ceil_div(blocks, steps) < _PROGRAMS:
        steps //= 2
    while steps > 1 and steps >= 2 * blocks:
        steps //= 2
    return ceil_div(blocks, steps), steps


def check_rows(logits: torch.Tensor, index: torch.Tensor, thresholds: tuple[torch.Tensor, torch.Tensor] | None) -> None:
    """Raise ValueError if shapes do not fit."""
    if logits.dim() != 2 or logits.stride(1) != 1:
        raise ValueError(f"logits must be [R, V] with adjacent ids, not {tuple(logits.shape)} by {logits.stride()}.")
    if index.dim() != 2 or not index.is_contiguous():
        raise ValueError("index must be a contiguous [B, N + 1].")
    if thresholds is not None and any(each.shape != logits.shape[:1] for each in thresholds):
        raise ValueError("thresholds must be two tensors [R].")


def _launch_choices(
    logits, index, parents, valid, seeds, positions, do_sample, temperature, thresholds, greedy_only, block
) -> tuple[torch.Tensor, torch.Tensor, int]:
    """Launch the choice after every root and node. Returns scores and ids of the best token per (row, slot, split), and the splits."""
    check_rows(logits, index, thresholds)
    batch, width = index.shape
    splits, steps = split_vocabulary(batch * width, logits.shape[1], block)
    scores = torch.empty(batch * width, splits, dtype=torch.float32, device=logits.device)
    ids = torch.empty(batch * width, splits, dtype=torch.int32, device=logits.device)
    sample = do_sample is not None and not greedy_only
    if sample and (seeds is None or positions is None):
        raise ValueError("Rows that sample need seeds and positions.")
    if batch:
        choices_kernel[(batch * width, splits)](
            logits, index, parents, as_bytes(valid), seeds, positions, as_bytes(do_sample), temperature,
            *(thresholds or (None, None)), scores, ids, logits.shape[1], logits.stride(0), width - 1,
            TREE=parents is not None, SAMPLE=sample, GREEDY_ONLY=greedy_only, HAS_TEMPERATURE=temperature is not None,
            HAS_THRESHOLDS=thresholds is not None, STEPS=steps, LANES=block // 32, num_warps=ceil_div(block, 1024),
        )  # fmt: skip
    return scores, ids, splits


def target_choices(
    logits: torch.Tensor,
    index: torch.Tensor,
    valid: torch.Tensor,
    parents: torch.Tensor | None = None,
    seeds: torch.Tensor | None = None,
    positions: torch.Tensor | None = None,
    do_sample: torch.Tensor | None = None,
    temperature: torch.Tensor | None = None,
    thresholds: tuple[torch.Tensor, torch.Tensor] | None = None,
    block: int = BLOCK,
) -> torch.Tensor:
    """The target's own token after the root and after each node: int64 [B, N + 1], 0 after padding.

    Greedy rows take the argmax of their scores. Rows that sample take the argmax of scores + Gumbel noise of the position
    (`random_bits.gumbel`, stream TOKEN_STREAM, step 0). Ties go to the lowest id.

    Args:
        logits: float32, bfloat16 or float16 [R, V], without NaN; ids adjacent, rows may be strided.
        index: int64 or int32 [B, N + 1], the row of logits after the root and each node.
        valid: bool [B, N], which entries are nodes.
        parents: int64 [B, N], -1: the root; None: chains.
        seeds, positions: int64 [B], each row's stream and the index of the token after its root. Required with do_sample.
        do_sample: bool [B]; None: all rows are greedy.
        temperature: float32 [B]; None: 1.
        thresholds: float32 [R] and int32 [R] from `sampling.triton.sampling_thresholds`; None: no token is removed.

    Memory traffic: the logits of existing nodes read once; 2 launches.
    """
    scores, ids, splits = _launch_choices(
        logits, index, parents, valid, seeds, positions, do_sample, temperature, thresholds, False, block
    )
    batch, width = index.shape
    choices = torch.empty(batch, width, dtype=torch.int64, device=logits.device)
    if batch:
        walk_kernel[(batch,)](
            scores, ids, None, None, None, None, choices, None, None, None, width - 1,
            SPLITS=splits, TREE=False, GREEDY_ONLY=False, WALK=False, BLOCK_N=next_power_of_two(width), num_warps=4,
        )  # fmt: skip
    return choices


def verify_choices(
    logits: torch.Tensor,
    index: torch.Tensor,
    tokens: torch.Tensor,
    valid: torch.Tensor,
    parents: torch.Tensor | None = None,
    seeds: torch.Tensor | None = None,
    positions: torch.Tensor | None = None,
    do_sample: torch.Tensor | None = None,
    temperature: torch.Tensor | None = None,
    thresholds: tuple[torch.Tensor, torch.Tensor] | None = None,
    out: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None = None,
    greedy_rows_only: bool = False,
    block: int = BLOCK,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Walk each tree along the target's own choices (definition: `reference.accepted_nodes`).

    Args:
        tokens: int64 [B, N], the drafted ids. For the others, see `target_choices`.
        out: bool [B, N], int32 [B], int64 [B] to write to.
        greedy_rows_only: skip rows that sample; their logits are not read and their outputs not written.

    Returns: accepted path bool [B, N], its length int32 [B], and the token after it int64 [B].

    Memory traffic: the logits of existing nodes read once; 2 launches. Coupled rows also compute a fourth of a Philox call per 8 ids
    to bound their noise, and the noise of a few ids.
    """
    if tokens.shape != valid.shape or index.shape[1] != tokens.shape[1] + 1 or not tokens.is_contiguous():
        raise ValueError("tokens and valid must be contiguous [B, N], index [B, N + 1].")
    scores, ids, splits = _launch_choices(
        logits, index, parents, valid, seeds, positions, do_sample, temperature, thresholds, greedy_rows_only, block
    )
    path, lengths, next_tokens = out if out is not None else empty_verdict(tokens)
    if tokens.shape[0]:
        choices = torch.empty(index.shape, dtype=torch.int64, device=logits.device)
        launch_walk(
            scores, ids, splits, tokens, parents, valid, do_sample if greedy_rows_only else None, choices,
            (path, lengths, next_tokens),
        )  # fmt: skip
    return path, lengths, next_tokens


def launch_walk(scores, ids, splits, tokens, parents, valid, only_greedy_of, choices, out) -> None:
    """Merge the splits and walk the trees; `only_greedy_of`: do_sample flags of rows to skip, or None."""
    batch, num_nodes = tokens.shape
    walk_kernel[(batch,)](
        scores, ids, tokens, parents, as_bytes(valid), as_bytes(only_greedy_of), choices, as_bytes(out[0]), out[1],
        out[2], num_nodes, SPLITS=splits, TREE=parents is not None, GREEDY_ONLY=only_greedy_of is not None, WALK=True,
        BLOCK_N=next_power_of_two(num_nodes + 1), num_warps=1 if parents is None else 4,
    )  # fmt: skip


def empty_verdict(tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Uninitialised outputs for drafts [B, N]."""
    batch, device = tokens.shape[0], tokens.device
    return (
        torch.empty(tokens.shape, dtype=torch.bool, device=device),
        torch.empty(batch, dtype=torch.int32, device=device),
        torch.empty(batch, dtype=torch.int64, device=device),
    )


def follow_choices(
    drafts: Drafts, scores: torch.Tensor, score_rows: np.ndarray, streams: RowStreams, temperature, thresholds
) -> tuple[torch.Tensor, torch.Tensor]:
    """See `verification.follow_choices`."""
    index, tokens, valid, parents = upload_drafts(drafts, score_rows, scores.device)
    seeds = positions = do_sample = None
    if any(streams.do_sample):
        seeds, positions, _, do_sample = upload_streams(streams, scores.device)
    path, _, next_tokens = verify_choices(
        scores, index, tokens, valid, parents, seeds, positions, do_sample, temperature, thresholds
    )
    return path, next_tokens
