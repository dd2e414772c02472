"""Attention of a ragged batch over a paged cache in the native library for CPUs: all rows in one call, keys read in place.

The definition is `reference.paged_attention`. Sums are float32 in every dtype, and a query's result does not depend on the rest of
the batch.
"""

from __future__ import annotations

import ctypes
import math

import torch

from ..cache.reference import Scales
from ..native import TYPES, Attention, library
from . import reference
from .inputs import AttentionBatch, Biases, NativeRows, Window, window_parts

# Rows with more new tokens (prompts) are matrix products, which torch does faster.
MOST_QUERIES = 64
_BYTES_PER_THREAD = 1 << 20  # of keys and values: waking a thread takes as long as reading some 100 KiB


def attend(query, key_pool, value_pool, batch: AttentionBatch, scaling, **options) -> torch.Tensor:
    """See `reference.attend`."""
    rows = batch.native_rows()
    if serves(query, key_pool, value_pool, rows, options.get("scales") is not None):
        return paged_attention(query, key_pool, value_pool, rows, scaling, **options)
    return reference.attend(query, key_pool, value_pool, batch, scaling, **options)


def serves(
    query: torch.Tensor, key_pool: torch.Tensor, value_pool: torch.Tensor, rows: NativeRows, is_quantized: bool = False
) -> bool:
    """True if the library computes this attention, and faster than the definition."""
    known = query.dtype in TYPES and (is_quantized or query.dtype == key_pool.dtype == value_pool.dtype)
    return known and rows.most_queries <= MOST_QUERIES and query.stride(2) == 1


def paged_attention(
    query: torch.Tensor,
    key_pool: torch.Tensor,
    value_pool: torch.Tensor,
    rows: NativeRows,
    scaling: float,
    window: int | Window | None = None,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
    biases: Biases | None = None,
    scales: Scales | None = None,
) -> torch.Tensor:
    """`reference.paged_attention` for rows that the library `serves`.

    Args:
        query: [T, H, D]; the last dimension is contiguous.
        key_pool, value_pool: [slots, Hkv, D] and [slots, Hkv, Dv]; the last dimension is contiguous.
        window: a query at position p sees only keys at positions above p - window, and the first ones (see `Window`).
        scales: of keys and values in int8.

    Returns: [T, H, Dv].
    """
    loaded = library()
    assert loaded is not None
    num_tokens, num_heads, width = query.shape
    kv_heads, value_width = value_pool.shape[1:]
    out = query.new_empty(num_tokens, num_heads, value_width)
    if sinks is not None and (sinks.dtype not in TYPES or not sinks.is_contiguous()):
        sinks = sinks.to(torch.float32).contiguous()
    assert biases is None or not softcap  # a definition adds biases to scores that are capped already
    added = None if biases is None else biases(int(rows.table[:, 2].max())).to(query.dtype).contiguous()
    num_bytes = int(rows.table[:, 2].sum()) * (key_pool.stride(0) + value_pool.stride(0)) * key_pool.element_size()
    threads = min(torch.get_num_threads(), 1 + num_bytes // _BYTES_PER_THREAD)
    heads_apart = key_pool.stride(1), value_pool.stride(1)
    if kv_heads == 1:  # latent attention has many queries for it, which threads share as if it were several
        kv_heads, heads_apart = math.gcd(num_heads, threads), (0, 0)
    call = Attention(
        rows.table.ctypes.data, len(rows.table), query.data_ptr(), key_pool.data_ptr(), value_pool.data_ptr(),
        0 if sinks is None else sinks.data_ptr(), out.data_ptr(), TYPES[query.dtype],
        0 if sinks is None else TYPES[sinks.dtype], num_heads, kv_heads, width, value_width, *query.stride()[:2],
        key_pool.stride(0), heads_apart[0], value_pool.stride(0), heads_apart[1], *window_parts(window), scaling, softcap or 0.0,
        0 if added is None else added.data_ptr(),
        *((0, 0) if scales is None else (scales[0].data_ptr(), scales[1].data_ptr())), value_pool.shape[1], int(heads_apart[0] > 0),
    )  # fmt: skip
    loaded.specdec_attention(ctypes.byref(call), threads)
    return out
