"""BlockPool against a model made of dicts, over random sequences of operations; `check()` after each of them."""

import hypothesis.strategies as st
import pytest
from cache_checks import check_blocks
from hypothesis import settings
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, initialize, invariant, precondition, rule

from hf_specdec.cache import BlockPool, OutOfBlocks

FREE = "free"


class PoolMachine(RuleBasedStateMachine):
    """`refs`: block → references; `content`: block → hash; `cached`: unused known blocks, oldest first."""

    held = Bundle("held")  # lists of blocks, one reference each

    @initialize(num_blocks=st.integers(1, 12))
    def start(self, num_blocks):
        self.pool = BlockPool(num_blocks)
        self.refs = dict.fromkeys(range(num_blocks), 0)
        self.content: dict[int, int] = {}
        self.cached: list[int] = []

    @property
    def free(self):
        return [b for b, n in self.refs.items() if n == 0 and b not in self.cached]

    @rule(target=held, count=st.integers(0, 6), after=st.none() | st.integers(0, 11))
    def allocate(self, count, after):
        if after is not None and after >= len(self.refs):
            after = None
        before = self.snapshot()
        if count > len(self.free) + len(self.cached):
            with pytest.raises(OutOfBlocks):
                self.pool.allocate(count, after)
            assert self.snapshot() == before
            return []
        while len(self.free) < count:  # evict, least recently released first
            del self.content[self.cached.pop(0)]
        free = self.free
        blocks = self.pool.allocate(count, after)
        assert blocks == self.expected_choice(count, after, free)
        for block in blocks:
            self.refs[block] = 1
        return blocks

    @precondition(lambda self: len(self.refs) < 12)
    @rule(more=st.integers(0, 4))
    def grow(self, more):
        size = min(len(self.refs) + more, 12)
        self.pool.grow(size)
        self.refs |= dict.fromkeys(range(len(self.refs), size), 0)
        with pytest.raises(ValueError, match="cannot grow"):
            self.pool.grow(size - 1)

    @staticmethod
    def expected_choice(count, after, free):
        runs = [
            list(range(s, s + count)) for s in range(max(free, default=-1) + 1) if set(range(s, s + count)) <= set(free)
        ]
        behind = [run for run in runs if after is not None and run[:1] == [after + 1]]
        return (behind or runs or [sorted(free)[:count]])[0]

    @rule(blocks=held, target=held)
    def retain(self, blocks):
        live = [b for b in blocks if self.refs[b] or b in self.cached]
        self.pool.retain(live)
        for block in live:
            self.refs[block] += 1
            if block in self.cached:
                self.cached.remove(block)
        return live

    @rule(blocks=consumes(held))
    def release(self, blocks):
        self.give_back(blocks)

    def give_back(self, blocks):
        assert all(self.refs[b] > 0 for b in blocks), "the test itself lost count"
        self.pool.release(blocks)
        for block in reversed(blocks):
            self.refs[block] -= 1
            if self.refs[block] == 0 and block in self.content:
                self.cached.append(block)

    @rule(blocks=held, content=st.integers(0, 5))
    def register(self, blocks, content):
        self.make_known(blocks, content)

    def make_known(self, blocks, content):
        """The blocks get the contents `content`, `content + 1`, .."""
        for block in blocks:
            self.pool.register(block, content)
            if block not in self.content and content not in self.content.values():
                self.content[block] = content
            content = (content + 1) % 6

    @rule(blocks=consumes(held), content=st.integers(0, 5))
    def leave(self, blocks, content):
        """As a row that ends: what it has read stays known."""
        self.make_known(blocks, content)
        self.give_back(blocks)

    @rule(content=st.integers(0, 5), target=held)
    def take_by_content(self, content):
        expected = next((b for b, c in self.content.items() if c == content), None)
        assert self.pool.lookup(content) == expected
        if expected is None:
            return []
        self.pool.retain([expected])
        self.refs[expected] += 1
        if expected in self.cached:
            self.cached.remove(expected)
        return [expected]

    @rule()
    def forget(self):
        self.pool.forget()
        self.content.clear()
        self.cached.clear()

    @precondition(lambda self: self.free)
    @rule(data=st.data())
    def free_blocks_are_nobodys(self, data):
        block = data.draw(st.sampled_from(self.free))
        before = self.snapshot()
        with pytest.raises(ValueError, match="is free"):
            self.pool.retain([block])
        with pytest.raises(ValueError, match="not in use"):
            self.pool.release([block])
        with pytest.raises(ValueError, match="not in use"):
            self.pool.register(block, 0)
        assert self.snapshot() == before

    def snapshot(self):
        pool = self.pool
        return (
            list(pool.ref_counts), bytes(pool._state), pool._num_free, dict(pool._hash_of), dict(pool._block_of), list(pool._cached)
        )  # fmt: skip

    @invariant()
    def agrees(self):
        if not hasattr(self, "pool"):
            return
        check_blocks(self.pool)
        assert self.pool.ref_counts == [self.refs[b] for b in range(len(self.refs))]
        runs = [block for first, end in self.pool.taken_runs() for block in range(first, end)]
        assert runs == [block for block in self.refs if block not in self.free]
        assert len(runs) <= self.pool.most_used <= len(self.refs)
        assert self.pool.num_used == sum(n > 0 for n in self.refs.values())
        assert self.pool.num_available == len(self.free) + len(self.cached)
        assert list(self.pool._cached) == self.cached
        assert all(self.pool.lookup(c) == b for b, c in self.content.items())


TestBlockPool = PoolMachine.TestCase
TestBlockPool.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)


def test_a_pool_needs_a_block():
    with pytest.raises(ValueError, match="at least one block"):
        BlockPool(0)


def test_prefers_the_block_behind_then_a_run_then_anything():
    pool = BlockPool(8)
    first = pool.allocate(2)
    second = pool.allocate(2)
    pool.release(first)  # free: 0 1 4 5 6 7
    assert pool.allocate(2, after=second[-1]) == [4, 5]
    assert pool.allocate(2, after=3) == [0, 1]  # behind 3 is taken: the first run
    pool.release([1])
    assert pool.allocate(3) == [1, 6, 7]  # no run of three is left


def test_a_prefix_outlives_its_continuation():
    """Blocks released together are evicted deepest first: a continuation without its prefix can never be matched."""
    pool = BlockPool(3)
    blocks = pool.allocate(3)
    for i, block in enumerate(blocks):
        pool.register(block, i)
    pool.release(blocks)
    pool.allocate(1)
    assert [pool.lookup(i) is not None for i in range(3)] == [True, True, False]


@pytest.mark.parametrize("corrupt", ["refs", "count", "hash"])
def test_check_finds_corruption(corrupt):
    pool = BlockPool(4)
    block = pool.allocate(1)[0]
    pool.register(block, "x")
    if corrupt == "refs":
        pool.ref_counts[block] = -1
    elif corrupt == "count":
        pool._num_free -= 1
    else:
        pool._hash_of[3] = "y"
    with pytest.raises(AssertionError):
        check_blocks(pool)
