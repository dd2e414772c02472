"""Computations that programs are made from: the forward of a model, the forward of a draft head, or a function of hidden states."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import nn

from ...cache import PagedStaticCache
from ...core.output import PackedOutput
from .. import architectures
from ..packed_batch import PackedBatch

if TYPE_CHECKING:
    from ..packed_head import PackedHead
    from ..packed_model import PackedModel


class Subject(Protocol):
    """A computation that a program may stand for.

    Attributes:
        key: distinguishes it from other subjects whose programs are kept in the same dictionary.
        name: for messages.
        device, dtype: of weights, keys and values.
        features_width: number of features per token that it reads besides ids; 0: none.
        reads_ids: it reads ids and positions and has a cache; otherwise only features.
        vocab_size: ids that it has embeddings for.
        max_positions: positions it was built for; None: any number.
        ours: its modules may be of this package; otherwise all must be torch's or transformers'.
    """

    key: Hashable
    name: str
    device: torch.device
    dtype: torch.dtype
    features_width: int
    reads_ids: bool
    vocab_size: int
    max_positions: int | None
    ours: bool

    def modules(self) -> list[nn.Module]:
        """All modules that it calls, submodules included."""
        ...

    def config(self) -> Any:
        """The configuration whose values it depends on; None: it depends on none."""
        ...

    def new_cache(self) -> PagedStaticCache:
        """A small cache for trials: 16 blocks of 16 slots."""
        ...

    def compute(self, batch: PackedBatch | None, features: torch.Tensor | None) -> list[torch.Tensor]:
        """Its outputs, [T or R, width] each, operator by operator. `features` are [T, F]."""
        ...


class ModelForward:
    """The forward of an active PackedModel."""

    features_width, reads_ids, ours = 0, True, False

    def __init__(self, packed: PackedModel):
        self.packed = packed
        self.model, self.key, self.name = packed.model, (packed.taps, packed.num_layers), type(packed.model).__name__
        self.device, self.dtype = packed.device, packed.model.dtype
        self.vocab_size, self.max_positions = packed.vocab_size, packed.max_positions

    def modules(self) -> list[nn.Module]:
        """All modules of the model."""
        return list(architectures.all_modules(self.model))

    def config(self) -> Any:
        """The model's configuration."""
        return self.model.config

    def new_cache(self) -> PagedStaticCache:
        """A small cache without prefix sharing."""
        return self.packed.new_cache(num_blocks=16, block_size=16, share_prefixes=False)

    def compute(self, batch: PackedBatch | None, features: torch.Tensor | None) -> list[torch.Tensor]:
        """Logits, then the tapped hidden states."""
        assert batch is not None
        return outputs_of(self.packed, self.packed.forward_batch(batch, batch.logit_index))


def outputs_of(packed: PackedModel, output: PackedOutput) -> list[torch.Tensor]:
    """The tensors that a forward of this model returns."""
    taps = packed.taps
    found = [output.logits, *([output.last_hidden] if taps.last_hidden else []), *output.layers.values()]
    return [*found, *([output.all_logits] if taps.logits else [])]  # pyright: ignore[reportReturnType]


class HeadForward:
    """A forward of a PackedHead.

    Args:
        reads: True: the forward of `PackedHead.read_batch`, with the head's `fuse`; False: that of `PackedHead.forward_batch`.
        features_width: width of the given features: of the input of `fuse` if `reads`, otherwise of the features after `fuse`.
    """

    reads_ids, ours, max_positions = True, True, None

    def __init__(self, head: PackedHead, key: Hashable, reads: bool, features_width: int):
        self.head, self.key, self.reads, self.features_width = head, key, reads, features_width
        self.name = type(head.module).__name__
        self.device, self.dtype = head.device, head.dtype
        tables = [each.weight.shape[0] for each in self.modules() if isinstance(each, nn.Embedding)]
        self.vocab_size = min(tables, default=1)

    def modules(self) -> list[nn.Module]:
        """All modules of the head, and the target's modules that it calls."""
        roots = [self.head.module, *self.head.borrowed()]
        return [inner for each in roots for inner in architectures.all_modules(each)]

    def config(self) -> Any:
        """The configuration of the head's layers."""
        return self.head.config

    def new_cache(self) -> PagedStaticCache:
        """A small cache for the head's layers."""
        return self.head.new_cache(num_blocks=16, block_size=16)

    def compute(self, batch: PackedBatch | None, features: torch.Tensor | None) -> list[torch.Tensor]:
        """The head's hidden states."""
        assert batch is not None and features is not None
        run = self.head.read_batch if self.reads else self.head.forward_batch
        return [run(batch, features=features)]


class RowFunction:
    """A function of hidden states [n, F] that calls modules, such as a language-model head.

    Args:
        called: the modules that it calls.
        like: hidden states, for their width, dtype and device.
    """

    reads_ids, ours, vocab_size, max_positions = False, True, 1, None

    def __init__(
        self,
        key: Hashable,
        function: Callable[[torch.Tensor], torch.Tensor],
        called: list[nn.Module],
        like: torch.Tensor,
    ):
        self.key, self.function, self.called = key, function, called
        self.name, self.features_width = type(called[0]).__name__, like.shape[1]
        self.device, self.dtype = like.device, like.dtype

    def modules(self) -> list[nn.Module]:
        """The modules that the function calls."""
        return [inner for each in self.called for inner in architectures.all_modules(each)]

    def config(self) -> Any:
        """None: the function depends on no configuration."""
        return None

    def new_cache(self) -> PagedStaticCache:
        """Not available: the function has no cache.

        Raises:
            TypeError: always.
        """
        raise TypeError("A function of hidden states has no cache.")

    def compute(self, batch: PackedBatch | None, features: torch.Tensor | None) -> list[torch.Tensor]:
        """The function's result."""
        assert features is not None
        return [self.function(features)]
