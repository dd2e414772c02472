"""Root-mean-square norm in Triton (definition: `reference`)."""

# pyright: reportCallIssue=false
from __future__ import annotations

import torch
import triton
import triton.language as tl

from ..dispatch import next_power_of_two


@triton.jit
def rms_norm_kernel(out, x, weight, eps, width, BLOCK: tl.constexpr):
    """out [R, H] = weight [H] * round(x / sqrt(mean(x^2) + eps)); one program per row."""
    row = tl.program_id(0).to(tl.int64) * width
    columns = tl.arange(0, BLOCK)
    inside = columns < width
    values = tl.load(x + row + columns, mask=inside, other=0.0).to(tl.float32)
    scale = tl.load(weight + columns, mask=inside, other=0.0).to(tl.float32)
    mean = tl.sum(values * values, axis=0) / width
    normed = (values * tl.rsqrt(mean + eps)).to(out.dtype.element_ty).to(tl.float32)
    tl.store(out + row + columns, (scale * normed).to(out.dtype.element_ty), mask=inside)


def rms_norm(x, weight, eps) -> torch.Tensor:
    """See `reference.rms_norm`: for up to MOST_WIDTH elements, and x and weight of one dtype: bfloat16, float16 or float32."""
    x, width = x.contiguous(), x.shape[-1]
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
