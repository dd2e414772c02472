"""Writing, rotating and moving keys and values: bit for bit, and the rotation against float64."""

# pyright: reportCallIssue=false, reportArgumentType=false
from __future__ import annotations

from collections.abc import Iterator

import torch

from hf_specdec.kernels.cache import reference

from .context import TOLERANCE, Context, relative_error, worst
from .report import Row, at_most

MODULES = ("cache",)


def wrong_elements(out: torch.Tensor, wanted: torch.Tensor) -> int:
    """How many elements differ in any bit."""
    size = {1: torch.uint8, 2: torch.int16, 4: torch.int32}[out.element_size()]
    return int((out.view(size) != wanted.view(size)).sum())


def write_errors(context: Context, dtype: torch.dtype, tokens: int, heads: int, width: int) -> float:
    """Wrong elements after writing tokens, some of which have no slot, into poisoned pools."""
    from hf_specdec.kernels.cache.triton import write_keys_values

    keys, values = (context.randn(heads, tokens, width, dtype=dtype).transpose(0, 1) for _ in range(2))
    pools = [torch.full((2 * tokens, heads, width), float("nan"), dtype=dtype, device=context.device) for _ in range(2)]
    slots = torch.randperm(2 * tokens, generator=context.generator, device=context.device)[:tokens]
    slots[context.randint(0, 5, tokens) == 0] = -1
    wanted = [pool.clone() for pool in pools]
    reference.write_keys_values(*(states[slots >= 0] for states in (keys, values)), *wanted, slots[slots >= 0])
    write_keys_values(keys, values, pools[0], pools[1], slots)
    return sum(wrong_elements(pool, each) for pool, each in zip(pools, wanted, strict=True))


def rotation_error(context: Context, dtype: torch.dtype, tokens: int, width: int, rotary: int) -> float:
    """Relative error of rotated queries and written keys; infinite where values or the rest of a head changed."""
    from hf_specdec.kernels.cache.triton import write_keys_values

    query, keys, values = (context.randn(n, tokens, width, dtype=dtype).transpose(0, 1) for n in (8, 2, 2))
    angles = context.randn(tokens, rotary // 2).mul(3).repeat(1, 2)
    cos, sin = angles.cos().to(dtype), angles.sin().to(dtype)
    pools = [torch.full((tokens, 2, width), float("nan"), dtype=dtype, device=context.device) for _ in range(2)]
    slots = torch.randperm(tokens, generator=context.generator, device=context.device)
    out = write_keys_values(keys, values, *pools, slots, query=query, cos=cos, sin=sin)
    if out is None:
        return float("inf")
    written = pools[0][slots]
    if wrong_elements(pools[1][slots], values.contiguous()) or not torch.equal(out[..., rotary:], query[..., rotary:]):
        return float("inf")
    return max(relative_error(each, rotated(x, cos, sin)) for each, x in ((out, query), (written, keys)))


def rotated(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """The first R elements of each head turned by the token's angles, float64 [T, heads, D]."""
    turned, rest = x.double().split([cos.shape[1], x.shape[2] - cos.shape[1]], dim=2)
    half = torch.cat([-turned[..., cos.shape[1] // 2 :], turned[..., : cos.shape[1] // 2]], dim=2)
    return torch.cat([turned * cos.double()[:, None] + half * sin.double()[:, None], rest], dim=2)


def random_moves(context: Context, slots: int, rows: int, nodes: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Accepted nodes of trees: per row ascending places moved to the front; slots scattered over the pool, -1: no move."""
    own = torch.randperm(slots, generator=context.generator, device=context.device)[: rows * nodes].view(rows, nodes)
    accepted = context.randint(0, 2, rows, nodes) > 0
    rank = accepted.cumsum(1) - 1
    moved = accepted & (rank < torch.arange(nodes, device=context.device))
    target = own.gather(1, rank.clamp(min=0))
    nothing = torch.full_like(own, -1)
    return torch.where(moved, own, nothing), torch.where(moved, target, nothing)


def move_errors(context: Context, dtype: torch.dtype, rows: int, nodes: int, layers: int) -> float:
    """Wrong elements after moving in the pools of several layers of different widths."""
    from hf_specdec.kernels.cache.triton import PoolTable, move_slots

    slots = rows * nodes + 3
    pools = [context.randn(slots, 1 + i % 3, 24 + 8 * (i % 5), dtype=dtype) for i in range(2 * layers)]
    source, target = random_moves(context, slots, rows, nodes)
    wanted = [pool.clone() for pool in pools]
    for pool in wanted:
        reference.move_slots(pool, source[source >= 0], target[source >= 0])
    move_slots(PoolTable.of(pools), source, target)
    return sum(wrong_elements(pool, each) for pool, each in zip(pools, wanted, strict=True))


def rows(context: Context, name: str, dtype: torch.dtype) -> Iterator[Row]:
    """A line per operation, of some draws."""
    times, small = (1, True) if context.toy else (5, False)
    sizes = (5, 2, 24) if small else (3000, 8, 128)
    wrong = sum(write_errors(context, dtype, *sizes) for _ in range(times))
    yield at_most("correctness", f"cache {name}: write", wrong, 0, "wrong elements")
    for width, rotary in ((32, 32), (24, 8)) if small else ((128, 128), (80, 32), (256, 64)):
        errors = [rotation_error(context, dtype, 3 if small else 700, width, rotary) for _ in range(times)]
        what = f"rotation {name}: {rotary} of {width}"
        yield at_most("correctness", what, worst(errors), TOLERANCE[name], "rel. error")
    wrong = sum(move_errors(context, dtype, *((2, 9, 2) if small else (64, 60, 32))) for _ in range(times))
    yield at_most("correctness", f"cache {name}: move accepted nodes", wrong, 0, "wrong elements")
