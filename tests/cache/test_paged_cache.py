"""PagedStaticCache with real (tiny) tensors, against a model in which every sequence is a plain list of its KV."""

import functools
import random
from types import SimpleNamespace

import hypothesis.strategies as st
import pytest
import torch
from cache_checks import check_blocks
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from hf_specdec.cache import OutOfBlocks, PagedStaticCache, memory, paged_cache
from hf_specdec.kernels.attention.reference import read_row
from hf_specdec.kernels.cache import reference as ops

CPU = torch.device("cpu")
LAYERS, HEADS, WIDTH, VALUE_WIDTH = 2, 2, 3, 5
BYTES_PER_SLOT = LAYERS * HEADS * (WIDTH + VALUE_WIDTH) * 4


def kv(prefix, layer):
    """What a model would compute for the last token of `prefix`: a function of all of it. [H, D], [H, Dv]."""
    return _kv(tuple(prefix), layer)


@functools.cache
def _kv(prefix, layer):
    rng = random.Random(repr((prefix, layer)))
    return (
        torch.tensor([[rng.random() for _ in range(WIDTH)] for _ in range(HEADS)]),
        torch.tensor([[rng.random() for _ in range(VALUE_WIDTH)] for _ in range(HEADS)]),
    )


def write(cache, seq_id, start, prefixes, gather=False):
    """Write the KV of the last tokens of `prefixes` at logical indices start, start + 1, .. as a forward would."""
    slots = torch.from_numpy(cache.tables[seq_id].slots[start : start + len(prefixes)])
    read = torch.from_numpy(cache.tables[seq_id].slots[: start + len(prefixes)])
    device = SimpleNamespace(write_slots=slots, read_slots=read, write=ops.write_keys_values)
    cache.batch = SimpleNamespace(on=lambda _: device, gather=gather, num_keys=start + len(prefixes))
    returned = []
    for index, layer in enumerate(cache.layers):
        keys, values = zip(*(kv(prefix, index) for prefix in prefixes), strict=True)
        packed = [torch.stack(states).transpose(0, 1)[None] for states in (keys, values)]
        returned.append((packed, layer.update(*packed)))
    cache.batch = None
    return returned


def check_content(cache, seq_id, tokens, length):
    """The sequence's first `length` tokens have the KV of their own prefixes, in every view the cache gives."""
    assert cache.tables[seq_id].length == length
    for index, layer in enumerate(cache.layers):
        expected = [kv(tokens[: i + 1], index) for i in range(length)]
        keys, values = cache.read(seq_id)[index] if layer.is_initialized else ([], [])
        assert len(keys) == length
        if not length:
            continue
        row = cache.row(seq_id, 0, 1, length, CPU)
        for pool, own, which in ((layer.keys, keys, 0), (layer.values, values, 1)):
            wanted = torch.stack([pair[which] for pair in expected])
            assert torch.equal(own, wanted)
            assert torch.equal(read_row(pool, row)[0].transpose(0, 1), wanted)


class CacheMachine(RuleBasedStateMachine):
    """Sequences as the loop drives them: a prompt (shared where it can be), then rounds of draft tree, commit, bonus token.

    `sequences`: id → [tokens, length]: `length` of the tokens have KV.
    """

    @initialize(
        block_size=st.integers(1, 4),
        num_blocks=st.integers(2, 14),
        share=st.booleans(),
        growth=st.sampled_from(["none", "address space", "extents"]),
        at_once=st.integers(1, 5),
    )
    def start(self, block_size, num_blocks, share, growth, at_once):
        """`at_once`: blocks of the address space at first, or slots of an extent."""
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(memory, "takes_memory_when_written", lambda tensors: growth != "extents")
            patch.setattr(paged_cache, "MOST_AT_ONCE", at_once)
            weights = () if growth == "none" else [torch.zeros(1)]
            self.cache = PagedStaticCache(LAYERS, num_blocks, block_size, share_prefixes=share, weights=weights)
        self.least_extent = at_once * BYTES_PER_SLOT
        self.sequences: dict[int, list] = {}
        self.next_id = 0
        self.pools = None

    def reserve(self, seq_id, slots):
        """Whether there was room; if not, nothing may have changed."""
        table, pool = self.cache.tables[seq_id], self.cache.pool
        before = (list(table.blocks), table.slots.tolist(), list(pool.ref_counts), pool.num_available)
        missing = self.cache.blocks_missing(seq_id, slots)
        assert missing == max(0, -(-slots // self.cache.block_size) - len(table.blocks))
        if missing > pool.num_available + self.cache.most_blocks - pool.num_blocks:
            with pytest.raises(OutOfBlocks):
                self.cache.reserve(seq_id, slots)
            assert before == (list(table.blocks), table.slots.tolist(), list(pool.ref_counts), pool.num_available)
            return False
        grows = missing > pool.num_available
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(paged_cache, "LEAST_EXTENT", self.least_extent)
            self.cache.reserve(seq_id, slots)
        if grows:
            self.pools = None
        assert len(table.slots) >= slots
        return True

    @rule(
        prompt=st.lists(st.integers(0, 1), min_size=1, max_size=12), gather=st.booleans(), may_become=st.integers(0, 16)
    )
    def add(self, prompt, gather, may_become):
        seq_id, self.next_id = self.next_id, self.next_id + 1
        self.cache.add(seq_id, may_become)
        with pytest.raises(ValueError, match="already"):
            self.cache.add(seq_id)
        matched = self.cache.match_prefix(seq_id, prompt)
        assert matched % self.cache.block_size == 0 and matched < len(prompt)
        assert matched == 0 or self.cache.share_prefixes
        self.sequences[seq_id] = [list(prompt), matched]
        check_content(self.cache, seq_id, prompt, matched)  # computed by others, valid for us
        if not self.reserve(seq_id, len(prompt)):
            self.remove_id(seq_id)
            return
        write(self.cache, seq_id, matched, [prompt[: i + 1] for i in range(matched, len(prompt))], gather)
        self.cache.register_prefix(seq_id, prompt, len(prompt))
        self.cache.commit([(seq_id, len(prompt), [])])
        self.sequences[seq_id][1] = len(prompt)
        # An equal prompt would share all full blocks that leave it a token to compute.
        if self.cache.share_prefixes:
            self.cache.add(-1)
            assert (
                self.cache.match_prefix(-1, prompt)
                == (len(prompt) - 1) // self.cache.block_size * self.cache.block_size
            )
            self.cache.remove(-1)

    @precondition(lambda self: self.sequences)
    @rule(data=st.data())
    def rounds(self, data):
        """One verification round for some sequences at once: write pending token and tree, commit a path of it."""
        chosen = data.draw(st.lists(st.sampled_from(sorted(self.sequences)), unique=True, min_size=1, max_size=3))
        kept, after = [], {}
        for seq_id in chosen:
            tokens, length = self.sequences[seq_id]
            tokens = tokens if length < len(tokens) else [*tokens, data.draw(st.integers(0, 1))]  # the bonus token
            count = data.draw(st.integers(0, 6))
            parents = [data.draw(st.integers(-1, i - 1)) for i in range(count)]
            drafted = [data.draw(st.integers(0, 1)) for _ in range(count)]
            if not self.reserve(seq_id, len(tokens) + count):
                continue
            paths = []
            for node in range(count):
                paths.append([*(paths[parents[node]] if parents[node] >= 0 else []), node])
            prefixes = [tokens[: i + 1] for i in range(length, len(tokens))]
            prefixes += [tokens + [drafted[n] for n in path] for path in paths]
            self.cache.register_prefix(seq_id, tokens, len(tokens))
            write(self.cache, seq_id, length, prefixes, gather=data.draw(st.booleans()))
            path = data.draw(st.sampled_from([[], *paths]))
            kept.append((seq_id, len(tokens), path))
            after[seq_id] = [tokens + [drafted[n] for n in path], len(tokens) + len(path)]
        self.cache.commit(kept)
        self.sequences.update(after)

    @precondition(lambda self: self.sequences)
    @rule(data=st.data())
    def truncate(self, data):
        """Roll back; what others may share stays as it is, or the call is refused and nothing changes."""
        seq_id = data.draw(st.sampled_from(sorted(self.sequences)))
        tokens, length = self.sequences[seq_id]
        new = data.draw(st.integers(0, length + 2))
        declared = len(self.cache.tables[seq_id].hashes) * self.cache.block_size
        if new < declared:
            with pytest.raises(ValueError, match="shared"):
                self.cache.truncate(seq_id, new)
            return
        self.cache.truncate(seq_id, new)
        self.sequences[seq_id] = [tokens[:new] if new < length else tokens, min(new, length)]

    @precondition(lambda self: self.sequences)
    @rule(data=st.data())
    def evict(self, data):
        """Its tokens are to be read again."""
        seq_id = data.draw(st.sampled_from(sorted(self.sequences)))
        place = self.cache.tables[seq_id].place
        self.cache.evict(seq_id)
        assert self.cache.tables[seq_id].place == place
        self.sequences[seq_id] = [[], 0]

    @precondition(lambda self: self.sequences)
    @rule(data=st.data())
    def remove(self, data):
        self.remove_id(data.draw(st.sampled_from(sorted(self.sequences))))

    def remove_id(self, seq_id):
        del self.sequences[seq_id]
        self.cache.remove(seq_id)
        with pytest.raises(KeyError):
            self.cache.remove(seq_id)

    @rule()
    def clear(self):
        self.cache.clear()
        self.sequences.clear()
        assert self.cache.pool.num_used == 0
        self.cache.add(-1)
        assert self.cache.match_prefix(-1, [0] * 9) == 0  # contents are forgotten
        self.cache.remove(-1)

    @invariant()
    def agrees(self):
        if not hasattr(self, "cache"):
            return
        cache = self.cache
        check_blocks(cache.pool)
        counts = [0] * cache.pool.num_blocks
        for seq_id, (tokens, length) in self.sequences.items():
            table = cache.tables[seq_id]
            check_content(cache, seq_id, tokens, length)
            expected = [b * cache.block_size + i for b in table.blocks for i in range(cache.block_size)]
            assert table.slots.tolist() == expected
            assert table.contiguous == (
                expected == list(range(expected[0], expected[0] + len(expected))) if expected else True
            )
            for block in table.blocks:
                counts[block] += 1
        assert counts == cache.pool.ref_counts
        if all(layer.is_initialized for layer in cache.layers):
            pools = [pool.data_ptr() for layer in cache.layers for pool in (layer.keys, layer.values)]
            assert pools == (self.pools or pools), "the memory moved"
            self.pools = pools
            blocks = cache.pool.most_used if cache.is_lazy else cache.pool.num_blocks
            assert cache.num_bytes == blocks * cache.block_size * BYTES_PER_SLOT

    def teardown(self):
        if hasattr(self, "cache"):
            for seq_id in list(self.sequences):
                self.remove_id(seq_id)
            check_blocks(self.cache.pool)
            assert self.cache.pool.num_used == 0, "blocks were leaked"


TestPagedCache = CacheMachine.TestCase
TestPagedCache.settings = settings(max_examples=80, stateful_step_count=20, deadline=None)


def test_what_update_returns():
    """The new states themselves when attention reads pages; a row's whole context for models that attend to the result."""
    cache = PagedStaticCache(LAYERS, 6, 2)
    cache.add(0)
    cache.reserve(0, 5)
    tokens = [4, 5, 6, 7, 8]
    for given, returned in write(cache, 0, 0, [tokens[: i + 1] for i in range(3)]):
        assert all(a is b for a, b in zip(given, returned, strict=True))
    for layer, (_, returned) in enumerate(write(cache, 0, 3, [tokens[: i + 1] for i in range(3, 5)], gather=True)):
        for which in (0, 1):
            expected = torch.stack([kv(tokens[: i + 1], layer)[which] for i in range(5)])
            assert torch.equal(returned[which][0].transpose(0, 1), expected)


def test_copies_of_a_prompt_share_it():
    """`num_return_sequences`: the prompt's full blocks exist once; each copy writes its own continuation."""
    cache = PagedStaticCache(LAYERS, 32, 4)
    prompt = list(range(11))
    for seq_id in range(4):
        cache.add(seq_id)
        matched = cache.match_prefix(seq_id, prompt)
        assert matched == (8 if seq_id else 0)
        cache.reserve(seq_id, len(prompt) + 3)
        write(cache, seq_id, matched, [prompt[: i + 1] for i in range(matched, 11)])
        cache.register_prefix(seq_id, prompt, len(prompt))
        cache.commit([(seq_id, len(prompt), [])])
    shared = cache.tables[0].blocks[:2]
    assert all(cache.tables[i].blocks[:2] == shared for i in range(4))
    assert [cache.pool.ref_counts[b] for b in shared] == [4, 4]
    assert cache.pool.num_used == 2 + 4 * 2
    texts = [[*prompt, 100 + i, 200 + i] for i in range(4)]
    for seq_id, text in enumerate(texts):
        write(cache, seq_id, 11, [text[:12], text[:13]])
        cache.commit([(seq_id, 11, [0, 1])])
    for seq_id, text in enumerate(texts):
        check_content(cache, seq_id, text, 13)
    cache.remove(0)  # whoever wrote the blocks may leave first
    for seq_id in (1, 2, 3):
        check_content(cache, seq_id, texts[seq_id], 13)
        cache.remove(seq_id)
    check_blocks(cache.pool)
    assert cache.pool.num_used == 0
    cache.add(9)
    assert cache.match_prefix(9, prompt) == 8  # still cached after all have left
    check_content(cache, 9, prompt, 8)


def test_equal_blocks_behind_different_prefixes_are_not_shared():
    cache = PagedStaticCache(LAYERS, 8, 2)
    cache.add(0)
    cache.reserve(0, 4)
    write(cache, 0, 0, [[1, 1, 7, 8][: i + 1] for i in range(4)])
    cache.register_prefix(0, [1, 1, 7, 8], 4)
    cache.add(1)
    assert cache.match_prefix(1, [2, 2, 7, 8, 9]) == 0
    cache.add(2)
    assert cache.match_prefix(2, [1, 1, 7, 9, 9]) == 2
    cache.add(3)
    assert cache.match_prefix(3, [1, 1, 7, 8]) == 2  # the last token is left to compute


def test_sharing_can_be_switched_off():
    cache = PagedStaticCache(LAYERS, 8, 2, share_prefixes=False)
    cache.add(0)
    cache.reserve(0, 4)
    cache.register_prefix(0, [1, 2, 3, 4], 4)
    cache.add(1)
    assert cache.match_prefix(1, [1, 2, 3, 4, 5]) == 0


def test_a_draft_moves_no_more_than_it_must(monkeypatch):
    """Chains are committed by bookkeeping alone; a tree moves the accepted nodes that stand out of place, nothing else."""
    cache = PagedStaticCache(LAYERS, 8, 4)
    cache.add(0)
    cache.reserve(0, 12)
    write(cache, 0, 0, [[1], [1, 2]])
    moved = []
    monkeypatch.setattr(
        ops, "move_slots", lambda pool, source, target: moved.append((source.tolist(), target.tolist()))
    )
    cache.commit([(0, 2, [0, 1, 2])])
    assert moved == [] and cache.tables[0].length == 5
    cache.commit([(0, 5, [0, 3, 5])])
    assert moved == [([8, 10], [6, 7])] * 2 * LAYERS and cache.tables[0].length == 8


def test_overlapping_moves():
    """Sources and targets overlap; all sources are read before any target is written."""
    pool = torch.arange(8.0).view(8, 1, 1)
    ops.move_slots(pool, torch.tensor([3, 5, 6]), torch.tensor([2, 3, 5]))
    assert pool.flatten().tolist() == [0, 1, 3, 5, 4, 6, 6, 7]


def test_load_and_read():
    cache = PagedStaticCache(1, 4, 2)
    cache.add(0)
    cache.reserve(0, 1)
    cache.pool.allocate(1)  # someone stands between: the sequence's blocks are not contiguous
    cache.reserve(0, 5)
    assert not cache.tables[0].contiguous
    keys, values = torch.rand(5, HEADS, WIDTH), torch.rand(5, HEADS, VALUE_WIDTH)
    cache.load(0, 0, keys, values)
    cache.commit([(0, 5, [])])
    assert all(torch.equal(a, b) for a, b in zip(cache.read(0)[0], (keys, values), strict=True))
    row = cache.row(0, 0, 1, 4, CPU)
    assert torch.equal(read_row(cache.layers[0].values, row)[0].transpose(0, 1), values[:4])


def test_size_is_logged(caplog):
    cache = PagedStaticCache(LAYERS, 8, 16)
    cache.add(0)
    cache.reserve(0, 1)
    with caplog.at_level("INFO"):
        write(cache, 0, 0, [[1]])
        write(cache, 0, 0, [[1]])
    assert [r.getMessage() for r in caplog.records] == [
        "KV cache: up to 8 blocks of 16 tokens, 2.0 KiB each, on cpu (torch.float32); 8 of them allocated."
    ]
    assert cache.num_bytes == 16 * BYTES_PER_SLOT  # of the one block that is used
