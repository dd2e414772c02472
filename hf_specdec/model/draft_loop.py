"""Buffers of a whole drafting loop: the inputs of its forwards, except the tokens and features that pass from one to the next.

The positions of every level's nodes, the slots they write and the number of keys each row attends to depend only on the
lengths of the texts. The host computes them for all levels before the loop starts and sends them in one copy. So the loop
runs without the host and can be one CUDA graph.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np
import torch

from ..cache import PagedStaticCache
from ..cache.paged_cache import BlockTable
from ..kernels.attention.inputs import InputSizes, pack_visibility, visibility_words
from ..kernels.dispatch import next_power_of_two
from ..kernels.transfer import upload_into
from .graphs import CapturedBatch


@dataclass(frozen=True, eq=False)
class LevelForward:
    """One forward of a drafting loop. It reads nodes that earlier levels drafted.

    Attributes:
        depth: depth of the level whose children it drafts. Only rows that draft deeper take part.
        first: it reads nodes `first`, .. E - 1 of each row, in drafting order; earlier forwards read the nodes before.
        depths: int64 numpy [E], depths of all nodes so far, ascending.
        ancestors: bool numpy [E - first, E], which nodes are on the path to each node it reads, that node included; None:
            known only while drafting.
        shift: number of slots by which the nodes' keys begin before the end of the text's keys.
    """

    depth: int
    first: int
    depths: np.ndarray
    ancestors: np.ndarray | None
    shift: int = 0

    @cached_property
    def end(self) -> int:
        """E: number of nodes so far."""
        return len(self.depths)

    @cached_property
    def width(self) -> int:
        """Number of nodes it reads in each row."""
        return self.end - self.first

    @cached_property
    def is_chain(self) -> bool:
        """True if no row branches so far: one node per depth."""
        return self.end == self.depth


class _HostLevel(NamedTuple):
    """Views of one level's host buffers: positions and slots int64 [B, F], and attention inputs by name (InputSizes.views)."""

    positions: np.ndarray
    slots: np.ndarray
    attention: dict[str, np.ndarray]


class LoopBuffers:
    """Buffers of one bucket of drafting loops: a block table shared by all levels, and integers of each level.

    Rows are sorted by descending draft length, so the rows that take part in a level come first. The tokens of all other
    rows, bucket padding included, belong to no row of the level and write to no slot.

    Args:
        forwards: the loop's forwards in order; empty for loops without keys and values, which have `limits` only.
        num_rows, max_blocks: the bucket's B, and the columns of its block table.

    Attributes:
        limits: int32 [B], draft length of each row; 0 for padding rows.
        batches: the batch of each forward, by `LevelForward.depth`.
    """

    def __init__(
        self,
        forwards: list[LevelForward],
        num_rows: int,
        max_blocks: int,
        cache: PagedStaticCache | None,
        device: torch.device,
    ):
        self.forwards, self.num_rows, self.cache = forwards, num_rows, cache
        sizes = [
            InputSizes(
                num_rows,
                num_rows * forward.width,
                forward.width,
                max_blocks if i == 0 else 0,  # all levels use the first one's block table
                0 if forward.is_chain else next_power_of_two(-(-forward.end // 32)),
            )
            for i, forward in enumerate(forwards)
        ]
        starts = np.cumsum([0, *(size.starts["end"] for size in sizes)])
        tokens = np.cumsum([0, *(2 * size.num_tokens for size in sizes)])
        # First int64 positions and slots; then, at a multiple of 16 bytes, int32 attention inputs and limits.
        flat_start = 8 * int(tokens[-1] + tokens[-1] % 2)
        self._host = np.zeros(flat_start + 4 * int(starts[-1] + num_rows), dtype=np.uint8)
        self._memory = torch.zeros(len(self._host), dtype=torch.uint8, device=device)
        host_integers, host_flat = self._host[:flat_start].view(np.int64), self._host[flat_start:].view(np.int32)
        integers, flat = self._memory[:flat_start].view(torch.long), self._memory[flat_start:].view(torch.int32)
        self.limits, self._host_limits = flat[starts[-1] :], host_flat[starts[-1] :]
        self.batches: dict[int, CapturedBatch] = {}
        self._levels: list[_HostLevel] = []
        first = None
        for forward, size, start, token in zip(forwards, sizes, starts, tokens, strict=False):
            assert cache is not None
            inputs = size.inputs(flat[start:], cache.block_size)
            inputs = first = inputs if first is None else dataclasses.replace(inputs, block_tables=first.block_tables)
            positions, slots = integers[token : token + 2 * size.num_tokens].view(2, -1)
            ids = torch.zeros(1, size.num_tokens, dtype=torch.long, device=device)
            self.batches[forward.depth] = CapturedBatch(ids, positions[None], slots, inputs, cache)
            on_host = host_integers[token : token + 2 * size.num_tokens].reshape(2, num_rows, forward.width)
            level = _HostLevel(on_host[0], on_host[1], size.views(host_flat[start:]))
            if not forward.is_chain:
                level.attention["region_lengths"][:] = forward.end
                if forward.ancestors is not None:
                    words = pack_visibility(forward.ancestors, size.num_words)
                    level.attention["visibility"][:] = np.tile(words, (num_rows, 1))
            self._levels.append(level)

    def fill(self, tables: list[BlockTable], limits: list[int]) -> None:
        """Write a round's rows into the buffers. `tables`: the rows' block tables; slots for the nodes are reserved after the text."""
        row_limits = np.asarray(limits)
        self._host_limits[:] = 0
        self._host_limits[: len(row_limits)] = row_limits
        if self.forwards:
            self._fill_levels(tables, row_limits, self.forwards[-1].depths)
        upload_into(self._memory, self._host)

    def _fill_levels(self, tables: list[BlockTable], limits: np.ndarray, all_depths: np.ndarray) -> None:
        assert self.cache is not None
        back = max(forward.shift for forward in self.forwards)
        lengths = np.array([table.length for table in tables])
        slots = np.full((len(tables), back + len(all_depths)), -1, dtype=np.int64)
        blocks = self._levels[0].attention["block_tables"]
        # Drafting continues only from nodes above the row's deepest level, so only these are read and written.
        written = np.searchsorted(all_depths, limits)
        for row, (table, count) in enumerate(zip(tables, written.tolist(), strict=True)):
            end = table.length + count
            start = max(table.length - back, 0)
            slots[row, start - table.length + back : back + count] = table.slots[start:end]
            num_blocks = -(-end // self.cache.block_size)
            blocks[row, :num_blocks] = table.blocks[:num_blocks]
        for forward, level in zip(self.forwards, self._levels, strict=True):
            active = int(np.count_nonzero(limits > forward.depth))
            ends = lengths[:active, None] - forward.shift  # text lengths in this forward's own count of keys
            level.slots[:] = -1
            first = back - forward.shift
            level.slots[:active] = slots[:active, first + forward.first : first + forward.end]
            level.positions[:] = 0
            level.positions[:active] = ends - 1 + forward.depths[forward.first :]
            into = level.attention
            into["positions"][:] = level.positions.ravel()
            into["query_starts"][:] = np.minimum(np.arange(self.num_rows + 1), active) * forward.width
            into["key_lengths"][:] = 0
            into["key_lengths"][:active] = ends[:, 0] + forward.end
            if not forward.is_chain:
                into["region_positions"][:active, : forward.end] = ends - 1 + forward.depths

    def batch(self, depth: int, tokens: torch.Tensor, ancestors: torch.Tensor | np.ndarray) -> CapturedBatch:
        """The batch of the forward at a depth, with its tokens and visibility.

        Args:
            tokens: int64 [B, F].
            ancestors: bool [B, F, E], copied into the batch; numpy if `LevelForward.ancestors` was known in advance and is
                in the buffers already.
        """
        batch = self.batches[depth]
        batch.input_ids = tokens.reshape(1, -1)
        visible = batch.inputs.visibility
        if visible is not None and isinstance(ancestors, torch.Tensor):
            visible.copy_(visibility_words(ancestors.flatten(0, 1), visible.shape[1]))
        return batch
