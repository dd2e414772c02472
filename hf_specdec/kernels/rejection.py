"""Rejection verification of chains and trees in Triton (definition: `reference.rejection_walk`).

Chains of points take two launches: (1) for every root and node the sum of exp(score) and the token that would be drawn if
the walk ended there, the drafted child left out of both; (2) one program a row walks its chain with these.

Others take four: (1) for every root and inner node, sums of exp(score) per block of the vocabulary, drafted children left
out; (2) one program a row walks its tree with these sums, which needs single logits only; (3) the draw of the next token
over what is left at the walk's end, split over the vocabulary; (4) the merge of the splits. Leaves are read by (3) only,
and (3) reads one row of logits per sequence.

The sums leave children out because what a rejected child leaves is rest + later siblings, a sum of positive numbers:
1 - p would lose all digits where p is near 1. Siblings that were drawn from distributions (`probs`) need a pass of the
walking program over the vocabulary per rejection that another sibling follows; chains never do.
"""

# pyright: reportCallIssue=false

from __future__ import annotations

from typing import Any

import torch

from .compiling import CompileCase
from .rejection_kernels import chain_kernel, draw_kernel, rejection_walk_kernel, sums_kernel
from .verification import (
    as_bytes,
    ceil_div,
    check_rows,
    empty_verdict,
    next_power_of_two,
    split_vocabulary,
    verify_choices,
)

BLOCK = 4096  # ids per step of a program, and per sum


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
    limits: tuple[torch.Tensor, torch.Tensor] | None = None,
    out: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None = None,
    block: int = BLOCK,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Speculative sampling of chains and trees, with the numbers of `random_bits`.

    Leviathan et al. 2023 and Chen et al. 2023 for chains; siblings are tried in order without replacement.

    Args:
        logits: float32, bfloat16 or float16 [R, V], without NaN; ids adjacent, rows may be strided.
        index: int64 [B, N + 1], the row of logits after the root and each node.
        tokens, valid, parents: int64, bool, int64 [B, N]; parents None: chains.
        seeds, positions, steps: int64 [B], each row's stream, the index of the token after its root, and its round.
        probs: float32 [B, M, V], the distributions drafts were drawn from; None: drafts are points.
        prob_index: int64 [B, N], which of them each node was drawn from; siblings share one. Needed with probs.
        do_sample: bool [B], rows to verify so; the others go by the target's argmax. None: all rows sample.
        temperature: float32 [B]; None: 1.
        limits: float32 [R] and int32 [R] from `sampling.sampling_limits`.
        out: bool [B, N], int32 [B], int64 [B] to write to.

    Returns: accepted path bool [B, N], its length int32 [B], and the token after it int64 [B].

    Floor: each row of logits once for chains of points, 2 launches; else the inner nodes' and one more per sequence, 4
    launches. With probs one of their rows per sequence. With do_sample 2 more launches.
    """
    check_rows(logits, index, limits)
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
            logits, index, tokens, valid, parents, None, None, do_sample, temperature, limits, out, True, block
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
    limit_values, limit_ids = limits or (None, None)
    valid, do_sample = valid.view(torch.uint8), as_bytes(do_sample)
    parents = tokens if parents is None else parents  # not read for chains
    sampling: dict[str, Any] = dict(
        ROWS=do_sample is not None, HAS_TEMPERATURE=temperature is not None, HAS_LIMITS=limits is not None
    )
    flags = dict(TREE=is_tree, BLOCK_N=next_power_of_two(num_nodes), BLOCK=block, **sampling)
    scores = (do_sample, temperature, limit_values, limit_ids)
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


def compile_cases() -> list[CompileCase]:
    """All kernels, for chains of points, without parameters and with all, and for trees with everything on."""
    types = {
        **dict.fromkeys(("index", "tokens", "parents", "prob_index", "seeds", "starts", "steps", "next_tokens"), "*i64"),
        **dict.fromkeys(("probs", "temperatures", "limits", "maxima", "sums", "masses", "kept", "scales"), "*fp32"),
        **dict.fromkeys(("limit_ids", "ends", "lengths", "best_ids"), "*i32"),
        **dict.fromkeys(("valid", "do_sample", "path"), "*u8"),
        **dict.fromkeys(("vocab", "row_stride", "num_nodes", "num_blocks", "num_probs"), "i32"),
        **dict.fromkeys(("blocks_per_split", "splits"), "i32"),
        "logits": "*bf16", "best_scores": "*fp32",
    }  # fmt: skip
    unaligned = ("num_nodes", "num_blocks", "num_probs", "blocks_per_split", "splits")
    chain: dict[str, Any] = dict(STEPS=4, LANES=BLOCK // 32, DRAWN=True, BLOCK=1024, BLOCK_N=8, BLOCK_S=8)
    tree: dict[str, Any] = dict(DRAWN=False, BLOCK=BLOCK, BLOCK_N=64, BLOCK_S=32)
    cases = []
    for kind, kernel, full, warps, flags in (
        ("chain points", chain_kernel, False, 4, chain),
        ("chain points fp32", chain_kernel, True, 4, chain),
        ("walk chain points", rejection_walk_kernel, False, 1, chain),
        ("sums tree probs", sums_kernel, True, 8, tree),
        ("walk tree probs", rejection_walk_kernel, True, 16, tree),
        ("draw tree probs", draw_kernel, True, 8, {**tree, "MERGE": False}),
        ("merge tree probs", draw_kernel, True, 8, {**tree, "MERGE": True}),
    ):
        absent = () if full else ("probs", "prob_index", "do_sample", "temperatures", "limits", "limit_ids")
        names = kernel.arg_names
        given = dict(TREE=full, POINTS=not full, ROWS=full, HAS_TEMPERATURE=full, HAS_LIMITS=full, **flags)
        constants = {n: given.get(n) for n in names if n.isupper() or n in absent}
        signature = {n: types[n] for n in names if n not in constants}
        if "fp32" in kind:
            signature["logits"] = "*fp32"
        skewed = tuple(n for n in unaligned if n in names)
        cases.append(CompileCase(f"rejection {kind}", kernel, signature, constants, warps, unaligned=skewed))
    return cases
