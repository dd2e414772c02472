"""Captures: functions captured as CUDA graphs, kept per bucket until the memory that they read moves; and which models can be captured."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Hashable
from typing import Any, Protocol

import torch
from torch import nn

from ..core.clock import StepTimer
from ..core.errors import UnsupportedModel
from ..kernels.dispatch import VARIABLE, can_capture_steps
from . import architectures
from .structure import state_of

logger = logging.getLogger(__name__)


class Captures:
    """Captured functions by bucket.

    All are dropped when the pools that they read are replaced, or when the modules have changed (see `state_of`), which takes longer to
    find out than a small step: modules are compared once in each context in which models run.

    Args:
        modules: returns the modules that the functions call.
    """

    contexts = 0  # how many have been entered, by any model

    def __init__(self, name: str, modules: Callable[[], list[nn.Module]]):
        self.name, self.capture = name, CudaGraphCapture()
        self._modules, self._state = modules, ()
        self._compared_in = 0  # the context
        self.refused = False  # a capture has failed; no other is tried
        self._found: dict[Hashable, tuple[Any, Any, Callable[[], None]]] = {}
        self._made_for: tuple = ()

    def __len__(self) -> int:
        return len(self._found)

    def clear(self) -> None:
        """Drop all captures, and with them the references to the pools that they read."""
        self._found.clear()
        self.capture.forget()

    def get(
        self, key: Hashable, made_for: tuple, make: Callable[[], tuple[Any, Callable[[], Any]]]
    ) -> tuple[Any, Any, Callable[[], None]] | None:
        """The bucket's (buffers, outputs, replay), captured at its first use; None if it cannot be captured.

        Args:
            made_for: addresses of the pools in use. All captures are dropped when they change.
            make: called for a new bucket; returns its filled buffers and the function to capture, which reads them.
        """
        if self.refused:
            return None
        state = self._state
        if self._compared_in != Captures.contexts:
            self._compared_in = Captures.contexts
            state = state_of(inner for module in self._modules() for inner in architectures.all_modules(module))
        if made_for != self._made_for or state != self._state:
            self.clear()
            self._made_for, self._state = made_for, state
        if key not in self._found:
            StepTimer.preparations += 1
            buffers, function = make()
            try:
                self._found[key] = buffers, *self.capture(function)
            except RuntimeError as error:
                self.refused = True
                self.clear()
                logger.warning("%s runs without CUDA graphs: %s", self.name, error)
                return None
        return self._found[key]


class CudaGraphCapture:
    """Captures functions as CUDA graphs that share one memory pool, so that all together need little more than the largest: a graph's
    outputs must be read before another graph runs."""

    def __init__(self) -> None:
        self._pool: Any = None

    def forget(self) -> None:
        """Use a new memory pool for later captures: CUDA frees a pool with the last graph in it."""
        self._pool = None

    def __call__(self, function: Callable[[], Any]) -> tuple[Any, Callable[[], None]]:
        """Run `function` twice on a side stream, so that its kernels are compiled and its memory is allocated, then capture it."""
        if self._pool is None:
            self._pool = torch.cuda.graph_pool_handle()
        current_stream = torch.cuda.current_stream()
        side_stream = torch.cuda.Stream()
        side_stream.wait_stream(current_stream)
        try:
            with torch.cuda.stream(side_stream):
                for _ in range(2):
                    function()
            current_stream.wait_stream(side_stream)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
                output = function()
        finally:
            torch.cuda.set_stream(current_stream)  # a failed capture leaves its own stream set
        return _borrowed(output, (graph, function)), graph.replay


class _Memory:
    """A tensor's memory for `torch.as_tensor`: not held, but kept for as long as the owner is, which the tensor made of it keeps."""

    def __init__(self, tensor: torch.Tensor, owner: Any):
        storage = tensor.untyped_storage()
        self.owner = owner
        self.__cuda_array_interface__ = {
            "shape": (storage.nbytes(),),
            "typestr": "|u1",
            "data": (storage.data_ptr(), False),
            "version": 3,
        }


def _borrowed(outputs: Any, owner: Any) -> Any:
    """A function's outputs with tensors that leave their memory to the pool, for the graphs captured next."""
    if torch.is_tensor(outputs):
        if not outputs.is_cuda or not outputs.numel():
            return outputs
        whole = torch.as_tensor(_Memory(outputs, owner), device=outputs.device).view(outputs.dtype)
        return whole.as_strided(outputs.shape, outputs.stride(), outputs.storage_offset())
    if isinstance(outputs, dict):
        return {name: _borrowed(output, owner) for name, output in outputs.items()}
    if isinstance(outputs, tuple):
        return tuple(_borrowed(output, owner) for output in outputs)
    if dataclasses.is_dataclass(outputs) and not isinstance(outputs, type):
        return dataclasses.replace(
            outputs,
            **{field.name: _borrowed(getattr(outputs, field.name), owner) for field in dataclasses.fields(outputs)},
        )
    return outputs


# ---- which models and heads run as CUDA graphs ----


class Capturable(Protocol):
    """A model or a head, as far as graphs need to know it.

    Attributes:
        forward_batch: runs its forward over a packed batch.
        modules: returns the modules that the forward calls: `module`, and those that are borrowed.
    """

    forward_batch: Callable[..., Any]
    modules: Callable[[], list[nn.Module]]

    @property
    def module(self) -> nn.Module:
        """What is run."""
        ...

    @property
    def device(self) -> torch.device:
        """Where it runs."""
        ...


def uses_graphs(wanted: bool | None, model: Capturable) -> bool:
    """True if forwards of a model or head should run as CUDA graphs.

    Args:
        wanted: the user's choice. None: use graphs where the model can be captured, except for mixtures of experts whose
            routing the host waits for: their capture would fail, and a failed capture costs time.

    Raises:
        UnsupportedModel: graphs are wanted, but the model cannot be captured.
    """
    obstacle = None if wanted is False else capture_obstacle(model)
    if wanted and obstacle is not None:
        raise UnsupportedModel(f"'cuda_graphs' {obstacle}. Leave the key out.")
    if wanted is not None:
        return wanted
    if getattr(model, "ranks", None) is not None:  # collectives inside graphs have never been run with this library
        return False
    return obstacle is None and not experts_wait(model.module, model.device)


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

    return any(waits(part) for name, part in module.named_modules() if name.rpartition(".")[2] == "experts")


def capture_obstacle(model: Capturable) -> str | None:
    """Why forwards of a model or head cannot run as CUDA graphs, after "'cuda_graphs'"; None: they can."""
    name, devices = type(model.module).__name__, {parameter.device for parameter in model.module.parameters()}
    if getattr(model, "recurrent", None) is not None:
        return f"cannot be used with {name}: its recurrent layers are run token by token, outside of graphs"
    if getattr(model, "family", None) is not None:
        return f"cannot be used with {name}: its decoder reads the encoder's output outside of graphs"
    if getattr(model, "segments", None):
        return f"cannot be used with {name}: its layers compress segments of the text row by row, outside of graphs"
    if architectures.has_indexers(model.module):
        return f"cannot be used with {name}: its indexers select keys row by row, outside of graphs"
    if not getattr(model, "gather", False) and can_capture_steps(model.device) and len(devices) == 1:
        return None
    return (
        f"needs a model that uses transformers' attention interface, on one CUDA device that can run the Triton kernels (compute "
        f"capability 8.0 or higher, Triton installed, {VARIABLE} not 'reference'); this {name} is on "
        f"{', '.join(sorted(map(str, devices)))}"
    )
