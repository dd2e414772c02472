"""Writing and moving keys and values in Triton, against the definitions in `reference` and transformers' rotation."""

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from transformers.models.gpt_neox.modeling_gpt_neox import apply_rotary_pos_emb as partial_rotation
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb
from triton_interpreter import DEVICE, RUNS_HERE, needs_triton

from hf_specdec.kernels.cache import reference

if RUNS_HERE:
    from hf_specdec.kernels.cache.triton import PoolTable, move_slots, write_keys_values

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
POISON = 12345.0  # in int8: 57
random_settings = settings(max_examples=30, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))


def states(tokens, heads, width, dtype):
    """[T, heads, width] as transformers hands it over: heads before tokens in memory."""
    return torch.randn(heads, tokens, width).to(dtype).to(DEVICE).transpose(0, 1)


def pool(slots, heads, width, dtype):
    return torch.full((slots, heads, width), POISON, device=DEVICE).to(dtype)


@needs_triton
@random_settings
@given(
    tokens=st.integers(0, 7),
    heads=st.tuples(st.integers(1, 5), st.integers(1, 20)),
    widths=st.tuples(st.integers(1, 40), st.integers(1, 130)),
    dtype=st.sampled_from(DTYPES),
    seed=st.integers(0, 1000),
)
def test_write(tokens, heads, widths, dtype, seed):
    """Keys and values of different heads and widths; nothing else is touched, negative slots are left out."""
    torch.manual_seed(seed)
    keys, values = states(tokens, heads[0], widths[0], dtype), states(tokens, heads[1], widths[1], dtype)
    key_pool, value_pool = pool(20, heads[0], widths[0], dtype), pool(20, heads[1], widths[1], dtype)
    slots = torch.randperm(20)[:tokens].to(DEVICE)
    slots[torch.rand(tokens) < 0.2] = -1
    written = slots >= 0
    wanted = key_pool.clone(), value_pool.clone()
    reference.write_keys_values(keys[written], values[written], wanted[0], wanted[1], slots[written])
    assert write_keys_values(keys, values, key_pool, value_pool, slots) is None
    assert torch.equal(key_pool, wanted[0]) and torch.equal(value_pool, wanted[1])


@needs_triton
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("rotary", [0, 32, 20])
def test_write_in_int8(dtype, rotary):
    """The same bits as the definition's, also for tokens of zeros and numbers half way between two."""
    torch.manual_seed(rotary)
    query, keys, values = states(9, 6, 32, dtype), states(9, 3, 32, dtype), states(9, 2, 40, dtype)
    keys[0], values[1] = 0, torch.arange(40) * 127 / 2 ** torch.randint(0, 8, (2, 1))
    angles = torch.rand(9, rotary // 2, device=DEVICE).repeat(1, 2)
    rotation = {"query": query, "cos": angles.cos(), "sin": angles.sin()} if rotary else {}
    pools, slots = [], torch.randperm(11)[:9].to(DEVICE)
    plain = torch.empty(11, 3, 32, dtype=dtype, device=DEVICE), torch.empty(11, 2, 40, dtype=dtype, device=DEVICE)
    write_keys_values(keys, values, *plain, slots, **rotation)  # the rotated keys
    ways = (reference.write_keys_values, plain[0][slots], {}), (write_keys_values, keys, rotation)
    for write, written, more in ways:
        ints = pool(11, 3, 32, torch.int8), pool(11, 2, 40, torch.int8)
        scales = pool(11, 3, 1, torch.float32), pool(11, 2, 1, torch.float32)
        write(written, values, *ints, slots, scales=scales, **more)
        pools.append([*ints, *scales])
    assert all(map(torch.equal, *pools))
    assert pools[0][0][slots].abs().max() == 127


@needs_triton
@random_settings
@given(
    tokens=st.integers(1, 5),
    heads=st.sampled_from([(1, 1), (4, 2), (9, 3), (33, 1)]),
    widths=st.sampled_from([(16, 16), (32, 8), (80, 32), (64, 16), (24, 6), (128, 128)]),
    dtype=st.sampled_from(DTYPES),
    seed=st.integers(0, 1000),
)
def test_rotate_and_write(tokens, heads, widths, dtype, seed):
    """In float64, rounded once; the elements behind the rotated ones stay; queries of unwritten tokens are rotated, too."""
    torch.manual_seed(seed)
    width, rotary = widths
    query, keys, values = (states(tokens, count, width, dtype) for count in (*heads, heads[1]))
    angles = torch.rand(tokens, rotary // 2) * 6
    angles = torch.cat([angles, angles], dim=1)
    cos, sin = angles.cos().to(dtype).to(DEVICE), angles.sin().to(dtype).to(DEVICE)
    key_pool, value_pool = pool(9, heads[1], width, dtype), pool(9, heads[1], width, dtype)
    slots = torch.randperm(9)[:tokens].to(DEVICE)
    slots[0] = -1
    out = write_keys_values(keys, values, key_pool, value_pool, slots, query=query, cos=cos, sin=sin)

    def rotated(x):
        exact = (each.transpose(0, 1)[None].double() for each in (x, x))
        return partial_rotation(*exact, cos[None].double(), sin[None].double())[0][0].transpose(0, 1)

    # relative to numbers of size 1: half a bit of the store, more where terms cancel
    bound = torch.finfo(dtype).eps * 4
    assert (out.double() - rotated(query)).abs().max() <= bound * query.double().abs().max()
    written = slots >= 0
    error = key_pool[slots[written]].double() - rotated(keys)[written]
    assert error.numel() == 0 or error.abs().max() <= bound * keys.double().abs().max()
    assert torch.equal(out[..., rotary:], query[..., rotary:])
    assert torch.equal(value_pool[slots[written]], values[written])
    untouched = torch.ones(9, dtype=torch.bool)
    untouched[slots[written].cpu()] = False
    assert (key_pool[untouched] == POISON).all() and (value_pool[untouched] == POISON).all()


@needs_triton
def test_rotation_is_that_of_transformers():
    query, keys = states(3, 4, 32, torch.float32), states(3, 2, 32, torch.float32)
    angles = torch.rand(3, 16, device=DEVICE).repeat(1, 2)
    key_pool, value_pool = pool(3, 2, 32, torch.float32), pool(3, 2, 32, torch.float32)
    slots = torch.arange(3, device=DEVICE)
    out = write_keys_values(keys, keys, key_pool, value_pool, slots, query=query, cos=angles.cos(), sin=angles.sin())
    wanted = apply_rotary_pos_emb(
        query.transpose(0, 1)[None], keys.transpose(0, 1)[None], angles.cos()[None], angles.sin()[None]
    )
    assert torch.allclose(out.transpose(0, 1), wanted[0][0], atol=1e-6)
    assert torch.allclose(key_pool.transpose(0, 1), wanted[1][0], atol=1e-6)


@needs_triton
@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"key_pool": torch.zeros(4, 2, 9)}, "does not hold"),
        ({"value_pool": torch.zeros(4, 2, 8).half()}, "float16 does not hold"),
    ],
)
def test_writes_that_do_not_fit(change, message):
    arguments = {name: torch.zeros(2, 2, 8) for name in ("keys", "values")}
    arguments |= {name: torch.zeros(4, 2, 8) for name in ("key_pool", "value_pool")}
    with pytest.raises(ValueError, match=message):
        write_keys_values(**{**arguments, "slots": torch.arange(2), **change})


def random_pools(rng, slots, dtype, count=3):
    """Keys and values of `count` layers, of different heads and widths, with content."""
    shapes = [(int(rng.integers(1, 4)), int(rng.integers(1, 40))) for _ in range(2 * count)]
    return [torch.randn(slots, *shape).to(dtype).to(DEVICE) for shape in shapes]


def random_moves(rng, slots, rows, width, nodes):
    """Accepted nodes of trees: per row ascending offsets, to be moved to 0, 1, ..; slots scattered over the pool."""
    order, source, target = rng.permutation(slots), np.full((rows, width), -1), np.full((rows, width), -1)
    for row in range(rows):
        own = order[row * nodes : (row + 1) * nodes]
        accepted = np.sort(rng.permutation(nodes)[: rng.integers(0, min(width, nodes) + 1)])
        moved = [(own[offset], own[i]) for i, offset in enumerate(accepted) if offset != i]
        # Nodes already in place may be listed as no move, anywhere in the row.
        places = np.sort(rng.permutation(width)[: len(moved)])
        for place, (a, b) in zip(places, moved, strict=True):
            source[row, place], target[row, place] = a, b
    return torch.from_numpy(source).to(DEVICE), torch.from_numpy(target).to(DEVICE)


@needs_triton
@random_settings
@given(
    rows=st.integers(1, 4),
    width=st.integers(1, 19),
    nodes=st.integers(1, 24),
    dtype=st.sampled_from([*DTYPES, torch.float8_e4m3fn]),
    seed=st.integers(0, 10**6),
)
def test_moves(rows, width, nodes, dtype, seed):
    """All layers at once, overlapping moves, more moves than one tile, pools of any width: bit for bit the definition."""
    torch.manual_seed(seed)
    rng = np.random.default_rng(seed)
    pools = random_pools(rng, rows * nodes + 3, dtype)
    source, target = random_moves(rng, rows * nodes + 3, rows, width, nodes)
    moved = source >= 0
    raw = [each.view(torch.uint8) for each in pools]
    wanted = [each.clone() for each in raw]
    for each in wanted:
        reference.move_slots(each, source[moved], target[moved])
    move_slots(PoolTable.of(pools), source, target)
    assert all(torch.equal(a, b) for a, b in zip(raw, wanted, strict=True))


@needs_triton
def test_a_whole_row_shifts_by_one():
    """Every source but the last is also a target, across tiles of moves."""
    pools = [torch.randn(40, 2, 16, device=DEVICE), torch.randn(40, 1, 4, device=DEVICE)]
    wanted = [torch.cat([each[1:], each[-1:]]) for each in pools]
    index = torch.arange(40, device=DEVICE)[None]
    move_slots(PoolTable.of(pools), index[:, 1:].contiguous(), index[:, :-1].contiguous())
    assert all(torch.equal(a, b) for a, b in zip(pools, wanted, strict=True))


@needs_triton
def test_no_moves():
    pools = [torch.randn(4, 2, 16, device=DEVICE)]
    before = pools[0].clone()
    nothing = torch.full((3, 5), -1, device=DEVICE)
    move_slots(PoolTable.of(pools), nothing, nothing)
    move_slots(PoolTable.of(pools), nothing[:, :0].contiguous(), nothing[:, :0].contiguous())
    assert torch.equal(pools[0], before)


@needs_triton
@pytest.mark.parametrize(
    ("shapes", "dtype", "word"),
    [([(2, 8), (1, 4)], torch.float16, 4), ([(1, 3)], torch.float16, 2), ([(1, 3)], torch.float8_e4m3fn, 1)],
)
def test_the_largest_word_that_fits(shapes, dtype, word):
    table = PoolTable.of([torch.zeros(4, *shape).to(dtype) for shape in shapes])
    assert table.word_bytes == word
    assert table.row_words.tolist() == [a * b * dtype.itemsize // word for a, b in shapes]
