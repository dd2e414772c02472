"""Linear layers of one input in one launch, for steps of few rows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ..dispatch import operation
from . import reference
from .reference import DTYPES, MOST_ROWS, MOST_WEIGHTS

__all__ = ["MOST_ROWS", "gated_linear", "linears"]


def _serves(
    x: torch.Tensor, weights: Sequence[torch.Tensor], biases: Sequence[torch.Tensor] | None = None, *_: Any, **__: Any
) -> bool:
    """True for few rows, up to MOST_WEIGHTS weights, and contiguous parameters of x's dtype, one of DTYPES."""
    few = x.numel() <= MOST_ROWS * x.shape[-1] and len(weights) <= MOST_WEIGHTS and x.dtype in DTYPES
    return few and all(tensor.dtype == x.dtype and tensor.is_contiguous() for tensor in (*weights, *(biases or ())))


linears = operation(reference.linears, _serves)
gated_linear = operation(reference.gated_linear, lambda x, *weights: _serves(x, weights))
