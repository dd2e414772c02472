"""Attention of a ragged batch over a paged cache in plain torch: the definition, and the CPU path."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F

from ..cache.reference import Scales, dequantized
from .inputs import AttentionBatch, AttentionRow, Biases, Window, window_parts


def attend(
    query, key_pool, value_pool, batch: AttentionBatch, scaling, *, window, softcap, sinks, biases: Biases | None = None,
    scales: Scales | None = None,
) -> torch.Tensor:  # fmt: skip
    """Attention [T, H, Dv] of queries [T, H, D] over a batch that describes its rows. See `paged_attention`."""
    rows, masks = batch.plan(window, query, key_pool)
    if biases is not None:
        added = [biases(distances.shape[1])[distances].permute(2, 0, 1) for distances in batch.distances()]
        masks = [more if mask is None else more + mask for more, mask in zip(added, masks, strict=True)]
    return paged_attention(query, key_pool, value_pool, rows, masks, scaling, softcap, sinks, scales)


def attend_invariant(
    query, key_pool, value_pool, batch: AttentionBatch, scaling, *, window, softcap, sinks, scales: Scales | None = None
) -> torch.Tensor:
    """`attend`, where a query's result does not depend, bit for bit, on the rest of the batch."""
    rows = batch.lines(query.device)
    return query_by_query(query, key_pool, value_pool, rows, scaling, window, softcap, sinks, scales)


def paged_attention(
    query: torch.Tensor,
    key_pool: torch.Tensor,
    value_pool: torch.Tensor,
    rows: list[AttentionRow],
    masks: Sequence[torch.Tensor | None],
    scaling: float,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
    scales: Scales | None = None,
) -> torch.Tensor:
    """Attention of a ragged batch over a paged cache.

    Args:
        query: [T, H, D], the queries of all rows, packed.
        key_pool, value_pool: [slots, Hkv, D] and [slots, Hkv, Dv]; the batch's own keys must already be written.
        rows, masks: see AttentionBatch.plan; where heads are not in groups, a mask may be [H, t, S], too.
        softcap: scores become `softcap * tanh(scores / softcap)` (Gemma 2).
        sinks: [H], one more logit per head in the softmax, without a value (gpt-oss).
        scales: of keys and values in int8.

    Returns: [T, H, Dv].
    """
    _, num_heads, width = query.shape
    num_kv_heads, value_width = key_pool.shape[1], value_pool.shape[2]
    group = num_heads // num_kv_heads
    plain = softcap is None and sinks is None
    few = _MATRIX_VECTOR_QUERIES // group if plain and query.dtype == torch.bfloat16 and not query.is_cuda else 0
    outs = []
    for row, mask in zip(rows, masks, strict=True):
        count = row.end - row.start
        q = query if len(rows) == 1 else query[row.start : row.end]
        k, v = _keys_and_values(key_pool, value_pool, row, scales, query.dtype)
        if count <= few and (mask is None or mask.dim() == 2):
            outs.append(_attention_query_by_query(q, k, v, mask, scaling))
            continue
        # Heads of a group become extra queries of their key head, so keys and values are never expanded.
        q = q.view(count, num_kv_heads, group, width)
        q = q if count == 1 else q.permute(1, 2, 0, 3).reshape(1, num_kv_heads, -1, width)
        if plain:
            attended = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scaling)
        else:
            attended = attention_with_softcap_or_sinks(q, k, v, mask, scaling, softcap, sinks)
        if count > 1:
            attended = attended.view(num_kv_heads, group, count, value_width).permute(2, 0, 1, 3)
        outs.append(attended.reshape(count, num_heads, value_width))
    return outs[0] if len(outs) == 1 else torch.cat(outs)


# For one bfloat16 query, torch's CPU attention uses matrix-vector products, which read keys in place; for several it first repacks
# keys into tiles. Measured: query by query is faster up to this number of queries (tokens x heads of a group).
_MATRIX_VECTOR_QUERIES = 4


def _attention_query_by_query(query, k, v, mask, scaling):
    """query [t, H, D], each as its own batch entry, with k and v [1, Hkv, S, D] and mask [G * t, S] → [t, H, Dv]."""
    count = query.shape[0]
    k, v = k.expand(count, -1, -1, -1), v.expand(count, -1, -1, -1)
    mask = None if mask is None else mask[:count, None, None]  # all heads of a group have the same mask
    attended = F.scaled_dot_product_attention(
        query[:, :, None], k, v, attn_mask=mask, scale=scaling, enable_gqa=query.shape[1] != k.shape[1]
    )
    return attended.squeeze(2)


def attention_with_softcap_or_sinks(q, k, v, mask, scaling, softcap, sinks):
    """q [1, Hkv, G * t, D], k and v [1, Hkv, S, D or Dv] → [1, Hkv, G * t, Dv]."""
    scores = torch.matmul(q, k.transpose(2, 3)) * scaling  # [1, Hkv, G * t, S]
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    if mask is not None:
        scores = scores + mask
    if sinks is not None:
        per_group = sinks.view(k.shape[1], -1).repeat_interleave(q.shape[2] * k.shape[1] // sinks.numel(), dim=1)
        scores = torch.cat([scores, per_group[None, :, :, None].to(scores.dtype)], dim=-1)
    weights = torch.softmax(scores, dim=-1, dtype=torch.float32).to(q.dtype)
    return torch.matmul(weights[..., : k.shape[2]], v)


def _keys_and_values(
    key_pool: torch.Tensor, value_pool: torch.Tensor, row: AttentionRow, scales: Scales | None, dtype: torch.dtype
) -> list[torch.Tensor]:
    """The row's keys and values [1, heads, length, width] in this dtype."""
    read = [read_row(key_pool, row), read_row(value_pool, row)]
    if scales is None:
        return read
    return [dequantized(states, read_row(pool, row), dtype) for states, pool in zip(read, scales, strict=True)]


def read_row(pool: torch.Tensor, row: AttentionRow) -> torch.Tensor:
    """The row's keys or values [1, heads, length, width]: a view of `pool` when contiguous, a gathered copy otherwise."""
    if row.slots is None:
        per_slot, per_head, _ = pool.stride()  # one operation instead of narrow, transpose and index
        shape, strides = (1, pool.shape[1], row.length, pool.shape[2]), (per_slot, per_head, per_slot, 1)
        return pool.as_strided(shape, strides, pool.storage_offset() + row.first_slot * per_slot)
    return pool.index_select(0, row.slots).transpose(0, 1)[None]


# ---- attention whose result for a query does not depend on the rest of the batch: one call per query ----


def query_by_query(
    query: torch.Tensor,
    key_pool: torch.Tensor,
    value_pool: torch.Tensor,
    rows: list[AttentionRow],
    scaling: float,
    window: int | Window | None = None,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
    scales: Scales | None = None,
) -> torch.Tensor:
    """As `paged_attention`, with one call per query, whose shapes depend only on how many keys the query sees.

    Args:
        query: [T, H, D].
        key_pool, value_pool: [slots, Hkv, D] and [slots, Hkv, Dv]; the batch's own keys must already be written.
        window: a query sees only the last so many keys, including its own, and the first ones (see `Window`).
        scaling, softcap, sinks, scales: see `paged_attention`.

    Returns: [T, H, Dv].
    """
    num_tokens, num_heads, _ = query.shape
    num_kv_heads, value_width = value_pool.shape[1:]
    size, kept = window_parts(window)
    out = query.new_zeros(num_tokens, num_heads, value_width)
    for row in rows:
        keys, values = _keys_and_values(key_pool, value_pool, row, scales, query.dtype)
        before = row.length - (row.end - row.start)
        for token in range(row.start, row.end):
            end = before + token - row.start + 1
            begin = max(end - size, 0) if size else 0
            q = query[token].clone()
            k, v = keys[:, :, begin:end], values[:, :, begin:end]
            if kept and begin:
                k, v = (torch.cat([x[:, :, : min(kept, begin)], y], dim=2) for x, y in ((keys, k), (values, v)))
            if softcap is None and sinks is None:
                attended = F.scaled_dot_product_attention(
                    q[None, :, None], k, v, scale=scaling, enable_gqa=num_heads != num_kv_heads
                )
            else:
                folded = q.view(1, num_kv_heads, num_heads // num_kv_heads, -1)
                attended = attention_with_softcap_or_sinks(folded, k, v, None, scaling, softcap, sinks)
            out[token] = attended.reshape(num_heads, value_width)
    return out
