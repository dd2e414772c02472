"""Greedy and coupled verification in Triton: from the target's logits to accepted paths and next tokens.

There are two launches for any trees: the target's choice after every root and node, split over the vocabulary; then one program
per row that merges the splits and walks the tree. Nothing crosses to the host, and no softmax or noise is written to memory.
Definitions: `random_bits.gumbel`, `argmax` with the lowest id first, `reference.accepted_nodes`.
"""

# pyright: reportCallIssue=false, reportGeneralTypeIssues=false, reportAssignmentType=false
from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from ..dispatch import as_bytes, ceil_div, next_power_of_two
from ..drafts import upload_drafts, upload_streams
from ..random_bits.triton import TOKEN_STREAM
from ..sampling.triton_scores import best_noisy, greatest, sampling_of


@triton.jit
def choices_kernel(
    logits, index, parents, valid, seeds, positions, do_sample, temperatures, thresholds, threshold_ids, best_scores, best_ids,
    vocab, row_stride, num_nodes,
    STEPS: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    """The best token of one part of a row's vocabulary, with the noise of its position. A program is a node and a part."""
    place = tl.program_id(0)
    split = tl.program_id(1)
    row = place // (num_nodes + 1)
    slot = place % (num_nodes + 1)  # 0: the root
    # Issue all loads before the first branch, so that they overlap.
    source = tl.load(index + place).to(tl.int64)
    wanted = tl.load(valid + row * num_nodes + slot - 1, mask=slot > 0, other=1) != 0
    sampled = False
    if do_sample is not None:
        sampled = tl.load(do_sample + row) != 0
    start = split * STEPS * LANES * 32
    best = tl.full([], float("-inf"), tl.float32)
    best_id = tl.full([], 0, tl.int32) + start
    if wanted:
        scores_row = logits + source * row_stride
        KIND: tl.constexpr = (temperatures is not None, thresholds is not None)
        sampling = sampling_of(row, source, temperatures, thresholds, threshold_ids)
        if do_sample is not None and sampled:
            position = tl.load(positions + row)
            if parents is not None:
                node = slot - 1
                while node >= 0:
                    position += 1
                    node = tl.load(parents + row * num_nodes + node).to(tl.int32)
            else:
                position += slot
            best, best_id, _top, _sum = best_noisy(
                scores_row, start, vocab, -1, sampling, tl.load(seeds + row), position, 0,
                TOKEN_STREAM, False, KIND, STEPS, LANES,
            )  # fmt: skip
        else:
            steps = tl.minimum(STEPS, tl.cdiv(vocab - start, LANES * 32))
            best, best_id = greatest(scores_row, start, steps, vocab, sampling, KIND, LANES)
    at = place * tl.num_programs(1) + split
    tl.store(best_scores + at, best)
    tl.store(best_ids + at, best_id)


@triton.jit
def walk_kernel(
    best_scores, best_ids, tokens, parents, valid, choices_out, path, lengths, next_tokens, num_nodes,
    SPLITS: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Joins the parts of each node's choice, then walks one row's tree along the choices. A program is a row."""
    row = tl.program_id(0).to(tl.int64)
    slots = tl.arange(0, BLOCK_N)
    exists = slots <= num_nodes
    places = row * (num_nodes + 1) + slots
    choices = tl.load(best_ids + places * SPLITS, mask=exists, other=0).to(tl.int64)
    if SPLITS > 1:
        best = tl.load(best_scores + places * SPLITS, mask=exists, other=0.0)
        for split in range(1, SPLITS):
            score = tl.load(best_scores + places * SPLITS + split, mask=exists, other=0.0)
            split_ids = tl.load(best_ids + places * SPLITS + split, mask=exists, other=0).to(tl.int64)
            # ties go to the earlier split, which has the lower id
            choices = tl.where(score > best, split_ids, choices)
            best = tl.maximum(score, best)
    tl.store(choices_out + places, choices, mask=exists)
    if tokens is not None:
        is_node = exists & (slots > 0)
        nodes = row * num_nodes + slots - 1
        if parents is not None:
            parent_slots = tl.load(parents + nodes, mask=is_node, other=-1).to(tl.int32) + 1
        else:
            parent_slots = tl.maximum(slots - 1, 0)
        drafted = tl.load(tokens + nodes, mask=is_node, other=-1)
        match = is_node & (tl.load(valid + nodes, mask=is_node, other=0) != 0)
        match = (match & (drafted == tl.gather(choices, parent_slots, 0))).to(tl.int32)
        frontier = (slots == 0).to(tl.int32)  # the nodes reached, depth by depth
        depth = tl.where(slots == 0, 0, -1)
        level = tl.full([], 0, tl.int32)
        alive = tl.full([], 1, tl.int32)
        while alive > 0:
            frontier = tl.gather(frontier, parent_slots, 0) * match
            alive = tl.max(frontier, 0)
            level += alive
            depth = tl.where(frontier > 0, level, depth)
        last = tl.min(tl.where(depth == level, slots, BLOCK_N), 0)  # the first of the deepest
        tl.store(lengths + row, level)
        tl.store(next_tokens + row, tl.sum(tl.where(slots == last, choices, 0), 0))
        on_path = tl.zeros([BLOCK_N], tl.int32)
        while last > 0:
            on_path = tl.where(slots == last, 1, on_path)
            last = tl.sum(tl.where(slots == last, parent_slots, 0), 0)
        tl.store(path + nodes, on_path.to(tl.int8), mask=is_node)


# ---- launches ----

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
    tokens: torch.Tensor | None = None,
    verdict: tuple[Any, Any, Any] = (None, None, None),
) -> torch.Tensor:
    """The target's own token after the root and after each node: int64 [B, N + 1], 0 after padding.

    Greedy rows take the argmax of their scores. Rows that sample take the argmax of scores + Gumbel noise of the position
    (`random_bits.gumbel`, stream TOKEN_STREAM, step 0). Ties go to the lowest id.

    Args:
        logits: float32, bfloat16 or float16 [R, V], without NaN; ids adjacent, rows may be strided.
        index: int64 or int32 [B, N + 1], contiguous, the row of logits after the root and each node.
        valid: bool [B, N], which entries are nodes.
        parents: int64 [B, N], -1: the root; None: chains.
        seeds, positions: int64 [B], each row's stream and the index of the token after its root. Required with do_sample.
        do_sample: bool [B]; None: all rows are greedy.
        temperature: float32 [B]; None: 1.
        thresholds: float32 [R] and int32 [R] from `sampling.triton.sampling_thresholds`; None: no token is removed.
        tokens, verdict: drafted ids int64 [B, N], contiguous, and the results of `verify_choices` to write; None: walk no tree.

    Memory traffic: the logits of existing nodes read once; 2 launches. Rows that sample also compute a fourth of a Philox call per 8 ids
    to bound their noise, and the noise of a few ids.
    """
    (batch, width), (vocab, device) = index.shape, (logits.shape[1], logits.device)
    splits, steps = split_vocabulary(batch * width, vocab, block)
    scores = torch.empty(batch * width, splits, dtype=torch.float32, device=device)
    ids = torch.empty(batch * width, splits, dtype=torch.int32, device=device)
    choices = torch.empty(batch, width, dtype=torch.int64, device=device)
    if batch:
        choices_kernel[(batch * width, splits)](
            logits, index, parents, as_bytes(valid), seeds, positions, as_bytes(do_sample), temperature,
            *(thresholds or (None, None)), scores, ids, vocab, logits.stride(0), width - 1, STEPS=steps,
            LANES=block // 32, num_warps=ceil_div(block, 1024),
        )  # fmt: skip
        path, lengths, next_tokens = verdict
        walk_kernel[(batch,)](
            scores, ids, tokens, parents, as_bytes(valid), choices, as_bytes(path), lengths, next_tokens, width - 1,
            SPLITS=splits, BLOCK_N=next_power_of_two(width), num_warps=1 if parents is None else 4,
        )  # fmt: skip
    return choices


def verify_choices(
    logits,
    index,
    tokens,
    valid,
    parents=None,
    *,
    out: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None = None,
    **sampling: Any,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Walk each tree along `target_choices` into `out`: path bool [B, N], length int32 [B], next token int64 [B]."""
    out = out if out is not None else empty_verdict(tokens)
    target_choices(logits, index, valid, parents, tokens=tokens, verdict=out, **sampling)
    return out


def empty_verdict(tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Uninitialised outputs for drafts [B, N]."""
    batch, device = tokens.shape[0], tokens.device
    return (
        torch.empty(tokens.shape, dtype=torch.bool, device=device),
        torch.empty(batch, dtype=torch.int32, device=device),
        torch.empty(batch, dtype=torch.int64, device=device),
    )


def follow_choices(drafts, scores, score_rows, streams, temperature=None, thresholds=None):
    """See `reference.follow_choices`."""
    index, tokens, valid, parents = upload_drafts(drafts, score_rows, scores.device)
    sampling: dict[str, Any] = {"temperature": temperature, "thresholds": thresholds}
    if any(streams.do_sample):
        seeds, positions, _, do_sample = upload_streams(streams, scores.device)
        sampling |= {"seeds": seeds, "positions": positions, "do_sample": do_sample}
    path, _, next_tokens = verify_choices(scores, index, tokens, valid, parents, **sampling)
    return path, next_tokens


def greedy_tokens(scores: torch.Tensor) -> torch.Tensor:
    """See `reference.greedy_tokens`."""
    index = torch.arange(len(scores), device=scores.device)[:, None]
    return target_choices(scores, index, index.new_zeros(len(scores), 0, dtype=torch.bool)).squeeze(1)
