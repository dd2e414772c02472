"""Linear layers of one input in one launch, for steps of few rows."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ..dispatch import uses_triton
from . import reference
from .sizes import DTYPES, MOST_ROWS

__all__ = ["MOST_ROWS", "gated_linear", "has_few_rows_kernel", "linears"]


def has_few_rows_kernel(device: torch.device) -> bool:
    """True if this device has a kernel that beats cuBLAS for few rows."""
    return uses_triton(device)


def linears(
    x: torch.Tensor,
    weights: Sequence[torch.Tensor],
    biases: Sequence[torch.Tensor] | None = None,
    residual: torch.Tensor | None = None,
) -> list[torch.Tensor]:
    """[x @ weight^T (+ bias)] for x [.., K] and weights [N_i, K]; `residual` [.., N] is added to a single product."""
    if _takes_kernel(x, weights):
        from .triton import linears as by_kernel

        added = None if residual is None else residual.reshape(-1, residual.shape[-1])
        outs = by_kernel(x.reshape(-1, x.shape[-1]), weights, biases, added)
        return [out.view(*x.shape[:-1], out.shape[-1]) for out in outs]
    return reference.linears(x, weights, biases, residual)


def gated_linear(x: torch.Tensor, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """silu(x [.., K] @ gate^T) * (x @ up^T)."""
    if _takes_kernel(x, (gate, up)):
        from .triton import gated_linear as by_kernel

        return by_kernel(x.reshape(-1, x.shape[-1]), gate, up).view(*x.shape[:-1], gate.shape[0])
    return reference.gated_linear(x, gate, up)


def _takes_kernel(x: torch.Tensor, weights: Sequence[torch.Tensor]) -> bool:
    if not uses_triton(x.device):
        return False
    return x.numel() <= MOST_ROWS * x.shape[-1] and all(each.dtype in DTYPES for each in (x, *weights))
