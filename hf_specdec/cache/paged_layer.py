"""PagedLayer: one layer's keys and values, in pools that its cache gives slots of."""

from __future__ import annotations

from typing import Any

import torch
from transformers.cache_utils import CacheLayerMixin

from ..kernels import reference as ops
from ..kernels.dispatch import uses_triton
from ..kernels.layer_reference import rotate
from . import memory


class PagedLayer(CacheLayerMixin):
    """One layer's pools: keys [slots, heads, width] and values [slots, heads, value width], there from the first write on."""

    is_sliding = False

    def __init__(self, owner: Any):
        super().__init__()
        self.owner = owner  # the PagedStaticCache

    @torch.compiler.disable  # once; there is nothing to gain from tracing it
    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Allocate the pools for states [1, heads, T, width]; keys and values may differ in heads and width (MLA)."""
        shapes = [(states.shape[1], states.shape[3]) for states in (key_states, value_states)]
        per_slot = sum(heads * width for heads, width in shapes) * key_states.element_size()
        slots = self.owner.slots_at_first(per_slot)
        # Zeros, not empty: masked slots are multiplied by zero weights, and 0 * NaN would be NaN.
        self.keys = memory.zeros((slots, *shapes[0]), key_states)
        self.values = memory.zeros((slots, *shapes[1]), value_states)
        self.is_initialized = True
        self.owner.note_allocated(self)

    def grow(self, num_slots: int, runs: list[tuple[int, int]]) -> None:
        """Move to larger pools with the content of the slots in `runs` (first, end)."""
        self.keys = _grown(self.keys, num_slots, runs)
        self.values = _grown(self.values, num_slots, runs)

    def shrink(self, num_slots: int) -> None:
        """Use the first slots only."""
        self.keys, self.values = self.keys[:num_slots], self.values[:num_slots]

    def update(self, key_states, value_states, *args, **kwargs):
        """Write the packed states [1, heads, T, width] to the current batch's slots.

        Returns the new states themselves (attention reads the pages), or, for models that attend to what the cache
        returns, the keys and values of all rows, one row after the other: [1, heads, S_total, width].
        """
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        batch = self.owner.batch
        there = batch.on(key_states.device)
        self.write(there.write_slots, key_states[0].transpose(0, 1), value_states[0].transpose(0, 1), there.uses_triton)
        if not batch.gather:
            return key_states, value_states
        read = there.read_slots
        keys, values = self.keys.index_select(0, read), self.values.index_select(0, read)
        return keys.transpose(0, 1)[None], values.transpose(0, 1)[None]

    def rotate_and_update(
        self, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
    ) -> torch.Tensor:
        """`update` with keys [1, Hk, T, D] that are rotated first by angles [1, T, D]; the queries [1, H, T, D], rotated too."""
        if not self.is_initialized:
            self.lazy_initialization(keys, values)
        if uses_triton(keys.device):
            from ..kernels.cache_ops import write_keys_values

            rotated = write_keys_values(
                *(states[0].transpose(0, 1) for states in (keys, values)), self.keys, self.values,
                self.owner.batch.on(keys.device).write_slots, query=query[0].transpose(0, 1),
                cos=cos[0].contiguous(), sin=sin[0].contiguous(),
            )  # fmt: skip
            assert rotated is not None
            return rotated.transpose(0, 1)[None]
        self.update(rotate(keys, cos[0], sin[0]), values)
        return rotate(query, cos[0], sin[0])

    def write(
        self, slots: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, by_triton: bool | None = None
    ) -> None:
        """Write keys [T, heads, width] and values to `slots` [T]; `by_triton`: whether kernels do it, where that is known."""
        if uses_triton(keys.device) if by_triton is None else by_triton:
            from ..kernels.cache_ops import write_keys_values

            write_keys_values(keys, values, self.keys, self.values, slots)
        else:
            ops.write_slots(self.keys, slots, keys)
            ops.write_slots(self.values, slots, values)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """What transformers' mask helpers ask for; our masks are already made."""
        return (self.owner.batch.num_keys if self.owner.batch is not None else query_length), 0

    def get_seq_length(self) -> int:
        """Positions are passed explicitly; any non-zero value says the cache is in use."""
        return self.owner.batch.num_keys if self.owner.batch is not None else 0

    def get_max_length(self) -> int:
        """Slots in the pool."""
        return self.owner.num_slots

    get_max_cache_shape = get_max_length  # its name before transformers 5.20


def _grown(pool: torch.Tensor, num_slots: int, runs: list[tuple[int, int]]) -> torch.Tensor:
    larger = memory.zeros((num_slots, *pool.shape[1:]), pool)
    for first, end in runs:
        larger[first:end].copy_(pool[first:end])
    return larger
