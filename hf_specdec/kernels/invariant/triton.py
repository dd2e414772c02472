"""Batch-invariant products and row reductions in Triton, whose order of summation depends only on the widths (see `reference`).

No tile, split or loop depends on the number of rows. There is one configuration per dtype, and one program computes each sum in
order.
"""

# pyright: reportCallIssue=false, reportGeneralTypeIssues=false
from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl

from ..dispatch import next_power_of_two


# Do not specialise on 1: few rows must run the same program.
@triton.jit(do_not_specialize=["num_rows", "tiles_of_rows"])
def product_kernel(
    out, x, weights, bias, num_rows, tiles_of_rows, num_outputs, width,
    weight_entry, weight_row, weight_column,
    HAS_BIAS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    """out [B, M, N] = x [B, M, K] @ weights [B, K, N] (+ bias [N]), float32 sums over BLOCK_K elements at a time.

    Programs: tiles of rows and outputs (tiles of the same outputs follow each other, for the L2 cache) x entries. x and out must be
    contiguous; strides are in elements.
    """
    tile = tl.program_id(0)
    entry = tl.program_id(1).to(tl.int64)
    rows = (tile % tiles_of_rows) * BLOCK_M + tl.arange(0, BLOCK_M)
    columns = (tile // tiles_of_rows) * BLOCK_N + tl.arange(0, BLOCK_N)
    row_exists = (rows < num_rows)[:, None]
    column_exists = (columns < num_outputs)[None, :]
    line = entry * num_rows + rows
    x_lines = x + line[:, None] * width
    weight_lines = weights + entry * weight_entry + columns.to(tl.int64)[None, :] * weight_column
    sums = tl.zeros([BLOCK_M, BLOCK_N], dtype=tl.float32)
    for first in range(0, width, BLOCK_K):
        index = first + tl.arange(0, BLOCK_K)
        a = tl.load(x_lines + index[None, :], mask=row_exists & (index < width)[None, :], other=0.0)
        b = tl.load(
            weight_lines + index.to(tl.int64)[:, None] * weight_row,
            mask=(index < width)[:, None] & column_exists,
            other=0.0,
        )
        if UPCAST:
            a, b = a.to(tl.float32), b.to(tl.float32)
        sums = tl.dot(a, b, sums, input_precision="ieee")
    if HAS_BIAS:
        sums += tl.load(bias + columns, mask=columns < num_outputs, other=0.0).to(tl.float32)[None, :]
    tl.store(
        out + line[:, None] * num_outputs + columns[None, :],
        sums.to(out.dtype.element_ty),
        mask=row_exists & column_exists,
    )


@triton.jit
def sum_kernel(out, x, width, BLOCK: tl.constexpr):
    """out [R] = sums of float32 x [R, width]; one program per row."""
    row = tl.program_id(0).to(tl.int64)
    sums = tl.zeros([BLOCK], dtype=tl.float32)
    for first in range(0, width, BLOCK):
        index = first + tl.arange(0, BLOCK)
        sums += tl.load(x + row * width + index, mask=index < width, other=0.0)
    tl.store(out + row, tl.sum(sums, axis=0))


@triton.jit
def softmax_kernel(out, x, width, LOG: tl.constexpr, BLOCK: tl.constexpr):
    """out [R, width] = softmax, or with LOG log_softmax, of x [R, width]; computed in float32, one program per row."""
    row = tl.program_id(0).to(tl.int64)
    line = x + row * width
    largest = tl.full([BLOCK], float("-inf"), dtype=tl.float32)
    for first in range(0, width, BLOCK):
        index = first + tl.arange(0, BLOCK)
        largest = tl.maximum(largest, tl.load(line + index, mask=index < width, other=float("-inf")).to(tl.float32))
    top = tl.max(largest, axis=0)
    sums = tl.zeros([BLOCK], dtype=tl.float32)
    for first in range(0, width, BLOCK):
        index = first + tl.arange(0, BLOCK)
        sums += tl.exp(tl.load(line + index, mask=index < width, other=float("-inf")).to(tl.float32) - top)
    total = tl.sum(sums, axis=0)
    for first in range(0, width, BLOCK):
        index = first + tl.arange(0, BLOCK)
        shifted = tl.load(line + index, mask=index < width, other=float("-inf")).to(tl.float32) - top
        if LOG:
            result = shifted - tl.log(total)
        else:
            result = tl.exp(shifted) / total
        tl.store(out + row * width + index, result.to(out.dtype.element_ty), mask=index < width)


# ---- launches ----

_LARGEST_BLOCK = 2048


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """x [M, K] @ weight [K, N] (+ bias [N]), summed in float32, rounded once to x's dtype."""
    return batched_product(x[None], weight[None], bias)[0]


def batched_product(x: torch.Tensor, weights: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """x [B, M, K] @ weights [B, K, N] (+ bias [N])."""
    entries, num_rows, width = x.shape
    num_outputs = weights.shape[2]
    out = x.new_empty(entries, num_rows, num_outputs)
    if out.numel() == 0:
        return out
    x = x.contiguous()
    tile = tile_of(x.dtype)
    tiles_of_rows = triton.cdiv(num_rows, tile["BLOCK_M"])
    grid = (tiles_of_rows * triton.cdiv(num_outputs, tile["BLOCK_N"]), entries)
    with torch.cuda.device_of(x):
        product_kernel[grid](
            out, x, weights, None if bias is None else bias.contiguous(), num_rows, tiles_of_rows, num_outputs, width,
            weights.stride(0), weights.stride(1), weights.stride(2),
            HAS_BIAS=bias is not None, UPCAST=not x.is_cuda, **tile, num_warps=4, num_stages=stages_of(x.dtype),
        )  # fmt: skip
    return out


def tile_of(dtype: torch.dtype) -> dict[str, int]:
    """The only tile of a dtype. Small steps fill it partly, which costs arithmetic but no memory traffic."""
    if dtype == torch.float32:  # exact products run on CUDA cores, whose operands are in registers
        return {"BLOCK_M": 16, "BLOCK_N": 32, "BLOCK_K": 32}
    return {"BLOCK_M": 64, "BLOCK_N": 32, "BLOCK_K": 64}


def stages_of(dtype: torch.dtype) -> int:
    """Stages of the software pipeline of a product in this dtype."""
    return 3 if dtype == torch.float32 else 4


def sum_last(x: torch.Tensor) -> torch.Tensor:
    """Sums over the last dimension of float32 x [..., N] → [...]."""
    out = x.new_empty(x.shape[:-1])
    if out.numel():
        x = x.contiguous()
        with torch.cuda.device_of(x):
            sum_kernel[(out.numel(),)](out, x, x.shape[-1], BLOCK=_block(x.shape[-1]), num_warps=4)
    return out


def softmax_last(x: torch.Tensor, dtype: torch.dtype | None = None, log: bool = False) -> torch.Tensor:
    """softmax, or log_softmax, over the last dimension, computed in float32, in `dtype` (None: x's)."""
    x = x.contiguous()
    out = torch.empty_like(x, dtype=dtype or x.dtype)
    if out.numel():
        width = x.shape[-1]
        with torch.cuda.device_of(x):
            softmax_kernel[(x.numel() // width,)](out, x, width, LOG=log, BLOCK=_block(width), num_warps=4)
    return out


log_softmax_last = functools.partial(softmax_last, log=True)


def _block(width: int) -> int:
    return min(max(next_power_of_two(width), 16), _LARGEST_BLOCK)
