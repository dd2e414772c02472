"""Root-mean-square norm in Triton (definition: `reference`)."""

# pyright: reportCallIssue=false
from __future__ import annotations

import torch
import triton
import triton.language as tl

from ..dispatch import next_power_of_two
from .reference import MOST_WIDTH

_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


@triton.jit
def rms_norm_kernel(out, x, weight, eps, width, BLOCK: tl.constexpr):
    """out [R, H] = weight [H] * round(x / sqrt(mean(x^2) + eps)); one program per row."""
    row = tl.program_id(0).to(tl.int64) * width
    columns = tl.arange(0, BLOCK)
    inside = columns < width
    own = tl.load(x + row + columns, mask=inside, other=0.0).to(tl.float32)
    scale = tl.load(weight + columns, mask=inside, other=0.0).to(tl.float32)
    mean = tl.sum(own * own, axis=0) / width
    normed = (own * tl.rsqrt(mean + eps)).to(out.dtype.element_ty).to(tl.float32)
    tl.store(out + row + columns, (scale * normed).to(out.dtype.element_ty), mask=inside)


def rms_norm(x, weight, eps) -> torch.Tensor:
    """See `reference.rms_norm`. Raises ValueError if shapes or dtypes are not supported."""
    width = x.shape[-1]
    if weight.shape != (width,) or x.dtype not in _DTYPES or weight.dtype != x.dtype or width > MOST_WIDTH:
        raise ValueError(
            f"a norm of {tuple(x.shape)}, {x.dtype}, with a weight {tuple(weight.shape)}, {weight.dtype}: widths (up to "
            f"{MOST_WIDTH}) and dtypes (bfloat16, float16 or float32) must be the same."
        )
    x = x.contiguous()
    out = torch.empty_like(x)
    if out.numel():
        with torch.cuda.device_of(x):
            rms_norm_kernel[(x.numel() // width,)](
                out, x, weight.contiguous(), eps, width, BLOCK=next_power_of_two(width), num_warps=num_warps_of(width)
            )
    return out


def num_warps_of(width: int) -> int:
    """16 elements per thread: each thread issues all its loads at once, and waits once."""
    return min(max(next_power_of_two(width) // 512, 1), 16)
