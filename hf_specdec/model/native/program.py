"""A forward as a program of the native library: one call runs it."""

from __future__ import annotations

import ctypes
import threading
from typing import NamedTuple

import numpy as np
import torch

from ...cache import PagedStaticCache
from ...kernels.native import Rows, library
from ...kernels.native import Step as StepInputs
from ..packed_batch import PackedBatch
from .tape import Table

# The most tokens of a forward that runs as a program. Measured: for more, torch's products and its attention are as fast or faster.
MOST_TOKENS = 256

_POSITIONS_AT_FIRST = 1024
_BYTES_PER_THREAD = 2 << 20  # of weights: a thread that reads fewer costs more at the barriers than it saves


class Output(NamedTuple):
    """A tensor that a program returns: its slot, dtype, elements per row, and what its rows are."""

    slot: int
    dtype: torch.dtype
    elements: int
    rows: Rows


class Program:
    """Operations over buffers. Weights are read in the model's own memory, so a write to them takes effect at once.

    One call runs at a time, because all calls use the same buffers.

    Args:
        most_tokens: number of tokens that fit the buffers.
        ops: the operations, an array of `OP`.
        slots: int64, the address of each register.
        memory: the buffers.
        weights: the weights; references that keep their memory from being reused.
        tables: slot and table of each table by position.
        features: slot of the features that the caller passes; None: the program reads none.
        outputs: what is returned.
        pools: by layer: key heads, width, value heads, value width.
        dtype: of keys and values.
        max_positions: number of positions the model was built for; its rotary module may have no angles after them. None: unknown.
    """

    def __init__(
        self,
        most_tokens: int,
        ops: np.ndarray,
        slots: np.ndarray,
        memory: torch.Tensor,
        weights: list[torch.Tensor],
        tables: list[tuple[int, Table]],
        features: int | None,
        outputs: list[Output],
        pools: dict[int, tuple[int, ...]],
        dtype: torch.dtype,
        max_positions: int | None = None,
    ):
        self.most_tokens, self.max_positions = most_tokens, max_positions
        self.ops, self.slots, self.memory, self.weights = ops, slots, memory, weights
        self.tables, self.features, self.outputs, self.pools, self.dtype = tables, features, outputs, pools, dtype
        self._most_threads = max(1, sum(each.nbytes for each in weights) // _BYTES_PER_THREAD)
        self.num_positions = 0  # rows of the tables; 0: the tables are computed again before the next run
        self._filled: list[torch.Tensor] = []
        self._lock = threading.Lock()

    def _fill_tables(self, num_positions: int) -> None:
        """Compute the tables for positions 0 .. `num_positions` - 1."""
        found: dict[int, list[torch.Tensor]] = {}
        self._filled = []
        for slot, table in self.tables:
            if id(table.rows) not in found:
                found[id(table.rows)] = table.rows(num_positions)
            self._filled.append(found[id(table.rows)][table.part])
            self.slots[slot] = self._filled[-1].data_ptr()
        self.num_positions = num_positions

    def run(self, batch: PackedBatch, pools: np.ndarray, features: torch.Tensor | None = None) -> list[torch.Tensor]:
        """The outputs for a batch of at most `most_tokens` tokens. Writes its keys and values to their slots.

        Args:
            pools: int64, the addresses of keys and values of layer 0, of layer 1, ..
            features: [T, F], for programs that read them.

        Raises:
            IndexError: an id or a position has no embedding.
        """
        num_tokens = batch.input_ids.shape[1]
        selected = torch.arange(num_tokens) if batch.logit_index is None else batch.logit_index
        rows = batch.native_rows()
        inputs = StepInputs(
            num_tokens, selected.shape[0], batch.input_ids.data_ptr(), batch.position_ids.data_ptr(), selected.data_ptr(),
            batch.write_slots.data_ptr(), rows.table.ctypes.data, len(rows.table), pools.ctypes.data,
        )  # fmt: skip
        with self._lock:
            highest = int(batch.position_ids.max())
            if highest >= self.num_positions:
                self._fill_tables(self._room_for(highest))
            return self._call(inputs, features)

    def _room_for(self, highest: int) -> int:
        """Number of rows for tables that must reach position `highest`: more than necessary, so that they are rarely computed again, but at
        most the model's own number of positions, unless the text itself is longer."""
        room = max(_POSITIONS_AT_FIRST, 2 * (highest + 1))
        return room if self.max_positions is None or highest >= self.max_positions else min(room, self.max_positions)

    def run_rows(self, features: torch.Tensor) -> list[torch.Tensor]:
        """The outputs for features [n, F] of at most `most_tokens` rows, for programs that read nothing else."""
        inputs = StepInputs()
        inputs.num_tokens = features.shape[0]
        with self._lock:
            return self._call(inputs, features)

    def _call(self, inputs: StepInputs, features: torch.Tensor | None) -> list[torch.Tensor]:
        loaded = library()
        assert loaded is not None
        counts = {Rows.TOKENS: inputs.num_tokens, Rows.SELECTED: inputs.num_selected}
        results = [torch.empty(counts[each.rows], each.elements, dtype=each.dtype) for each in self.outputs]
        for each, result in zip(self.outputs, results, strict=True):
            self.slots[each.slot] = result.data_ptr()
        if self.features is not None:
            assert features is not None
            features = features.contiguous()
            self.slots[self.features] = features.data_ptr()
        failed = loaded.specdec_run(
            self.ops.ctypes.data,
            len(self.ops),
            self.slots.ctypes.data,
            ctypes.byref(inputs),
            min(torch.get_num_threads(), self._most_threads),
        )
        if failed >= 0:
            raise IndexError("index out of range: an id or a position that the model has no embedding for")
        return results


def addresses(program: Program, cache: PagedStaticCache) -> np.ndarray:
    """int64: where keys and values of layer 0, of layer 1, .. are in a cache; pools that do not exist yet are allocated."""
    found = np.zeros(2 * len(cache.layers), dtype=np.int64)
    for layer, (heads, width, value_heads, value_width) in program.pools.items():
        own = cache.layers[layer]
        if not own.is_initialized:
            shapes = (1, heads, 1, width), (1, value_heads, 1, value_width)
            own.lazy_initialization(*(torch.empty(shape, dtype=program.dtype) for shape in shapes))
        found[2 * layer], found[2 * layer + 1] = own.keys.data_ptr(), own.values.data_ptr()
    return found
