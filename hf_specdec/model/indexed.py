"""Indexers over pages: each row's tokens select, among the row's keys, those that they attend to (DeepSeek-V3.2; DeepSeek-AI, 2025)."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from ..cache.paged_layer import INDEX, PagedLayer
from ..core.errors import UnsupportedModel
from ..core.names import CACHE
from ..kernels.attention.inputs import AttentionRow
from ..kernels.attention.reference import read_row


def by_row(forward: Callable[..., Any]) -> Callable[..., Any]:
    """The forward of an indexer, which over pages returns, for each row, int64 [t, k]: the keys of each token by their index in the row.

    With other caches it is the same function.
    """

    @functools.wraps(forward)
    def select(indexer: Any, *inputs: Any, **given: Any) -> Any:
        cache: Any = given.get(CACHE)
        batch = getattr(cache, "batch", None)
        if batch is None or batch.gather:
            return forward(indexer, *inputs, **given)
        if batch.captured or batch.invariant is not None:
            raise UnsupportedModel(
                "Layers that select their keys (indexers) run neither in CUDA graphs nor with 'deterministic'. Leave the key out."
            )
        hidden, queries, angles, mask, *positions = inputs  # Dots3-Note names the last, and gives none
        # Every key is written before any row is scored, because rows may share blocks.
        forward(indexer, hidden, queries, angles, mask[..., :0], *positions, **given)
        rows, masks = batch.plan(cache.window, hidden[0, :, None], hidden[0, :, None])
        selected = []
        for row, mask_of_row in zip(rows, masks, strict=True):
            tokens = slice(row.start, row.end)
            seen = hidden.new_zeros(1, row.length) if mask_of_row is None else mask_of_row
            keys = _KeysOf(cache.layers[indexer.layer_idx], row)
            turned = tuple(angle[:, tokens] for angle in angles)
            part = (
                hidden[:, tokens],
                queries[:, tokens],
                turned,
                seen[None],
                *(position[:, tokens] for position in positions),
            )
            selected.append(forward(indexer, *part, **given | {CACHE: keys})[0].long())
        return selected

    return select


class _KeysOf:
    """A cache for the indexer of one layer and one row, whose keys are in the pages already."""

    def __init__(self, layer: PagedLayer, row: AttentionRow):
        self._layer, self._row = layer, row

    def update_indexer(self, states: torch.Tensor, layer_idx: int) -> torch.Tensor:
        """The keys [1, S, width] of the row."""
        return read_row(self._layer.further[INDEX], self._row)[0]
