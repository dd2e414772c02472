"""BlockPool: the owners of KV blocks. It holds integers, no tensors.

A block is `free`, `used` (reference count ≥ 1) or `cached` (unused, but its content is known by a prefix hash and may be used again).
When free blocks run out, the least recently used cached block is evicted first.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable
from collections.abc import Sequence as SequenceOf

_FREE, _TAKEN = 0, 1


class OutOfBlocks(RuntimeError):
    """The pool has fewer free blocks than requested. Nothing was allocated."""


class BlockPool:
    """Allocation, reference counts, prefix hashes and eviction of `num_blocks` KV blocks."""

    def __init__(self, num_blocks: int):
        if num_blocks < 1:
            raise ValueError(f"A block pool needs at least one block, not {num_blocks}.")
        self.num_blocks = num_blocks
        self.ref_counts = [0] * num_blocks
        # _FREE or _TAKEN (used or cached); bytearray.find scans for runs at C speed
        self._state = bytearray(num_blocks)
        self._num_free = num_blocks
        self.most_used = 0  # the most blocks that were used or cached at one time
        self._hash_of: dict[int, Hashable] = {}
        self._block_of: dict[Hashable, int] = {}
        self._cached: OrderedDict[int, None] = OrderedDict()  # unused blocks with a known content, oldest first

    @property
    def num_available(self) -> int:
        """Blocks that can be allocated now, including cached ones."""
        return self._num_free + len(self._cached)

    @property
    def num_used(self) -> int:
        """Blocks with at least one reference."""
        return self.num_blocks - self.num_available

    def grow(self, num_blocks: int) -> None:
        """Grow to `num_blocks` blocks. The additional ones are free."""
        more = num_blocks - self.num_blocks
        if more < 0:
            raise ValueError(f"A pool of {self.num_blocks} blocks cannot grow to {num_blocks}.")
        self.ref_counts += [0] * more
        self._state += bytes(more)
        self._num_free += more
        self.num_blocks = num_blocks

    def taken_runs(self) -> list[tuple[int, int]]:
        """Used and cached blocks as runs (first, end)."""
        runs, first = [], self._state.find(_TAKEN)
        while first >= 0:
            end = self._state.find(_FREE, first)
            end = self.num_blocks if end < 0 else end
            runs.append((first, end))
            first = self._state.find(_TAKEN, end)
        return runs

    def allocate(self, count: int, after: int | None = None) -> list[int]:
        """Take `count` blocks with one reference each. They are contiguous if possible, preferably right after block `after`.

        Raises:
            OutOfBlocks: fewer than `count` are available. Nothing was taken.
        """
        if count > self.num_available:
            raise OutOfBlocks(
                f"{count} KV blocks needed, {self.num_available} of {self.num_blocks} available: raise num_blocks or kv_cache_memory_bytes."
            )
        while self._num_free < count:
            self._evict_one()
        blocks = self._find(count, after)
        for block in blocks:
            self._state[block] = _TAKEN
            self.ref_counts[block] = 1
        self._num_free -= count
        self.most_used = max(self.most_used, self.num_blocks - self._num_free)
        return blocks

    def _find(self, count: int, after: int | None) -> list[int]:
        run = b"\x00" * count
        if after is not None and self._state.startswith(run, after + 1):
            return list(range(after + 1, after + 1 + count))
        start = self._state.find(run)
        if start >= 0:
            return list(range(start, start + count))
        blocks, start = [], -1
        for _ in range(count):
            start = self._state.find(_FREE, start + 1)
            blocks.append(start)
        return blocks

    def retain(self, blocks: SequenceOf[int]) -> None:
        """Add one reference to each used or cached block."""
        for block in blocks:
            if self.ref_counts[block] == 0:
                if block not in self._cached:
                    raise ValueError(f"Block {block} is free: it cannot be retained.")
                del self._cached[block]
            self.ref_counts[block] += 1

    def release(self, blocks: SequenceOf[int]) -> None:
        """Drop one reference from each block. A block without references becomes free, or cached if its content is known."""
        # Deepest block first, so that it is also evicted first: a block is useful only while all blocks before it are cached.
        for block in reversed(blocks):
            if self.ref_counts[block] < 1:
                raise ValueError(f"Block {block} is not in use: it cannot be released.")
            self.ref_counts[block] -= 1
            if self.ref_counts[block] == 0:
                if block in self._hash_of:
                    self._cached[block] = None
                else:
                    self._state[block] = _FREE
                    self._num_free += 1

    def register(self, block: int, content_hash: Hashable) -> None:
        """Declare the content of a used, full block, so that equal prefixes can share it. The first registration wins."""
        if self.ref_counts[block] < 1:
            raise ValueError(f"Block {block} is not in use: its content cannot be registered.")
        if content_hash not in self._block_of and block not in self._hash_of:
            self._block_of[content_hash] = block
            self._hash_of[block] = content_hash

    def lookup(self, content_hash: Hashable) -> int | None:
        """The block holding this content, or None."""
        return self._block_of.get(content_hash)

    def forget(self) -> None:
        """Drop all prefix hashes, because contents can no longer be trusted. Cached blocks become free."""
        for block in self._cached:
            self._state[block] = _FREE
        self._num_free += len(self._cached)
        self._cached.clear()
        self._hash_of.clear()
        self._block_of.clear()

    def _evict_one(self) -> None:
        block, _ = self._cached.popitem(last=False)
        del self._block_of[self._hash_of.pop(block)]
        self._state[block] = _FREE
        self._num_free += 1
