"""Rounds of drafting as CUDA graphs: all depths in one launch, from what is known of the texts to the drafts.

What runs is the growth of tree_growth.py itself, over a bucket of rows that all draft equally deep; each row's draft is cut to
its own limit afterwards. No depth waits for the host: where its nodes stand is known before (`LoopBuffers`), and their
tokens, states and, in dynamic trees, paths stay on the device.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from ...cache import PagedStaticCache
from ...core.sequence import Sequence
from ...kernels.transfer import upload
from ...model.buckets import blocks_bucket, power_of_two, rows_bucket
from ...model.draft_loop import LevelForward, LoopBuffers
from ...model.graphs import MOST_TOKENS, Captures, places_of
from ...sampling.buffers import SamplingBuffers
from .levels import Draft, Growth
from .tree_growth import DynamicGrowth, growth_of
from .tree_shapes import TreeShape, TreeTemplate

if TYPE_CHECKING:
    from .grower import GrowingGenerator


class CapturedRounds:
    """One drafter's rounds, captured when a bucket is first needed: of rows, of depths, of blocks.

    Rows that sample are among them: seeds, positions and sampling parameters are tensors. Rounds that are more than a function
    of tensors are left to the drafter: rows with other logits processors, drafts that end where they are unlikely.
    """

    def __init__(self, drafter: GrowingGenerator):
        self.drafter = drafter
        self.captures = Captures(f"The drafting loop of {type(drafter).__name__}")
        self._forwards_of: dict[int, list[LevelForward]] = {}  # by depth
        self._probs = torch.zeros(0)  # what drafts are drawn from, of whichever round was the last

    def clear(self) -> None:
        """Forget all, and with them the pools they read."""
        self.captures.clear()
        self._probs = torch.zeros(0)

    def draft(self, sequences: list[Sequence], limits: list[int], roots: tuple[torch.Tensor, ...]) -> Draft:
        """A round's draft, by a graph or, if it is no round for one, by the drafter.

        Args:
            sequences, limits: the batch, and how deep each row drafts.
            roots: of the rows with a limit (see `GrowingGenerator.roots`).
        """
        drafter = self.drafter
        growth = growth_of(drafter, drafter.config, drafter.shape, sequences, limits)
        draft = self._replayed(growth, sequences, roots) if growth.is_replayable else None
        return growth.draft(*growth.levels(drafter.begin(*roots))) if draft is None else draft

    def _replayed(self, growth: Growth, sequences: list[Sequence], roots: tuple[torch.Tensor, ...]) -> Draft | None:
        """The draft; None if there are too many nodes, no memory yet, or something that cannot be captured."""
        drafter = self.drafter
        if self.captures.refused:
            return None
        limits = growth.limits
        drafted = [i for i, limit in enumerate(limits) if limit]
        order = sorted(range(len(drafted)), key=lambda i: -limits[drafted[i]])  # the deepest first: see LoopBuffers
        rows = [drafted[i] for i in order]
        num_rows, depth = rows_bucket(len(rows)), min(power_of_two(growth.last), drafter.shape.depth)
        forwards = self._forwards(depth)
        if num_rows * max((each.width for each in forwards), default=drafter.shape.widest) > MOST_TOKENS:
            return None
        cache: PagedStaticCache | None = getattr(drafter, "cache", None)
        num_blocks = 0
        if cache is not None and forwards:
            if not cache.is_allocated:
                return None
            longest = max(cache.tables[sequences[i].id].length for i in rows) + drafter.shape.num_expanded(growth.last)
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

        made_for = (cache.identity if cache is not None else (), places_of(drafter.modules()), self._probs.data_ptr())
        key = num_rows, depth, num_blocks, kind, growth.independent
        found = self.captures.get(key, made_for, make)
        if found is None:
            return None
        buffers, tensors, replay = found
        fill(buffers)
        replay()
        if rows == list(range(len(sequences))):  # as they stood; they are read before the next round writes them
            growth.probs = None if probs is None else probs[: len(rows)]
            return growth.draft(*(each[: len(rows)] for each in tensors))
        place = np.zeros(len(sequences), dtype=np.int64)
        place[rows] = np.arange(len(rows))
        index = upload(place, tensors[0].device)
        growth.probs = None if probs is None else probs.index_select(0, index)
        return growth.draft(*(each.index_select(0, index) for each in tensors))

    def _probs_of(self, num_rows: int, depth: int, device: torch.device) -> torch.Tensor:
        """Where a bucket's rounds keep the distributions they draw from, [rows, nodes, V]: the same memory for all buckets."""
        drafter = self.drafter
        shape = num_rows, 1 + drafter.shape.num_expanded(depth), drafter.target.vocab_size
        if len(self._probs) < math.prod(shape):
            self._probs = torch.zeros(math.prod(shape), device=device)
        return self._probs[: math.prod(shape)].view(shape)

    def _forwards(self, depth: int) -> list[LevelForward]:
        if depth not in self._forwards_of:
            self._forwards_of[depth] = self.drafter.level_forwards(depth)
        return self._forwards_of[depth]


class _RoundBuffers:
    """What one bucket's rounds read, and the round itself."""

    def __init__(
        self,
        drafter: GrowingGenerator,
        loop: LoopBuffers,
        roots: tuple[torch.Tensor, ...],
        depth: int,
        sampling: SamplingBuffers | None,
        probs: torch.Tensor | None,
    ):
        self.drafter, self.loop, self.depth = drafter, loop, depth
        self.sampling, self.probs = sampling, probs
        self.roots = [root.new_zeros(loop.num_rows, *root.shape[1:]) for root in roots]
        self.rows = [Sequence([0], 1) for _ in range(loop.num_rows)]  # stand for any: a round reads nothing of them

    def fill(self, roots: tuple[torch.Tensor, ...], order: list[int], tables, limits: list[int]) -> None:
        """Put a round in: the roots' rows in `order`, and of each in that order its slots and limit."""
        if order != list(range(len(order))):
            index = upload(order, roots[0].device)
            roots = tuple(root.index_select(0, index) for root in roots)
        for buffer, root in zip(self.roots, roots, strict=True):
            buffer[: len(order)].copy_(root)
        self.loop.fill(tables, limits)

    def run(self) -> tuple[torch.Tensor, ...]:
        """All depths, from the buffers: what is captured."""
        drafter = self.drafter
        limits = [self.depth] * len(self.rows)
        growth = growth_of(drafter, drafter.config, drafter.shape, self.rows, limits, self.sampling, self.probs)
        if isinstance(growth, DynamicGrowth):
            growth.device_limits = self.loop.limits
        drafter.loop = self.loop
        try:
            with torch.no_grad():
                return growth.levels(drafter.begin(*self.roots))
        finally:
            drafter.loop = None


def expanded_nodes(shape: TreeShape, depth: int) -> tuple[np.ndarray, np.ndarray | None]:
    """The nodes that are continued in drafts of that depth, in their order: depths int64 [E], and which are on each one's path,
    bool [E, E], itself included; None where that is found while drafting."""
    if isinstance(shape, TreeTemplate):
        nodes = shape.expanded[shape.depths[shape.expanded] < depth]
        return shape.depths[nodes], shape.ancestors[np.ix_(nodes, nodes)]
    return np.repeat(np.arange(1, depth), shape.top_k), None
