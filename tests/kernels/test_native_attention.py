"""Attention in the native library against the definition in float64, over random ragged batches."""

import math

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hf_specdec.kernels.attention import native, reference
from hf_specdec.kernels.attention.inputs import NativeRows, RowDescription, Window
from hf_specdec.kernels.cache.reference import quantized
from hf_specdec.kernels.native import library

pytestmark = pytest.mark.skipif(library() is None, reason="the native library is not compiled")
SETS = ["baseline", "avx2", "avx512", "avx512_bf16", "amx_bf16"]
# Scores and weights are rounded as in torch. Scores reach 10 here, so one rounding changes a weight by up to 2 per cent in bfloat16.
BOUNDS = {torch.float32: 2e-6, torch.float16: 5e-3, torch.bfloat16: 4e-2}


@pytest.fixture(params=SETS)
def instruction_set(request):
    """Each instruction set that this CPU has, in turn."""
    loaded = library()
    best = loaded.specdec_instruction_set()
    if not loaded.specdec_use(request.param.encode()):
        pytest.skip(f"this CPU or build has no {request.param}")
    yield request.param
    loaded.specdec_use(best)


@st.composite
def problems(draw):
    """Shapes, options and rows (queries, keys before them, region or None) of a batch."""
    group, kv_heads = draw(st.sampled_from([1, 2, 3, 4, 7, 8])), draw(st.integers(1, 3))
    rows = draw(st.lists(st.tuples(st.integers(1, 20), st.integers(0, 70), st.booleans()), min_size=1, max_size=4))
    return {
        "heads": group * kv_heads, "kv_heads": kv_heads, "rows": rows,
        "width": draw(st.sampled_from([8, 20, 32, 64, 80, 128])), "value_width": draw(st.sampled_from([4, 16, 33, 64, 96])),
        "window": draw(st.sampled_from([None, 1, 4, 30, Window(4, 3), Window(9, 20)])), "softcap": draw(st.sampled_from([None, 2.0])),
        "sinks": draw(st.booleans()), "one_pool": draw(st.booleans()), "seed": draw(st.integers(0, 2**20)),
        "dtype": draw(st.sampled_from([torch.float32, torch.bfloat16, torch.float16])),
    }  # fmt: skip


def batch(problem):
    """(query, pools, native rows, allowed per row, slots per row): slots that no row owns hold big numbers."""
    random = np.random.default_rng(problem["seed"])
    draw = torch.Generator().manual_seed(problem["seed"])
    num_slots = sum(count + before for count, before, _ in problem["rows"]) + 9
    order, rows, allowed, own, start, used = random.permutation(num_slots), [], [], [], 0, 0
    pools = [
        torch.full((num_slots, problem["kv_heads"], problem[name]), 3e4).to(problem["dtype"])
        for name in ("width", "value_width")
    ]
    for count, before, is_tree in problem["rows"]:
        length, slots = count + before, order[used : used + count + before].copy()
        for pool in pools:
            pool[torch.from_numpy(slots)] = torch.randn(length, *pool.shape[1:], generator=draw).to(pool.dtype)
        visibility = places = positions = None
        seen, keys, queries = np.tri(count, length, before, dtype=bool), np.arange(length), np.arange(before, length)
        if is_tree:
            region = int(random.integers(count, length + 1))
            visibility = random.random((count, region)) < 0.5
            visibility[np.arange(count), np.arange(region - count, region)] = True
            places = np.sort(random.integers(0, length, region))
            positions = queries = np.maximum(random.integers(0, length, count), places[region - count :])
            seen = np.ones((count, length), dtype=bool)
            seen[:, length - region :] = visibility
            keys = np.concatenate([keys[: length - region], places])
        if problem["window"] is not None:
            seen = seen & near(queries, keys, problem["window"])
            seen[np.arange(count), np.arange(before, length)] |= not is_tree
        if not seen.any(axis=1).all():
            positions = queries = keys[length - count :]  # a token always sees itself
            seen = np.ones((count, length), dtype=bool)
            seen[:, length - visibility.shape[1] :] = visibility
            seen &= near(queries, keys, problem["window"])
        rows.append(RowDescription(slots, count, length, visibility, positions, places))
        allowed.append(seen)
        own.append(torch.from_numpy(slots))
        start, used = start + count, used + length
    if problem.get("one_pool") and problem["value_width"] <= problem["width"]:  # latent attention
        pools[1] = pools[0][..., : problem["value_width"]]
    query = torch.randn(problem["heads"], start, problem["width"], generator=draw).to(problem["dtype"]).transpose(0, 1)
    return query, *pools, NativeRows.of(rows), rows, allowed, own


def near(queries, keys, window):
    """bool [t, S]: keys in a window, or among the first."""
    size, kept = window if isinstance(window, Window) else (window, 0)
    return (queries[:, None] - keys[None] < size) | (keys[None] < kept)


def starts_of(rows):
    """Each row's first packed token."""
    return np.cumsum([0, *(row.query_length for row in rows[:-1])]).tolist()


def by_definition(problem, query, keys, values, rows, allowed, own, sinks, biases=None):
    """The same attention by `reference.paged_attention`, in float64. `biases`: [H, t, S] for each row."""
    group = problem["heads"] // problem["kv_heads"]
    masks = [
        torch.zeros(seen.shape).double().masked_fill_(torch.from_numpy(~seen), -math.inf).repeat(group, 1)
        for seen in allowed
    ]
    masks = masks if biases is None else [mask + more for mask, more in zip(masks, biases, strict=True)]
    described = [
        reference.AttentionRow(start, start + row.query_length, row.key_length, -1, slots)
        for start, row, slots in zip(starts_of(rows), rows, own, strict=True)
    ]
    sinks = None if sinks is None else sinks.double()
    return reference.paged_attention(
        query.double().contiguous(), keys.double(), values.double(), described, masks, 0.3, problem["softcap"], sinks
    )


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(problem=problems())
def test_equals_the_definition(instruction_set, problem):
    query, keys, values, table, rows, allowed, own = batch(problem)
    sinks = torch.linspace(-1, 1, problem["heads"]).to(problem["dtype"]) if problem["sinks"] else None
    wanted = by_definition(problem, query, keys, values, rows, allowed, own, sinks)
    assert native.serves(query, keys, values, table)
    found = native.paged_attention(query, keys, values, table, 0.3, problem["window"], problem["softcap"], sinks)
    assert found.dtype == problem["dtype"] and found.is_contiguous() and found.shape == wanted.shape
    # Rounded weights leave an error in proportion to the values they weigh, which are about 1, however small their mean is.
    error = (found.double() - wanted).abs().max() / wanted.abs().max().clamp(min=1.0)
    assert error < BOUNDS[problem["dtype"]] * (10 if problem["softcap"] and problem["dtype"] == torch.float32 else 1)


@settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(problem=problems())
def test_pools_in_int8(instruction_set, problem):
    """As exact as others, over the numbers that they stand for; and each query by itself."""
    query, *pools, table, rows, allowed, own = batch(problem)
    sinks = torch.linspace(-1, 1, problem["heads"]).to(problem["dtype"]) if problem["sinks"] else None
    pools, scales = zip(*map(quantized, pools), strict=True)
    meant = [pool * scale.double() for pool, scale in zip(pools, scales, strict=True)]
    wanted = by_definition(problem, query, *meant, rows, allowed, own, sinks)
    options = {
        "scaling": 0.3,
        "window": problem["window"],
        "softcap": problem["softcap"],
        "sinks": sinks,
        "scales": scales,
    }
    found = native.paged_attention(query, *pools, table, **options)
    error = (found.double() - wanted).abs().max() / wanted.abs().max().clamp(min=1.0)
    assert error < BOUNDS[problem["dtype"]] * (10 if problem["softcap"] and problem["dtype"] == torch.float32 else 1)
    first = rows[0].query_length
    assert torch.equal(native.paged_attention(query[:first], *pools, NativeRows.of(rows[:1]), **options), found[:first])


@settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(problem=problems())
def test_biases_by_distance(instruction_set, problem):
    """T5's: looked up by positions, which in trees are not the places of keys."""
    problem |= {"heads": problem["kv_heads"], "softcap": None}
    query, keys, values, table, rows, allowed, own = batch(problem)
    by_distance = torch.randn(100, problem["heads"], generator=torch.Generator().manual_seed(1)).to(problem["dtype"])
    added = []
    for row in rows:
        length, places = row.key_length, np.arange(row.key_length)
        if row.region_positions is not None:
            places = np.concatenate([places[: length - len(row.region_positions)], row.region_positions])
        queries = np.arange(length - row.query_length, length) if row.positions is None else row.positions
        distances = torch.from_numpy(np.maximum(queries[:, None] - places, 0))
        added.append(by_distance.double()[distances].permute(2, 0, 1))
    wanted = by_definition(problem, query, keys, values, rows, allowed, own, None, added)
    window, biases = problem["window"], lambda count: by_distance[:count]
    found = native.paged_attention(query, keys, values, table, 0.3, window, biases=biases)
    error = (found.double() - wanted).abs().max() / wanted.abs().max().clamp(min=1.0)
    assert error < BOUNDS[problem["dtype"]]


def test_a_query_does_not_depend_on_its_batch(instruction_set):
    problem = {
        "heads": 8, "kv_heads": 2, "rows": [(3, 40, True), (1, 17, False), (5, 0, False), (6, 33, True)], "width": 64,
        "value_width": 64, "window": None, "softcap": None, "seed": 3, "dtype": torch.bfloat16,
    }  # fmt: skip
    query, keys, values, table, rows, _, _ = batch(problem)
    together = native.paged_attention(query, keys, values, table, 0.125)
    for start, row in zip(starts_of(rows), rows, strict=True):
        own = slice(start, start + row.query_length)
        found = native.paged_attention(query[own], keys, values, NativeRows.of([row]), 0.125)
        assert torch.equal(found, together[own])


@pytest.mark.parametrize("window", [None, 9, Window(9, 5)])
@pytest.mark.parametrize("is_tree", [False, True])
@pytest.mark.parametrize("dtype", BOUNDS, ids=str)
def test_a_query_does_not_depend_on_its_neighbours(instruction_set, dtype, is_tree, window):
    """Bit for bit: blocks of queries, with blocks that end in the middle of the row."""
    problem = {
        "heads": 6, "kv_heads": 2, "rows": [(37, 45, is_tree)], "width": 40, "value_width": 72, "window": window, "softcap": None,
        "seed": 5, "dtype": dtype,
    }  # fmt: skip
    query, keys, values, table, (row,), _, _ = batch(problem)
    together = native.paged_attention(query, keys, values, table, 0.2, window)
    for q in range(row.query_length):
        if is_tree:
            own = row.visibility[q : q + 1], row.positions[q : q + 1], row.region_positions
            alone = RowDescription(row.blocks, 1, row.key_length, *own)
        else:
            alone = RowDescription(row.blocks, 1, row.key_length - row.query_length + q + 1)
        found = native.paged_attention(query[q : q + 1], keys, values, NativeRows.of([alone]), 0.2, window)
        assert torch.equal(found[0], together[q]), q


@pytest.mark.parametrize("kv_heads", [3, 1])
def test_threads_share_the_work(instruction_set, monkeypatch, kv_heads):
    """Its one key head, too, of latent attention."""
    problem = {
        "heads": 6, "kv_heads": kv_heads, "rows": [(3, 40, True), (1, 17, False), (5, 0, False)], "width": 32, "value_width": 32,
        "window": 9, "softcap": None, "seed": 4, "dtype": torch.float32,
    }  # fmt: skip
    query, keys, values, table, *_ = batch(problem)
    alone = native.paged_attention(query, keys, values, table, 0.2, 9)
    monkeypatch.setattr(native, "_BYTES_PER_THREAD", 1)
    call, parts = native.Attention, []
    monkeypatch.setattr(native, "Attention", lambda *fields: parts.append(fields[10]) or call(*fields))
    threads = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        for _ in range(20):
            assert torch.equal(native.paged_attention(query, keys, values, table, 0.2, 9), alone)
    finally:
        torch.set_num_threads(threads)
    assert set(parts) == {3}


def test_prompts_and_other_dtypes_are_left_to_the_definition():
    query = torch.zeros(100, 2, 8)
    pool = torch.zeros(100, 2, 8)
    row = RowDescription(np.arange(100), 100, 100)
    assert not native.serves(query, pool, pool, NativeRows.of([row]))
    short = NativeRows.of([row._replace(query_length=4)])
    assert native.serves(query, pool, pool, short)
    assert not native.serves(query.double(), pool.double(), pool.double(), short)
    assert not native.serves(query, pool.bfloat16(), pool.bfloat16(), short)
