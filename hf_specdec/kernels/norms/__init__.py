"""Root-mean-square norm (Zhang and Sennrich 2019), rounded as the RMSNorm modules of transformers round."""

from __future__ import annotations

import torch

from ..dispatch import uses_triton
from . import reference
from .sizes import MOST_WIDTH


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """weight [H] * (x / sqrt(mean(x^2) + eps)) for x [.., H]: computed in float32, rounded to x's dtype before the weight."""
    if uses_triton(x.device) and x.shape[-1] <= MOST_WIDTH:
        from .triton import rms_norm as by_kernel

        return by_kernel(x, weight, eps)
    return reference.rms_norm(x, weight, eps)
