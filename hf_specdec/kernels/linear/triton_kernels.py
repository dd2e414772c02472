"""Triton kernels of linear layers of few rows, which read each weight once.

Weights are the left operand, so that the few rows are the narrow side of a tile. No tile or order of summation depends on the
number of rows: a row's outputs have the same bits beside any other rows.
"""

# pyright: reportGeneralTypeIssues=false
from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def one_of(tile, first, second, third, start_of_second, start_of_third):
    """Select the value for the matrix that a tile belongs to: the tiles of three matrices follow each other."""
    found = first
    if tile >= start_of_second:
        found = second
        if tile >= start_of_third:
            found = third
    return found


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
    own = tl.program_id(0) * HALF + tl.arange(0, HALF)
    places = rows[None, :] * num_outputs + own[:, None]
    tl.store(out + places, (gated * upper).to(dtype), mask=row_exists & (own < num_outputs)[:, None])
