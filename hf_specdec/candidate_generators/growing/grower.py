"""GrowsDrafts: drafters that grow drafts depth by depth, one depth after the other or all as a CUDA graph.

A captured round runs the growth of tree_growth.py over a bucket of rows that all draft equally deep; each row's draft is cut to
its own limit afterwards. No depth waits for the host: the nodes' positions are known in advance (`LoopBuffers`), and their
tokens, states and, in dynamic trees, paths stay on the device.
"""

from __future__ import annotations

import functools
import math
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import nn

from ...cache import PagedStaticCache
from ...core.draft_trees import DraftTrees
from ...core.sequence import Sequence
from ...kernels.dispatch import current, next_power_of_two
from ...kernels.transfer import upload
from ...model.captures import Captures
from ...model.draft_loop import LevelForward, LoopBuffers
from ...model.graphs import MOST_TOKENS, blocks_bucket, rows_bucket
from ...model.native import DraftRound
from ...model.packed_model import PackedModel
from ...sampling.parameters import SamplingBuffers
from ..checkpoints.target_parts import DraftVocabulary
from .tree_growth import Draft, DraftLevel, DynamicGrowth, Growth, growth_of
from .tree_shapes import TreeShape


class GrowsDrafts(ABC):
    """Drafts chains, static trees or dynamic trees depth by depth, with its `roots`, `begin` and `expand`.

    A class that has it calls `grow_as` and sets `vocabulary` in its `__init__`.

    Attributes:
        rounds: the captured rounds; None: rounds run eagerly.
        state: [R, F, S], what the last level's nodes pass to their children (of the roots: F = 1); None: nothing.
        loop: the inputs of the round's forwards, while it is captured.
        survival: [R, F], for each node of the last logits, the log-probability that its path and its next token are accepted: what
            `draft_confidence_threshold` is compared with. None: the drafted tokens' own probabilities are.
    """

    config: Any  # a TreeDraftingConfig, which each method narrows
    target: PackedModel
    vocabulary: DraftVocabulary
    survival: torch.Tensor | None = None

    def grow_as(self, shape: TreeShape, has_loop: bool = True) -> None:
        """Grow drafts of this shape from now on.

        Args:
            has_loop: `begin` and `expand` compute each depth from the one before, and read no sequences while `loop` is set, so that
                rounds can be captured as CUDA graphs.
        """
        self.shape = shape
        self.sequences: list[Sequence] = []
        self.state: torch.Tensor | None = None
        self.loop: LoopBuffers | None = None
        graphs = self.target.graphs is not None if self.config.cuda_graphs is None else self.config.cuda_graphs
        self.rounds = CapturedRounds(self) if graphs and has_loop else None

    @property
    def max_draft_nodes(self) -> int:
        """The nodes of the shape."""
        return self.shape.num_nodes(self.shape.depth)

    def propose(self, sequences: list[Sequence], limits: list[int]) -> DraftTrees:
        """Grow a draft for every row with a limit, and cut it to the limit."""
        limits = self.begin_round(sequences, limits)
        rows = [i for i, limit in enumerate(limits) if limit]
        if not rows:
            return DraftTrees.empty(len(sequences), self.target.device)
        texts = [sequences[i] for i in rows], [limits[i] for i in rows]
        growth = growth_of(self, sequences, limits)
        with current(self.target.device):
            if self.rounds is not None:
                draft = self.rounds.draft(growth, self.roots(*texts))
            else:
                draft = growth.draft(*growth.levels(self.root_logits(*texts)))
        self.drafted(sequences, draft)
        self.sequences = []  # a text that ends is not kept here: it may have images
        return draft.trees

    def begin_round(self, sequences: list[Sequence], limits: list[int]) -> list[int]:
        """Begin a round: how deep each row drafts."""
        self.sequences, depth = sequences, self.shape.depth
        return [limit and self.reach(seq, min(limit, depth)) for seq, limit in zip(sequences, limits, strict=True)]

    def root_logits(self, sequences: list[Sequence], limits: list[int]) -> torch.Tensor:
        """Logits [R, Vd] of the token after each text."""
        return self.begin(*self.roots(sequences, limits))

    def remaining(self, level: DraftLevel) -> torch.Tensor:
        """`state` [R, F of the last level, S] of the rows that are still drafting."""
        assert self.state is not None
        return level.keep(self.state)

    def carried(self, level: DraftLevel) -> torch.Tensor:
        """The state [R, F, S] of each node's parent."""
        state = self.remaining(level)
        if state.shape[1] == 1:  # a chain, or the first level
            return state.expand(-1, level.tokens.shape[1], -1)
        return state.gather(1, level.parents[:, :, None].expand(-1, -1, state.shape[2]))

    # ---- hooks of a drafter -----------------------------------------------------------------------------------------

    def reach(self, seq: Sequence, limit: int) -> int:
        """How deep a row drafts in this step, at most its limit, which is not 0; 0: it cannot. Reserves memory for its draft."""
        return limit

    @abstractmethod
    def roots(self, sequences: list[Sequence], limits: list[int]) -> tuple[torch.Tensor, ...]:
        """Read the new tokens of each text, which all have a limit. Returns the arguments of `begin`, one row per text; by default
        logits [R, Vd]."""

    def begin(self, *roots: torch.Tensor) -> torch.Tensor:
        """Logits [R, Vd] of the token after each text; sets `state`, if the drafter has one."""
        return roots[0]

    @abstractmethod
    def expand(self, level: DraftLevel) -> torch.Tensor:
        """Logits [R, F, Vd] of the token after each node; [R, 1, Vd] if all nodes of a row share them."""

    def at_once(self, rows: list[int], logits: torch.Tensor, made: Callable[[], DraftRound]) -> DraftRound | None:
        """The round that `made` describes, drafted for `rows` of the batch; None: `expand` drafts it.

        Args:
            logits: [R, Vd], after the texts, as `state`. Both may be overwritten.
        """
        return None

    def score_only(self, rows: Callable[[nn.Module], nn.Module]) -> None:
        """Replace the language-model heads of `begin` and `expand` by `rows` of them, which are those of `draft_vocabulary`. Raises
        SpeculativeConfigError: this drafter cannot."""
        raise self.config.fail("draft_vocabulary", "cannot be used: its drafter scores all tokens. Leave it out.")

    def modules(self) -> list[nn.Module]:
        """The modules that `begin` and `expand` run: captured rounds are dropped when their weights change. By default those that a head
        may share with the target."""
        model: Any = self.target.model
        return [model.get_input_embeddings(), model.get_output_embeddings()]

    def level_forwards(self, depth: int) -> list[LevelForward]:
        """The forwards that use a KV cache in a round of this depth; empty for drafters without a cache."""
        return []

    def drafted(self, sequences: list[Sequence], draft: Draft) -> None:
        """Called when the round's draft is complete."""


class CapturedRounds:
    """One drafter's captured rounds, by bucket of rows, depth and blocks; a bucket is captured when first needed.

    Rounds that sample can be captured, since seeds, positions and sampling parameters are tensors. Rounds that depend on more than
    tensors run eagerly: rows with other logits processors, drafts that stop at a confidence threshold.
    """

    def __init__(self, drafter: GrowsDrafts):
        self.drafter = owner = weakref.proxy(drafter)  # whose weights go when it does
        self.captures = Captures(f"The drafting loop of {type(drafter).__name__}", lambda: owner.modules())
        self._forwards = functools.cache(lambda depth: owner.level_forwards(depth))
        self._probs = torch.zeros(0)  # the distributions of the last round, shared by all buckets

    def clear(self) -> None:
        """Drop all captured rounds, which hold references to the KV pools they read."""
        self.captures.clear()
        self._probs = torch.zeros(0)

    def draft(self, growth: Growth, roots: tuple[torch.Tensor, ...]) -> Draft:
        """Run a round through a graph, or eagerly if it cannot be captured; `roots`: of `GrowsDrafts.roots`, for the rows with a limit."""
        depends_on_tensors = growth.least is None and growth.only_sampling
        draft = self._replayed(growth, roots) if depends_on_tensors else None
        return growth.draft(*growth.levels(self.drafter.begin(*roots))) if draft is None else draft

    def _replayed(self, growth: Growth, roots: tuple[torch.Tensor, ...]) -> Draft | None:
        """The draft from a graph; None if there are too many nodes, no cache is allocated yet, or capturing failed."""
        drafter, shape, sequences = self.drafter, self.drafter.shape, growth.sequences
        if self.captures.refused:
            return None
        limits = growth.limits
        drafted = [i for i, limit in enumerate(limits) if limit]
        order = sorted(range(len(drafted)), key=lambda i: -limits[drafted[i]])  # the deepest first: see LoopBuffers
        rows = [drafted[i] for i in order]
        num_rows, depth = rows_bucket(len(rows)), min(next_power_of_two(growth.last), shape.depth)
        forwards = self._forwards(depth)
        if num_rows * max((tensor.width for tensor in forwards), default=shape.widest) > MOST_TOKENS:
            return None
        cache: PagedStaticCache | None = getattr(drafter, "cache", None)
        num_blocks = 0
        if cache is not None and forwards:
            if not cache.is_allocated:
                return None
            longest = max(cache.tables[sequences[i].id].length for i in rows) + shape.num_expanded(growth.last)
            num_blocks = blocks_bucket(-(-longest // cache.block_size))

        device, kind = roots[0].device, growth.sampling_kind()
        probs = self._probs_of(num_rows, depth, device) if growth.keeps_probs else None

        def fill(buffers: _RoundBuffers) -> None:
            tables = [] if cache is None else [cache.tables[sequences[i].id] for i in rows]
            buffers.fill(roots, order, tables, [limits[i] for i in rows])
            if buffers.sampling is not None:
                buffers.sampling.fill([sequences[i] for i in rows])

        def make() -> tuple[_RoundBuffers, Callable[[], Any]]:
            loop = LoopBuffers(forwards, num_rows, num_blocks, cache, device)
            sampling = SamplingBuffers(num_rows, kind, device) if any(kind) else None
            buffers = _RoundBuffers(drafter, loop, roots, depth, sampling, probs)
            fill(buffers)
            return buffers, buffers.run

        made_for = cache.identity if cache is not None else (), self._probs.data_ptr()
        key = num_rows, depth, num_blocks, kind, growth.independent
        capture = self.captures.get(key, made_for, make)
        if capture is None:
            return None
        buffers, tensors, replay = capture
        fill(buffers)
        replay()
        # rows in batch order need no copy: the buffers are read before the next round
        if rows == list(range(len(sequences))):
            growth.probs = None if probs is None else probs[: len(rows)]
            return growth.draft(*(tensor[: len(rows)] for tensor in tensors))
        place = np.zeros(len(sequences), dtype=np.int64)
        place[rows] = np.arange(len(rows))
        index = upload(place, tensors[0].device)
        growth.probs = None if probs is None else probs.index_select(0, index)
        return growth.draft(*(tensor.index_select(0, index) for tensor in tensors))

    def _probs_of(self, num_rows: int, depth: int, device: torch.device) -> torch.Tensor:
        """The buffer [rows, nodes, V] for the distributions drafts are drawn from; all buckets share its memory."""
        shape = num_rows, 1 + self.drafter.shape.num_expanded(depth), self.drafter.target.vocab_size
        if len(self._probs) < math.prod(shape):
            self._probs = torch.zeros(math.prod(shape), device=device)
        return self._probs[: math.prod(shape)].view(shape)


class _RoundBuffers:
    """The static inputs of one bucket, and the round that reads them."""

    def __init__(
        self,
        drafter: GrowsDrafts,
        loop: LoopBuffers,
        roots: tuple[torch.Tensor, ...],
        depth: int,
        sampling: SamplingBuffers | None,
        probs: torch.Tensor | None,
    ):
        self.drafter, self.loop, self.depth = drafter, loop, depth
        self.sampling, self.probs = sampling, probs
        self.roots = [root.new_zeros(loop.num_rows, *root.shape[1:]) for root in roots]
        # placeholders: a captured round does not read them
        self.rows = [Sequence([0], 1) for _ in range(loop.num_rows)]

    def fill(self, roots: tuple[torch.Tensor, ...], order: list[int], tables, limits: list[int]) -> None:
        """Copy a round's inputs: the roots' rows in `order`, and the cache slots and limits in that order."""
        if order != list(range(len(order))):
            index = upload(order, roots[0].device)
            roots = tuple(root.index_select(0, index) for root in roots)
        for buffer, root in zip(self.roots, roots, strict=True):
            buffer[: len(order)].copy_(root)
        self.loop.fill(tables, limits)

    def run(self) -> tuple[torch.Tensor, ...]:
        """Run all depths on the buffers; this is what the graph captures."""
        drafter, limits = self.drafter, [self.depth] * len(self.rows)
        growth = growth_of(drafter, self.rows, limits, self.sampling, self.probs)
        if isinstance(growth, DynamicGrowth):
            growth.device_limits = self.loop.limits
        drafter.loop = self.loop
        try:
            with torch.no_grad():
                return growth.levels(drafter.begin(*self.roots))
        finally:
            drafter.loop = None
