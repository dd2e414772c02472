"""Decides which models and heads run as CUDA graphs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import nn

from ..core.errors import UnsupportedModel
from ..kernels.dispatch import VARIABLE, can_capture_steps


class Capturable(Protocol):
    """A model or a head, as far as graphs need to know it.

    Attributes:
        gather: it attends to gathered keys, whose number changes from step to step.
        forward_batch: runs its forward over a packed batch.
    """

    gather: bool
    forward_batch: Callable[..., Any]

    @property
    def module(self) -> nn.Module:
        """The module that holds its weights."""
        ...

    @property
    def device(self) -> torch.device:
        """The device of its input ids."""
        ...


def uses_graphs(wanted: bool | None, model: Capturable) -> bool:
    """True if forwards of a model or head should run as CUDA graphs.

    Args:
        wanted: the user's choice. None: use graphs where the model can be captured, except for mixtures of experts whose
            routing the host waits for: their capture would fail, and a failed capture costs time.

    Raises:
        UnsupportedModel: graphs are wanted, but the model cannot be captured.
    """
    if wanted:
        check_capturable(model)
    if wanted is not None:
        return wanted
    if getattr(model, "ranks", None) is not None:  # collectives inside graphs have never been run with this library
        return False
    return is_capturable(model) and not experts_wait(model.module, model.device)


def experts_wait(module: nn.Module, device: torch.device) -> bool:
    """True if a module has experts that the host can launch only after it has read the routing from the device.

    transformers' "batched_mm" never waits, its loop ("eager") does. "grouped_mm" is one launch where torch has a kernel for
    it: bfloat16 on compute capability 9 and 10 (`_grouped_mm_cuda` in ATen/native/cuda/GroupedBlas.cpp); elsewhere torch
    copies the groups' ends to the host. Other implementations are unknown and taken to wait.
    """

    def waits(experts: nn.Module) -> bool:
        implementation = getattr(getattr(experts, "config", None), "_experts_implementation", None)
        in_bfloat16 = all(parameter.dtype == torch.bfloat16 for parameter in experts.parameters())
        if implementation == "grouped_mm" and in_bfloat16:
            return torch.cuda.get_device_capability(device)[0] not in (9, 10)
        return implementation != "batched_mm"

    return any(waits(each) for name, each in module.named_modules() if name.rpartition(".")[2] == "experts")


def is_capturable(model: Capturable) -> bool:
    """True if forwards of a model or head can run as CUDA graphs."""
    if model.gather or getattr(model, "recurrent", None) is not None or not can_capture_steps(model.device):
        return False
    return len({parameter.device for parameter in model.module.parameters()}) == 1


def check_capturable(model: Capturable) -> None:
    """Raise UnsupportedModel unless forwards of a model or head can run as CUDA graphs; the message says what to do."""
    if getattr(model, "recurrent", None) is not None:
        raise UnsupportedModel(
            f"'cuda_graphs' cannot be used with {type(model.module).__name__}: its recurrent layers are run token by token, outside of "
            "graphs. Leave the key out."
        )
    if not is_capturable(model):
        spread = {parameter.device for parameter in model.module.parameters()}
        raise UnsupportedModel(
            f"'cuda_graphs' needs a model that uses transformers' attention interface, on one CUDA device that can run the Triton "
            f"kernels (compute capability 8.0 or higher, Triton installed, {VARIABLE} not 'reference'); "
            f"this {type(model.module).__name__} is on {', '.join(sorted(map(str, spread)))}. Leave the key out."
        )
