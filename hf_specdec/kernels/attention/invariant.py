"""Attention whose result for a query does not depend on the rest of the batch: one call per query. The CPU path."""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F

from .reference import attention_with_softcap_or_sinks


class LinearRow(NamedTuple):
    """One line of text: a row of a batch, or one path of its draft tree.

    `start:end` are its queries among the packed tokens. Its keys are in `slots` [S], in the order of the text; the last ones are
    those of the queries. A query sees the keys up to its own.
    """

    start: int
    end: int
    slots: torch.Tensor


def paged_attention(
    query: torch.Tensor,
    key_pool: torch.Tensor,
    value_pool: torch.Tensor,
    rows: list[LinearRow],
    scaling: float,
    window: int | None = None,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """As `reference.paged_attention`, with one call per query, whose shapes depend only on how many keys the query sees.

    Args:
        query: [T, H, D].
        key_pool, value_pool: [slots, Hkv, D] and [slots, Hkv, Dv]; the batch's own keys must already be written.
        window: a query sees only the last `window` keys, including its own.
        scaling, softcap, sinks: see `reference.paged_attention`.

    Returns: [T, H, Dv].
    """
    num_tokens, num_heads, _ = query.shape
    num_kv_heads, value_width = value_pool.shape[1:]
    out = query.new_zeros(num_tokens, num_heads, value_width)
    for row in rows:
        keys, values = key_pool.index_select(0, row.slots), value_pool.index_select(0, row.slots)
        before = keys.shape[0] - (row.end - row.start)
        for token in range(row.start, row.end):
            end = before + token - row.start + 1
            begin = 0 if window is None else max(end - window, 0)
            q = query[token].clone()
            k, v = keys[begin:end].transpose(0, 1)[None], values[begin:end].transpose(0, 1)[None]
            if softcap is None and sinks is None:
                attended = F.scaled_dot_product_attention(
                    q[None, :, None], k, v, scale=scaling, enable_gqa=num_heads != num_kv_heads
                )
            else:
                folded = q.view(1, num_kv_heads, num_heads // num_kv_heads, -1)
                attended = attention_with_softcap_or_sinks(folded, k, v, None, scaling, softcap, sinks)
            out[token] = attended.reshape(num_heads, value_width)
    return out
