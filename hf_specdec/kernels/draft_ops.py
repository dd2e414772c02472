"""The drafting side in Triton: growing and pruning dynamic trees, draft vocabularies, features of accepted tokens.

Everything stays on the device and shapes do not depend on what was drafted, so that a whole drafting loop can be one CUDA
graph. Ties go to the lowest index everywhere.
"""

# pyright: reportCallIssue=false

from __future__ import annotations

import torch
import triton
import triton.language as tl

from .compiling import CompileCase
from .verification import as_bytes, next_power_of_two

_NO_INDEX = tl.constexpr(2**31 - 1)


@triton.jit
def _frontier_kernel(
    frontier_values, log_probs, tokens, limits, children, best_values, best_indices, best_tokens, best_parents, depth,
    frontier, width, keep, HAS_LIMITS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    lanes = tl.arange(0, BLOCK)
    count = frontier * width
    exists = lanes < count
    values = tl.load(frontier_values + row * frontier + lanes // width, mask=exists, other=float("-inf"))
    values += tl.load(log_probs + row * count + lanes, mask=exists, other=0.0).to(tl.float32)
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


def next_frontier(
    frontier_values: torch.Tensor,
    tokens: torch.Tensor,
    log_probs: torch.Tensor,
    keep: int,
    limits: torch.Tensor | None = None,
    depth: int = 0,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """One level of a dynamic tree (definition, arguments and results: `reference.next_frontier`).

    Floor: 12 bytes read and 4 written a child; one launch, one program a row.
    """
    rows, frontier, width = log_probs.shape
    if frontier_values.shape != (rows, frontier) or tokens.shape != log_probs.shape or not 0 < keep <= frontier * width:
        raise ValueError("next_frontier needs values [R, F], tokens and log_probs [R, F, k], and 0 < keep <= F * k.")
    device = log_probs.device
    children = torch.empty(rows, frontier * width, dtype=torch.float32, device=device)
    values = torch.empty(rows, keep, dtype=torch.float32, device=device)
    indices, chosen, parents = (torch.empty(rows, keep, dtype=torch.int64, device=device) for _ in range(3))
    if rows:
        _frontier_kernel[(rows,)](
            frontier_values, log_probs, tokens, limits, children, values, indices, chosen, parents, depth, frontier,
            width, keep, HAS_LIMITS=limits is not None, BLOCK=next_power_of_two(frontier * width), num_warps=4,
        )  # fmt: skip
    return children, values, indices, chosen, parents


@triton.jit
def _prune_kernel(
    tokens, values, parents, expanded, out_tokens, out_parents, out_expanded, out_nodes, lengths, size, count,
    BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    lanes = tl.arange(0, BLOCK)
    exists = lanes < size
    at = row * size + lanes
    value = tl.load(values + at, mask=exists, other=float("-inf"))
    exists = exists & (value > float("-inf"))
    # The count-th greatest value, bit by bit of its ordered key; -inf, and what is no node, has the least keys.
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


def prune_tree(
    tokens: torch.Tensor, values: torch.Tensor, parents: torch.Tensor, expanded: torch.Tensor, count: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Keep the `count` likeliest nodes of each pool, in their order, and renumber their parents (EAGLE-2's last step).

    Args:
        tokens, parents, expanded: int64 [B, P]; parents stand before children and are at least as likely (-1: the root).
        values: float32 [B, P], path log-probabilities, -inf where there is no node.

    Returns: tokens, parents, expanded and places in the pool, int64 [B, count], and lengths int32 [B]. Of equally likely
        nodes the first are kept. Padding has token 0, the entry before it as parent, and -1 for the other two.

    Floor: 28 bytes read a node of the pool, 32 written a kept one; one launch, one program a row.
    """
    if any(each.shape != values.shape for each in (tokens, parents, expanded)) or count < 1:
        raise ValueError("prune_tree needs tokens, values, parents and expanded [B, P], and count above 0.")
    batch, size = values.shape
    outs = [torch.empty(batch, count, dtype=torch.int64, device=values.device) for _ in range(4)]
    lengths = torch.empty(batch, dtype=torch.int32, device=values.device)
    if batch:
        _prune_kernel[(batch,)](
            tokens, values, parents, expanded, *outs, lengths, size, count,
            BLOCK=next_power_of_two(max(size, count)), num_warps=4,
        )  # fmt: skip
    return outs[0], outs[1], outs[2], outs[3], lengths


@triton.jit
def _map_kernel(ids, target_ids, out, count, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    draft = tl.load(ids + at, mask=at < count, other=0)
    tl.store(out + at, tl.load(target_ids + draft, mask=at < count, other=0), mask=at < count)


def to_target_ids(draft_ids: torch.Tensor, target_ids: torch.Tensor) -> torch.Tensor:
    """Ids of the target's vocabulary, int64 of any shape: target_ids[draft_ids]; `target_ids` int64 [Vd] (arange + d2t).

    Floor: 24 bytes an id; one launch.
    """
    out = torch.empty_like(draft_ids)
    if draft_ids.numel():
        ids = draft_ids.contiguous()
        _map_kernel[(triton.cdiv(ids.numel(), 256),)](ids, target_ids, out, ids.numel(), BLOCK=256, num_warps=2)
    return out


def draft_places(target_ids: torch.Tensor, vocab_size: int) -> torch.Tensor:
    """The inverse table, int32 [V]: the draft id of each target id, -1 where there is none. Once per drafter."""
    places = torch.full((vocab_size,), -1, dtype=torch.int32, device=target_ids.device)
    places[target_ids] = torch.arange(len(target_ids), dtype=torch.int32, device=target_ids.device)
    return places


@triton.jit
def _widen_kernel(scores, places, out, draft_size, vocab, fill, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    ids = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    place = tl.load(places + ids, mask=ids < vocab, other=-1)
    value = tl.load(scores + row * draft_size + place, mask=place >= 0, other=0.0)
    value = tl.where(place >= 0, value.to(tl.float32), fill)
    tl.store(out + row * vocab + ids, value, mask=ids < vocab)


def to_target_vocabulary(
    scores: torch.Tensor, places: torch.Tensor, fill: float = float("-inf"), out: torch.Tensor | None = None
) -> torch.Tensor:
    """Draft logits (fill -inf) or probabilities (fill 0) [R, Vd] over the target's vocabulary, float32 [R, V].

    Args:
        scores: float32, bfloat16 or float16, contiguous.
        places: int32 [V] from `draft_places`.

    Floor: one read of the scores and one write of float32 [R, V], in order; one launch.
    """
    if scores.dim() != 2 or not scores.is_contiguous() or places.dim() != 1:
        raise ValueError("to_target_vocabulary needs contiguous scores [R, Vd] and places [V].")
    rows, vocab = scores.shape[0], places.shape[0]
    out = out if out is not None else torch.empty(rows, vocab, dtype=torch.float32, device=scores.device)
    if rows:
        _widen_kernel[(rows, triton.cdiv(vocab, 2048))](
            scores, places, out, scores.shape[1], vocab, fill, BLOCK=2048, num_warps=8
        )
    return out


@triton.jit
def _accepted_kernel(
    index, path, lengths, sources, starts, batch, num_nodes, root, capacity, BLOCK_B: tl.constexpr, BLOCK: tl.constexpr
):
    row = tl.program_id(0)
    rows = tl.arange(0, BLOCK_B)
    before = tl.load(lengths + rows, mask=rows < tl.minimum(row, batch), other=-root)
    start = tl.sum(before + root, 0)
    tl.store(starts + row, start)
    slots = tl.arange(0, BLOCK)
    if row < batch:
        on_path = tl.load(
            path + row.to(tl.int64) * num_nodes + slots - 1, mask=(slots > 0) & (slots <= num_nodes), other=0
        )
        chosen = (on_path != 0) | ((slots == 0) & (root > 0))
        rank = tl.cumsum(chosen.to(tl.int32), 0) - 1
        source = tl.load(index + row.to(tl.int64) * (num_nodes + 1) + slots, mask=chosen, other=-1)
        tl.store(sources + start + rank, source.to(tl.int64), mask=chosen)
    else:
        for first in range(0, capacity, BLOCK):
            at = first + slots
            tl.store(sources + at, tl.full([BLOCK], -1, tl.int64), mask=(at >= start) & (at < capacity))


def accepted_rows(
    index: torch.Tensor, path: torch.Tensor, lengths: torch.Tensor, include_root: bool = True
) -> tuple[torch.Tensor, torch.Tensor]:
    """Where the accepted tokens of all rows are, one row after the other.

    Args:
        index: int64 [B, N + 1], which of T packed rows the root and each node are.
        path: bool [B, N], accepted nodes; lengths: int32 [B], how many.
        include_root: whether each row's root comes first.

    Returns: int64 [B * (N + 1)], the packed row of each accepted token, -1 behind the last; and int32 [B + 1], where each
        row's begin, the total last.

    Floor: 9 bytes a node read, 8 written; one launch.
    """
    batch, width = index.shape
    if path.shape != (batch, width - 1) or lengths.shape != (batch,):
        raise ValueError("accepted_rows needs index [B, N + 1], path [B, N] and lengths [B].")
    sources = torch.empty(batch * width, dtype=torch.int64, device=index.device)
    starts = torch.empty(batch + 1, dtype=torch.int32, device=index.device)
    _accepted_kernel[(batch + 1,)](
        index, as_bytes(path), lengths, sources, starts, batch, width - 1, int(include_root), batch * width,
        BLOCK_B=next_power_of_two(batch), BLOCK=next_power_of_two(width), num_warps=4,
    )  # fmt: skip
    return sources, starts


@triton.jit
def _gather_kernel(features, sources, out, hidden, stride, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    lanes = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    source = tl.load(sources + row)
    value = tl.load(features + source * stride + lanes, mask=(lanes < hidden) & (source >= 0), other=0.0)
    tl.store(out + row * hidden + lanes, value, mask=lanes < hidden)


def gather_features(features: torch.Tensor, sources: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
    """Rows of features [T, H] by `sources` int64 [C] (`accepted_rows`), [C, H] in their dtype; zeros where that is -1.

    Floor: 2 H itemsize bytes a row that exists, half of that for others; one launch.
    """
    if features.dim() != 2 or features.stride(1) != 1 or sources.dim() != 1:
        raise ValueError("gather_features needs features [T, H] with adjacent columns and sources [C].")
    count, hidden = sources.shape[0], features.shape[1]
    out = out if out is not None else torch.empty(count, hidden, dtype=features.dtype, device=features.device)
    if count and hidden:
        _gather_kernel[(count, triton.cdiv(hidden, 2048))](
            features, sources, out, hidden, features.stride(0), BLOCK=min(next_power_of_two(hidden), 2048), num_warps=4
        )
    return out


def compile_cases() -> list[CompileCase]:
    """One case a kernel, at the sizes of EAGLE-2's default tree (10 children, depth 6, 60 nodes)."""
    i64 = (
        "tokens", "parents", "expanded", "best_indices", "best_tokens", "best_parents", "out_tokens", "out_parents",
        "out_expanded", "out_nodes", "ids", "target_ids", "index", "sources",
    )  # fmt: skip
    i32 = ("limits", "lengths", "places", "starts")
    bf16 = ("scores", "features")
    numbers = (
        "depth", "frontier", "width", "keep", "size", "count", "draft_size", "vocab", "hidden", "stride", "batch",
        "num_nodes", "root", "capacity",
    )  # fmt: skip
    types = {**dict.fromkeys(i64, "*i64"), **dict.fromkeys(i32, "*i32"), **dict.fromkeys(bf16, "*bf16")}
    types |= {**dict.fromkeys(numbers, "i32"), "path": "*u8", "fill": "fp32"}
    cases = []
    for name, kernel, constants, changed in (
        ("next frontier", _frontier_kernel, {"HAS_LIMITS": True, "BLOCK": 128}, {}),
        ("prune tree", _prune_kernel, {"BLOCK": 512}, {}),
        ("map ids", _map_kernel, {"BLOCK": 256}, {"out": "*i64"}),
        ("widen vocabulary", _widen_kernel, {"BLOCK": 2048}, {}),
        ("accepted rows", _accepted_kernel, {"BLOCK_B": 64, "BLOCK": 64}, {}),
        ("gather features", _gather_kernel, {"BLOCK": 2048}, {"out": "*bf16"}),
    ):
        names = [n for n in kernel.arg_names if n not in constants]
        signature = {n: changed.get(n, types.get(n, "*fp32")) for n in names}
        skewed = tuple(n for n in names if n in numbers and n not in ("vocab", "hidden", "stride", "draft_size"))
        warps = 8 if name == "widen vocabulary" else 4
        cases.append(CompileCase(f"draft {name}", kernel, signature, constants, warps, unaligned=skewed))
    return cases
