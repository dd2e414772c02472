"""Attention to compressed segments of the text, over pages (DeepSeek-V4): which tokens close segments, and which see their entries.

A token attends to the last tokens, within a sliding window, and to the entries of segments that were closed up to it: to all of them,
or to those that an indexer selects. See `cache.segments` for where entries are kept.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn

from ..cache import PagedStaticCache
from ..cache.paged_layer import PagedLayer
from ..cache.segments import ClosedSegments, SegmentSize, entries_of, layer_of
from ..core.rows import RowInput
from ..kernels.attention import reference
from ..kernels.attention.inputs import AttentionRow, Window
from ..kernels.transfer import upload
from .functions import change_method
from .row_descriptions import additive_mask, key_positions, visible

_COMPRESSOR, _INDEXER = "compressor", "indexer"  # transformers' names of what makes entries
_MOST_QUERIES = 128  # in one product: a long prompt's queries see different windows


def segments_of(module: nn.Module) -> dict[int, SegmentSize]:
    """By index, how a model's layers compress segments of the text; {}: none does. From then on its indexers' scorers select by row."""
    sizes = {}
    for inner in module.modules():
        compressor: Any = getattr(inner, _COMPRESSOR, None)
        if not hasattr(compressor, "compress_rate"):
            continue
        indexer = getattr(compressor, _INDEXER, None)
        sizes[inner.layer_idx] = SegmentSize(compressor.compress_rate, 1 if indexer is None else 2)
        if indexer is not None:
            change_method(type(indexer.scorer), "forward", _by_part)
    return sizes


def _by_part(forward: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """The forward of an indexer's scorer: over pages it leaves itself with the layer, for `attend_segments`, and returns no scores."""

    @functools.wraps(forward)
    def score(scorer: Any, queries: torch.Tensor, entries: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
        layer = layer_of(entries)
        if layer is None:
            return forward(scorer, queries, entries, hidden)

        def score_part(part: Part) -> torch.Tensor:
            tokens, pool = slice(part.start, part.end), layer.further[entries_of(_INDEXER)]
            return forward(scorer, queries[:, tokens], pool[None, part.entries, 0], hidden[:, tokens])[0]

        layer.score = score_part
        return hidden.new_zeros(*hidden.shape[:2], 0)

    return score


@dataclass
class Part:
    """At most _MOST_QUERIES tokens `start:end` of a forward, all of one row.

    Attributes:
        keys, entries: int64 [n], [C], slots of the keys that some of them see, and of the tokens that have closed segments.
        sees_keys, sees_entries: additive masks [t, n], [t, C].
    """

    start: int
    end: int
    keys: torch.Tensor
    entries: torch.Tensor
    sees_keys: torch.Tensor
    sees_entries: torch.Tensor


def attend_segments(
    module: Any, query: torch.Tensor, layer: PagedLayer, batch: Any, scaling: float, window: int | Window | None,
    sinks: torch.Tensor | None,
) -> torch.Tensor:  # fmt: skip
    """Attention [T, H, D] of one layer, of queries [T, H, D], to its window and its entries, whose values are their keys."""
    out, entries = torch.empty_like(query), layer.further[entries_of(_COMPRESSOR)]
    indexer = getattr(module.compressor, _INDEXER, None)
    assert layer.segment is not None
    for part in batch.parts_of(layer.segment.rate, window, query.dtype, query.device):
        mask = part.sees_entries
        if indexer is not None:
            chosen = (layer.score(part) + mask).topk(min(indexer.index_topk, mask.shape[1]), dim=-1).indices
            mask = torch.full_like(mask, float("-inf")).scatter_(1, chosen, 0) + mask
        keys = torch.cat([layer.keys[part.keys], entries[part.entries]])
        alone = AttentionRow(0, part.end - part.start, len(keys), 0, None)
        mask = torch.cat([part.sees_keys, mask], dim=1).repeat(query.shape[1], 1)
        tokens = slice(part.start, part.end)
        out[tokens] = reference.paged_attention(query[tokens], keys, keys, [alone], [mask], scaling, sinks=sinks)
    return out


# ---- described on the host, once per step and kind of layer ----


def closed_segments(
    rows: list[RowInput], cache: PagedStaticCache, size: SegmentSize, device: torch.device
) -> ClosedSegments:
    """The segments that the rows' tokens close."""
    slots, inputs, firsts = [], [], []
    width = size.rate * size.span
    for row in rows:
        of_row, positions = cache.tables[row.seq_id].slots, key_positions(row)
        seen = None if row.visibility is None else visible(row, None)
        for index in row.start + np.flatnonzero(_closes(positions[row.start :], size.rate)):
            first = max(index + 1 - width, 0)
            path = np.arange(first, index + 1) if seen is None else np.flatnonzero(seen[index - row.start])[-width:]
            inputs.append(np.concatenate([np.full(width - len(path), -1), of_row[path]]))
            slots.append(of_row[index])
            firsts.append(positions[index] - size.rate + 1)
    count = len(slots)
    grid = np.array(inputs, dtype=np.int64).reshape(count, width)
    shifts = np.repeat(np.array(firsts, dtype=np.int64), size.span) - np.arange(count * size.span) * size.rate
    missing = grid < 0
    return ClosedSegments(
        upload(np.array(slots, dtype=np.int64), device), upload(grid.clip(0), device),
        upload(missing, device) if missing.any() else None, upload(shifts, device),
    )  # fmt: skip


def parts_of(
    rows: list[RowInput], starts: list[int], cache: PagedStaticCache, rate: int, window: int | Window | None, dtype: torch.dtype,
    device: torch.device,
) -> list[Part]:  # fmt: skip
    """The rows in parts, for layers with segments of `rate` tokens and this sliding window. `dtype`: of the masks."""
    parts = []
    for row, start in zip(rows, starts, strict=False):
        slots = cache.tables[row.seq_id].slots
        for part in _split(row):
            length, first = part.start + part.num_tokens, start + part.start - row.start
            near, far = (_seen(part, reach) for reach in (window, cache.window))
            keys = np.flatnonzero(near.any(0))
            entries = np.flatnonzero(_closes(key_positions(part), rate))
            masks = (additive_mask(seen, dtype, device) for seen in (near[:, keys], far[:, entries]))
            key_slots, entry_slots = (upload(slots[:length][index], device) for index in (keys, entries))
            parts.append(Part(first, first + part.num_tokens, key_slots, entry_slots, *masks))
    return parts


def _split(row: RowInput) -> Iterator[RowInput]:
    """A causal row in parts of at most _MOST_QUERIES tokens. Trees are smaller."""
    if row.visibility is not None or row.num_tokens <= _MOST_QUERIES:
        yield row
        return
    for first in range(0, row.num_tokens, _MOST_QUERIES):
        count = min(_MOST_QUERIES, row.num_tokens - first)
        yield dataclasses.replace(row, tokens=np.zeros(count, dtype=np.int64), drafts=None, start=row.start + first)


def _closes(positions: np.ndarray, rate: int) -> np.ndarray:
    return (positions + 1) % rate == 0


def _seen(row: RowInput, window: int | Window | None) -> np.ndarray:
    seen = visible(row, window)
    return np.ones((row.num_tokens, row.start + row.num_tokens), dtype=bool) if seen is None else seen
