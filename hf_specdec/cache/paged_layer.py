"""PagedLayer: the pools of keys and values of one layer."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any, Protocol, cast

import torch
from transformers.cache_utils import CacheLayerMixin

from ..kernels.cache import dequantized, rotate_and_write, write_keys_values
from . import memory
from .segments import WithSegments

INDEX = "index"  # the further pool of keys by which an indexer selects tokens
_untraced = cast("Callable[[Any], Any]", torch.compiler.disable)  # typed as what it returns for all kinds of arguments


class SlotsOnDevice(Protocol):
    """Where the tokens of a forward are in the pools on one device, and the operation that writes them there."""

    @property
    def write_slots(self) -> torch.Tensor:
        """int64 [T]: the slot of each token of the forward."""
        ...

    @property
    def read_slots(self) -> torch.Tensor | None:
        """int64 [slots]: those that whole rows are gathered from; None if attention reads the pools itself."""
        ...

    @property
    def write(self) -> Callable[..., Any]:
        """Writes keys and values into the pools."""
        ...


class RunningBatch(Protocol):
    """The batch of a forward, as layers ask for it."""

    @property
    def gather(self) -> bool:
        """True if layers return the keys and values of whole rows."""
        ...

    @property
    def num_keys(self) -> int:
        """Number of keys of all rows together."""
        ...

    def on(self, device: torch.device) -> SlotsOnDevice:
        """What a device needs of it."""
        ...


class PagedLayer(WithSegments, CacheLayerMixin):
    """One layer's keys [slots, heads, width] and values [slots, heads, value width], allocated by the first write.

    `pools`: what was allocated, keys and values; for latent attention one tensor whose columns are the latents and the rotated keys,
    which transformers caches as keys and values; one tensor, too, where values are the keys. `further`: more pools [slots, 1, width] by
    name, in the order in which they were first written, the keys of an indexer for example. `quantized`: {}; of keys and values in int8
    {"scales": those of both [slots, heads, 1]}, which are pools, too, and go to the operations on them.
    """

    is_sliding = False
    keys: Any  # tensors; transformers' classes have None in them before the first write
    values: Any

    def __init__(self, owner: Any):
        super().__init__()
        self.pools: list[torch.Tensor] = []
        self.further: dict[str, torch.Tensor] = {}
        self.quantized: dict[str, tuple[torch.Tensor, torch.Tensor]] = {}
        # weak: a cycle of strong references would keep all memory until the garbage collector runs
        self._owner = weakref.ref(owner)

    @property
    def owner(self) -> Any:
        """The PagedStaticCache that holds this layer."""
        return self._owner()

    @_untraced  # runs once, so tracing it gains nothing
    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Allocate the pools for states [1, heads, T, width]; keys and values may differ in heads and width (MLA)."""
        shapes = [(states.shape[1], states.shape[3]) for states in (key_states, value_states)]
        self._widths = [width for _, width in shapes]
        if self.owner.is_latent:
            shapes = [(shapes[0][0], sum(self._widths))]
        elif key_states is value_states:
            shapes = shapes[:1]
        self.dtype, pools = key_states.dtype, [(shape, key_states) for shape in shapes]
        if self.owner.is_quantized:
            ints, floats = (key_states.new_empty(0, dtype=dtype) for dtype in (torch.int8, torch.float32))
            pools = [*((shape, ints) for shape in shapes), *(((heads, 1), floats) for heads, _ in shapes)]
        slots = self.owner.slots_at_first(sum(heads * width * like.itemsize for (heads, width), like in pools))
        # Zeros, not empty: attention multiplies masked slots by zero weights, and 0 * NaN would be NaN.
        self._use([memory.zeros((slots, *shape), like) for shape, like in pools])
        self.is_initialized = True
        self.owner.note_allocated(self.pools)

    def _use(self, pools: list[torch.Tensor]) -> None:
        self.pools, first = pools, pools[: len(pools) - len(self.further)]
        self.further = dict(zip(self.further, pools[len(first) :], strict=True))
        if self.owner.is_quantized:
            first, scales = first[: len(first) // 2], first[len(first) // 2 :]
            self.quantized = {"scales": (scales[0], scales[-1])}
        self.keys, self.values = pools[0].split(self._widths, dim=2) if self.owner.is_latent else (first[0], first[-1])

    @property
    def states(self) -> tuple[torch.Tensor, ...]:
        """All that is kept of a token: keys, values, their scales and what is in the further pools."""
        return self.keys, self.values, *self.quantized.get("scales", ()), *self.further.values()

    def dequantized(self, states: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        """The `states` of some tokens, with keys and values in the model's dtype."""
        if states[0].dtype != torch.int8:
            return states
        return tuple(dequantized(*pair, self.dtype) for pair in zip(states[:2], states[2:], strict=True))

    def grow(self, num_slots: int, runs: list[tuple[int, int]]) -> None:
        """Move to larger pools and copy the slots in `runs` (first, end)."""
        self._use([_grown(pool, num_slots, runs) for pool in self.pools])

    def shrink(self, num_slots: int) -> None:
        """Keep only the first slots."""
        self._use([pool[:num_slots] for pool in self.pools])

    def update(self, key_states, value_states, *args, **kwargs):
        """Write the packed states [1, heads, T, width] to the current batch's slots.

        Returns the new states themselves, since attention reads the pages; of latent attention none, so that the layer expands none. For
        models that attend to what the cache returns, it returns the keys and values of all rows, one row after the other:
        [1, heads, S_total, width].
        """
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        batch = self.owner.batch
        there = batch.on(key_states.device)
        keys, values = tokens_first(key_states), tokens_first(value_states)
        there.write(keys, values, self.keys, self.values, there.write_slots, **self.quantized)
        if not batch.gather:
            if self.owner.is_latent:
                return key_states[:, :, :0], value_states[:, :, :0]
            return key_states, value_states
        stored = self.states[: 4 if self.quantized else 2]
        keys, values = self.dequantized(tuple(states.index_select(0, there.read_slots) for states in stored))
        return keys.transpose(0, 1)[None], values.transpose(0, 1)[None]

    def rotate_and_update(
        self, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
    ) -> torch.Tensor:
        """As `update`, but first rotate keys [1, Hk, T, D] and queries [1, H, T, D] by angles [1, T, D]. Returns the queries."""
        if not self.is_initialized:
            self.lazy_initialization(keys, values)
        slots = self.owner.batch.on(keys.device).write_slots
        query, keys, values = tokens_first(query), tokens_first(keys), tokens_first(values)
        out = rotate_and_write(query, keys, values, self.keys, self.values, slots, cos[0], sin[0], **self.quantized)
        return out.transpose(0, 1)[None]

    def write(self, slots: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Write keys and values [T, heads, width] to `slots` [T]."""
        write_keys_values(keys, values, self.keys, self.values, slots, **self.quantized)

    def write_further(self, name: str, slots: torch.Tensor, states: torch.Tensor) -> None:
        """Write states [T, 1, width] to `slots` [T] of a further pool."""
        if name not in self.further:
            self.further[name] = memory.zeros((self.keys.shape[0], *states.shape[1:]), states)
            self.pools.append(self.further[name])
            self.owner.note_allocated([self.further[name]])
        self.further[name].index_copy_(0, slots, states)

    def update_indexer(self, indexer_key_states: torch.Tensor) -> torch.Tensor:
        """Write an indexer's keys [1, T, width]. Returns none, since the pages are read, or, for models that attend to what the cache
        returns, those of all rows, one row after the other: [1, S_total, width]."""
        there = self.owner.batch.on(indexer_key_states.device)
        self.write_further(INDEX, there.write_slots, indexer_key_states[0][:, None])
        if not self.owner.batch.gather:
            return indexer_key_states[:, :0]
        return self.further[INDEX].index_select(0, there.read_slots).transpose(0, 1)

    def get_mask_sizes(self, query_length: int) -> tuple[int, Any]:
        """The number of keys, and what makes their indices positions: of gathered keys of several rows a tensor [S_total]. Our masks are
        made elsewhere."""
        batch = self.owner.batch
        if batch is None or not batch.gather:
            return (batch.num_keys if batch is not None else query_length), 0
        return batch.num_keys, batch.offsets[1]

    def get_seq_length(self) -> int:
        """Any non-zero value tells transformers that the cache is in use; positions are passed explicitly."""
        return self.owner.batch.num_keys if self.owner.batch is not None else 0

    def get_max_length(self) -> int:
        """Slots in the pool."""
        return self.owner.num_slots

    get_max_cache_shape = get_max_length  # its name before transformers 5.20


def tokens_first(states: torch.Tensor) -> torch.Tensor:
    """[T, heads, width] from states [1, heads, T, width]: a view."""
    return states.squeeze(2) if states.shape[2] == 1 else states[0].transpose(0, 1)  # one operation, not two


def _grown(pool: torch.Tensor, num_slots: int, runs: list[tuple[int, int]]) -> torch.Tensor:
    larger = memory.zeros((num_slots, *pool.shape[1:]), pool)
    for first, end in runs:
        larger[first:end].copy_(pool[first:end])
    return larger
