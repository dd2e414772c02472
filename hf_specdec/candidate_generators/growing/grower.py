"""What drafters that grow drafts depth by depth share: the shape, the round, and (for those with KV) the cache."""

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
    """Drafts chains, static trees or dynamic trees from what `roots` and `expand` say; see tree_growth.py beside this.

    A subclass sets `vocabulary` in its `__init__`. One whose nodes hand something on to their children keeps that in
    `state` [R, F, S], of the last level's nodes (of the roots: F = 1) in the running round.

    Attributes:
        has_loop: every depth is computed from the one before by `begin` and `expand`, which read no sequence where `loop`
            holds what a round's forwards read of them: then rounds can be captured (`cuda_graphs`).
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
        """Grow a draft for every row that has a limit and that the drafter knows enough of."""
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
        """The limits, 0 for rows that cannot be drafted for now; memory for the others is reserved."""
        return limits

    @abstractmethod
    def roots(self, sequences: list[Sequence]) -> tuple[torch.Tensor, ...]:
        """Read what is new of each text; what drafts begin with, a row each: their logits [R, Vd], or what `begin` takes."""

    def begin(self, *roots: torch.Tensor) -> torch.Tensor:
        """Logits [R, Vd] of what follows each sequence's text, from its root; sets `state`, where there is one."""
        return roots[0]

    @abstractmethod
    def expand(self, level: Level) -> torch.Tensor:
        """Logits [R, F, Vd] of what follows each node (see NodeExpander)."""

    def root_logits(self, sequences: list[Sequence]) -> torch.Tensor:
        """Logits [R, Vd] of what follows each sequence's text."""
        return self.begin(*self.roots(sequences))

    def remaining(self, level: Level) -> torch.Tensor:
        """`state` [R, F of the last level, S] of the rows that go on."""
        assert self.state is not None
        return self.state if len(level.kept) == len(self.state) else self.state[level.kept]

    def carried(self, level: Level) -> torch.Tensor:
        """The state [R, F, S] of each node's parent."""
        state = self.remaining(level)
        if state.shape[1] == 1:  # chains, and the nodes below the root
            return state.expand(-1, level.tokens.shape[1], -1)
        return state.gather(1, level.parents[:, :, None].expand(-1, -1, state.shape[2]))

    def modules(self) -> list[nn.Module]:
        """What `begin` and `expand` run: captured rounds are forgotten when these have other weights."""
        return []

    def level_forwards(self, depth: int) -> list[LevelForward]:
        """The forwards over keys and values of a round that drafts so deep; none without a cache."""
        return []

    def drafted(self, sequences: list[Sequence], draft: Draft) -> None:
        """The round's draft is complete; `draft.trees` goes to the target."""


class CachedGenerator(GrowingGenerator):
    """A growing drafter with keys and values of its own, in pages like the target's.

    Attributes:
        has_graphs: its forwards are CUDA graphs, which read the cache.
    """

    cache: PagedStaticCache
    has_graphs = False
    window_stays = False  # while drafting, sliding windows stay where they are at the text's end
    _num_sequences = 1

    def run_as_graphs(self, has_graphs: bool) -> None:
        """Say whether its forwards are CUDA graphs. If not, rounds are none either."""
        self.has_graphs = has_graphs
        self.rounds = self.rounds if has_graphs else None

    def level_forwards(self, depth: int) -> list[LevelForward]:
        """One for each depth but the last, over its nodes."""
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
        """How many tokens the drafter may have to read for so many of the target's."""
        return num_tokens

    @property
    def num_draft_slots(self) -> int:
        """Slots for one draft."""
        return self.shape.num_expanded(self.shape.depth) + 1

    def allocate(self, num_tokens: int, num_sequences: int, block_size: int) -> None:
        """A cache like the target's, for the texts as the drafter reads them, plus room for one draft per sequence."""
        drafts = -(-(self.num_draft_slots + block_size) // block_size) * num_sequences
        num_blocks = -(-self.own_tokens(num_tokens) // block_size) + drafts
        if self.has_graphs and self.cache.can_serve(block_size):
            self.cache.grow_up_to(num_blocks)
        else:
            self._forget_rounds()
            self.cache = self.new_cache(num_blocks, block_size)
        self._num_sequences = num_sequences

    def release(self) -> None:
        """Drop the cache, unless CUDA graphs read it: then it is kept for the next call."""
        if self.has_graphs and self.cache.is_allocated:
            self.cache.clear()
        else:
            self._forget_rounds()
            self.cache = self.new_cache(1, self.config.block_size)

    def _forget_rounds(self) -> None:
        if self.rounds is not None:
            self.rounds.clear()

    def start(self, seq: Sequence) -> None:
        """An empty cache entry."""
        whole = self.own_tokens(seq.max_length) + self.num_draft_slots
        self.cache.add(seq.id, self.cache.place_of(whole, self._num_sequences))

    def evict(self, seq: Sequence) -> None:
        """Give the KV blocks back; they are recomputed."""
        self.cache.evict(seq.id)

    def stop(self, seq: Sequence) -> None:
        """Free the cache entry."""
        self.cache.remove(seq.id)

    def try_reserve(self, seq: Sequence, num_slots: int) -> bool:
        """Whether the sequence has, or now got, that many slots."""
        try:
            self.cache.reserve(seq.id, num_slots)
        except OutOfBlocks:
            return False
        return True

    def level_inputs(
        self, level: Level, tokens: torch.Tensor, seq_ids: list[int], positions: list[int]
    ) -> list[RowInput]:
        """The rows of a forward over a level's nodes, behind what the cache holds of each sequence.

        Args:
            tokens: int64 [R, F] ids as the drafter knows them.
            seq_ids: of the level's R rows.
            positions: of the roots' tokens; a node at depth d stands d behind.
        """
        count = level.tokens.shape[1]
        on_host = tokens.numpy() if tokens.device.type == "cpu" else None
        ancestors = None if level.ancestors.shape[2] == level.depth else level.host_ancestors  # None: a chain so far
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
