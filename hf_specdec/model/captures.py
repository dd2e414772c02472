"""Functions captured as CUDA graphs, kept by bucket until the memory they read moves."""

from __future__ import annotations

import logging
from collections.abc import Callable, Hashable
from typing import Any, Protocol

import torch
from torch import nn

logger = logging.getLogger(__name__)

MOST_BYTES = 2**31  # that the graphs of one model may hold in outputs: float32 logits of every token of a bucket


class Capture(Protocol):
    """How functions are captured."""

    def __call__(self, function: Callable[[], Any]) -> tuple[Any, Callable[[], None]]:
        """What it returned, and a function that runs it again into the same outputs."""
        ...

    def forget(self) -> None:
        """Nothing that was captured is used any more."""
        ...


class Captures:
    """Functions captured by bucket; all are forgotten when the pools or weights they read are no longer those in use, and the one
    that was used longest ago when their outputs are more than MOST_BYTES.

    Args:
        name: whose, for the log.
        capture: how; tests run the same again in Python.
    """

    def __init__(self, name: str, capture: Capture | None = None):
        self.name, self.capture = name, capture or CudaGraphCapture()
        self.refused = False  # something in it cannot be captured: found once, not tried again
        self._found: dict[Hashable, tuple[Any, Any, Callable[[], None]]] = {}
        self._made_for: tuple = ()

    def __len__(self) -> int:
        return len(self._found)

    def clear(self) -> None:
        """Forget all, and with them the pools they read."""
        self._found.clear()
        self.capture.forget()

    def get(
        self, key: Hashable, made_for: tuple, make: Callable[[], tuple[Any, Callable[[], Any]]]
    ) -> tuple[Any, Any, Callable[[], None]] | None:
        """(buffers, outputs, replay) of a bucket; None if it cannot be captured.

        Args:
            made_for: where the pools and weights are.
            make: the bucket's buffers, filled, and what to run on them, if the bucket is seen for the first time.
        """
        if self.refused:
            return None
        if made_for != self._made_for:
            self.clear()
            self._made_for = made_for
        if key not in self._found:
            buffers, function = make()
            try:
                self._found[key] = buffers, *self.capture(function)
            except RuntimeError as error:
                self.refused = True
                self.clear()
                logger.warning("%s runs without CUDA graphs: %s", self.name, error)
                return None
            self._make_room()
        self._found[key] = self._found.pop(key)  # the newest last
        return self._found[key]

    def _make_room(self) -> None:
        sizes = {key: num_bytes(outputs) for key, (_, outputs, _) in self._found.items()}
        while sum(sizes.values()) > MOST_BYTES and len(sizes) > 1:
            if torch.cuda.is_available():  # it may be running
                torch.cuda.synchronize()
            oldest = next(iter(sizes))
            del self._found[oldest], sizes[oldest]


class CudaGraphCapture:
    """Captures functions as CUDA graphs that share memory: one's outputs are read before another runs."""

    def __init__(self) -> None:
        self._pool: Any = None

    def forget(self) -> None:
        """The next captures get memory of their own: a pool ends with the last graph in it."""
        self._pool = None

    def __call__(self, function: Callable[[], Any]) -> tuple[Any, Callable[[], None]]:
        """Run `function` twice on a stream of its own, so that kernels are compiled and memory is there, then capture it."""
        if self._pool is None:
            self._pool = torch.cuda.graph_pool_handle()
        before = torch.cuda.current_stream()
        stream = torch.cuda.Stream()
        stream.wait_stream(before)
        try:
            with torch.cuda.stream(stream):
                for _ in range(2):
                    function()
            before.wait_stream(stream)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
                output = function()
        finally:
            torch.cuda.set_stream(before)  # a capture that fails leaves its own behind
        return output, graph.replay


def num_bytes(outputs: Any) -> int:
    """Of the tensors in what a function returned: tensors, sequences and dictionaries of such, or an object with such fields."""
    if torch.is_tensor(outputs):
        return outputs.nbytes
    if isinstance(outputs, (list, tuple)):
        return sum(map(num_bytes, outputs))
    fields = outputs if isinstance(outputs, dict) else getattr(outputs, "__dict__", {})
    return sum(map(num_bytes, fields.values()))


def places_of(modules: list[nn.Module]) -> tuple[int, ...]:
    """Where modules' weights are, by the first of each: what was captured reads these and no others."""

    def place(module: nn.Module) -> int:
        weight = _first_tensor(module, "_parameters")
        weight = _first_tensor(module, "_buffers") if weight is None else weight
        return 0 if weight is None else weight.data_ptr()

    return tuple(map(place, modules))


def _first_tensor(module: nn.Module, kind: str) -> torch.Tensor | None:
    """Found by hand, as `parameters()` takes longer to set out than this takes to arrive, and it is asked in every step."""
    for tensor in getattr(module, kind).values():
        if type(tensor) in (nn.Parameter, torch.Tensor):  # quantized ones have no place of their own
            return tensor
    found = (_first_tensor(child, kind) for child in module._modules.values() if child is not None)
    return next((tensor for tensor in found if tensor is not None), None)
