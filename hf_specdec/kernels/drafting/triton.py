"""Drafting operations in Triton: grow and prune dynamic trees, map draft vocabularies, gather the target's features.

Everything stays on the device, and shapes do not depend on the drafted tokens, so a whole drafting loop can be one CUDA graph.
Ties always go to the lowest index.
"""

# pyright: reportCallIssue=false

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ..dispatch import next_power_of_two

_NO_INDEX = tl.constexpr(2**31 - 1)


@triton.jit
def frontier_kernel(
    frontier_values, log_probs, tokens, limits, children, best_values, best_indices, best_tokens, best_parents, depth,
    frontier, width, keep, HAS_LIMITS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """`reference.next_frontier` for one row. A program is a row."""
    row = tl.program_id(0).to(tl.int64)
    lanes = tl.arange(0, BLOCK)
    count = frontier * width
    exists = lanes < count
    values = tl.load(frontier_values + row * frontier + lanes // width, mask=exists, other=float("-inf"))
    values += tl.load(log_probs + row * count + lanes, mask=exists, other=0.0).to(tl.float32)
    values = tl.where(values == values, values, float("-inf"))  # NaN equals nothing, so no index would be found
    if HAS_LIMITS:
        values = tl.where(tl.load(limits + row) >= depth, values, float("-inf"))
    tl.store(children + row * count + lanes, values, mask=exists)
    left = exists
    for rank in range(keep):
        top = tl.max(tl.where(left, values, float("-inf")), 0)
        best = tl.min(tl.where(left & (values == top), lanes, _NO_INDEX), 0)
        left = left & (lanes != best)
        at = row * keep + rank
        tl.store(best_values + at, top)
        tl.store(best_indices + at, best.to(tl.int64))
        tl.store(best_parents + at, (best // width).to(tl.int64))
        tl.store(best_tokens + at, tl.load(tokens + row * count + best))


def next_frontier(frontier_values, tokens, log_probs, keep, limits=None, depth=0) -> tuple[torch.Tensor, ...]:
    """Grow a dynamic tree by one level (definition, arguments and results: `reference.next_frontier`).

    Memory traffic: 12 bytes read and 4 written per child; one launch, one program per row.
    """
    rows, frontier, width = log_probs.shape
    device = log_probs.device
    children = torch.empty(rows, frontier * width, dtype=torch.float32, device=device)
    values = torch.empty(rows, keep, dtype=torch.float32, device=device)
    indices, chosen, parents = (torch.empty(rows, keep, dtype=torch.int64, device=device) for _ in range(3))
    if rows:
        frontier_kernel[(rows,)](
            frontier_values, log_probs, tokens, limits, children, values, indices, chosen, parents, depth, frontier,
            width, keep, HAS_LIMITS=limits is not None, BLOCK=next_power_of_two(frontier * width), num_warps=4,
        )  # fmt: skip
    return children, values, indices, chosen, parents


@triton.jit
def prune_kernel(
    tokens, values, parents, expanded, out_tokens, out_parents, out_expanded, out_nodes, lengths, size, count,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """`reference.prune_tree` for one row. A program is a row."""
    row = tl.program_id(0).to(tl.int64)
    lanes = tl.arange(0, BLOCK)
    exists = lanes < size
    at = row * size + lanes
    value = tl.load(values + at, mask=exists, other=float("-inf"))
    exists = exists & (value > float("-inf"))
    # Find the count-th greatest value bit by bit, by keys in the order of the values. Entries that are no nodes have key 0.
    bits = tl.where(value == 0.0, 0.0, value).to(tl.int32, bitcast=True)
    key = tl.where(exists, tl.where(bits < 0, ~bits, bits ^ -2147483648), 0).to(tl.uint32, bitcast=True)
    cut = tl.full([], 0, tl.uint32)
    for step in range(32):
        bit = tl.full([], 31, tl.int32) - step
        trial = cut | (tl.full([], 1, tl.uint32) << bit.to(tl.uint32))
        cut = tl.where(tl.sum((key >= trial).to(tl.int32), 0) >= count, trial, cut)
    above = exists & (key > cut)
    equal = exists & (key == cut)
    room = count - tl.sum(above.to(tl.int32), 0)
    kept = above | (equal & (tl.cumsum(equal.to(tl.int32), 0) <= room))
    place = tl.cumsum(kept.to(tl.int32), 0) - 1
    length = tl.sum(kept.to(tl.int32), 0)
    parent = tl.load(parents + at, mask=kept, other=-1).to(tl.int32)
    moved = tl.where(parent < 0, -1, tl.gather(place, tl.maximum(parent, 0), 0))
    to = row * count + place
    tl.store(out_tokens + to, tl.load(tokens + at, mask=kept, other=0), mask=kept)
    tl.store(out_parents + to, moved.to(tl.int64), mask=kept)
    tl.store(out_expanded + to, tl.load(expanded + at, mask=kept, other=-1), mask=kept)
    tl.store(out_nodes + to, lanes.to(tl.int64), mask=kept)
    tl.store(lengths + row, length)
    padding = (lanes >= length) & (lanes < count)
    nothing = tl.zeros([BLOCK], tl.int64)
    tl.store(out_tokens + row * count + lanes, nothing, mask=padding)
    tl.store(out_parents + row * count + lanes, (lanes - 1).to(tl.int64), mask=padding)
    tl.store(out_expanded + row * count + lanes, nothing - 1, mask=padding)
    tl.store(out_nodes + row * count + lanes, nothing - 1, mask=padding)


def prune_tree(tokens, values, parents, expanded, count) -> tuple[torch.Tensor, ...]:
    """Prune trees (definition, arguments and results: `reference.prune_tree`).

    Memory traffic: 28 bytes read per node, 32 written per kept node; one launch, one program per row.
    """
    batch, size = values.shape
    outs = [torch.empty(batch, count, dtype=torch.int64, device=values.device) for _ in range(4)]
    lengths = torch.empty(batch, dtype=torch.int32, device=values.device)
    if batch:
        prune_kernel[(batch,)](
            tokens, values, parents, expanded, *outs, lengths, size, count,
            BLOCK=next_power_of_two(max(size, count)), num_warps=4,
        )  # fmt: skip
    return *outs, lengths


def draft_places(target_ids: torch.Tensor, vocab_size: int) -> torch.Tensor:
    """The inverse table, int32 [V]: the draft id of each target id, or -1. Built once per drafter."""
    places = torch.full((vocab_size,), -1, dtype=torch.int32, device=target_ids.device)
    places[target_ids] = torch.arange(len(target_ids), dtype=torch.int32, device=target_ids.device)
    return places


@triton.jit
def widen_kernel(scores, places, out, draft_size, vocab, fill, BLOCK: tl.constexpr):
    """Scores [R, draft vocabulary] as scores [R, V]; ids without a place get `fill`. A program is a row and BLOCK ids."""
    row = tl.program_id(0).to(tl.int64)
    ids = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    place = tl.load(places + ids, mask=ids < vocab, other=-1)
    value = tl.load(scores + row * draft_size + place, mask=place >= 0, other=0.0)
    value = tl.where(place >= 0, value.to(tl.float32), fill)
    tl.store(out + row * vocab + ids, value, mask=ids < vocab)


def to_target_vocabulary(scores: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
    """Map draft logits [R, Vd] to the target's vocabulary: float32 [R, V]; ids that the drafter lacks get -inf.

    Args:
        scores: float32, bfloat16 or float16, contiguous.
        places: int32 [V] from `draft_places`.

    Memory traffic: the scores read once and float32 [R, V] written once; one launch.
    """
    rows, vocab = scores.shape[0], places.shape[0]
    out = torch.empty(rows, vocab, dtype=torch.float32, device=scores.device)
    if rows:
        widen_kernel[(rows, triton.cdiv(vocab, 2048))](
            scores, places, out, scores.shape[1], vocab, float("-inf"), BLOCK=2048, num_warps=8
        )
    return out


@triton.jit
def gather_kernel(layer0, layer1, layer2, layer3, index, out, hidden, out_stride, BLOCK: tl.constexpr):
    """Copies the rows `index` of up to four layers side by side into `out`. A program is a row, BLOCK columns and a layer."""
    row, which = tl.program_id(0).to(tl.int64), tl.program_id(2)
    layer = layer0
    if which == 1:
        layer = layer1
    elif which == 2:
        layer = layer2
    elif which == 3:
        layer = layer3
    lanes = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    source = tl.load(index + row)
    value = tl.load(layer + source * hidden + lanes, mask=lanes < hidden)
    tl.store(out + row * out_stride + which * hidden + lanes, value.to(out.dtype.element_ty), mask=lanes < hidden)


LAYERS_PER_LAUNCH = 4


def gather_features(layers, index, dtype) -> torch.Tensor:
    """Gather features (definition, arguments and results: `reference.gather_features`).

    Memory traffic: each chosen state read once and written once; one launch per four layers, without the intermediate tensors of
    gathering, casting and joining.
    """
    num_tokens, hidden = layers[0].shape
    if any(layer.shape != (num_tokens, hidden) for layer in layers) or index.dim() != 1:
        raise ValueError("gather_features needs layers [T, H] of one shape and an index [n].")
    layers = [layer.contiguous() for layer in layers]  # they are, except in models that pass views on
    out = torch.empty(len(index), len(layers) * hidden, dtype=dtype, device=index.device)
    if not out.numel():
        return out
    block = min(next_power_of_two(hidden), 2048)
    for first in range(0, len(layers), LAYERS_PER_LAUNCH):
        some = layers[first : first + LAYERS_PER_LAUNCH]
        padded = some + some[:1] * (LAYERS_PER_LAUNCH - len(some))
        gather_kernel[(len(index), triton.cdiv(hidden, block), len(some))](
            *padded, index, out[:, first * hidden :], hidden, out.stride(0), BLOCK=block, num_warps=4
        )
    return out
