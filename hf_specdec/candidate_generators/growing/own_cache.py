"""OwnsCache: drafters with a paged KV cache of their own. OwnCache: that cache, which is made when the drafter first needs it."""

from __future__ import annotations

import weakref
from abc import ABC, abstractmethod

import numpy as np
import torch

from ...cache import OutOfBlocks, PagedStaticCache
from ...core.rows import RowInput
from ...core.sequence import Sequence
from ...model.draft_loop import LevelForward
from .grower import Grower
from .tree_growth import DraftLevel, on_host


class OwnCache:
    """The cache of a drafter's layers. A run in which the drafter is never asked costs no cache.

    Args:
        drafter: makes the cache.
        grower: its captured rounds are dropped with the cache, to which they refer.

    Attributes:
        made: the cache; None: the drafter has not needed it yet.
        has_graphs: the drafter's forwards are CUDA graphs, which refer to the pools: these are kept for the next run.
        outlives_texts: prefixes of texts that have ended are kept, because later texts may share them.
    """

    has_graphs = False
    outlives_texts = False

    def __init__(self, drafter: OwnsCache, grower: Grower, block_size: int):
        self._drafter, self._grower = weakref.proxy(drafter), grower
        self._size, self._num_sequences = (1, block_size), 1
        self.made: PagedStaticCache | None = None
        self._joined: dict[int, int] = {}  # sequence id → slots that its text and a draft may need

    @property
    def paged(self) -> PagedStaticCache:
        """The cache, with a table for every sequence that has joined."""
        if self.made is not None:
            return self.made
        made = self.made = self._drafter.new_cache(*self._size)
        for seq_id, num_slots in self._joined.items():
            self._add(seq_id, num_slots)
        return made

    @property
    def _num_draft_slots(self) -> int:
        return self._grower.shape.num_expanded(self._grower.shape.depth) + 1

    def expect(self, num_tokens: int, num_sequences: int, block_size: int) -> None:
        """Set the size for a run: `num_tokens` in all, and a draft for each sequence. Nothing is allocated yet."""
        drafts = -(-(self._num_draft_slots + block_size) // block_size) * num_sequences
        num_blocks = -(-num_tokens // block_size) + drafts
        self._size, self._num_sequences = (num_blocks, block_size), num_sequences
        self.outlives_texts = not num_sequences
        if self.made is not None and self.has_graphs and self.made.can_serve(block_size):
            self.made.grow_up_to(num_blocks)
        else:
            self._drop()

    def release(self) -> None:
        """End a run: drop the cache, unless CUDA graphs refer to it."""
        self._joined.clear()
        if self.made is not None and self.has_graphs and self.made.is_allocated:
            self.made.clear()
        else:
            self._size = 1, self._size[1]
            self._drop()

    def _drop(self) -> None:
        if self.made is not None:
            self.made = None
            self._grower.forget()

    def join(self, seq: Sequence, num_tokens: int) -> None:
        """A sequence joins, with room for `num_tokens` and a draft in one place where rows have places."""
        self._joined[seq.id] = num_tokens + self._num_draft_slots
        if self.made is not None:
            self._add(seq.id, self._joined[seq.id])

    def _add(self, seq_id: int, num_slots: int) -> None:
        assert self.made is not None
        self.made.add(seq_id, self.made.slots_each(num_slots, self._num_sequences))

    def evict(self, seq: Sequence) -> None:
        """Give a sequence's blocks back; they will be computed again."""
        if self.made is not None:
            self.made.evict(seq.id)

    def leave(self, seq: Sequence) -> None:
        del self._joined[seq.id]
        if self.made is not None:
            self.made.remove(seq.id)

    def length(self, seq: Sequence) -> int:
        """Number of the sequence's tokens that are in the cache."""
        return 0 if self.made is None else self.made.tables[seq.id].length

    def try_reserve(self, seq: Sequence, num_slots: int) -> bool:
        """Reserve that many slots in all for a sequence; False if there are no free blocks."""
        try:
            self.paged.reserve(seq.id, num_slots)
        except OutOfBlocks:
            return False
        return True

    def level_inputs(
        self, level: DraftLevel, tokens: torch.Tensor, seq_ids: list[int], before: list[int], window_stays: bool = False
    ) -> list[RowInput]:
        """The input rows of a forward over a level's nodes, after the cached tokens of each sequence.

        Args:
            tokens: int64 [R, F] ids in the drafter's vocabulary.
            seq_ids: the level's R sequences.
            before: position of the last token of each text; a node at depth d has this position plus d.
            window_stays: sliding windows end at the text's last token while drafting.
        """
        # None if there are only chains so far
        ancestors = None if level.ancestors.shape[2] == level.depth else on_host(level.ancestors)
        tables = self.paged.tables
        ends = [tables[seq_id].length for seq_id in seq_ids]
        rows = node_inputs(tokens, seq_ids, ends, before, level.first, level.depths, ancestors)
        if window_stays:
            for row, position in zip(rows, before, strict=True):
                row.window_positions = np.full(tokens.shape[1], position)
        return rows


def node_inputs(
    tokens: torch.Tensor, seq_ids: list[int], ends: list[int], before: list[int], first: int, depths: np.ndarray,
    ancestors: np.ndarray | None,
) -> list[RowInput]:  # fmt: skip
    """The input rows of a forward over the nodes `first`, `first` + 1, .. of each draft.

    Args:
        tokens: int64 [R, F] ids.
        ends: number of cache slots that each text takes.
        before: position of the last token of each text.
        depths: of all nodes so far.
        ancestors: bool [R, F, first + F], the nodes on each node's path; None if there are only chains.
    """
    on_host = tokens.numpy() if tokens.device.type == "cpu" else None
    rows = []
    for i, (seq_id, end, position) in enumerate(zip(seq_ids, ends, before, strict=True)):
        row = RowInput(seq_id, tokens[i] if on_host is None else on_host[i], end + first, logits=tokens.shape[1])
        row.positions = position + depths[first:]
        if ancestors is not None:
            row.visibility, row.region_positions = ancestors[i], position + depths
        rows.append(row)
    return rows


class OwnsCache(ABC):
    """A drafter with keys and values of its own; `pages` is set in its `__init__`.

    Attributes:
        num_heads: heads that draft in turn, each with a layer of the cache.
    """

    grower: Grower
    pages: OwnCache
    num_heads = 1

    @abstractmethod
    def new_cache(self, num_blocks: int, block_size: int) -> PagedStaticCache:
        """An empty cache for the drafter's layers, which grows up to `num_blocks`."""

    @property
    def cache(self) -> PagedStaticCache:
        made = self.pages.made
        return self.pages.paged if made is None else made

    def own_tokens(self, num_tokens: int) -> int:
        """The most tokens that `num_tokens` of the target's can become in the drafter's vocabulary."""
        return num_tokens

    def allocate(self, num_tokens: int, num_sequences: int, block_size: int) -> None:
        self.pages.expect(self.own_tokens(num_tokens), num_sequences, block_size)

    def release(self) -> None:
        self.pages.release()

    def start(self, seq: Sequence) -> None:
        self.pages.join(seq, self.own_tokens(seq.max_length))

    def evict(self, seq: Sequence) -> None:
        self.pages.evict(seq)

    def stop(self, seq: Sequence) -> None:
        self.pages.leave(seq)

    def level_forwards(self, depth: int) -> list[LevelForward]:
        """One for each depth but the last: the head whose turn it is reads all nodes it has not read."""
        depths, ancestors = self.grower.shape.expanded_nodes(depth)
        num_read, out = [0] * self.num_heads, []
        for level in range(1, depth):
            head, end = level % self.num_heads, int(np.searchsorted(depths, level + 1))
            first, num_read[head] = num_read[head], end
            seen = None if ancestors is None else ancestors[first:end, :end]
            out.append(LevelForward(level, first, depths[:end], seen, shift=head))
        return out
