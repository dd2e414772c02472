"""Linear layers with 8-bit or 4-bit weights in the native library for CPUs. Activations keep their precision.

The weight of output n and input k is `q * scale` with 8 bits and `(q - 8) * scale + zero` with 4, where q are the stored integers and
inputs k of one group share a scale. The library reads weights in panels of 16 outputs (`native/source/quantized.h`).
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

import torch

from ..native import TYPES, Linear, library_of

OUTPUTS = 16  # of a panel
GROUPS = (0, 32, 64, 128)  # inputs that share a scale; 0: all
MOST_TOKENS = 256  # measured: for more, torch's product with dequantized weights is as fast or faster
_PADDING = 8  # inputs of a panel are a multiple of this
# The order of inputs in the bytes of a panel: a shift leaves pairs of neighbours in the lower and upper halves of 32-bit words.
_BYTES = {8: [0, 2, 1, 3], 4: [0, 4, 1, 5]}
_SECOND = [2, 6, 3, 7]  # of the upper four bits of each byte
_BYTES_PER_THREAD = 1 << 20


@dataclass(frozen=True)
class WeightLayout:
    """How weights [outputs, inputs] are stored.

    Attributes:
        bits: 8 or 4.
        group: inputs that share a scale, one of GROUPS.
        scales: dtype of scales and zero points, float32 or bfloat16.

    Raises:
        ValueError: the library has no such layout.
    """

    bits: int
    group: int
    outputs: int
    inputs: int
    scales: torch.dtype

    def __post_init__(self) -> None:
        if self.bits not in _BYTES or self.group not in GROUPS or (self.group and self.inputs % self.group):
            raise ValueError(f"no layout for {self.bits} bits and {self.inputs} inputs in groups of {self.group}.")

    @property
    def padded(self) -> int:
        """Number of inputs in a panel."""
        return -(-self.inputs // _PADDING) * _PADDING

    @property
    def groups(self) -> int:
        """Number of scales per output."""
        return self.inputs // self.group if self.group else 1


def pack(values: torch.Tensor, scales: torch.Tensor, zeros: torch.Tensor | None, layout: WeightLayout) -> torch.Tensor:
    """Panels, uint8 [ceil(N / 16), bytes].

    Args:
        values: q, [N, K]: int8, or of any integer type 0 .. 15.
        scales, zeros: [N, groups]; no zeros with 8 bits.
    """
    panels = -(-layout.outputs // OUTPUTS)
    missing = panels * OUTPUTS - layout.outputs
    stored = torch.nn.functional.pad(values.to(torch.int8), (0, layout.padded - layout.inputs, 0, missing))
    stored = stored.view(torch.uint8).view(panels, OUTPUTS, -1, 32 // layout.bits)
    words = stored[..., _BYTES[layout.bits]]
    if layout.bits == 4:
        words = words | stored[..., _SECOND] << 4
    words = words.transpose(1, 2).reshape(panels, -1)
    heads = [
        torch.nn.functional.pad(numbers.to(layout.scales), (0, 0, 0, missing)).view(panels, OUTPUTS, -1).transpose(1, 2)
        for numbers in (scales, *([] if zeros is None else [zeros]))
    ]
    return torch.cat([*(head.reshape(panels, -1).view(torch.uint8) for head in heads), words], dim=1)


def linear(
    x: torch.Tensor, panels: torch.Tensor, layout: WeightLayout, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """x [T, K] times the weights transposed, plus bias [N], in x's dtype: float32, bfloat16 or float16.

    Products and sums are exact within blocks of inputs, whose numbers are rounded to multiples of 2^-29 (float32) or 2^-15 of the power of
    two above the block's largest. A token's result has the same bits whatever the other tokens are.
    """
    if x.stride(1) != 1:
        x = x.contiguous()
    if bias is not None:
        bias = bias.to(x.dtype).contiguous()
    out = x.new_empty(x.shape[0], layout.outputs)
    call = Linear(
        x.data_ptr(), panels.data_ptr(), 0 if bias is None else bias.data_ptr(), out.data_ptr(), TYPES[x.dtype], x.shape[0],
        layout.outputs, layout.inputs, x.stride(0), 0, layout.outputs, 0, layout.bits, layout.group, TYPES[layout.scales],
    )  # fmt: skip
    library_of().specdec_linear(ctypes.byref(call), threads_for(panels))
    return out


def dequantized(panels: torch.Tensor, layout: WeightLayout, dtype: torch.dtype) -> torch.Tensor:
    """The weights [N, K], computed in float32 and rounded to `dtype`: float32, bfloat16 or float16."""
    out = torch.empty(layout.outputs, layout.inputs, dtype=dtype)
    call = Linear(
        0, panels.data_ptr(), 0, out.data_ptr(), TYPES[dtype], 0, layout.outputs, layout.inputs, 0, 0, layout.inputs, 0, layout.bits,
        layout.group, TYPES[layout.scales],
    )  # fmt: skip
    library_of().specdec_dequantize(ctypes.byref(call), threads_for(panels))
    return out


def threads_for(weights: torch.Tensor) -> int:
    """Number of threads that read these weights."""
    return min(torch.get_num_threads(), 1 + weights.nbytes // _BYTES_PER_THREAD)
