"""Buffers of a whole drafting loop: what its forwards read besides the tokens and features that flow from one to the next.

Where every level's nodes stand, which slots they write and how much each row attends to follows from the texts' lengths
alone. It is computed on the host for all levels before the first, and crosses in one copy, so that the loop itself needs
no host and can be one CUDA graph.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch

from ..cache import PagedStaticCache
from ..cache.paged_cache import BlockTable
from ..kernels.attention import InputSizes, pack_visibility, visibility_words
from ..kernels.transfer import upload_into
from .buckets import power_of_two
from .graphs import StaticBatch


@dataclass(frozen=True, eq=False)
class LevelForward:
    """One forward of a drafting loop over nodes whose tokens are drafted by then.

    Attributes:
        depth: of the level it continues. Rows that draft deeper take part.
        first: each row's nodes `first`, .. E - 1 are read, in the order in which they were given; those before were already.
        depths: int64 numpy [E], depths of the nodes so far; ascending.
        ancestors: bool numpy [E - first, E], which nodes are on each one's path, itself included; None: found while drafting.
        shift: where the nodes' keys begin: so many slots before the end of the text's.
    """

    depth: int
    first: int
    depths: np.ndarray
    ancestors: np.ndarray | None
    shift: int = 0

    @cached_property
    def end(self) -> int:
        """E."""
        return len(self.depths)

    @cached_property
    def width(self) -> int:
        """Nodes it reads in each row."""
        return self.end - self.first

    @cached_property
    def is_chain(self) -> bool:
        """Whether no row branches so far: one node per depth."""
        return self.end == self.depth


@dataclass
class _HostLevel:
    """Views of the host buffers of one level: int64 [B, F], and the attention inputs by name (see InputSizes.views)."""

    positions: np.ndarray
    slots: np.ndarray
    attention: dict[str, np.ndarray]


class LoopBuffers:
    """Buffers of one bucket of drafting loops: for all levels one table of blocks, and each level's own integers. Loops without
    keys and values have `limits` only.

    Rows stand in descending order of how deep they draft, so that those that take part in a level come first; the tokens of
    others, and of rows that fill up the bucket, are in no row of the level and write to no slot.

    Attributes:
        limits: int32 [B], how deep each row drafts; 0 for rows that fill up.
        batches: by depth, what the level's forward reads.
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
                num_rows * each.width,
                each.width,
                max_blocks if i == 0 else 0,  # the first one's serves all
                0 if each.is_chain else power_of_two(-(-each.end // 32)),
            )
            for i, each in enumerate(forwards)
        ]
        starts = np.cumsum([0, *(size.starts["end"] for size in sizes)])
        tokens = np.cumsum([0, *(2 * size.num_tokens for size in sizes)])
        # Positions and slots int64, then the rest int32, at a multiple of 16 bytes.
        flat_start = 8 * int(tokens[-1] + tokens[-1] % 2)
        self._host = np.zeros(flat_start + 4 * int(starts[-1] + num_rows), dtype=np.uint8)
        self._memory = torch.zeros(len(self._host), dtype=torch.uint8, device=device)
        host_integers, host_flat = self._host[:flat_start].view(np.int64), self._host[flat_start:].view(np.int32)
        integers, flat = self._memory[:flat_start].view(torch.long), self._memory[flat_start:].view(torch.int32)
        self.limits, self._host_limits = flat[starts[-1] :], host_flat[starts[-1] :]
        self.batches: dict[int, StaticBatch] = {}
        self._levels: list[_HostLevel] = []
        first = None
        for each, size, start, token in zip(forwards, sizes, starts, tokens, strict=False):
            assert cache is not None
            inputs = size.inputs(flat[start:], cache.block_size)
            inputs = first = inputs if first is None else dataclasses.replace(inputs, block_tables=first.block_tables)
            positions, slots = integers[token : token + 2 * size.num_tokens].view(2, -1)
            ids = torch.zeros(1, size.num_tokens, dtype=torch.long, device=device)
            self.batches[each.depth] = StaticBatch(ids, positions[None], slots, inputs, cache)
            on_host = host_integers[token : token + 2 * size.num_tokens].reshape(2, num_rows, each.width)
            level = _HostLevel(on_host[0], on_host[1], size.views(host_flat[start:]))
            if not each.is_chain:
                level.attention["region_lengths"][:] = each.end
                if each.ancestors is not None:
                    words = pack_visibility(each.ancestors, size.num_words)
                    level.attention["visibility"][:] = np.tile(words, (num_rows, 1))
            self._levels.append(level)

    def fill(self, tables: list[BlockTable], limits: list[int]) -> None:
        """Put a round's rows into the buffers.

        Args:
            tables: the rows' slots; those of their nodes are reserved behind their text.
            limits: how deep each row drafts, descending.
        """
        depths = np.asarray(limits)
        self._host_limits[:] = 0
        self._host_limits[: len(depths)] = depths
        if self.forwards:
            self._fill_levels(tables, depths, self.forwards[-1].depths)
        upload_into(self._memory, self._host)

    def _fill_levels(self, tables: list[BlockTable], limits: np.ndarray, all_depths: np.ndarray) -> None:
        assert self.cache is not None
        back = max(each.shift for each in self.forwards)
        lengths = np.array([table.length for table in tables])
        slots = np.full((len(tables), back + len(all_depths)), -1, dtype=np.int64)
        blocks = self._levels[0].attention["block_tables"]
        written = np.searchsorted(all_depths, limits)  # nodes of lesser depths: those the row's drafter continues
        for row, (table, count) in enumerate(zip(tables, written.tolist(), strict=True)):
            end = table.length + count
            start = max(table.length - back, 0)
            slots[row, start - table.length + back : back + count] = table.slots[start:end]
            num_blocks = -(-end // self.cache.block_size)
            blocks[row, :num_blocks] = table.blocks[:num_blocks]
        for each, level in zip(self.forwards, self._levels, strict=True):
            active = int(np.count_nonzero(limits > each.depth))
            ends = lengths[:active, None] - each.shift  # of the texts, as this forward's keys are counted
            level.slots[:] = -1
            level.slots[:active] = slots[:active, back - each.shift + each.first : back - each.shift + each.end]
            level.positions[:] = 0
            level.positions[:active] = ends - 1 + each.depths[each.first :]
            into = level.attention
            into["positions"][:] = level.positions.ravel()
            into["query_starts"][:] = np.minimum(np.arange(self.num_rows + 1), active) * each.width
            into["key_lengths"][:] = 0
            into["key_lengths"][:active] = ends[:, 0] + each.end
            if not each.is_chain:
                into["region_positions"][:active, : each.end] = ends - 1 + each.depths

    def batch(self, depth: int, tokens: torch.Tensor, ancestors: torch.Tensor | np.ndarray) -> StaticBatch:
        """What the forward at a depth reads, with its tokens.

        Args:
            tokens: int64 [B, F].
            ancestors: bool [B, F, E]; numpy where the template said it all before.
        """
        batch = self.batches[depth]
        batch.input_ids = tokens.reshape(1, -1)
        visible = batch.inputs.visibility
        if visible is not None and isinstance(ancestors, torch.Tensor):
            visible.copy_(visibility_words(ancestors.flatten(0, 1), visible.shape[1]))
        return batch
