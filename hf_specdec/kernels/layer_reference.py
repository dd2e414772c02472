"""What decoder layers do besides products and attention, in plain torch: the definitions of our kernels for it."""

from __future__ import annotations

import torch


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotary embedding of x [.., T, D] by angles [T, D], computed in float32 (Su et al. 2021, halves as in GPT-NeoX)."""
    first, second = x.float().chunk(2, dim=-1)
    return (x.float() * cos.float() + torch.cat((-second, first), dim=-1) * sin.float()).to(x.dtype)


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """weight [H] * (x / sqrt(mean(x^2) + eps)) of x [.., H], computed in float32, rounded to x's dtype before the weight."""
    wide = x.float()
    return weight * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)).to(x.dtype)
