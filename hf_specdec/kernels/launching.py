"""Small helpers for launching Triton kernels. Nothing here imports Triton."""

from __future__ import annotations

import torch


def next_power_of_two(n: int) -> int:
    """The smallest power of two that is at least n and at least 1."""
    return 1 << max(n - 1, 0).bit_length()


def ceil_div(a: int, b: int) -> int:
    """a / b, rounded up."""
    return -(-a // b)


def as_bytes(flags: torch.Tensor | None) -> torch.Tensor | None:
    """View booleans as bytes without a copy: Triton handles bytes more simply."""
    return flags.view(torch.uint8) if flags is not None and flags.dtype == torch.bool else flags
