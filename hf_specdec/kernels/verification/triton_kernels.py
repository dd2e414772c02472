"""The kernels of verification by the target's own choices: choose after every node, then walk each tree."""

# pyright: reportGeneralTypeIssues=false
from __future__ import annotations

import triton
import triton.language as tl

from ..random_bits.triton import TOKEN_STREAM
from ..sampling.triton_scores import best_noisy, greatest, sampling_of


@triton.jit
def choices_kernel(
    logits, index, parents, valid, seeds, positions, do_sample, temperatures, thresholds, threshold_ids, best_scores, best_ids,
    vocab, row_stride, num_nodes,
    TREE: tl.constexpr, SAMPLE: tl.constexpr, GREEDY_ONLY: tl.constexpr, HAS_TEMPERATURE: tl.constexpr,
    HAS_THRESHOLDS: tl.constexpr, STEPS: tl.constexpr, LANES: tl.constexpr,
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
    if SAMPLE or GREEDY_ONLY:
        sampled = tl.load(do_sample + row) != 0
    if GREEDY_ONLY:
        wanted = wanted & (not sampled)
    start = split * STEPS * LANES * 32
    best = tl.full([], float("-inf"), tl.float32)
    best_id = tl.full([], 0, tl.int32) + start
    if wanted:
        scores_row = logits + source * row_stride
        temperature, threshold, threshold_id = sampling_of(  # pyright: ignore[reportGeneralTypeIssues]
            row, source, temperatures, thresholds, threshold_ids, HAS_TEMPERATURE, HAS_THRESHOLDS
        )
        if SAMPLE and sampled:
            position = tl.load(positions + row)
            if TREE:
                node = slot - 1
                while node >= 0:
                    position += 1
                    node = tl.load(parents + row * num_nodes + node).to(tl.int32)
            else:
                position += slot
            best, best_id, _top, _sum = best_noisy(
                scores_row, start, vocab, -1, temperature, threshold, threshold_id, tl.load(seeds + row), position, 0,
                TOKEN_STREAM, False, HAS_TEMPERATURE, HAS_THRESHOLDS, STEPS, LANES,
            )  # fmt: skip
        else:
            best, best_id = greatest(
                scores_row, start, tl.minimum(STEPS, tl.cdiv(vocab - start, LANES * 32)), vocab, temperature, threshold,
                threshold_id, HAS_TEMPERATURE, HAS_THRESHOLDS, LANES,
            )  # fmt: skip
    at = place * tl.num_programs(1) + split
    tl.store(best_scores + at, best)
    tl.store(best_ids + at, best_id)


@triton.jit
def walk_kernel(
    best_scores, best_ids, tokens, parents, valid, do_sample, choices_out, path, lengths, next_tokens, num_nodes,
    SPLITS: tl.constexpr, TREE: tl.constexpr, GREEDY_ONLY: tl.constexpr, WALK: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Joins the parts of each node's choice, then walks one row's tree along the choices. A program is a row."""
    row = tl.program_id(0).to(tl.int64)
    slots = tl.arange(0, BLOCK_N)
    exists = slots <= num_nodes
    wanted = True
    if GREEDY_ONLY:
        wanted = tl.load(do_sample + row) == 0
    if wanted:
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
        if WALK:
            is_node = exists & (slots > 0)
            nodes = row * num_nodes + slots - 1
            if TREE:
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
