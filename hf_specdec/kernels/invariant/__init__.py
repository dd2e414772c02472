"""Products and row reductions whose result for a row does not depend, bit for bit, on the other rows."""

from __future__ import annotations

import torch

from ..dispatch import operation, uses_triton
from . import reference
from .reference import elementwise, layer_norm, mean_last, rms_norm, variance_last, wide

__all__ = [
    "batched_product", "elementwise", "is_served", "layer_norm", "linear", "log_softmax_last", "mean_last", "rms_norm", "softmax_last",
    "sum_last", "variance_last", "wide",
]  # fmt: skip


def is_served(device: torch.device) -> bool:
    """True if a device has invariant operations: CPUs, and CUDA devices that run the Triton kernels."""
    return device.type == "cpu" or (device.type == "cuda" and uses_triton(device))


linear = operation(reference.linear)
batched_product = operation(reference.batched_product)
sum_last = operation(reference.sum_last)
softmax_last = operation(reference.softmax_last)
log_softmax_last = operation(reference.log_softmax_last)
