"""Memory is taken as text grows: what a long `max_new_tokens` costs, pools that grow in the middle of a run, bounded pools."""

import errno
import gc
import mmap
import types
from pathlib import Path

import pytest
import torch
from cache_checks import check_blocks
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from oracle import assert_clean, method_configs, ragged, tiny_llama
from replayed_graphs import defined_attention, graphs_in_python  # noqa: F401
from transformers import DynamicCache
from transformers.generation.stopping_criteria import StoppingCriteria, StoppingCriteriaList

from hf_specdec.cache import OutOfBlocks, PagedStaticCache, memory, paged_cache
from hf_specdec.cache.paged_layer import PagedLayer
from hf_specdec.core.names import CACHE
from hf_specdec.kernels.cache import write_keys_values

MEBI = 2**20


def resident() -> int:
    """Bytes of this process that are in memory."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * mmap.PAGESIZE


class Watch(StoppingCriteria):
    """Stops after `count` new tokens; knows how much more memory the process had at most when it was asked, than before the call
    and than after the first token."""

    def __init__(self, count: int):
        self.left, self.before, self.first, self.most = count, resident(), 0, 0

    def __call__(self, input_ids, scores, **kwargs):
        self.left -= 1
        self.first = self.first or resident()
        self.most = max(self.most, resident() - self.before)
        return torch.full((len(input_ids),), self.left <= 0)

    @property
    def grown(self):
        """Bytes at most, above those after the first token."""
        return self.most + self.before - self.first


@pytest.fixture(scope="module")
def wide():
    """4 KV heads of 128, 8 layers: 32 KiB a token; long texts are within its positions."""
    return tiny_llama(
        hidden_size=512, num_attention_heads=4, num_key_value_heads=4, num_hidden_layers=8, max_position_embeddings=2**20
    )  # fmt: skip


@pytest.fixture
def extents(monkeypatch):
    """Pools grow as on a device: by extents of `extents(n)` bytes. Lists how many blocks each pool had when it had grown."""
    sizes: list[int] = []
    grow = PagedStaticCache._grow

    def growing(self, num_blocks):
        places = self.identity
        grow(self, num_blocks)
        if self.is_allocated:
            sizes.append(num_blocks)
        assert num_blocks == self.pool.num_blocks and places != self.identity

    def by(num_bytes: int) -> list[int]:
        monkeypatch.setattr(paged_cache, "LEAST_EXTENT", num_bytes)
        monkeypatch.setattr(paged_cache, "EXTENT", 0.0)
        sizes.clear()
        return sizes

    monkeypatch.setattr(memory, "takes_memory_when_written", lambda tensors: False)
    monkeypatch.setattr(PagedStaticCache, "_grow", growing)
    return by


# ---- what is not used costs nothing ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("max_new_tokens", "batch", "name"),
    [(30_000, 1, "none"), (30_000, 4, "ngram"), (131_072, 4, "chain"), (10**9, 3, "none"), (10**9, 1, "tree")],
)
def test_a_long_max_new_tokens_costs_nothing_until_it_is_used(wide, max_new_tokens, batch, name):
    config = dict(method_configs("")[name])
    kwargs = {"assistant_model": wide} if config.pop("model", None) is not None else {}
    inputs = ragged([9] * batch)
    # What stays (code, packed weights) comes with the first call.
    wide.generate(**inputs, max_new_tokens=10, do_sample=False, speculative_config=config, **kwargs)
    watch = Watch(10)
    out = wide.generate(
        **inputs, max_new_tokens=max_new_tokens, do_sample=False, speculative_config=config, **kwargs,
        stopping_criteria=StoppingCriteriaList([watch]),
    )  # fmt: skip
    assert out.shape == (batch, 19)
    assert watch.most < 32 * MEBI  # what malloc keeps differs from run to run; 30,000 tokens a row are 938 MiB
    assert_clean(wide)


@pytest.mark.parametrize("name", ["none", "ngram", "chain", "tree"])
def test_pools_are_freed_with_their_call(wide, name):
    """Without the garbage collector, which may run after the next call has allocated its own."""
    config = dict(method_configs("")[name])
    kwargs = {"assistant_model": wide} if config.pop("model", None) is not None else {}
    gc.collect()
    gc.disable()
    try:
        wide.generate(**ragged([9]), max_new_tokens=10, do_sample=False, speculative_config=config, **kwargs)
        gc.set_debug(gc.DEBUG_SAVEALL)
        gc.collect()
        assert not [each for each in gc.garbage if isinstance(each, PagedStaticCache)]
    finally:
        gc.set_debug(0)
        gc.garbage.clear()
        gc.enable()


@pytest.mark.parametrize("batch", [pytest.param(1, marks=pytest.mark.slow), 3])
def test_memory_is_that_of_a_dynamic_cache(wide, batch):
    """Resident memory while a long text is written; everything but keys and values is the same at its beginning."""
    inputs = ragged([200] * batch)
    config = {"method": "none", "prefill_chunk_size": 64}
    wide.generate(**inputs, max_new_tokens=16, do_sample=False, speculative_config=config)
    watch = Watch(200)
    out = wide.generate(
        **inputs, max_new_tokens=4000, do_sample=False, speculative_config=config, return_dict_in_generate=True,
        stopping_criteria=StoppingCriteriaList([watch]),
    )  # fmt: skip
    dynamic = batch * 400 * 32 * 1024
    # What malloc holds may go meanwhile, so less says nothing: what the blocks take does.
    assert watch.most < 1.1 * dynamic + MEBI and watch.grown < 1.1 * dynamic + MEBI
    assert 0.99 * dynamic < out.speculation.kv_cache_bytes < 1.05 * dynamic
    assert_clean(wide)


@pytest.mark.parametrize("batch", [pytest.param(1, marks=pytest.mark.slow), 3])
def test_extents_stay_within_a_tenth_of_what_is_used(wide, monkeypatch, batch):
    """At every length: pools, the layer that is copied, and weights, against transformers' cache and weights."""
    monkeypatch.setattr(memory, "takes_memory_when_written", lambda tensors: False)
    monkeypatch.setattr(paged_cache, "LEAST_EXTENT", 0)
    weights = sum(parameter.nbytes for parameter in wide.parameters())
    sizes, reserve, grow = [], PagedStaticCache.reserve, PagedLayer.grow
    copied = [0]

    def growing(self, num_slots, runs):
        copied.append(self.keys.nbytes)  # the larger one is there beside it
        grow(self, num_slots, runs)

    def reserving(self, seq_id, num_slots):
        reserve(self, seq_id, num_slots)
        used = sum(len(table.slots) for table in self.tables.values()) * 32 * 1024
        if self.is_allocated:
            sizes.append((self.num_bytes + copied[-1] + weights) / (used + weights))
        del copied[1:]

    monkeypatch.setattr(PagedLayer, "grow", growing)
    monkeypatch.setattr(PagedStaticCache, "reserve", reserving)
    wide.generate(
        **ragged([40] * batch), max_new_tokens=4000, do_sample=False, speculative_config={"method": "none"},
        stopping_criteria=StoppingCriteriaList([Watch(200)]),
    )  # fmt: skip
    assert len(sizes) > 10 * batch and 1.0 < max(sizes) < 1.1  # a reading for each block
    assert_clean(wide)


# ---- growth in the middle of a run ----------------------------------------------------------------------------------


METHODS = ["none", "ngram", "chain", "tree"]


@pytest.mark.parametrize("name", METHODS)
def test_growing_changes_no_token(model, drafter_path, extents, name):
    sizes = extents(1)
    inputs = ragged([6, 13, 2, 9])
    out = model.generate(
        **inputs, max_new_tokens=60, do_sample=False,
        speculative_config={**method_configs(drafter_path)[name], "block_size": 4},
    )  # fmt: skip
    assert torch.equal(out, model.generate(**inputs, max_new_tokens=60, do_sample=False))
    assert len(sizes) > 10
    assert_clean(model)


@pytest.mark.parametrize(
    "config",
    [
        {"method": "eagle", "model": "tiny-eagle", "num_speculative_tokens": 3},
        {"method": "eagle3", "model": "tiny-eagle3", "top_k": 3, "total_tokens": 10, "depth": 3},
        {"method": "mtp", "model": "tiny-mtp"},
        {"method": "dflash", "model": "tiny-dflash"},
    ],
    ids=lambda config: config["method"],
)
def test_heads_grow_too(tiny_model, extents, config):
    sizes = extents(1)
    inputs = ragged([6, 21], vocab_size=tiny_model.config.vocab_size)
    out = tiny_model.generate(
        **inputs, max_new_tokens=40, do_sample=False, speculative_config={**config, "block_size": 4}
    )
    assert torch.equal(out, tiny_model.generate(**inputs, max_new_tokens=40, do_sample=False))
    assert len(sizes) > 20  # the target's and the head's
    assert_clean(tiny_model)


@settings(max_examples=15, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    name=st.sampled_from(METHODS), lengths=st.lists(st.integers(1, 40), min_size=1, max_size=4), new=st.integers(1, 40),
    block_size=st.sampled_from([1, 3, 16]), extent=st.integers(1, 60_000), equal=st.booleans(),
    spare=st.none() | st.integers(0, 12),
)  # fmt: skip
def test_any_growth_points(model, drafter_path, extents, name, lengths, new, block_size, extent, equal, spare):
    """With prefixes shared, and with rows preempted because the pool is bounded and may not grow further."""
    extents(extent)
    inputs = ragged([max(lengths)] * len(lengths) if equal else lengths)
    config = {**method_configs(drafter_path)[name], "block_size": block_size}
    if spare is not None:  # the longest row, and a little
        config["num_blocks"] = -(-(max(lengths) + new) // block_size) + spare
    out = model.generate(**inputs, max_new_tokens=new, do_sample=False, speculative_config=config)
    assert torch.equal(out, model.generate(**inputs, max_new_tokens=new, do_sample=False))
    assert_clean(model)


@pytest.mark.long
def test_what_was_captured_on_smaller_pools_is_forgotten(tiny_model, extents, graphs_in_python, defined_attention):  # noqa: F811
    """Graphs read the pools by address: they are captured anew after growth, and only then."""
    config = {
        "method": "eagle3",
        "model": "tiny-eagle3",
        "num_speculative_tokens": 3,
        "cuda_graphs": True,
        "compile": False,
    }
    inputs = ragged([6, 21], vocab_size=tiny_model.config.vocab_size)
    plain = tiny_model.generate(**inputs, max_new_tokens=60, do_sample=False)

    def call(extent: int) -> tuple[int, int]:
        """Captures, and growths."""
        sizes, before = extents(extent), sum(each.capture.count for each in graphs_in_python)
        out = tiny_model.generate(**inputs, max_new_tokens=60, do_sample=False, speculative_config=config)
        assert torch.equal(out, plain)
        assert not any(each.refused for each in graphs_in_python)
        return sum(each.capture.count for each in graphs_in_python) - before, len(sizes)

    captured, grown = call(1)
    assert grown > 4 and captured > grown
    # The pools that the last call left are large enough: only what was forgotten is captured.
    captured_again, grown = call(1)
    assert grown == 0 and captured_again < captured
    assert call(1) == (0, 0)
    assert_clean(tiny_model)
    at_once, grown = call(2**30)
    assert grown == 0 and 0 < at_once < captured
    assert_clean(tiny_model)


def test_a_growth_that_fails_leaves_a_cache_of_one_size(monkeypatch):
    monkeypatch.setattr(memory, "takes_memory_when_written", lambda tensors: False)
    monkeypatch.setattr(paged_cache, "LEAST_EXTENT", 1)
    cache = PagedStaticCache(3, 100, 4, weights=[torch.zeros(1)])
    cache.add(0)
    cache.reserve(0, 8)
    states = torch.arange(8.0).view(1, 1, 8, 1).expand(1, 2, 8, 3)
    slots = types.SimpleNamespace(write_slots=torch.from_numpy(cache.tables[0].slots), write=write_keys_values)
    cache.batch = types.SimpleNamespace(on=lambda device: slots, gather=False)
    for layer in cache.layers:
        layer.update(states, states.clone())
    cache.tables[0].length = 8
    zeros, calls = memory.zeros, []

    def failing(shape, like):
        calls.append(shape)
        if len(calls) == 4:  # the second layer's values
            raise MemoryError("no more")
        return zeros(shape, like)

    monkeypatch.setattr(memory, "zeros", failing)
    with pytest.raises(MemoryError, match="no more"):
        cache.reserve(0, 20)
    assert {len(pool) for layer in cache.layers for pool in (layer.keys, layer.values)} == {cache.num_slots}
    check_blocks(cache.pool)
    cache.reserve(0, 20)
    assert {len(pool) for layer in cache.layers for pool in (layer.keys, layer.values)} == {cache.num_slots}
    for index in range(3):
        keys, values = cache.read(0)[index]
        assert torch.equal(keys, states[0].transpose(0, 1)) and torch.equal(values, keys)


# ---- places ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", METHODS)
def test_rows_of_a_batch_are_read_in_place(model, drafter_path, monkeypatch, name):
    """On a CPU every row's blocks are one run, in the target's pools and in the drafter's, however long the rows become."""
    apart, row = [], PagedStaticCache.row

    def asking(self, seq_id, *args):
        apart.append(not self.tables[seq_id].contiguous)
        return row(self, seq_id, *args)

    monkeypatch.setattr(PagedStaticCache, "row", asking)
    monkeypatch.setenv("HF_SPECDEC_KERNELS", "reference")  # which asks for rows
    config = {**method_configs(drafter_path)[name], "block_size": 4}
    model.generate(**ragged([6, 13, 2, 9]), max_new_tokens=60, do_sample=False, speculative_config=config)
    assert len(apart) > 100 and not any(apart)
    assert_clean(model)


def test_rows_that_share_a_prefix_leave_each_other_room(model, monkeypatch):
    """The first row's blocks stay one run; each other row has one run of its own after the blocks it shares."""
    config = {"method": "none", "block_size": 4}
    inputs = {name: value.repeat(3, 1) for name, value in ragged([13]).items()}
    tables, remove = [], PagedStaticCache.remove

    def removing(self, seq_id):
        tables.append(self.tables[seq_id])
        remove(self, seq_id)

    monkeypatch.setattr(PagedStaticCache, "remove", removing)
    model.generate(**inputs, max_new_tokens=40, do_sample=False, speculative_config=config)
    first, *others = tables
    assert first.contiguous
    for table in others:
        assert table.blocks[:3] == first.blocks[:3]
        own = table.blocks[3:]
        assert own == list(range(own[0], own[0] + len(own)))
    assert_clean(model)


# ---- bounded pools --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", METHODS)
def test_a_bounded_pool_takes_a_long_max_new_tokens(model, drafter_path, name):
    """`num_blocks` bounds what is used, not what may be asked for: rows wait for each other."""
    inputs = ragged([6, 13, 2, 9])
    config = {**method_configs(drafter_path)[name], "block_size": 4, "num_blocks": 14}
    stop = {"max_new_tokens": 200, "do_sample": False}
    watches = [StoppingCriteriaList([Watch(30)]) for _ in range(2)]
    out = model.generate(**inputs, **stop, stopping_criteria=watches[0], speculative_config=config)
    assert torch.equal(out, model.generate(**inputs, **stop, stopping_criteria=watches[1]))
    assert_clean(model)


def test_a_text_that_outgrows_its_pool_is_one_clear_error(model):
    with pytest.raises(OutOfBlocks, match=r"A text of \d+ tokens .* Raise num_blocks, or lower max_new_tokens"):
        model.generate(
            **ragged([6, 9]), max_new_tokens=200, do_sample=False,
            speculative_config={"method": "ngram", "block_size": 4, "num_blocks": 12},
        )  # fmt: skip
    assert_clean(model)


def test_a_cache_passed_in_is_taken_over_by_growing_pools(model, extents):
    extents(1)
    inputs = ragged([24])
    plain = model.generate(**inputs, max_new_tokens=20, do_sample=False)
    begun = DynamicCache()
    model(input_ids=inputs["input_ids"][:, :20], **{CACHE: begun})
    out = model.generate(
        **inputs, **{CACHE: begun}, max_new_tokens=20, do_sample=False,
        speculative_config={"method": "ngram", "block_size": 4},
    )  # fmt: skip
    assert torch.equal(out, plain) and begun.get_seq_length() == 43
    assert_clean(model)


# ---- address space --------------------------------------------------------------------------------------------------


def test_zeros_take_memory_where_they_are_written():
    before = resident()
    pool = memory.zeros((2**20, 4, 64), torch.empty(0, dtype=torch.bfloat16))  # 512 MiB
    assert pool[12345].abs().sum() == 0 and resident() - before < 4 * MEBI
    pool[: 2**17].fill_(1)
    assert 60 * MEBI < resident() - before < 70 * MEBI
    assert pool[2**17 :][::4096].abs().sum() == 0
    del pool
    assert resident() - before < 4 * MEBI


def test_where_address_space_is_not_free_pools_grow_by_extents(monkeypatch, tmp_path):
    strict = tmp_path / "overcommit_memory"
    weights = [torch.zeros(1)]
    assert memory.takes_memory_when_written(weights)
    assert not memory.takes_memory_when_written([torch.zeros(1, device="meta")])
    for content, free in (("0\n", True), ("1\n", True), ("2\n", False)):
        strict.write_text(content)
        monkeypatch.setattr(memory, "_OVERCOMMIT", strict)
        assert memory.takes_memory_when_written(weights) == free
        assert PagedStaticCache(1, 50, 4, weights=weights).pool.num_blocks == (50 if free else 1)


def test_no_address_space_is_one_clear_error(monkeypatch):
    def refusing(*args, **kwargs):
        raise OSError(errno.ENOMEM, "Cannot allocate memory")

    monkeypatch.setattr(mmap, "mmap", refusing)
    with pytest.raises(MemoryError, match=r"refused 2\.0 GiB of address space .*num_blocks"):
        memory.zeros((2**29,), torch.zeros(0))
