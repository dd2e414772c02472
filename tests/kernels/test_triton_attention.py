"""The paged attention kernel against its definition and against float64, over random ragged batches."""

import dataclasses

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from triton_interpreter import DEVICE, RUNS_HERE, needs_triton

from hf_specdec.kernels.attention import reference
from hf_specdec.kernels.attention.inputs import RowDescription, Window, attention_inputs, pack_visibility, sizes_of
from hf_specdec.kernels.attention.launch import (
    H200,
    AttentionLaunch,
    AttentionShape,
    choose_launch,
    choose_splits,
    head_widths,
    merge_tile,
    num_tiles,
)
from hf_specdec.kernels.cache.reference import quantized

if RUNS_HERE:
    from hf_specdec.kernels.attention.triton import paged_attention

TOLERANCE = {torch.float32: 2e-6, torch.float16: 2e-3, torch.bfloat16: 1e-2}  # of norms; issue 5 for the last two


def random_tree(rng, nodes, before):
    """Visibility [nodes, before + nodes] and depths of a random tree whose root sees `before` keys of the region."""
    parents = [-1] + [int(rng.integers(0, i)) for i in range(1, nodes)]
    seen, depths = np.zeros((nodes, before + nodes), dtype=bool), np.zeros(nodes, dtype=np.int64)
    for i, parent in enumerate(parents):
        seen[i] = seen[parent] if parent >= 0 else np.arange(before + nodes) < before
        seen[i, before + i] = True
        depths[i] = depths[parent] + 1 if parent >= 0 else 0
    return seen, depths


def random_row(rng, kind, key_length, query_length):
    """A row without its blocks."""
    key_length = max(key_length, query_length)
    if kind == "empty":
        return RowDescription([], 0, int(rng.integers(0, 2)))
    if kind == "causal":
        return RowDescription([], query_length, key_length)
    before = int(rng.integers(0, min(key_length - query_length, 40) + 1))
    seen, depths = random_tree(rng, query_length, before)
    first = key_length - query_length
    known = np.arange(first - before, first)
    return RowDescription([], query_length, key_length, seen, first + depths, np.concatenate([known, first + depths]))


class Batch:
    """Random rows in scattered blocks of poisoned pools."""

    def __init__(self, rows, heads, kv_heads, width, value_width, dtype, block_size, seed=0, **buckets):
        rng = np.random.default_rng(seed)
        counts = [-(-row.key_length // block_size) for row in rows]
        order = rng.permutation(np.arange(sum(counts) + 2))
        self.rows = []
        for row, end in zip(rows, np.cumsum(counts, dtype=np.int64), strict=True):
            blocks = order[end - -(-row.key_length // block_size) : end]
            self.rows.append(row._replace(blocks=blocks))
        self.inputs = attention_inputs(
            self.rows, block_size, DEVICE, dataclasses.replace(sizes_of(self.rows), **buckets)
        )
        slots = len(order) * block_size
        generator = torch.Generator().manual_seed(seed)
        # What is behind a row's keys is NaN: reading it unmasked shows.
        self.key_pool = torch.full((slots, kv_heads, width), float("nan"))
        self.value_pool = torch.full((slots, kv_heads, value_width), float("nan"))
        for row in self.rows:
            own = self.slots(row)
            self.key_pool[own] = torch.randn(len(own), kv_heads, width, generator=generator)
            self.value_pool[own] = torch.randn(len(own), kv_heads, value_width, generator=generator)
        self.key_pool = self.key_pool.to(dtype)
        self.value_pool = self.value_pool.to(dtype)
        num_tokens = buckets.get("num_tokens") or sum(row.query_length for row in rows)
        # as transformers hands it over: heads before tokens
        self.query = torch.randn(heads, num_tokens, width, generator=generator).to(dtype).transpose(0, 1)

    def slots(self, row):
        size = self.inputs.block_size
        every = np.asarray(row.blocks, dtype=np.int64)[:, None] * size + np.arange(size)
        return torch.from_numpy(every.ravel()[: row.key_length])

    def allowed(self, row, window=None):
        """bool [t, S], positions of queries [t] and keys [S], as `row_descriptions.visible` has them."""
        first = row.key_length - row.query_length
        seen = np.tril(np.ones((row.query_length, row.key_length), dtype=bool), first)
        queries = np.arange(first, row.key_length) if row.positions is None else row.positions
        keys = np.arange(row.key_length)
        if row.visibility is not None:
            region = row.visibility.shape[1]
            seen[:] = True
            seen[:, row.key_length - region :] = row.visibility
            if row.region_positions is not None:
                keys[row.key_length - region :] = row.region_positions
        if window is not None:
            size, kept = window if isinstance(window, Window) else (window, 0)
            seen = seen & ((queries[:, None] - keys[None, :] < size) | (keys[None, :] < kept))
        return torch.from_numpy(seen), torch.from_numpy(queries), torch.from_numpy(keys)

    def run(self, scaling=0.2, **options):
        """The kernel's output on the CPU, written into poison."""
        out = torch.full((*self.query.shape[:2], self.value_pool.shape[2]), float("nan"), dtype=self.query.dtype)
        out = out.to(DEVICE)
        options = {key: each.to(DEVICE) if torch.is_tensor(each) else each for key, each in options.items()}
        if (table := options.pop("biases", None)) is not None:
            options["biases"] = lambda count: table[:count]
        pools = self.key_pool.to(DEVICE), self.value_pool.to(DEVICE)
        done = paged_attention(self.query.to(DEVICE), *pools, self.inputs, scaling, out=out, **options)
        assert done is out
        return out.cpu()

    def plain(self, scaling=0.2, window=None, softcap=None, sinks=None, biases=None):
        """The same in float64, row by row, from the rounded inputs; NaN where no row is."""
        heads, kv_heads = self.query.shape[1], self.key_pool.shape[1]
        out = torch.full((*self.query.shape[:2], self.value_pool.shape[2]), float("nan"), dtype=torch.float64)
        start = 0
        for row in self.rows:
            end = start + row.query_length
            seen, queries, keys = self.allowed(row, window)
            k = self.key_pool[self.slots(row)].double().repeat_interleave(heads // kv_heads, 1)
            v = self.value_pool[self.slots(row)].double().repeat_interleave(heads // kv_heads, 1)
            scores = torch.einsum("thd,shd->hts", self.query[start:end].double(), k) * scaling
            if softcap is not None:
                scores = softcap * torch.tanh(scores / softcap)
            if biases is not None:
                scores = scores + biases.double()[(queries[:, None] - keys).clamp(min=0)].permute(2, 0, 1)
            scores = scores.masked_fill(~seen, float("-inf"))
            if sinks is not None:
                column = sinks.double()[:, None, None].expand(-1, row.query_length, 1)
                scores = torch.cat([scores, column], dim=2)
            weights = torch.softmax(scores, dim=2)[:, :, : row.key_length]
            out[start:end] = torch.einsum("hts,shd->thd", weights, v)
            start = end
        return out

    def defined(self, scaling=0.2, window=None, softcap=None, sinks=None, biases=None):
        """`reference.paged_attention` on the same pools."""
        group = self.query.shape[1] // self.key_pool.shape[1]
        rows, masks, start = [], [], 0
        for row in self.rows:
            if row.query_length == 0:
                continue
            end = start + row.query_length
            rows.append(reference.AttentionRow(start, end, row.key_length, -1, self.slots(row)))
            seen, queries, keys = self.allowed(row, window)
            mask = torch.zeros(row.query_length, row.key_length, dtype=self.query.dtype)
            mask = mask.masked_fill_(~seen, float("-inf")).repeat(group, 1)
            if biases is not None:
                more = biases[(queries[:, None] - keys).clamp(min=0)].permute(2, 0, 1)  # [H, t, S]
                mask = mask.view(1, group, *seen.shape) + more.unflatten(0, (-1, group))
                mask = mask.flatten(1, 2)
            masks.append(mask)
            start = end
        if not rows:
            return self.query.new_full((*self.query.shape[:2], self.value_pool.shape[2]), float("nan"))
        out = reference.paged_attention(
            self.query[:start], self.key_pool, self.value_pool, rows, masks, scaling, softcap, sinks
        )
        rest = out.new_full((self.query.shape[0] - start, *out.shape[1:]), float("nan"))
        return torch.cat([out, rest])


def check(out, wanted, tolerance=None):
    """Written exactly where a row is, and near there."""
    assert torch.equal(out.isnan(), wanted.isnan())
    there = ~wanted.isnan()
    if there.any():
        error = (out.double()[there] - wanted.double()[there]).norm() / wanted.double()[there].norm()
        assert error < (TOLERANCE[out.dtype] if tolerance is None else tolerance), float(error)


LAUNCHES = [
    None,
    AttentionLaunch(16, 16, 4, 2),
    AttentionLaunch(32, 32, 4, 2, num_splits=3, keys_per_split=32),
    AttentionLaunch(16, 16, 4, 2, num_splits=5, keys_per_split=16),
    AttentionLaunch(16, 32, 4, 2, num_splits=4, keys_per_split=64, fixed_splits=True),
    AttentionLaunch(16, 16, 4, 2, num_splits=3, keys_per_split=32, peel=False),
    AttentionLaunch(32, 16, 4, 2, peel=False),
    AttentionLaunch(16, 16, 4, 2, num_splits=12, keys_per_split=16, peel=False),
]


def check_random_batch(kinds, heads, widths, dtype, block_size, window, softcap, sinks, biased, launch, padding, seed):
    rng = np.random.default_rng(seed)
    rows = [random_row(rng, *kind) for kind in kinds]
    num_tokens = sum(row.query_length for row in rows) + padding
    batch = Batch(rows, *heads, *widths, dtype, block_size, seed, num_tokens=num_tokens)
    options = {"window": window, "softcap": softcap, "sinks": torch.randn(heads[0]).to(dtype) if sinks else None}
    if biased:  # by distance, and so large that another distance's shows
        options["biases"] = 3 * torch.randn(batch.inputs.max_key_length, heads[0]).to(dtype)
    if num_tokens == 0:
        return
    out = batch.run(launch=launch, **options)
    check(out, batch.plain(**options))
    # The definition rounds scores and weights to the dtype; it is compared where it is as exact as we are.
    if dtype == torch.float32:
        check(out, batch.defined(**options), 1e-5)


RANDOM_BATCHES = dict(
    kinds=st.lists(
        st.tuples(st.sampled_from(["empty", "causal", "tree"]), st.integers(1, 90), st.integers(1, 9)),
        min_size=1,
        max_size=5,
    ),
    heads=st.sampled_from([(1, 1), (4, 2), (6, 2), (7, 1), (3, 3)]),
    widths=st.sampled_from([(16, 16), (32, 32), (24, 40), (48, 16)]),
    dtype=st.sampled_from([torch.float32, torch.float16, torch.bfloat16]),
    block_size=st.sampled_from([1, 4, 16, 24]),
    window=st.sampled_from([None, None, 1, 7, 40, Window(7, 3), Window(1, 20)]),
    softcap=st.sampled_from([None, 3.0]),
    sinks=st.booleans(),
    biased=st.booleans(),
    launch=st.sampled_from(LAUNCHES),
    padding=st.integers(0, 3),
    seed=st.integers(0, 10**6),
)


@needs_triton
@settings(max_examples=12, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(**RANDOM_BATCHES)
def test_random_batches(**case):
    check_random_batch(**case)


@needs_triton
@pytest.mark.slow
@settings(max_examples=300, deadline=None, suppress_health_check=list(HealthCheck))
@given(**RANDOM_BATCHES)
def test_many_random_batches(**case):
    check_random_batch(**case)


@needs_triton
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    ("width", "value_width", "heads"),
    [(32, 32, (4, 2)), (64, 64, (8, 1)), (80, 80, (2, 2)), (96, 96, (2, 2)), (128, 128, (4, 1)), (192, 128, (2, 2)), (256, 256, (2, 1))],
)  # fmt: skip
def test_head_widths(width, value_width, heads, dtype):
    rng = np.random.default_rng(width)
    rows = [random_row(rng, "tree", 45, 6), random_row(rng, "causal", 33, 1), random_row(rng, "causal", 21, 21)]
    batch = Batch(rows, *heads, width, value_width, dtype, 16, seed=width)
    check(batch.run(scaling=width**-0.5), batch.plain(scaling=width**-0.5))


@needs_triton
@pytest.mark.parametrize(
    ("dtype", "widths", "heads", "launch"),
    [
        (torch.float32, (32, 32), (4, 2), LAUNCHES[2]), (torch.float16, (80, 48), (3, 3), None),
        (torch.bfloat16, (24, 40), (6, 1), LAUNCHES[5]),
    ],
)  # fmt: skip
def test_pools_in_int8(dtype, widths, heads, launch):
    rng = np.random.default_rng(2)
    rows = [random_row(rng, "tree", 45, 6), random_row(rng, "causal", 33, 1), random_row(rng, "causal", 21, 21)]
    batch = Batch(rows, *heads, *widths, dtype, 4)
    pools, scales = zip(*map(quantized, (batch.key_pool, batch.value_pool)), strict=True)
    batch.key_pool, batch.value_pool = (pool * scale.double() for pool, scale in zip(pools, scales, strict=True))
    wanted = batch.plain(window=9)
    batch.key_pool, batch.value_pool = pools
    check(batch.run(window=9, launch=launch, scales=tuple(scale.to(DEVICE) for scale in scales)), wanted)


@needs_triton
@pytest.mark.parametrize(("splits", "one_pool"), [(1, True), (2, True), (1, False)])
def test_latent_attention(splits, one_pool):
    """MLA as absorbed: one key head, more query heads than a tile has; in one pool, values are the keys' first columns."""
    rng = np.random.default_rng(1)
    rows = [random_row(rng, "tree", 40, 2), random_row(rng, "causal", 17, 1)]
    batch = Batch(rows, 24, 1, 576, 512, torch.bfloat16, 16)
    if one_pool:
        batch.value_pool = batch.key_pool[..., :512]
    launch = AttentionLaunch(16, 32, 8, 2, num_splits=splits, keys_per_split=32)
    check(batch.run(scaling=0.05, launch=launch), batch.plain(scaling=0.05))


@needs_triton
@pytest.mark.parametrize("length", [17, 65, *(pytest.param(n, marks=pytest.mark.slow) for n in (15, 16, 32, 33, 64))])
def test_borders_of_blocks_tiles_and_splits(length):
    rows = [RowDescription([], 1, length), RowDescription([], min(length, 17), length)]
    batch = Batch(rows, 2, 1, 16, 16, torch.float32, 16)
    wanted = batch.plain()
    for launch in LAUNCHES[1:]:
        check(batch.run(launch=launch), wanted)


@needs_triton
def test_keys_of_something_else():
    """Cross-attention: every token sees all keys of its row, which may be fewer than the tokens."""
    shapes = [(5, 3), (1, 40), (17, 1), (4, 90), (2, 17)]
    rows = [RowDescription([], tokens, keys, np.ones((tokens, 1), dtype=bool)) for tokens, keys in shapes]
    batch = Batch(rows, 2, 1, 16, 16, torch.float32, 16)
    for launch in LAUNCHES:
        check(batch.run(launch=launch), batch.plain())


@needs_triton
@pytest.mark.parametrize("words", [pytest.param(None, marks=pytest.mark.slow), 3])
def test_wide_trees(words):
    """Regions of more than 32 keys: bit 31, the next word, a bucket with words left over."""
    rng = np.random.default_rng(5)
    rows = [random_row(rng, "tree", 90, n) for n in (31, 32, 33)] + [random_row(rng, "causal", 50, 3)]
    batch = Batch(rows, 2, 1, 16, 16, torch.float32, 16, num_words=words)
    check(batch.run(launch=LAUNCHES[1]), batch.plain())
    # Two levels of the tree: positions of keys count, not their indices.
    for window in (2, Window(2, 5)):
        check(batch.run(launch=LAUNCHES[2], window=window), batch.plain(window=window))
    biases = torch.randn(batch.inputs.max_key_length, 2)
    check(batch.run(launch=LAUNCHES[2], biases=biases), batch.plain(biases=biases))


@needs_triton
@pytest.mark.parametrize("launch", LAUNCHES, ids=range(len(LAUNCHES)))
def test_the_first_keys_stay_visible_beside_a_window(launch):
    """Windows far behind the first keys, next to these, and before these end; a tile's queries may leave out different keys."""
    rng = np.random.default_rng(4)
    rows = [
        RowDescription([], 1, 150),
        RowDescription([], 20, 117),
        random_row(rng, "tree", 140, 6),
        RowDescription([], 3, 5),
    ]
    batch = Batch(rows, 2, 1, 16, 16, torch.float32, 16)
    for window in (Window(1, 1), Window(20, 17), Window(60, 70)):
        check(batch.run(launch=launch, window=window), batch.plain(window=window))


@needs_triton
@pytest.mark.parametrize("launch", LAUNCHES, ids=range(len(LAUNCHES)))
def test_padding_of_a_graph_bucket(launch):
    """Rows and tokens that only fill the bucket: their outputs and the tables behind the keys are not touched."""
    real = [RowDescription([], 3, 20), RowDescription([], 1, 40)]
    batch = Batch(real + [RowDescription([], 0, 0)] * 3, 4, 2, 16, 16, torch.float32, 16,
                  num_tokens=12, max_query_length=4, max_blocks=6)  # fmt: skip
    tables = batch.inputs.block_tables
    for i, row in enumerate(batch.rows):
        tables[i, len(row.blocks) :] = 2**31 - 1
    out = batch.run(launch=launch)
    check(out, batch.plain())
    assert out[4:].isnan().all()


@needs_triton
@pytest.mark.parametrize("launch", [None, LAUNCHES[3], LAUNCHES[4], LAUNCHES[7]], ids=["33", "5", "fixed", "12"])
def test_rows_with_fewer_tiles_than_splits(launch):
    """A bucket for long rows holds short ones: splits without keys leave no trace, whatever their results' memory held."""
    if launch is None:  # as an H200 is given
        launch = choose_launch(dataclasses.replace(llama(1, 1, 32768), itemsize=4), H200)
        launch = dataclasses.replace(launch, keys_per_split=16, early_merge=False)
        assert launch.num_splits == 33
    rng = np.random.default_rng(3)
    rows = [RowDescription([], 1, 1), RowDescription([], 3, 30), random_row(rng, "tree", 50, 6)]
    batch = Batch(rows, 2, 1, 16, 16, torch.float32, 16, max_blocks=64)
    torch.use_deterministic_algorithms(True)  # new tensors are full of NaN
    try:
        for options in ({}, {"window": Window(5, 4)}, {"window": 9, "sinks": torch.tensor([0.5, -1.0])}):
            check(batch.run(launch=launch, **options), batch.plain(**options))
    finally:
        torch.use_deterministic_algorithms(False)


@needs_triton
def test_a_trash_row_full_of_poison_harms_no_other_row():
    """A padding token may read a trash block that holds anything; its NaN stays its own."""
    batch = Batch([RowDescription([], 2, 20), RowDescription([], 1, 1)], 2, 1, 16, 16, torch.float32, 16)
    wanted = batch.plain()
    batch.value_pool[batch.slots(batch.rows[1])] = float("nan")
    out = batch.run()
    check(out[:2], wanted[:2])
    assert out[2:].isnan().all()


@needs_triton
@pytest.mark.parametrize(
    ("dtype", "window"),
    [(torch.float32, 30), (torch.float32, Window(20, 6)), (torch.float16, None), (torch.bfloat16, None)],
)
def test_invariant_attention_is_the_same_bit_for_bit(dtype, window):
    """Verifying a chain of tokens at once, in a batch, as a chunk or as a tree, gives what one token at a time gives."""
    length, drafts = 75, 4
    launch = AttentionLaunch(16, 16, 4, 2, num_splits=3, keys_per_split=32, fixed_splits=True)
    tree = np.tril(np.ones((drafts, drafts), dtype=bool))
    together = Batch([RowDescription([], drafts, length, tree), RowDescription([], drafts, length)],
                     4, 2, 32, 32, dtype, 16)  # fmt: skip
    together.query[drafts:] = together.query[:drafts]
    together.key_pool[together.slots(together.rows[1])] = together.key_pool[together.slots(together.rows[0])]
    together.value_pool[together.slots(together.rows[1])] = together.value_pool[together.slots(together.rows[0])]
    out = together.run(launch=launch, window=window)
    assert torch.equal(out[:drafts], out[drafts:])
    for i in range(drafts):
        keys = length - drafts + i + 1
        alone = Batch([RowDescription([], 1, keys)], 4, 2, 32, 32, dtype, 16)
        alone.key_pool[alone.slots(alone.rows[0])] = together.key_pool[together.slots(together.rows[0])][:keys]
        alone.value_pool[alone.slots(alone.rows[0])] = together.value_pool[together.slots(together.rows[0])][:keys]
        alone.query[:] = together.query[i : i + 1]
        more_splits = dataclasses.replace(launch, num_splits=12)
        assert torch.equal(alone.run(launch=more_splits, window=window)[0], out[i])


@needs_triton
@pytest.mark.parametrize("launch", LAUNCHES[1:4], ids=range(3))
def test_large_scores_do_not_overflow(launch):
    """Scores of thousands, of either sign, where the softmax is nearly a choice; a sink below and one above all."""
    batch = Batch([RowDescription([], 3, 100), RowDescription([], 1, 33)], 2, 1, 16, 16, torch.float32, 16)
    batch.query *= 1000
    for sinks in (None, torch.tensor([-3e4, 3e4])):
        check(batch.run(launch=launch, sinks=sinks), batch.plain(sinks=sinks), 1e-4)


@needs_triton
def test_a_query_without_keys_gives_zeros():
    batch = Batch([RowDescription([], 2, 20, np.eye(2, 20, dtype=bool))], 1, 1, 16, 16, torch.float32, 16)
    batch.inputs.visibility.zero_()
    for launch in LAUNCHES:
        assert (batch.run(launch=launch) == 0).all()


@needs_triton
@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda b: {"query": b.query[:, :, :8]}, "do not fit together"),
        (lambda b: {"key_pool": b.key_pool.half()}, "dtypes differ"),
        (lambda b: {"scaling": 0.0}, "above 0"),
        (lambda b: {"value_pool": b.value_pool.transpose(0, 2).contiguous().transpose(0, 2)}, "contiguous"),
    ],
)
def test_what_does_not_fit_is_refused(change, message):
    batch = Batch([RowDescription([], 2, 20)], 2, 1, 16, 16, torch.float32, 16)
    arguments = {
        "query": batch.query,
        "key_pool": batch.key_pool,
        "value_pool": batch.value_pool,
        "inputs": batch.inputs,
    }
    with pytest.raises(ValueError, match=message):
        paged_attention(**{**arguments, "scaling": 0.2, **change(batch)})


# ---- without Triton ---------------------------------------------------------------------------------------------------


def test_bits_of_the_visibility():
    seen = np.zeros((2, 40), dtype=bool)
    seen[0, [0, 31, 32]] = True
    seen[1, 39] = True
    assert pack_visibility(seen, 3).tolist() == [[1 - 2**31, 1, 0], [0, 128, 0]]


def test_widths_are_covered():
    for width in range(1, 600):
        first, second = head_widths(width)
        assert first >= 16 and first & (first - 1) == 0 and first + second >= width
        assert second == 0 or (second >= 16 and second & (second - 1) == 0 and first < width)


def llama(rows, tokens, keys):
    return AttentionShape(rows, rows * tokens, tokens, keys, 8, 4, 128, 128, 2)


def test_launches_fill_the_device():
    """One row with a long context is split over the multiprocessors, with fewer tiles in flight; many rows are not split."""
    for tokens, block_m in ((1, 16), (8, 32)):
        long = choose_launch(llama(1, tokens, 32768), H200)
        assert (long.block_m, long.num_splits, long.num_stages) == (block_m, 33, 3)
        many = choose_launch(llama(64, tokens, 2048), H200)
        assert (many.block_m, many.num_splits, many.num_stages) == (block_m, 1, 4)
    small_tiles = dataclasses.replace(llama(1, 1, 32768), key_width=64, value_width=64)
    assert choose_launch(small_tiles, H200).num_stages == 4


@pytest.mark.parametrize(
    ("keys", "splits"),
    [(16, 1), (128, 1), (129, 3), (200, 4), (256, 4), (512, 8), (1024, 8), (2048, 16), (4096, 32), (8192, 33)],
)
def test_short_contexts_are_split_by_the_tile(keys, splits):
    launch = choose_launch(llama(1, 1, keys), H200)
    assert launch.num_splits == splits and launch.keys_per_split == 64 and launch.keys_per_split % launch.block_n == 0


@pytest.mark.parametrize("keys", [1, 200, 1024, 5000, 65536])
def test_splits_are_never_more_than_fill_the_device(keys):
    for programs in range(1, 600):
        splits = choose_splits(programs, keys, 264)
        assert 1 <= splits <= min(64, -(-keys // 64))
        assert splits == 1 or programs * splits <= 264


def test_merges_read_all_splits_at_once():
    """But by eights where their number may change no bit."""
    for splits, at_once in ((2, 8), (8, 8), (9, 16), (33, 64), (64, 64)):
        launch = AttentionLaunch(16, 16, 4, 2, num_splits=splits)
        assert merge_tile(512, launch) == (128, at_once)
        assert merge_tile(80, dataclasses.replace(launch, fixed_splits=True)) == (128, 8)


def test_invariant_launches_do_not_depend_on_the_batch():
    shapes = [llama(1, 1, 4096), llama(64, 8, 4096), llama(3, 512, 4096)]
    assert len({choose_launch(shape, H200, invariant=True) for shape in shapes}) == 1


def test_every_row_gets_enough_tiles():
    """Also where the search finds them: as many tiles as each row needs, whatever the lengths are."""
    for tokens, group, block_m in [(40, 1, 16), (1000, 7, 64), (33, 128, 32), (5, 3, 16)]:
        for rows in (1, 3, 9):
            shape = dataclasses.replace(llama(rows, 1, 64), num_tokens=tokens, max_query_length=tokens, group=group)
            tiles, per_row = num_tiles(shape, block_m)
            assert tiles >= -(-tokens * group // block_m) and (per_row == 0 or tiles == rows * per_row)
