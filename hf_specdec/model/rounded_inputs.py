"""Linear layers that round what they read, as products in int8 and fp8 do, told apart by what they compute."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from .architectures import all_modules

# Relative errors of products of random rows. Measured on CPUs: a layer that rounds with other rows (bitsandbytes int8) differs by 8e-3; one
# that rounds by itself is nonlinear by 3e-3 (bf16) to 4e-2 (fp8), in bfloat16 by 2e-2 to 7e-2; weight-only formats by 4e-7 in float32 and
# 5e-3 to 8e-3 in bfloat16.
_WITH_OTHERS, _NONLINEAR, _NONLINEAR_LOW_PRECISION = 5e-3, 1e-3, 1.2e-2
# Layers of these round nothing, or are no products.
_PLAIN = ("torch.nn.", "torch.distributed.", "transformers.models.", "peft.")


def rounding_layers(model: PreTrainedModel, device: torch.device) -> tuple[list[str], list[str]]:
    """The kinds of linear layers that round their inputs by the other rows of a product; and those that round each row alone. One layer of
    a kind is run, in models that were loaded quantized, or whose weights or layers are of a library that quantizes. The model has run
    before: some layers quantize at their first call.
    """
    kinds, is_quantized = {}, getattr(model, "hf_quantizer", None) is not None
    for module in all_modules(model):
        origin = _origin(module)
        suspect = is_quantized or origin.startswith("torch.ao.") or _is_of_own_class(getattr(module, "weight", None))
        if suspect and not origin.startswith(_PLAIN) and isinstance(getattr(module, "in_features", None), int):
            kinds.setdefault(f"{type(module).__name__} ({origin.split('.')[0]})", module)
    others, alone = [], []
    for name, layer in kinds.items():
        rows = torch.randn(3, layer.in_features, generator=torch.Generator().manual_seed(0))
        first, second, third = rows.to(device, model.dtype)[:, None, None]
        by_itself = layer(first)
        if _difference(layer(torch.cat([first, 100 * second], dim=1))[:, :1], by_itself) > _WITH_OTHERS:
            others.append(name)
            continue
        added = layer(first + second) - by_itself
        most = _NONLINEAR if model.dtype == torch.float32 else _NONLINEAR_LOW_PRECISION
        if _difference(layer(third + second) - layer(third), added) > most:
            alone.append(name)
    return others, alone


def _origin(module: nn.Module) -> str:
    """The Python module of what computes a layer's output: a forward in place of its own, its weight's class, or its class."""
    forward: Any = vars(module).get("forward")
    function = getattr(forward, "func", forward)
    replaced = getattr(getattr(function, "__func__", function), "__globals__", {}).get("__name__")
    weight = getattr(module, "weight", None)
    made = type(weight) if type(module) is nn.Linear and _is_of_own_class(weight) else type(module)
    return f"{made.__module__ if replaced is None or replaced.startswith('accelerate.') else replaced}."


def _is_of_own_class(weight: Any) -> bool:
    return isinstance(weight, torch.Tensor) and type(weight) not in (torch.Tensor, nn.Parameter)


def _difference(output: torch.Tensor, expected: torch.Tensor) -> float:
    return float((output.double() - expected.double()).norm() / expected.double().norm().clamp(min=1e-12))
