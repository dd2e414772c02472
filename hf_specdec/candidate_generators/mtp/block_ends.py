"""What several MTP modules need beside the keys and values of a shared prefix: the states they had reached at its end."""

from __future__ import annotations

import torch

from ...cache import PagedStaticCache


class BlockEnds:
    """States of the modules at the ends of KV blocks.

    Module j + 1 reads a token with module j's output at the token before it. Where a text takes over n rows of another, that output at
    token n is not computed again, so it is kept beside the block that ends there: [H] for each module but the last that has begun.
    """

    def __init__(self) -> None:
        self._kept: dict[bytes, list[torch.Tensor]] = {}  # by the block's hash
        self._waiting: dict[int, dict[int, list[torch.Tensor]]] = {}  # per sequence, by n: the block has no hash yet

    def note(self, seq_id: int, first: int, states: torch.Tensor, block_size: int) -> None:
        """A module has read tokens `first`, `first` + 1, .. of a text: its states [n, H]. Call for one module after the other."""
        own = self._waiting.setdefault(seq_id, {})
        for n in range(-(-first // block_size) * block_size, first + len(states), block_size):
            own.setdefault(n, []).append(states[n - first].clone())

    def keep(self, seq_id: int, cache: PagedStaticCache) -> None:
        """Blocks of the sequence may be shared by now: keep the states at their ends."""
        own, hashes = self._waiting.get(seq_id, {}), cache.tables[seq_id].hashes
        for n in [n for n in own if n // cache.block_size <= len(hashes)]:
            self._kept[hashes[n // cache.block_size - 1]] = own.pop(n)
        if len(self._kept) > 2 * cache.pool.num_blocks:  # those of blocks that were evicted
            self._kept = {key: states for key, states in self._kept.items() if cache.pool.lookup(key) is not None}

    def num_known(self, hashes: list[bytes]) -> int:
        """How many leading blocks, of those with these hashes, have states at their ends."""
        return next((i for i, key in enumerate(hashes) if key not in self._kept), len(hashes))

    def at(self, key: bytes) -> list[torch.Tensor]:
        """The states at a block's end."""
        return self._kept[key]

    def drop(self, seq_id: int) -> None:
        """The sequence has ended, or will be read again."""
        self._waiting.pop(seq_id, None)

    def forget(self) -> None:
        """The states come from weights that have changed."""
        self._kept.clear()
