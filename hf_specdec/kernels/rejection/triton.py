"""Launch rejection verification of chains and trees (definition: `reference.rejection_walk`).

Deterministic chains take two launches: (1) for every root and node, compute the sum of exp(score) and the token that would be drawn
if the walk ended there, both without the drafted child; (2) one program per row walks its chain with these.

Other drafts take four launches: (1) for every root and inner node, compute sums of exp(score) per block of the vocabulary, without
drafted children; (2) one program per row walks its tree with these sums and single logits; (3) draw the next token from the
residual at the walk's end, split over the vocabulary; (4) merge the splits. Only (3) reads leaves, and it reads one row of logits
per sequence.

The sums exclude children because the residual after a rejected child is rest + later siblings, a sum of positive numbers: 1 - p
would lose all digits when p is near 1. If siblings were drawn from distributions (`probs`), the walking program reads the
vocabulary once per rejection that is followed by another sibling. Chains never need this.
"""

# pyright: reportCallIssue=false

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch

from ..drafts import Drafts, RowStreams, prob_index_on, upload_drafts, upload_streams
from ..launching import as_bytes, ceil_div, next_power_of_two
from ..verification.triton import check_rows, empty_verdict, split_vocabulary, verify_choices
from .triton_kernels import chain_kernel, draw_kernel, rejection_walk_kernel, sums_kernel

BLOCK = 4096  # ids per tile of a program, and per sum


def verify_rejection(
    logits: torch.Tensor,
    index: torch.Tensor,
    tokens: torch.Tensor,
    valid: torch.Tensor,
    seeds: torch.Tensor,
    positions: torch.Tensor,
    steps: torch.Tensor,
    parents: torch.Tensor | None = None,
    probs: torch.Tensor | None = None,
    prob_index: torch.Tensor | None = None,
    do_sample: torch.Tensor | None = None,
    temperature: torch.Tensor | None = None,
    thresholds: tuple[torch.Tensor, torch.Tensor] | None = None,
    out: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None = None,
    block: int = BLOCK,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Speculative sampling of chains and trees, with the numbers of `random_bits`.

    Chains follow Leviathan et al. 2023 and Chen et al. 2023; siblings are tried in order without replacement.

    Args:
        logits: float32, bfloat16 or float16 [R, V], without NaN; ids adjacent, rows may be strided.
        index: int64 [B, N + 1], the row of logits after the root and each node.
        tokens, valid, parents: int64, bool, int64 [B, N]; parents None: chains.
        seeds, positions, steps: int64 [B], each row's stream, the index of the token after its root, and its round.
        probs: float32 [B, M, V], the distributions of the drafts; None: deterministic drafts.
        prob_index: int64 [B, N], which of them each node was drawn from; siblings share one. Required with probs.
        do_sample: bool [B]; rows that do not sample follow the target's argmax. None: all rows sample.
        temperature: float32 [B]; None: 1.
        thresholds: float32 [R] and int32 [R] from `sampling.triton.sampling_thresholds`.
        out: bool [B, N], int32 [B], int64 [B] to write to.

    Returns: accepted path bool [B, N], its length int32 [B], and the token after it int64 [B].

    Memory traffic: for deterministic chains each row of logits once, in 2 launches; otherwise those of inner nodes and one more per
    sequence, in 4 launches. With probs, also one of their rows per sequence. With do_sample, 2 more launches.
    """
    check_rows(logits, index, thresholds)
    if (probs is None) != (prob_index is None) or (probs is not None and not probs.is_contiguous()):
        raise ValueError("probs must be contiguous [B, M, V] and come with prob_index [B, N].")
    if tokens.shape != valid.shape or index.shape[1] != tokens.shape[1] + 1:
        raise ValueError("tokens and valid must be [B, N], index [B, N + 1].")
    out = out if out is not None else empty_verdict(tokens)
    if not len(tokens):
        return out
    if do_sample is not None:
        verify_choices(
            logits, index, tokens, valid, parents, None, None, do_sample, temperature, thresholds, out, True, block
        )
    sampling: dict[str, Any] = dict(
        ROWS=do_sample is not None, HAS_TEMPERATURE=temperature is not None, HAS_THRESHOLDS=thresholds is not None
    )
    walk = _Walk(
        logits, index, tokens, parents, valid.view(torch.uint8), probs, prob_index, (seeds, positions, steps),
        (as_bytes(do_sample), temperature, *(thresholds or (None, None))), sampling, out, block,
    )  # fmt: skip
    if parents is None and probs is None:
        _launch_chains(walk)
    else:
        _launch_drafts(walk)
    return out


class _Walk(NamedTuple):
    """The arguments of `verify_rejection` as the kernels take them."""

    logits: torch.Tensor
    index: torch.Tensor  # pyright: ignore[reportIncompatibleMethodOverride]
    tokens: torch.Tensor
    parents: torch.Tensor | None
    valid: torch.Tensor
    probs: torch.Tensor | None
    prob_index: torch.Tensor | None
    noise: tuple[torch.Tensor, ...]  # seeds, positions, steps
    scores: tuple[torch.Tensor | None, ...]  # do_sample, temperature, thresholds, their ids
    sampling: dict[str, Any]  # flags of the kernels
    out: tuple[torch.Tensor, torch.Tensor, torch.Tensor]
    block: int

    def empty(self, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """Uninitialised memory on the device."""
        return torch.empty(*shape, dtype=dtype, device=self.logits.device)


def _launch_chains(walk: _Walk) -> None:
    """Deterministic chains: read each row of logits once, then walk."""
    (batch, num_nodes), vocab, block = walk.tokens.shape, walk.logits.shape[1], walk.block
    splits, per_split = split_vocabulary(batch * (num_nodes + 1), vocab, block)
    sums = walk.empty(4, batch * (num_nodes + 1), splits)
    chain_kernel[(batch * (num_nodes + 1), splits)](
        walk.logits, walk.index, walk.tokens, walk.valid, *walk.noise, *walk.scores, sums[0], sums[1], sums[2],
        sums[3].view(torch.int32), vocab, walk.logits.stride(0), num_nodes, STEPS=per_split, LANES=block // 32,
        num_warps=ceil_div(block, 1024), **walk.sampling,
    )  # fmt: skip
    _launch_walk(walk, sums, drawn=True)


def _launch_drafts(walk: _Walk) -> None:
    """Trees, and drafts with distributions: sums without children, the walk, and the draw of the next token in two launches."""
    (batch, num_nodes), vocab, block = walk.tokens.shape, walk.logits.shape[1], walk.block
    num_blocks = ceil_div(vocab, block)
    sums = walk.empty(4, batch * (num_nodes + 1), num_blocks)
    parents = walk.tokens if walk.parents is None else walk.parents  # not read for chains
    flags = dict(
        TREE=walk.parents is not None, BLOCK_N=next_power_of_two(num_nodes), BLOCK=block, num_warps=8, **walk.sampling
    )
    if num_nodes:
        splits, per_split = split_vocabulary(batch * (num_nodes + 1), vocab, block)
        sums_kernel[(batch * (num_nodes + 1), splits)](
            walk.logits, walk.index, walk.tokens, parents, walk.valid, *walk.scores, sums[0], sums[1], vocab,
            walk.logits.stride(0), num_nodes, num_blocks, per_split, **flags,
        )  # fmt: skip
    masses, ends, scales = _launch_walk(walk, sums, drawn=False)
    splits, per_split = split_vocabulary(batch, vocab, block)
    best_scores, best_ids = walk.empty(batch, splits), walk.empty(batch, splits, dtype=torch.int32)
    num_probs = 0 if walk.probs is None else walk.probs.shape[1]
    for merge in (False, True):
        draw_kernel[(batch, 1 if merge else splits)](
            walk.logits, walk.index, walk.tokens, parents, walk.valid, walk.probs, walk.prob_index, *walk.noise,
            *walk.scores, masses[0], masses[1], ends, scales, walk.out[1], best_scores, best_ids, walk.out[2], vocab,
            walk.logits.stride(0), num_nodes, num_probs, per_split, splits, MERGE=merge, POINTS=walk.probs is None, **flags,
        )  # fmt: skip


def _launch_walk(walk: _Walk, sums: torch.Tensor, drawn: bool) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Walk each row's tree. Returns what `draw_kernel` reads: masses and kept [2, B, N], ends and scales [B, 2].

    Args:
        sums: float32 [4, B (N + 1), blocks]: maxima and sums, and if `drawn` the scores and ids of the tokens drawn at each node.
    """
    (batch, num_nodes), vocab = walk.tokens.shape, walk.logits.shape[1]
    masses = walk.empty(2, batch, max(num_nodes, 1))
    ends, scales = walk.empty(batch, 2, dtype=torch.int32), walk.empty(batch, 2)
    is_tree, points = walk.parents is not None, walk.probs is None
    path, lengths, next_tokens = walk.out
    rejection_walk_kernel[(batch,)](
        walk.logits, walk.index, walk.tokens, walk.tokens if walk.parents is None else walk.parents, walk.valid, walk.probs,
        walk.prob_index, *walk.noise, *walk.scores, sums[0], sums[1], sums[2], sums[3].view(torch.int32), masses[0], masses[1],
        ends, scales, as_bytes(path), lengths, next_tokens, vocab, walk.logits.stride(0), num_nodes, sums.shape[2],
        0 if walk.probs is None else walk.probs.shape[1], DRAWN=drawn, TREE=is_tree, POINTS=points,
        BLOCK_N=next_power_of_two(num_nodes), BLOCK_S=next_power_of_two(sums.shape[2]), BLOCK=1024 if drawn else walk.block,
        num_warps=1 if not is_tree else 4 if points else 16, **walk.sampling,
    )  # fmt: skip
    return masses, ends, scales


def verify_tokens(
    drafts: Drafts, scores: torch.Tensor, score_rows: np.ndarray, streams: RowStreams, temperature, thresholds
) -> tuple[torch.Tensor, torch.Tensor]:
    """See `rejection.verify_tokens`."""
    device = scores.device
    index, tokens, valid, parents = upload_drafts(drafts, score_rows, device)
    seeds, positions, steps, _ = upload_streams(streams, device)
    prob_index = None if drafts.probs is None else prob_index_on(drafts, device).contiguous()
    path, _, next_tokens = verify_rejection(
        scores, index, tokens, valid, seeds, positions, steps, parents, drafts.probs, prob_index,
        temperature=temperature, thresholds=thresholds,
    )  # fmt: skip
    return path, next_tokens
