"""Launch batch-invariant products and row reductions (definitions: `reference`, with the same names)."""

# pyright: reportCallIssue=false
from __future__ import annotations

import torch
import triton

from ..launching import next_power_of_two
from .triton_kernels import product_kernel, softmax_kernel, sum_kernel

_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
_LARGEST_BLOCK = 2048


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """x [M, K] @ weight [K, N] (+ bias [N]), summed in float32, rounded once to x's dtype."""
    return _product(x[None], weight[None], bias)[0]


def batched_product(x: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """x [B, M, K] @ weights [B, K, N]."""
    return _product(x, weights, None)


def _product(x: torch.Tensor, weights: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    entries, num_rows, width = x.shape
    num_outputs = weights.shape[2]
    if x.dtype not in _DTYPES or weights.dtype != x.dtype or (bias is not None and bias.dtype != x.dtype):
        raise ValueError(
            f"a product of {x.dtype} and {weights.dtype}: both must be one of bfloat16, float16 and float32."
        )
    if weights.shape[:2] != (entries, width) or (bias is not None and bias.shape != (num_outputs,)):
        raise ValueError(f"a product of {tuple(x.shape)} and {tuple(weights.shape)}: the shapes do not fit together.")
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
    if x.dtype != torch.float32:
        raise ValueError(f"sums are of float32, not {x.dtype}.")
    out = x.new_empty(x.shape[:-1])
    if out.numel():
        x = x.contiguous()
        with torch.cuda.device_of(x):
            sum_kernel[(out.numel(),)](out, x, x.shape[-1], BLOCK=_block(x.shape[-1]), num_warps=4)
    return out


def softmax_last(x: torch.Tensor, dtype: torch.dtype | None = None) -> torch.Tensor:
    """softmax over the last dimension, computed in float32, in `dtype` (None: x's)."""
    return _softmax(x, dtype, False)


def log_softmax_last(x: torch.Tensor, dtype: torch.dtype | None = None) -> torch.Tensor:
    """log_softmax over the last dimension, computed in float32, in `dtype` (None: x's)."""
    return _softmax(x, dtype, True)


def _softmax(x: torch.Tensor, dtype: torch.dtype | None, log: bool) -> torch.Tensor:
    if x.dtype not in _DTYPES:
        raise ValueError(f"softmax of {x.dtype}: it must be one of bfloat16, float16 and float32.")
    x = x.contiguous()
    out = torch.empty_like(x, dtype=dtype or x.dtype)
    if out.numel():
        width = x.shape[-1]
        with torch.cuda.device_of(x):
            softmax_kernel[(x.numel() // width,)](out, x, width, LOG=log, BLOCK=_block(width), num_warps=4)
    return out


def _block(width: int) -> int:
    return min(max(next_power_of_two(width), 16), _LARGEST_BLOCK)
