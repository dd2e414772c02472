"""Linear layers of few rows in Triton, which take about the time of reading their weights (definitions: `reference`).

With few rows, a product is limited by memory traffic. Libraries lose the time in which memory idles: between launches, and while
splits are summed. Here, layers of one input are one launch, and so are a layer with its residual and the two layers of a gated unit.
Each weight is read once.

Weights are the left operand, so that the few rows are the narrow side of a tile. No tile or order of summation depends on the
number of rows: a row's outputs have the same bits beside any other rows.
"""

# pyright: reportCallIssue=false, reportGeneralTypeIssues=false
from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl

from .reference import MOST_ROWS, MOST_WEIGHTS


@triton.jit
def one_of(tile, first, second, third, start_of_second, start_of_third):
    """Select the value for the matrix that a tile belongs to: the tiles of three matrices follow each other."""
    value = first
    if tile >= start_of_second:
        value = second
        if tile >= start_of_third:
            value = third
    return value


@triton.jit
def products(
    sums, weights, inputs, width, column_exists, row_exists,
    EVEN_N: tl.constexpr, EVEN_K: tl.constexpr, UPCAST: tl.constexpr, BLOCK_K: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """sums [N, M] + weights [N, K] @ inputs [K, M], from pointers to their first BLOCK_K columns and rows."""
    index = tl.arange(0, BLOCK_K)
    for first in tl.range(0, width, BLOCK_K, num_stages=STAGES):
        if EVEN_K:
            b = tl.load(inputs, mask=row_exists, other=0.0)
            if EVEN_N:
                a = tl.load(weights)
            else:
                a = tl.load(weights, mask=column_exists, other=0.0)
        else:
            inside = first + index < width
            b = tl.load(inputs, mask=row_exists & inside[:, None], other=0.0)
            a = tl.load(weights, mask=column_exists & inside[None, :], other=0.0)
        if UPCAST:
            a, b = a.to(tl.float32), b.to(tl.float32)
        sums = tl.dot(a, b, sums, input_precision="ieee")
        weights += BLOCK_K
        inputs += BLOCK_K
    return sums


# Do not specialise on 1: one row must run the same program.
@triton.jit(do_not_specialize=["num_rows"])
def few_rows_kernel(
    out0, out1, out2, x, weight0, weight1, weight2, bias0, bias1, bias2, residual,
    num_rows, outputs0, outputs1, outputs2, width,
    HAS_BIAS: tl.constexpr, HAS_RESIDUAL: tl.constexpr, EVEN_N: tl.constexpr, EVEN_K: tl.constexpr, UPCAST: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """out_i [M, N_i] = x [M, K] @ weight_i [N_i, K]^T (+ bias_i [N_i]) (+ residual [M, N_0]) for up to three weights, M <= BLOCK_M.

    Programs: tiles of outputs, all weights one after another. All tensors must be contiguous.
    """
    tile = tl.program_id(0)
    second = tl.cdiv(outputs0, BLOCK_N)
    third = second + tl.cdiv(outputs1, BLOCK_N)
    out = one_of(tile, out0, out1, out2, second, third)
    weight = one_of(tile, weight0, weight1, weight2, second, third)
    num_outputs = one_of(tile, outputs0, outputs1, outputs2, second, third)
    columns = (tile - one_of(tile, 0, second, third, second, third)) * BLOCK_N + tl.arange(0, BLOCK_N)
    rows = tl.arange(0, BLOCK_M)
    index = tl.arange(0, BLOCK_K)
    weights = weight + columns.to(tl.int64)[:, None] * width + index[None, :]
    inputs = x + rows[None, :] * width + index[:, None]
    row_exists = (rows < num_rows)[None, :]
    column_exists = (columns < num_outputs)[:, None]
    sums = tl.zeros([BLOCK_N, BLOCK_M], dtype=tl.float32)
    sums = products(sums, weights, inputs, width, column_exists, row_exists, EVEN_N, EVEN_K, UPCAST, BLOCK_K, STAGES)
    if HAS_BIAS:
        bias = one_of(tile, bias0, bias1, bias2, second, third)
        sums += tl.load(bias + columns, mask=columns < num_outputs, other=0.0).to(tl.float32)[:, None]
    places = rows[None, :] * num_outputs + columns[:, None]
    exists = row_exists & column_exists
    if HAS_RESIDUAL:  # round where two operations would round
        sums = sums.to(out.dtype.element_ty).to(tl.float32)
        sums += tl.load(residual + places, mask=exists, other=0.0).to(tl.float32)
    tl.store(out + places, sums.to(out.dtype.element_ty), mask=exists)


@triton.jit(do_not_specialize=["num_rows"])
def gated_kernel(
    out, x, gate, up_offset, num_rows, num_outputs, width,
    EVEN_N: tl.constexpr, EVEN_K: tl.constexpr, UPCAST: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """out [M, N] = silu(x [M, K] @ gate [N, K]^T) * (x @ up [N, K]^T), M <= BLOCK_M; up starts `up_offset` elements after gate.

    One program computes BLOCK_N / 2 outputs: their rows of both weights form one tile.
    """
    HALF: tl.constexpr = BLOCK_N // 2
    lines = tl.arange(0, BLOCK_N)
    columns = tl.program_id(0) * HALF + lines % HALF
    rows = tl.arange(0, BLOCK_M)
    index = tl.arange(0, BLOCK_K)
    starts = columns.to(tl.int64) * width + tl.where(lines < HALF, 0, up_offset)
    weights = gate + starts[:, None] + index[None, :]
    inputs = x + rows[None, :] * width + index[:, None]
    row_exists = (rows < num_rows)[None, :]
    column_exists = (columns < num_outputs)[:, None]
    sums = tl.zeros([BLOCK_N, BLOCK_M], dtype=tl.float32)
    sums = products(sums, weights, inputs, width, column_exists, row_exists, EVEN_N, EVEN_K, UPCAST, BLOCK_K, STAGES)
    dtype = out.dtype.element_ty
    gated, upper = tl.split(tl.permute(tl.reshape(sums.to(dtype).to(tl.float32), [2, HALF, BLOCK_M]), [1, 2, 0]))
    gated = (gated / (1.0 + tl.exp(-gated))).to(dtype).to(tl.float32)  # round where three operations would round
    outputs = tl.program_id(0) * HALF + tl.arange(0, HALF)
    places = rows[None, :] * num_outputs + outputs[:, None]
    tl.store(out + places, (gated * upper).to(dtype), mask=row_exists & (outputs < num_outputs)[:, None])


# ---- launches ----

_ENOUGH_TILES = 96  # enough to saturate the bandwidth of an H100, whose 132 multiprocessors hold two wide tiles each
WIDE = {"BLOCK_M": MOST_ROWS, "BLOCK_N": 64, "BLOCK_K": 128, "STAGES": 4}
NARROW = {"BLOCK_M": MOST_ROWS, "BLOCK_N": 16, "BLOCK_K": 256, "STAGES": 5}


def linears(x, weights, biases=None, residual=None) -> list[torch.Tensor]:
    """See `reference.linears`: one launch, summed in float32, for up to MOST_ROWS rows and MOST_WEIGHTS contiguous weights of DTYPES."""
    lines, width = x.shape[:-1], x.shape[-1]
    num_rows = lines.numel()
    sizes = [weight.shape[0] for weight in weights]
    outs = [x.new_empty(*lines, size) for size in sizes]
    if num_rows == 0:
        return outs
    tile = tile_of(sum(sizes))
    with torch.cuda.device_of(x):
        few_rows_kernel[(sum(triton.cdiv(size, tile["BLOCK_N"]) for size in sizes),)](
            *_three(outs), x.contiguous(), *_three(weights), *(_three(biases) if biases else (None,) * 3),
            None if residual is None else residual.contiguous(), num_rows, *sizes, *[0] * (MOST_WEIGHTS - len(sizes)), width,
            HAS_BIAS=bool(biases), HAS_RESIDUAL=residual is not None, **_fit(x, sizes, tile),
        )  # fmt: skip
    return outs


def gated_linear(x, gate, up) -> torch.Tensor:
    """See `reference.gated_linear`: one launch, rounded to x's dtype at the same places as three operations; inputs as of `linears`."""
    num_rows, size = x.shape[:-1].numel(), gate.shape[0]
    out = x.new_empty(*x.shape[:-1], size)
    if out.numel() == 0:
        return out
    half = WIDE["BLOCK_N"] // 2
    with torch.cuda.device_of(x):
        gated_kernel[(triton.cdiv(size, half),)](
            out, x.contiguous(), gate, (up.data_ptr() - gate.data_ptr()) // gate.itemsize, num_rows, size, x.shape[-1],
            **_fit(x, [size], WIDE, half),
        )  # fmt: skip
    return out


def tile_of(num_outputs: int) -> dict[str, int]:
    """Wide tiles if there are enough of them, else narrow ones."""
    return WIDE if num_outputs >= _ENOUGH_TILES * WIDE["BLOCK_N"] else NARROW


def _fit(x: torch.Tensor, sizes: Sequence[int], tile: dict[str, int], outputs: int | None = None) -> dict[str, Any]:
    """Keyword arguments of a launch; `outputs`: number of outputs per tile."""
    outputs = outputs or tile["BLOCK_N"]
    return {
        "EVEN_N": all(size % outputs == 0 for size in sizes),
        "EVEN_K": x.shape[-1] % tile["BLOCK_K"] == 0,
        "UPCAST": not x.is_cuda,
        **tile,
        "num_warps": 4,
        "num_stages": tile["STAGES"],
    }


def _three(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    return [*tensors, *[tensors[0]] * (MOST_WEIGHTS - len(tensors))]
