"""Whole drafting rounds as CUDA graphs: one launch runs all depths.

A captured round runs the growth of tree_growth.py over a bucket of rows that all draft equally deep; each row's draft is cut to
its own limit afterwards. No depth waits for the host: the nodes' positions are known in advance (`LoopBuffers`), and their
tokens, states and, in dynamic trees, paths stay on the device.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Protocol

import numpy as np
import torch
from torch import nn

from ...cache import PagedStaticCache
from ...core.sequence import Sequence
from ...kernels.dispatch import next_power_of_two as power_of_two
from ...kernels.transfer import upload
from ...model.captures import Captures, places_of
from ...model.draft_loop import LevelForward, LoopBuffers
from ...model.graphs import MOST_TOKENS, blocks_bucket, rows_bucket
from ...model.packed_model import PackedModel
from ...sampling.buffers import SamplingBuffers
from .levels import Draft, Growth, NodeExpander
from .tree_growth import DynamicGrowth, growth_of
from .tree_shapes import TreeDraftingConfig, TreeShape, TreeTemplate


class LoopDrafter(NodeExpander, Protocol):
    """A drafter whose rounds can be captured: a `GrowingGenerator` with `has_loop`, where these members are documented."""

    config: TreeDraftingConfig
    shape: TreeShape
    target: PackedModel
    loop: LoopBuffers | None

    def begin(self, *roots: torch.Tensor) -> torch.Tensor:
        """Logits [R, V] of the first drafted tokens."""
        ...

    def modules(self) -> list[nn.Module]:
        """Modules whose weights the captured round reads."""
        ...

    def level_forwards(self, depth: int) -> list[LevelForward]:
        """The forwards of a round that drafts to this depth."""
        ...


class CapturedRounds:
    """One drafter's captured rounds, by bucket of rows, depth and blocks; a bucket is captured when first needed.

    Rounds that sample can be captured, since seeds, positions and sampling parameters are tensors. Rounds that depend on more than
    tensors run eagerly: rows with other logits processors, drafts that stop at a confidence threshold.
    """

    def __init__(self, drafter: LoopDrafter):
        self.drafter = drafter
        self.captures = Captures(f"The drafting loop of {type(drafter).__name__}")
        self._forwards_of: dict[int, list[LevelForward]] = {}  # by depth
        self._probs = torch.zeros(0)  # the distributions of the last round, shared by all buckets

    def clear(self) -> None:
        """Drop all captured rounds, which hold references to the KV pools they read."""
        self.captures.clear()
        self._probs = torch.zeros(0)

    def draft(self, sequences: list[Sequence], limits: list[int], roots: tuple[torch.Tensor, ...]) -> Draft:
        """Run a round through a graph, or eagerly if this round cannot be captured.

        Args:
            sequences, limits: the batch, and how deep each row drafts.
            roots: what `GrowingGenerator.roots` returned for the rows with a limit.
        """
        drafter = self.drafter
        growth = growth_of(drafter, drafter.config, drafter.shape, sequences, limits)
        draft = self._replayed(growth, sequences, roots) if growth.is_replayable else None
        return growth.draft(*growth.levels(drafter.begin(*roots))) if draft is None else draft

    def _replayed(self, growth: Growth, sequences: list[Sequence], roots: tuple[torch.Tensor, ...]) -> Draft | None:
        """The draft from a graph; None if there are too many nodes, no cache is allocated yet, or capturing failed."""
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
        # rows in batch order need no copy: the buffers are read before the next round
        if rows == list(range(len(sequences))):
            growth.probs = None if probs is None else probs[: len(rows)]
            return growth.draft(*(each[: len(rows)] for each in tensors))
        place = np.zeros(len(sequences), dtype=np.int64)
        place[rows] = np.arange(len(rows))
        index = upload(place, tensors[0].device)
        growth.probs = None if probs is None else probs.index_select(0, index)
        return growth.draft(*(each.index_select(0, index) for each in tensors))

    def _probs_of(self, num_rows: int, depth: int, device: torch.device) -> torch.Tensor:
        """The buffer [rows, nodes, V] for the distributions drafts are drawn from; all buckets share its memory."""
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
    """The static inputs of one bucket, and the round that reads them."""

    def __init__(
        self,
        drafter: LoopDrafter,
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
    """The E nodes that are expanded in drafts of that depth, in order.

    Returns: their depths, int64 [E]; the nodes on each one's path, itself included, bool [E, E] (None for dynamic trees, whose
        paths are known only while drafting)."""
    if isinstance(shape, TreeTemplate):
        nodes = shape.expanded[shape.depths[shape.expanded] < depth]
        return shape.depths[nodes], shape.ancestors[np.ix_(nodes, nodes)]
    return np.repeat(np.arange(1, depth), shape.top_k), None
