"""Base classes of drafters that grow drafts depth by depth, without and with a KV cache of their own."""

from __future__ import annotations

from abc import abstractmethod
from typing import ClassVar

import numpy as np
import torch
from torch import nn

from ...cache import OutOfBlocks, PagedStaticCache
from ...core.draft_trees import DraftTrees
from ...core.rows import RowInput
from ...core.sequence import Sequence
from ...kernels.dispatch import current
from ...model.draft_loop import LevelForward, LoopBuffers
from ...model.packed_model import PackedModel
from ..base import CandidateGenerator, DrafterContext
from .captured_rounds import CapturedRounds, expanded_nodes
from .levels import Draft, Level, Vocabulary
from .tree_growth import grow
from .tree_shapes import TreeDraftingConfig, TreeShape


class GrowingGenerator(CandidateGenerator):
    """Drafts chains, static trees or dynamic trees with a subclass's `roots` and `expand`; see tree_growth.py.

    A subclass sets `vocabulary` in its `__init__`. If nodes pass a state to their children, it keeps the states of the last
    level's nodes in `state` [R, F, S] (of the roots: F = 1).

    Attributes:
        has_loop: `begin` and `expand` compute each depth from the one before, and read no sequences while `loop` is set (it
            holds the inputs of the round's forwards), so that rounds can be captured as CUDA graphs.
    """

    config: TreeDraftingConfig
    vocabulary: Vocabulary
    has_loop: ClassVar[bool] = False

    def __init__(self, config: TreeDraftingConfig, target: PackedModel, context: DrafterContext | None = None):
        super().__init__(config, target, context)
        self.shape: TreeShape = config.shape()
        self.state: torch.Tensor | None = None
        self.loop: LoopBuffers | None = None
        graphs = target.graphs is not None if config.cuda_graphs is None else config.cuda_graphs
        self.rounds = CapturedRounds(self) if graphs and self.has_loop else None

    @property
    def max_draft_nodes(self) -> int:
        """Nodes of the deepest tree."""
        return self.shape.num_nodes(self.shape.depth)

    def propose(self, sequences: list[Sequence], limits: list[int]) -> DraftTrees:
        """Grow a draft for every row that has a limit and is ready."""
        limits = self.ready(sequences, [min(limit, self.shape.depth) for limit in limits])
        rows = [i for i, limit in enumerate(limits) if limit]
        if not rows:
            return DraftTrees.empty(len(sequences), self.target.device)
        drafted = [sequences[i] for i in rows]
        with current(self.target.device):
            if self.rounds is not None:
                draft = self.rounds.draft(sequences, limits, self.roots(drafted))
            else:
                draft = grow(self, self.config, self.shape, sequences, limits, self.root_logits(drafted))
        self.drafted(sequences, draft)
        return draft.trees

    def ready(self, sequences: list[Sequence], limits: list[int]) -> list[int]:
        """The limits; 0 for rows that cannot draft in this step. Reserves memory for the others."""
        return limits

    @abstractmethod
    def roots(self, sequences: list[Sequence]) -> tuple[torch.Tensor, ...]:
        """Read the new tokens of each text. Returns the arguments of `begin`, one row per text; by default logits [R, Vd]."""

    def begin(self, *roots: torch.Tensor) -> torch.Tensor:
        """Logits [R, Vd] of the token after each text; sets `state`, if the drafter has one."""
        return roots[0]

    @abstractmethod
    def expand(self, level: Level) -> torch.Tensor:
        """Logits [R, F, Vd] of the token after each node (see `NodeExpander`)."""

    def root_logits(self, sequences: list[Sequence]) -> torch.Tensor:
        """Logits [R, Vd] of the token after each text."""
        return self.begin(*self.roots(sequences))

    def remaining(self, level: Level) -> torch.Tensor:
        """`state` [R, F of the last level, S] of the rows that are still drafting."""
        assert self.state is not None
        return self.state if len(level.kept) == len(self.state) else self.state[level.kept]

    def carried(self, level: Level) -> torch.Tensor:
        """The state [R, F, S] of each node's parent."""
        state = self.remaining(level)
        if state.shape[1] == 1:  # a chain, or the first level
            return state.expand(-1, level.tokens.shape[1], -1)
        return state.gather(1, level.parents[:, :, None].expand(-1, -1, state.shape[2]))

    def modules(self) -> list[nn.Module]:
        """The modules that `begin` and `expand` run: captured rounds are dropped when their weights change."""
        return []

    def level_forwards(self, depth: int) -> list[LevelForward]:
        """The forwards that use the KV cache in a round of this depth; empty for drafters without a cache."""
        return []

    def drafted(self, sequences: list[Sequence], draft: Draft) -> None:
        """Called when the round's draft is complete."""


class CachedGenerator(GrowingGenerator):
    """A growing drafter with a paged KV cache of its own.

    Attributes:
        has_graphs: its forwards are CUDA graphs, which hold references to the cache.
    """

    cache: PagedStaticCache
    has_graphs = False
    window_stays = False  # whether sliding windows end at the text's last token while drafting
    _num_sequences = 1
    outlives_texts = False  # whether prefixes of texts that have ended are kept, because later texts may share them

    def run_as_graphs(self, has_graphs: bool) -> None:
        """Set whether the forwards are CUDA graphs; if not, rounds are not captured either."""
        self.has_graphs = has_graphs
        self.rounds = self.rounds if has_graphs else None

    def level_forwards(self, depth: int) -> list[LevelForward]:
        """One for each depth but the last, over its expanded nodes."""
        depths, ancestors = expanded_nodes(self.shape, depth)
        out = []
        for level in range(1, depth):
            first, end = np.searchsorted(depths, [level, level + 1])
            seen = None if ancestors is None else ancestors[first:end, :end]
            out.append(LevelForward(level, int(first), depths[:end], seen))
        return out

    @abstractmethod
    def new_cache(self, num_blocks: int, block_size: int) -> PagedStaticCache:
        """An empty cache for the drafter's layers, which grows up to `num_blocks`."""

    def own_tokens(self, num_tokens: int) -> int:
        """The most tokens that `num_tokens` of the target's can become in the drafter's vocabulary."""
        return num_tokens

    @property
    def num_draft_slots(self) -> int:
        """Cache slots that one draft needs."""
        return self.shape.num_expanded(self.shape.depth) + 1

    def allocate(self, num_tokens: int, num_sequences: int, block_size: int) -> None:
        """Make a cache for the texts in the drafter's tokens, plus room for one draft per sequence."""
        drafts = -(-(self.num_draft_slots + block_size) // block_size) * num_sequences
        num_blocks = -(-self.own_tokens(num_tokens) // block_size) + drafts
        if self.has_graphs and self.cache.can_serve(block_size):
            self.cache.grow_up_to(num_blocks)
        else:
            self._forget_rounds()
            self.cache = self.new_cache(num_blocks, block_size)
        self._num_sequences, self.outlives_texts = num_sequences, not num_sequences

    def release(self) -> None:
        """Drop the cache, unless CUDA graphs refer to it: then it is kept for the next call."""
        if self.has_graphs and self.cache.is_allocated:
            self.cache.clear()
        else:
            self._forget_rounds()
            self.cache = self.new_cache(1, self.config.block_size)

    def _forget_rounds(self) -> None:
        if self.rounds is not None:
            self.rounds.clear()

    def start(self, seq: Sequence) -> None:
        """Add an empty cache entry."""
        whole = self.own_tokens(seq.max_length) + self.num_draft_slots
        self.cache.add(seq.id, self.cache.slots_each(whole, self._num_sequences))

    def evict(self, seq: Sequence) -> None:
        """Give the KV blocks back; they will be recomputed."""
        self.cache.evict(seq.id)

    def stop(self, seq: Sequence) -> None:
        """Free the cache entry."""
        self.cache.remove(seq.id)

    def try_reserve(self, seq: Sequence, num_slots: int) -> bool:
        """Reserve that many slots in all for a sequence; False if there are no free blocks."""
        try:
            self.cache.reserve(seq.id, num_slots)
        except OutOfBlocks:
            return False
        return True

    def level_inputs(
        self, level: Level, tokens: torch.Tensor, seq_ids: list[int], positions: list[int]
    ) -> list[RowInput]:
        """The input rows of a forward over a level's nodes, after the cached tokens of each sequence.

        Args:
            tokens: int64 [R, F] ids in the drafter's vocabulary.
            seq_ids: the level's R sequences.
            positions: of the last token of each text; a node at depth d has this position plus d.
        """
        count = level.tokens.shape[1]
        on_host = tokens.numpy() if tokens.device.type == "cpu" else None
        # None if there are only chains so far
        ancestors = None if level.ancestors.shape[2] == level.depth else level.host_ancestors
        inputs = []
        for i, (seq_id, position) in enumerate(zip(seq_ids, positions, strict=True)):
            length = self.cache.tables[seq_id].length
            row = RowInput(seq_id, tokens[i] if on_host is None else on_host[i], length + level.first, logits=count)
            row.positions = np.full(count, position + level.depth)
            if ancestors is not None:
                row.visibility = ancestors[i]
                row.region_positions = position + level.depths
            if self.window_stays:
                row.window_positions = np.full(count, position)
            inputs.append(row)
        return inputs
