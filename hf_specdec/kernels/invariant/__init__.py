"""Products and row reductions whose result for a row does not depend, bit for bit, on the other rows."""

from __future__ import annotations

from types import ModuleType

import torch

from ..dispatch import uses_triton
from . import reference
from .reference import elementwise, layer_norm, mean_last, rms_norm, variance_last, wide

__all__ = [
    "batched_product",
    "elementwise",
    "implementation",
    "is_served",
    "layer_norm",
    "linear",
    "log_softmax_last",
    "mean_last",
    "rms_norm",
    "softmax_last",
    "sum_last",
    "variance_last",
    "wide",
]


def is_served(device: torch.device) -> bool:
    """True if a device has invariant operations: CPUs, and CUDA devices that run the Triton kernels."""
    return device.type == "cpu" or (device.type == "cuda" and uses_triton(device))


def implementation(device: torch.device) -> ModuleType:
    """The module that defines the operations below for a device."""
    if not uses_triton(device):
        return reference
    from . import triton

    return triton


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """x [M, K] @ weight [K, N] (+ bias [N]), summed in float32 or wider, rounded once to x's dtype."""
    return implementation(x.device).linear(x, weight, bias)


def batched_product(x: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """x [B, M, K] @ weights [B, K, N]."""
    return implementation(x.device).batched_product(x, weights)


def sum_last(x: torch.Tensor) -> torch.Tensor:
    """Sum over the last dimension [..., N] → [...]."""
    return implementation(x.device).sum_last(x)


def softmax_last(x: torch.Tensor, dtype: torch.dtype | None = None) -> torch.Tensor:
    """softmax over the last dimension, computed in float32 or wider, in `dtype` (None: x's)."""
    return implementation(x.device).softmax_last(x, dtype)


def log_softmax_last(x: torch.Tensor, dtype: torch.dtype | None = None) -> torch.Tensor:
    """log_softmax over the last dimension, computed in float32 or wider, in `dtype` (None: x's)."""
    return implementation(x.device).log_softmax_last(x, dtype)
