"""Counter-based random numbers (Philox4x32-10): the same on every device. Inside kernels, see `triton.py`."""

from .reference import (
    ACCEPT_STREAM,
    DRAFT_STREAM,
    GROUP,
    MINIMA,
    RESIDUAL_STREAM,
    TOKEN_STREAM,
    gumbel,
    minima,
    noisy_argmax,
    philox4x32,
    philox4x32_of_arrays,
    uniform,
)

__all__ = [
    "ACCEPT_STREAM",
    "DRAFT_STREAM",
    "GROUP",
    "MINIMA",
    "RESIDUAL_STREAM",
    "TOKEN_STREAM",
    "gumbel",
    "minima",
    "noisy_argmax",
    "philox4x32",
    "philox4x32_of_arrays",
    "uniform",
]
