"""ReadsPages: drafters whose forwards read a paged KV cache; OwnsCache: one of their own, made when the drafter first needs it."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from ...cache import OutOfBlocks, PagedStaticCache
from ...core.rows import RowInput
from ...core.sequence import Sequence
from ...model.draft_loop import LevelForward
from ...model.native import DraftRound, draft_round
from ...model.packed_model import PackedModel
from ..base import CandidateGenerator, DrafterContext, KeepsPrefixes
from .grower import GrowsDrafts
from .tree_growth import DraftLevel
from .tree_shapes import TreeDraftingConfig


class ReadsPages(GrowsDrafts, CandidateGenerator):
    """A drafter whose forwards read and write pages of `cache`: the keys of a text, then those of its draft.

    Attributes:
        num_heads: heads that draft in turn, each with a layer of the cache.
        window_stays: sliding windows end at the text's last token while drafting.
    """

    num_heads = 1
    window_stays = False

    @property
    @abstractmethod
    def cache(self) -> PagedStaticCache:
        """The cache, with a table for every sequence that drafts."""

    def num_read(self, seq: Sequence) -> int:
        """Number of the sequence's tokens that are in the cache."""
        return self.cache.tables[seq.id].length

    def try_reserve(self, seq: Sequence, num_slots: int) -> bool:
        """Reserve that many slots in all for a sequence; False if there are no free blocks."""
        try:
            self.cache.reserve(seq.id, num_slots)
        except OutOfBlocks:
            return False
        return True

    def node_inputs(
        self, level: DraftLevel, tokens: torch.Tensor, ancestors: np.ndarray | torch.Tensor, shift: int = 0
    ) -> list[RowInput]:
        """The input rows of a forward over the last F of the E nodes that have been expanded in each draft. They follow the cached tokens
        of each sequence.

        Args:
            tokens: int64 [R, F] ids in the drafter's vocabulary.
            ancestors: bool [R, F, E], the nodes on each node's path, itself included.
            shift: see `LevelForward`.
        """
        count, first = tokens.shape[1], ancestors.shape[2] - tokens.shape[1]
        is_chain = ancestors.shape[2] == level.depth
        seen: Any = ancestors.cpu().numpy() if isinstance(ancestors, torch.Tensor) and not is_chain else ancestors
        ids = tokens.numpy() if tokens.device.type == "cpu" else tokens
        inputs = []
        for i, seq in enumerate(self.sequences[row] for row in level.rows):
            end = self.num_read(seq) - shift  # a node at depth d has that position plus d - 1
            row = RowInput(seq.id, ids[i], end + first, logits=count)
            row.positions = end - 1 + level.depths[first:]
            if not is_chain:
                row.visibility, row.region_positions = seen[i], end - 1 + level.depths
            if self.window_stays:
                row.window_positions = np.full(count, end - 1)
            inputs.append(row)
        return inputs

    def over_nodes(
        self, model: Any, level: DraftLevel, tokens: torch.Tensor, ancestors: Any, shift: int = 0, **features: torch.Tensor
    ) -> Any:  # fmt: skip
        """The output of a PackedModel, or of a PackedHead with its `features` [R F, ..], over nodes (see `node_inputs`). It reads the
        buffers of a round that is captured."""
        if self.loop is not None:
            return model.forward_batch(self.loop.batch(level.depth, tokens, ancestors), **features)
        return model.forward(self.node_inputs(level, tokens, ancestors, shift), *features.values(), self.cache)

    def at_once(self, rows: list[int], logits: torch.Tensor, made: Callable[[], DraftRound]) -> DraftRound | None:
        """See `GrowsDrafts`."""
        programs = self.round_programs()
        if programs is None or len(rows) * self.shape.widest > programs[0].most_tokens:
            return None
        if any(program is not None and (program.calls or program.reads_sources) for program in programs):
            return None
        if self.shape.nodes[:, 2].max() >= min(logits.shape[1], self.vocabulary.vocab_size):
            return None  # a node has more children than there are tokens
        features = None if self.state is None else self.state[:, 0]
        seq_ids, out = [self.sequences[row].id for row in rows], made()
        draft_round(*programs, self.cache, seq_ids, logits, features, self.vocabulary, out)
        return out

    def round_programs(self) -> tuple[Any, Any] | None:
        """The `forward` and `head` of `draft_round` that compute what `expand` does; None: there are none."""
        return None

    def level_forwards(self, depth: int) -> list[LevelForward]:
        """One for each depth but the last: the head whose turn it is reads all nodes it has not read."""
        depths, ancestors = self.shape.expanded_nodes(depth)
        num_read, out = [0] * self.num_heads, []
        for level in range(1, depth):
            head, end = level % self.num_heads, int(np.searchsorted(depths, level + 1))
            first, num_read[head] = num_read[head], end
            seen = None if ancestors is None else ancestors[first:end, :end]
            out.append(LevelForward(level, first, depths[:end], seen, shift=head))
        return out


class OwnsCache(ReadsPages, KeepsPrefixes):
    """A drafter with keys and values of its own. A run in which it is never asked costs no cache.

    Attributes:
        pages: the cache; None: the drafter has not needed it yet.
        has_graphs: the drafter's forwards are CUDA graphs, which refer to the pools: these are kept for the next run.
        outlives_texts: prefixes of texts that have ended are kept, because later texts may share them.
    """

    has_graphs = False
    outlives_texts = False

    def __init__(self, config: TreeDraftingConfig, target: PackedModel, context: DrafterContext | None = None):
        super().__init__(config, target, context)
        self.pages: PagedStaticCache | None = None
        self._size, self._num_sequences = (1, config.block_size), 1
        self._joined: dict[int, Sequence] = {}

    @abstractmethod
    def new_cache(self, num_blocks: int, block_size: int) -> PagedStaticCache:
        """An empty cache for the drafter's layers, which grows up to `num_blocks`."""

    def own_tokens(self, num_tokens: int) -> int:
        """The most tokens that `num_tokens` of the target's can become in the drafter's vocabulary."""
        return num_tokens

    @property
    def cache(self) -> PagedStaticCache:
        """The cache, with a table for every sequence that has joined."""
        if self.pages is None:
            self.pages = self.new_cache(*self._size)
            for seq in self._joined.values():
                self._add(self.pages, seq)
        return self.pages

    def _add(self, cache: PagedStaticCache, seq: Sequence) -> None:
        num_slots = self.own_tokens(seq.max_length) + self._num_draft_slots
        cache.add(seq.id, cache.slots_each(num_slots, self._num_sequences), seq.adapter)

    @property
    def _num_draft_slots(self) -> int:
        return self.shape.num_expanded(self.shape.depth) + 1

    def allocate(self, num_tokens: int, num_sequences: int, block_size: int) -> None:
        """Set the size for a run, with a draft for each sequence. Nothing is allocated yet."""
        drafts = -(-(self._num_draft_slots + block_size) // block_size) * num_sequences
        num_blocks = -(-self.own_tokens(num_tokens) // block_size) + drafts
        self._size, self._num_sequences = (num_blocks, block_size), num_sequences
        self.outlives_texts = not num_sequences
        if self.pages is not None and self.has_graphs and self.pages.can_serve(block_size):
            self.pages.grow_up_to(num_blocks)
        else:
            self._drop()

    def release(self) -> None:
        """End a run: drop the cache, unless CUDA graphs refer to it."""
        self._joined.clear()
        if self.pages is not None and self.has_graphs and self.pages.is_allocated:
            self.pages.clear()
        else:
            self._size = 1, self._size[1]
            self._drop()

    def _drop(self) -> None:
        if self.pages is not None:
            self.pages = None
            if self.rounds is not None:
                self.rounds.clear()  # they refer to it

    def start(self, seq: Sequence) -> None:
        """A sequence joins, with room for its text and a draft in one place where rows have places."""
        self._joined[seq.id] = seq
        if self.pages is not None:
            self._add(self.pages, seq)

    def evict(self, seq: Sequence) -> None:
        """Give a sequence's blocks back; they will be computed again."""
        if self.pages is not None:
            self.pages.evict(seq.id)

    def stop(self, seq: Sequence) -> None:
        del self._joined[seq.id]
        if self.pages is not None:
            self.pages.remove(seq.id)

    def forget_prefixes(self) -> None:
        """Drop all prefix hashes: rows of the cache come from the target, its features or its weights."""
        if self.pages is not None:
            self.pages.forget_prefixes()

    def num_read(self, seq: Sequence) -> int:
        return 0 if self.pages is None else super().num_read(seq)
