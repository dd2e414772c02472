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

from typing import Any

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
    batch, num_nodes = tokens.shape
    if (probs is None) != (prob_index is None) or (probs is not None and not probs.is_contiguous()):
        raise ValueError("probs must be contiguous [B, M, V] and come with prob_index [B, N].")
    if tokens.shape != valid.shape or index.shape[1] != num_nodes + 1:
        raise ValueError("tokens and valid must be [B, N], index [B, N + 1].")
    out = out if out is not None else empty_verdict(tokens)
    if not batch:
        return out
    if do_sample is not None:
        verify_choices(
            logits, index, tokens, valid, parents, None, None, do_sample, temperature, thresholds, out, True, block
        )
    vocab, device = logits.shape[1], logits.device
    path, lengths, next_tokens = out
    is_tree, points = parents is not None, probs is None
    in_one_read = points and not is_tree
    splits, per_split = split_vocabulary(batch * (num_nodes + 1), vocab, block)
    num_blocks = splits if in_one_read else ceil_div(vocab, block)
    maxima = torch.empty(4, batch * (num_nodes + 1), num_blocks, dtype=torch.float32, device=device)
    masses = torch.empty(2, batch, max(num_nodes, 1), dtype=torch.float32, device=device)
    ends = torch.empty(batch, 2, dtype=torch.int32, device=device)
    scales = torch.empty(batch, 2, dtype=torch.float32, device=device)
    best_scores, best_ids = maxima[2], maxima[3].view(torch.int32)
    threshold_values, threshold_ids = thresholds or (None, None)
    valid, do_sample = valid.view(torch.uint8), as_bytes(do_sample)
    parents = tokens if parents is None else parents  # not read for chains
    sampling: dict[str, Any] = dict(
        ROWS=do_sample is not None, HAS_TEMPERATURE=temperature is not None, HAS_THRESHOLDS=thresholds is not None
    )
    flags = dict(TREE=is_tree, BLOCK_N=next_power_of_two(num_nodes), BLOCK=block, **sampling)
    scores = (do_sample, temperature, threshold_values, threshold_ids)
    noise = (seeds, positions, steps)
    num_probs = 0 if probs is None else probs.shape[1]
    if in_one_read:
        chain_kernel[(batch * (num_nodes + 1), splits)](
            logits, index, tokens, valid, *noise, *scores, maxima[0], maxima[1], best_scores, best_ids, vocab,
            logits.stride(0), num_nodes, STEPS=per_split, LANES=block // 32, num_warps=ceil_div(block, 1024),
            **sampling,
        )  # fmt: skip
    elif num_nodes:
        sums_kernel[(batch * (num_nodes + 1), splits)](
            logits, index, tokens, parents, valid, *scores, maxima[0], maxima[1], vocab, logits.stride(0), num_nodes,
            num_blocks, per_split, **flags, num_warps=8,
        )  # fmt: skip
    rejection_walk_kernel[(batch,)](
        logits, index, tokens, parents, valid, probs, prob_index, *noise, *scores, maxima[0], maxima[1], best_scores,
        best_ids, masses[0], masses[1], ends, scales, as_bytes(path), lengths, next_tokens, vocab, logits.stride(0),
        num_nodes, num_blocks, num_probs, DRAWN=in_one_read, POINTS=points, BLOCK_S=next_power_of_two(num_blocks),
        num_warps=1 if not is_tree else 4 if points else 16, **{**flags, "BLOCK": 1024 if in_one_read else block},
    )  # fmt: skip
    if in_one_read:
        return out
    splits, per_split = split_vocabulary(batch, vocab, block)
    best_scores = torch.empty(batch, splits, dtype=torch.float32, device=device)
    best_ids = torch.empty(batch, splits, dtype=torch.int32, device=device)
    for merge in (False, True):
        draw_kernel[(batch, 1 if merge else splits)](
            logits, index, tokens, parents, valid, probs, prob_index, *noise, *scores, masses[0], masses[1], ends,
            scales, lengths, best_scores, best_ids, next_tokens, vocab, logits.stride(0), num_nodes, num_probs,
            per_split, splits, MERGE=merge, POINTS=points, **flags, num_warps=8,
        )  # fmt: skip
    return out


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
