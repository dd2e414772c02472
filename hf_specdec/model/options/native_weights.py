"""NativeWeight: 8-bit or 4-bit weights of a linear layer on a CPU, stored as the native library reads them.

torchao quantizes; the integers, scales and zero points are its own, bit for bit. Only their order in memory differs. In this order the
library's products are faster than torchao's (benchmarks/LOG.md).
"""

from __future__ import annotations

import logging
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils._pytree import tree_map

from ...kernels.linear.quantized import GROUPS, MOST_TOKENS, WeightLayout, dequantized, linear, pack
from ...kernels.native import TYPES

logger = logging.getLogger(__name__)

# Rows in a block of torch's int4 format, which depends on the CPU; the one found last comes first.
_PACKINGS = [64, 32, 16]


class NativeWeight(torch.Tensor):
    """Weights [N, K] in panels. `F.linear` computes with them as they are; every other operator gets them dequantized.

    Attributes:
        panels: uint8, see `kernels.linear.quantized`.
    """

    panels: torch.Tensor
    form: WeightLayout

    @staticmethod
    def __new__(cls, panels: torch.Tensor, form: WeightLayout, dtype: torch.dtype) -> NativeWeight:
        """Args: see the attributes; `dtype`: of the weights when they are dequantized."""
        made = torch.Tensor._make_wrapper_subclass(cls, (form.outputs, form.inputs), dtype=dtype, device=panels.device)
        made.panels, made.form = panels, form
        return made

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        return ["panels"], (self.form, self.dtype)

    @staticmethod
    def __tensor_unflatten__(inner: dict[str, torch.Tensor], context: Any, size: Any, stride: Any) -> NativeWeight:
        return NativeWeight(inner["panels"], *context)

    def __repr__(self, **kwargs: Any) -> str:
        return f"NativeWeight({self.form}, dtype={self.dtype})"

    def dequantize(self) -> torch.Tensor:
        """The weights [N, K] as a plain tensor."""
        return dequantized(self.panels, self.form, self.dtype)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = kwargs or {}
        if func is F.linear and not kwargs and len(args) in (2, 3) and isinstance(args[1], NativeWeight):
            x, weight = args[:2]
            bias = args[2] if len(args) == 3 else None
            if _serves(x, weight, bias):
                form = weight.form
                lines = x.reshape(-1, form.inputs)
                out = product(lines, weight.panels, bias, form.bits, form.group, form.outputs, form.scales)
                return out.view(*x.shape[:-1], form.outputs)
        with torch._C.DisableTorchFunctionSubclass():  # results are plain tensors
            return func(*args, **kwargs)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = kwargs or {}
        if func in (torch.ops.aten.detach.default, torch.ops.aten.alias.default):
            return NativeWeight(args[0].panels, args[0].form, args[0].dtype)
        if func._schema.is_mutable:
            raise NotImplementedError(f"{func} on quantized weights")
        plain = tree_map(lambda arg: arg.dequantize() if isinstance(arg, NativeWeight) else arg, (args, kwargs))
        return func(*plain[0], **plain[1])


def _serves(x: torch.Tensor, weight: NativeWeight, bias: torch.Tensor | None) -> bool:
    """True if the library computes F.linear(x, weight, bias), faster than torch with dequantized weights."""
    known = x.dtype in TYPES and x.shape[-1] == weight.form.inputs and not torch.is_autocast_enabled("cpu")
    learns = torch.is_grad_enabled() and (x.requires_grad or (bias is not None and bias.requires_grad))
    return known and not learns and 0 < x.numel() <= MOST_TOKENS * x.shape[-1]


_operators = torch.library.Library("hf_specdec", "FRAGMENT")
_operators.define(
    "quantized_linear(Tensor x, Tensor panels, Tensor? bias, int bits, int group, int outputs, ScalarType scales) -> Tensor"
)


def _quantized_linear(
    x: torch.Tensor, panels: torch.Tensor, bias: torch.Tensor | None, bits: int, group: int, outputs: int, scales: torch.dtype
) -> torch.Tensor:  # fmt: skip
    return linear(x, panels, WeightLayout(bits, group, outputs, x.shape[1], scales), bias)


_operators.impl("quantized_linear", _quantized_linear, "CPU")
product = torch.ops.hf_specdec.quantized_linear.default  # an operator of torch's, so that forwards can be recorded


# ---- from torchao's formats -----------------------------------------------------------------------------------------


def native_weight(weight: torch.Tensor) -> nn.Parameter | None:
    """A weight that torchao quantized, in the library's order; None if it is of a kind that the library does not compute with.

    Args:
        weight: on the CPU, of any class.
    """
    name = type(weight).__name__
    if weight.dtype not in TYPES or getattr(weight, "act_pre_scale", None) is not None:
        return None
    converted = None
    if name == "Int8Tensor" and getattr(weight, "act_quant_kwargs", None) is None:
        converted = _from_int8(weight)
    elif name == "Int4OpaqueTensor" and getattr(weight, "act_mapping_type", None) is None:
        converted = _from_int4(weight)
    return None if converted is None else nn.Parameter(converted, requires_grad=False)


def _from_int8(weight: Any) -> NativeWeight | None:
    (outputs, inputs), (rows, group) = weight.qdata.shape, weight.block_size
    group = 0 if group == inputs else group
    has_zeros = weight.zero_point is not None and bool(weight.zero_point.any())
    if rows != 1 or group not in GROUPS or weight.qdata.dtype != torch.int8 or has_zeros:
        return None
    layout = WeightLayout(8, group, outputs, inputs, torch.float32)
    return NativeWeight(pack(weight.qdata, weight.scale.reshape(outputs, -1), None, layout), layout, weight.dtype)


def _from_int4(weight: Any) -> NativeWeight | None:
    (outputs, inputs), group = weight.shape, weight.block_size[1]
    values = _int4_values(weight.qdata) if group in GROUPS else None
    if values is None:
        return None
    scales, zeros = weight.scale_and_zero.unbind(-1)  # [groups, N]
    kept = torch.bfloat16 if scales.dtype == torch.bfloat16 else torch.float32
    layout = WeightLayout(4, group, outputs, inputs, kept)
    return NativeWeight(pack(values, scales.t(), zeros.t(), layout), layout, weight.dtype)


def _int4_values(packed: torch.Tensor) -> torch.Tensor | None:
    """The integers uint8 [N, K] in torch's format for int4 on CPUs, [N, K / 2]; None if they are packed in an unknown way."""
    for size in list(_PACKINGS):
        values = _unpacked(packed, size)
        if torch.equal(torch.ops.aten._convert_weight_to_int4pack_for_cpu(values.to(torch.int32), 1), packed):
            _PACKINGS.remove(size)
            _PACKINGS.insert(0, size)
            return values
    logger.warning("This version of torch packs 4-bit weights in an unknown way; its own product is used.")
    return None


def _unpacked(packed: torch.Tensor, size: int) -> torch.Tensor:
    """The integers uint8 [N, K] of blocks [K, size / 2]: 64 or 32 outputs in halves of four bits, fewer side by side."""
    (outputs, width), values = packed.shape, []
    for first in range(0, outputs, size):
        count = min(size, outputs - first)
        block = packed[first : first + count].reshape(2 * width, count // 2)
        halves = [block & 15, block >> 4]
        rows = torch.cat(halves, dim=1) if count == size > 16 else torch.stack(halves, dim=2).view(2 * width, count)
        values.append(rows.t())
    return torch.cat(values)
