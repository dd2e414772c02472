"""Mixtures of experts in traced layers: one opaque operator. They change tensors of their own in place, beside which nothing of
a graph could be moved, and are as they are when they run."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import nn


class _Running(threading.local):
    """The block of the layer that runs in this thread, as `SparseBlocks.running` says."""

    block: SparseBlock


_running = _Running()


@torch.library.custom_op("hf_specdec::sparse_block", mutates_args=(), schema="(Tensor x) -> Tensor")
def _sparse_block(x):
    out = _running.block.own(x)
    return (out if torch.is_tensor(out) else out[0]).contiguous()


@_sparse_block.register_fake
def _(x):
    return x.new_empty(x.shape)


class SparseBlock:
    """`forward` of a router and its experts: hidden states [1, T, H] to the same, alone or the first of several outputs.

    Args:
        num_outputs: of a call, by the block's class, once one has been seen; 0: a tensor.
    """

    def __init__(self, block: nn.Module, num_outputs: dict[type[nn.Module], int]):
        self.own: Callable[..., Any] = block.forward
        self.kind, self.num_outputs = type(block), num_outputs

    def forward(self, hidden_states: torch.Tensor, *args, **kwargs) -> Any:
        """Of the block."""
        if torch.compiler.is_compiling() and not args and not kwargs:
            out, count = _sparse_block(hidden_states), self.num_outputs[self.kind]
            return (out, *[None] * (count - 1)) if count else out
        out = self.own(hidden_states, *args, **kwargs)
        self.num_outputs[self.kind] = 0 if torch.is_tensor(out) else len(out)
        return out

    @property
    def is_known(self) -> bool:
        """Whether a call has been seen."""
        return self.kind in self.num_outputs


class SparseBlocks:
    """The blocks of a model's layers, opaque to tracing inside `opaque`."""

    def __init__(self) -> None:
        self._num_outputs: dict[type[nn.Module], int] = {}
        self._of: dict[nn.Module, SparseBlock] = {}  # by layer

    @contextlib.contextmanager
    def opaque(self, layers: Iterable[nn.Module]) -> Iterator[None]:
        """Inside, dynamo sees one operator for the block of each of the layers that have one block."""
        replaced: dict[nn.Module, nn.Module] = {}
        try:
            for layer in layers:
                blocks = [each for each in layer.modules() if "experts" in each._modules]
                if len(blocks) == 1 and "forward" not in vars(
                    blocks[0]
                ):  # else it is somebody else's, or opaque already
                    self._of[layer] = SparseBlock(blocks[0], self._num_outputs)
                    blocks[0].forward = self._of[layer].forward  # a method: dynamo traces objects one by one
                    replaced[layer] = blocks[0]
            yield
        finally:
            for layer, block in replaced.items():
                del self._of[layer], block.forward
            vars(_running).pop("block", None)  # nothing of a model's outlives its call

    def ready(self, layer: nn.Module) -> bool:
        """Whether a layer can be traced: it has no block, or one of a kind that has been seen at work. It is about to run."""
        block = self._of.get(layer)
        if block is None:
            return True
        _running.block = block
        return block.is_known
