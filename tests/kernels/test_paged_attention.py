"""Attention over pages against the definition, computed query by query in float64."""

import itertools
import math

import pytest
import torch

from hf_specdec.kernels.attention.reference import AttentionRow, paged_attention

HEAD_WIDTH, VALUE_WIDTH = 16, 24
# (queries, keys) of each row
ROWS = [(1, 9), (3, 20), (6, 6), (1, 1), (2, 33), (4, 17)]


def definition(query, keys, values, allowed, scaling, softcap=None, sinks=None):
    """query [t, H, D], keys [S, Hkv, D], values [S, Hkv, Dv], allowed bool [t, S] → [t, H, Dv], all in float64."""
    out = torch.zeros(query.shape[0], query.shape[1], values.shape[2], dtype=torch.float64)
    group = query.shape[1] // keys.shape[1]
    for token, head in itertools.product(range(query.shape[0]), range(query.shape[1])):
        seen = [j for j in range(keys.shape[0]) if allowed[token, j]]
        scores = [float(query[token, head].double() @ keys[j, head // group].double()) * scaling for j in seen]
        if softcap is not None:
            scores = [softcap * math.tanh(score / softcap) for score in scores]
        terms = [math.exp(score) for score in scores]
        total = sum(terms) + (0.0 if sinks is None else math.exp(float(sinks[head])))
        for j, term in zip(seen, terms, strict=True):
            out[token, head] += term / total * values[j, head // group].double()
    return out


def additive(allowed, group, dtype):
    if allowed.all():
        return None
    return torch.zeros(allowed.shape, dtype=dtype).masked_fill(~allowed, -math.inf).repeat(group, 1)


def batch(heads, kv_heads, dtype, scattered):
    """A packed batch over pools whose other slots hold big numbers."""
    generator = torch.Generator().manual_seed(heads * 10 + kv_heads)
    slots = sum(keys + 5 for _, keys in ROWS)
    key_pool = torch.full((slots, kv_heads, HEAD_WIDTH), 1e4, dtype=dtype)
    value_pool = torch.full((slots, kv_heads, VALUE_WIDTH), -1e4, dtype=dtype)
    order = torch.randperm(slots, generator=generator) if scattered else torch.arange(slots)
    rows, allowed, start, first = [], [], 0, 2
    for count, length in ROWS:
        own = order[first : first + length]
        key_pool[own] = torch.randn(length, kv_heads, HEAD_WIDTH, generator=generator).to(dtype)
        value_pool[own] = torch.randn(length, kv_heads, VALUE_WIDTH, generator=generator).to(dtype)
        rows.append(AttentionRow(start, start + count, length, first, own if scattered else None))
        seen = torch.rand(count, length, generator=generator) < 0.7  # any pattern: trees, windows
        seen[torch.arange(count), torch.arange(length - count, length)] = True
        allowed.append(seen if len(allowed) % 2 else torch.ones_like(seen))
        start, first = start + count, first + length + 5
    # as transformers hands it over: heads before tokens
    query = torch.randn(heads, start, HEAD_WIDTH, generator=generator).to(dtype).transpose(0, 1)
    return query, key_pool, value_pool, rows, allowed, order


@pytest.mark.parametrize("extras", ["plain", "softcap", "sinks"])
@pytest.mark.parametrize("scattered", [False, True], ids=["contiguous", "scattered"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize(("heads", "kv_heads"), [(2, 2), (4, 2), (8, 2), (8, 1)])
def test_every_row_attends_to_its_own_keys_as_defined(heads, kv_heads, dtype, scattered, extras):
    query, key_pool, value_pool, rows, allowed, order = batch(heads, kv_heads, dtype, scattered)
    softcap = 2.0 if extras == "softcap" else None
    sinks = torch.linspace(-1, 1, heads).to(dtype) if extras == "sinks" else None
    masks = [additive(each, heads // kv_heads, dtype) for each in allowed]
    out = paged_attention(query, key_pool, value_pool, rows, masks, 0.3, softcap, sinks)
    assert out.shape == (query.shape[0], heads, VALUE_WIDTH)
    assert out.dtype == dtype and out.is_contiguous()
    for row, seen in zip(rows, allowed, strict=True):
        own = order[row.first_slot : row.first_slot + row.length]
        wanted = definition(query[row.start : row.end], key_pool[own], value_pool[own], seen, 0.3, softcap, sinks)
        bound = 1e-5 if dtype == torch.float32 else 0.03
        assert (out[row.start : row.end].double() - wanted).abs().max() < bound
