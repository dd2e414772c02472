"""Root-mean-square norm in plain torch: the definition, and the CPU path."""

from __future__ import annotations

import torch

MOST_WIDTH = 16384  # one program of the kernel holds a whole row


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """weight [H] * (x / sqrt(mean(x^2) + eps)) for x [.., H]: computed in float32, rounded to x's dtype before the weight."""
    wide = x.float()
    return weight * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)).to(x.dtype)
