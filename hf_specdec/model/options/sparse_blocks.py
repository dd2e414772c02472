"""Mixtures of experts as one opaque operator of a traced layer.

They modify tensors in place, so a graph that contains their operations could not be rewritten. The operator runs the block's
own forward.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import nn


class _RunningBlock(threading.local):
    """The block of the layer that runs in this thread; `SparseBlocks.ready` sets it."""

    block: SparseBlock


_running = _RunningBlock()


@torch.library.custom_op("hf_specdec::sparse_block", mutates_args=(), schema="(Tensor x) -> Tensor")
def _sparse_block(x):
    out = _running.block.own(x)
    return (out if torch.is_tensor(out) else out[0]).contiguous()


@_sparse_block.register_fake
def _(x):
    return x.new_empty(x.shape)


class SparseBlock:
    """Replaces the `forward` of a block, a router with its experts: hidden states [1, T, H] → [1, T, H].

    The block returns this tensor alone or as the first of several outputs.

    Args:
        num_outputs: number of outputs by the block's class, known after its first call; 0: a tensor instead of a tuple.
    """

    def __init__(self, block: nn.Module, num_outputs: dict[type[nn.Module], int]):
        self.own: Callable[..., Any] = block.forward
        self.kind, self.num_outputs = type(block), num_outputs

    def forward(self, hidden_states: torch.Tensor, *args, **kwargs) -> Any:
        """The block's own forward; while a layer is traced, the operator, with None for outputs after the first."""
        if torch.compiler.is_compiling() and not args and not kwargs:
            out, count = _sparse_block(hidden_states), self.num_outputs[self.kind]
            return (out, *[None] * (count - 1)) if count else out
        out = self.own(hidden_states, *args, **kwargs)
        self.num_outputs[self.kind] = 0 if torch.is_tensor(out) else len(out)
        return out

    @property
    def is_known(self) -> bool:
        """True once a block of this class has run, so its number of outputs is known."""
        return self.kind in self.num_outputs


class SparseBlocks:
    """Makes the mixture-of-experts blocks of a model's layers opaque to tracing."""

    def __init__(self) -> None:
        self._num_outputs: dict[type[nn.Module], int] = {}
        self._by_layer: dict[nn.Module, SparseBlock] = {}

    @contextlib.contextmanager
    def opaque(self, layers: Iterable[nn.Module]) -> Iterator[None]:
        """Inside the context, dynamo sees one operator for the block of each layer that has exactly one."""
        replaced: dict[nn.Module, nn.Module] = {}
        try:
            for layer in layers:
                blocks = [module for module in layer.modules() if "experts" in module._modules]
                # A block whose forward was replaced before is wrapped by other code, or is opaque already.
                if len(blocks) == 1 and "forward" not in vars(blocks[0]):
                    self._by_layer[layer] = SparseBlock(blocks[0], self._num_outputs)
                    # A bound method, because dynamo would trace callable objects one by one.
                    blocks[0].forward = self._by_layer[layer].forward
                    replaced[layer] = blocks[0]
            yield
        finally:
            for layer, block in replaced.items():
                del self._by_layer[layer], block.forward
            vars(_running).pop("block", None)  # hold no reference to the model after its call

    def ready(self, layer: nn.Module) -> bool:
        """True if a layer can be traced: it has no block, or its block's number of outputs is known.

        Call right before the layer runs: this also selects the block that the operator runs.
        """
        block = self._by_layer.get(layer)
        if block is None:
            return True
        _running.block = block
        return block.is_known
