"""Linear layers with plain weights in the native library for CPUs, for few rows."""

from __future__ import annotations

import ctypes

import torch

from ..native import TYPES, Linear, library_of
from .quantized import threads_for


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """x [.., K] times weight [N, K] transposed, plus bias [N]; all contiguous but x, of one dtype: float32, bfloat16 or float16."""
    rows, (outputs, inputs) = x.reshape(-1, x.shape[-1]).contiguous(), weight.shape
    out = x.new_empty(*x.shape[:-1], outputs)
    call = Linear(
        rows.data_ptr(), weight.data_ptr(), 0 if bias is None else bias.data_ptr(), out.data_ptr(), TYPES[x.dtype], len(rows),
        outputs, inputs, inputs, inputs, outputs,
    )  # fmt: skip
    library_of().specdec_linear(ctypes.byref(call), threads_for(weight))
    return out
