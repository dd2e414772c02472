"""Linear layers that round what they read, as products in int8 and fp8 do, told apart by what they compute."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from .architectures import all_modules

# Relative errors of products of random rows. Measured on CPUs: a layer that rounds with other rows (bitsandbytes int8) differs by 8e-3; one
# that rounds by itself is nonlinear by 3e-3 (bf16) to 4e-2 (fp8); weight-only formats by 4e-7 in float32 and 4e-3 in bfloat16.
_WITH_OTHERS, _NONLINEAR = 5e-3, 1e-3


def rounding_layers(model: PreTrainedModel) -> tuple[list[str], list[str]]:
    """The kinds of linear layers that round their inputs by the other rows of a product; and, in float32, those that round each row
    alone. One layer of a kind is run. The model has run before: some layers quantize at their first call.
    """
    kinds = {}
    for module in all_modules(model):
        weight = getattr(module, "weight", None)
        plain = type(module) is nn.Linear and type(weight) is nn.Parameter and "forward" not in vars(module)
        if isinstance(getattr(module, "in_features", None), int) and not plain:
            kinds.setdefault(f"{type(module).__name__} ({_library(module, weight)})", module)
    others, alone = [], []
    for name, layer in kinds.items():
        rows = torch.randn(3, layer.in_features, generator=torch.Generator().manual_seed(0))
        first, second, third = rows.to(model.device, model.dtype)[:, None, None]
        by_itself = layer(first)
        if _difference(layer(torch.cat([first, 100 * second], dim=1))[:, :1], by_itself) > _WITH_OTHERS:
            others.append(name)
        elif model.dtype == torch.float32:
            added = layer(first + second) - by_itself
            if _difference(layer(third + second) - layer(third), added) > _NONLINEAR:
                alone.append(name)
    return others, alone


def _library(module: nn.Module, weight: Any) -> str:
    """Whose layer it is: by its forward, its weight's class or its class."""
    forward = vars(module).get("forward")
    own = getattr(forward, "__func__", forward)
    origin = getattr(own, "__globals__", {}).get("__name__") or (
        type(weight).__module__ if type(module) is nn.Linear else type(module).__module__
    )
    return origin.split(".")[0]


def _difference(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found.double() - expected.double()).norm() / expected.double().norm().clamp(min=1e-12))
