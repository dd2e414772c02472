"""What must always hold of the records of blocks and states."""

from hf_specdec.cache import BlockPool, PagedStaticCache
from hf_specdec.cache.block_pool import _FREE
from hf_specdec.cache.state_pool import PrefixStates, StatePool


def check_cache(cache: PagedStaticCache) -> None:
    """The records of blocks and states agree."""
    check_blocks(cache.pool)
    if cache.states is not None:
        _check_states(cache.states)
    if cache.prefix_states is not None:
        check_prefix_states(cache.prefix_states)


def check_blocks(pool: BlockPool) -> None:
    """Every block is in exactly one state, and all records agree."""
    blocks = range(pool.num_blocks)
    free, cached = {block for block in blocks if pool._state[block] == _FREE}, set(pool._cached)
    used = {block for block in blocks if pool.ref_counts[block] > 0}
    assert all(count >= 0 for count in pool.ref_counts), "negative reference count"
    assert not (free & cached) and not (free & used) and not (cached & used), "a block is in two states"
    assert len(free) + len(cached) + len(used) == pool.num_blocks, "a block is in no state"
    assert len(free) == pool._num_free, "the free count is wrong"
    assert {block: content for content, block in pool._block_of.items()} == pool._hash_of, "the hash maps disagree"
    assert cached <= set(pool._hash_of), "a cached block has no hash"
    assert not (free & set(pool._hash_of)), "a free block has a hash"


def _check_states(pool: StatePool) -> None:
    """Each slot and each state is free or in use exactly once."""
    used = [slot for own in pool._slots.values() for slot in own.values()]
    assert sorted([*used, *pool._free]) == list(range(1, pool.num_slots)), "a state slot is lost or used twice"
    if pool.replays:
        states = [state for _, state in pool._states.values()]
        known = sorted([*states, *pool._free_states])
        assert known == list(range(1, pool.num_states)), "a state is lost or used twice"


def check_prefix_states(kept: PrefixStates) -> None:
    """The memory is counted right and bounded."""
    assert kept.num_bytes == sum(each.num_bytes for each in kept._states.values()) <= kept.most_bytes
