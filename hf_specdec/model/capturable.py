"""Which models and heads can run as CUDA graphs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import nn

from ..core.errors import UnsupportedModel
from ..kernels.dispatch import VARIABLE, uses_triton


class Capturable(Protocol):
    """What graphs need to know of a model or a head.

    Attributes:
        gather: it attends to gathered keys, which differ in number from step to step.
        forward_batch: its forward over a packed batch.
    """

    gather: bool
    forward_batch: Callable[..., Any]

    @property
    def module(self) -> nn.Module:
        """Its weights."""
        ...

    @property
    def device(self) -> torch.device:
        """Where input ids go."""
        ...


def uses_graphs(wanted: bool | None, model: Capturable) -> bool:
    """Whether forwards of a model or head are to be CUDA graphs: as wanted; None: where they can be, but for mixtures of experts
    that wait for the device to choose: a capture that fails is not free.

    Raises:
        UnsupportedModel: they are wanted and cannot be.
    """
    if wanted:
        check_capturable(model)
    if wanted is not None:
        return wanted
    return is_capturable(model) and not experts_wait(model.module, model.device)


def experts_wait(module: nn.Module, device: torch.device) -> bool:
    """Whether a module has experts that the host must hear of before it can launch them.

    transformers' "batched_mm" never asks, its loop ("eager") does. "grouped_mm" is one launch where torch has a kernel for it: bfloat16
    on compute capability 9 and 10 (`_grouped_mm_cuda` in ATen/native/cuda/GroupedBlas.cpp); elsewhere torch copies the
    groups' ends to the host. Of other experts nothing is known.
    """

    def waits(experts: nn.Module) -> bool:
        how = getattr(getattr(experts, "config", None), "_experts_implementation", None)
        in_bfloat16 = all(parameter.dtype == torch.bfloat16 for parameter in experts.parameters())
        if how == "grouped_mm" and in_bfloat16:
            return torch.cuda.get_device_capability(device)[0] not in (9, 10)
        return how != "batched_mm"

    return any(waits(each) for name, each in module.named_modules() if name.rpartition(".")[2] == "experts")


def is_capturable(model: Capturable) -> bool:
    """Whether forwards of a model or head can be CUDA graphs."""
    if model.gather or model.device.type != "cuda" or not uses_triton(model.device):
        return False
    return len({parameter.device for parameter in model.module.parameters()}) == 1


def check_capturable(model: Capturable) -> None:
    """Raise UnsupportedModel, with what to do, unless forwards of a model or head can be CUDA graphs."""
    if not is_capturable(model):
        spread = {parameter.device for parameter in model.module.parameters()}
        raise UnsupportedModel(
            f"'cuda_graphs' needs a model on transformers' attention interface, on one CUDA device that Triton's kernels serve (compute "
            f"capability 8.0 and above, Triton installed, {VARIABLE} not 'reference'); "
            f"this {type(model.module).__name__} is on {', '.join(sorted(map(str, spread)))}. Leave the key out."
        )
