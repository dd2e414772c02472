"""Products and row reductions whose result for a row does not depend, bit for bit, on the other rows."""

from __future__ import annotations

from typing import Any

import torch

from ..dispatch import operation, uses_triton
from . import reference
from .reference import elementwise, wide

__all__ = [
    "batched_product", "elementwise", "is_served", "layer_norm", "linear", "log_softmax_last", "mean_last", "rms_norm", "softmax_last",
    "sum_last", "variance_last", "wide",
]  # fmt: skip


def is_served(device: torch.device) -> bool:
    """True if a device has invariant operations: CPUs, and CUDA devices that run the Triton kernels."""
    return device.type == "cpu" or (device.type == "cuda" and uses_triton(device))


def _serves(*tensors: Any, **_: Any) -> bool:
    """True for tensors of one dtype that the kernels compute with."""
    dtypes = {tensor.dtype for tensor in tensors if isinstance(tensor, torch.Tensor)}
    return len(dtypes) == 1 and dtypes <= {torch.bfloat16, torch.float16, torch.float32}


linear = operation(reference.linear, _serves)
batched_product = operation(reference.batched_product, _serves)
sum_last = operation(reference.sum_last, lambda x: x.dtype == torch.float32)
softmax_last = operation(reference.softmax_last, _serves)
log_softmax_last = operation(reference.log_softmax_last, _serves)


def mean_last(x: torch.Tensor) -> torch.Tensor:
    """Means over the last dimension [..., N] → [...], summed in float32 or wider."""
    return (sum_last(wide(x)) / x.shape[-1]).to(x.dtype)


def variance_last(x: torch.Tensor, correction: float = 0.0) -> torch.Tensor:
    """Variances over the last dimension [..., N] → [...], in two passes."""
    exact = wide(x)
    centred = exact - (sum_last(exact) / x.shape[-1])[..., None]
    return (sum_last(centred * centred) / max(x.shape[-1] - correction, 0)).to(x.dtype)


def layer_norm(
    x: torch.Tensor, weight: torch.Tensor | None, bias: torch.Tensor | None, eps: float
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Layer norm over the last dimension; also the means and the reciprocal deviations [..., 1], float32 or wider."""
    exact = wide(x)
    mean = mean_last(exact)[..., None]
    rstd = 1.0 / (variance_last(exact)[..., None] + eps).sqrt()
    out = (exact - mean) * rstd
    if weight is not None:
        out = out * weight
    if bias is not None:
        out = out + bias
    return out.to(x.dtype), mean, rstd


def rms_norm(x: torch.Tensor, weight: torch.Tensor | None, eps: float) -> tuple[torch.Tensor, torch.Tensor]:
    """RMS norm over the last dimension; also the reciprocal root mean squares [..., 1], float32 or wider."""
    exact = wide(x)
    rstd = 1.0 / (mean_last(exact * exact)[..., None] + eps).sqrt()
    out = exact * rstd
    return (out if weight is None else out * weight).to(x.dtype), rstd
