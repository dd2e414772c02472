"""Attention of a ragged batch over a paged cache in the native library for CPUs: all rows in one call, keys read in place.

The definition is `reference.paged_attention`. Sums are float32 in every dtype, and a query's result does not depend on the rest of
the batch.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch

from ..native import TYPES, Attention, library

# Rows with more new tokens (prompts) are matrix products, which torch does faster.
MOST_QUERIES = 64
_BYTES_PER_THREAD = 1 << 20  # of keys and values: waking a thread takes as long as reading some 100 KiB


class NativeRow(NamedTuple):
    """One row of a ragged batch.

    `start:end` are its queries among the packed tokens, and its keys are in the first `length` of `slots` (int64). `visibility` bool
    [end - start, m] says which of the last m keys a query sees (None: causal). Windows read `region_positions` [m] and `positions`
    [end - start], int64; None: a key's position is its index.
    """

    start: int
    end: int
    length: int
    slots: np.ndarray
    visibility: np.ndarray | None = None
    region_positions: np.ndarray | None = None
    positions: np.ndarray | None = None


@dataclass
class NativeRows:
    """The rows as the library reads them: int64 [B, 8], and the arrays that it points to."""

    table: np.ndarray
    most_queries: int
    kept: list[Any] = field(default_factory=list)

    @classmethod
    def of(cls, rows: Iterable[NativeRow]) -> NativeRows:
        """Describe the rows."""
        lines, kept, most = [], [], 0
        for row in rows:
            line = [
                row.start,
                row.end,
                row.length,
                0,
                0,
                0 if row.visibility is None else row.visibility.shape[1],
                0,
                0,
            ]
            for place, array, dtype in (
                (3, row.slots, np.int64),
                (4, row.visibility, np.uint8),
                (6, row.region_positions, np.int64),
                (7, row.positions, np.int64),
            ):
                if array is not None:
                    own = np.ascontiguousarray(array, dtype=dtype)
                    kept.append(own)
                    line[place] = own.__array_interface__["data"][0]  # `.ctypes` takes several times as long
            lines.append(line)
            most = max(most, row.end - row.start)
        return cls(np.array(lines, dtype=np.int64).reshape(-1, 8), most, kept)


def serves(query: torch.Tensor, key_pool: torch.Tensor, value_pool: torch.Tensor, rows: NativeRows) -> bool:
    """True if the library computes this attention, and faster than the definition."""
    known = query.dtype in TYPES and query.dtype == key_pool.dtype == value_pool.dtype
    return known and rows.most_queries <= MOST_QUERIES and query.stride(2) == 1


def paged_attention(
    query: torch.Tensor,
    key_pool: torch.Tensor,
    value_pool: torch.Tensor,
    rows: NativeRows,
    scaling: float,
    window: int | None = None,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """`reference.paged_attention` for rows that the library `serves`.

    Args:
        query: [T, H, D]; the last dimension is contiguous.
        key_pool, value_pool: [slots, Hkv, D] and [slots, Hkv, Dv], contiguous.
        window: a query at position p sees only keys at positions above p - window.

    Returns: [T, H, Dv].
    """
    loaded = library()
    assert loaded is not None
    num_tokens, num_heads, width = query.shape
    kv_heads, value_width = value_pool.shape[1:]
    out = query.new_empty(num_tokens, num_heads, value_width)
    if sinks is not None and (sinks.dtype not in TYPES or not sinks.is_contiguous()):
        sinks = sinks.to(torch.float32).contiguous()
    call = Attention(
        rows.table.ctypes.data, len(rows.table), query.data_ptr(), key_pool.data_ptr(), value_pool.data_ptr(),
        0 if sinks is None else sinks.data_ptr(), out.data_ptr(), TYPES[query.dtype],
        0 if sinks is None else TYPES[sinks.dtype], num_heads, kv_heads, width, value_width, *query.stride()[:2],
        *key_pool.stride()[:2], *value_pool.stride()[:2], window or 0, scaling, softcap or 0.0,
    )  # fmt: skip
    num_bytes = int(rows.table[:, 2].sum()) * (key_pool.stride(0) + value_pool.stride(0)) * query.element_size()
    threads = min(torch.get_num_threads(), 1 + num_bytes // _BYTES_PER_THREAD)
    loaded.specdec_attention(ctypes.byref(call), threads)
    return out
