"""BlockEnds: the states of several MTP modules at the end of a shared prefix, which they need besides its keys and values."""

from __future__ import annotations

import torch

from ...cache import PagedStaticCache


class BlockEnds:
    """States of the modules at the ends of KV blocks.

    Module j + 1 reads a token together with module j's output at the token before it. If a text shares n rows of another, module j's
    output at token n is not computed again. So it is kept for every block that ends at n: [H] for each module except the last one that
    has begun.
    """

    def __init__(self) -> None:
        self._kept: dict[bytes, list[torch.Tensor]] = {}  # by the block's hash
        self._waiting: dict[int, dict[int, list[torch.Tensor]]] = {}  # per sequence, by n: the block has no hash yet

    def note(self, seq_id: int, first: int, states: torch.Tensor, block_size: int) -> None:
        """Note the states [n, H] of a module that has read tokens `first`, `first` + 1, .. of a text. Call for the modules in order."""
        own = self._waiting.setdefault(seq_id, {})
        for n in range(-(-first // block_size) * block_size, first + len(states), block_size):
            own.setdefault(n, []).append(states[n - first].clone())

    def keep(self, seq_id: int, cache: PagedStaticCache) -> None:
        """Keep the states at the ends of those blocks of the sequence that can be shared by now."""
        own, hashes = self._waiting.get(seq_id, {}), cache.tables[seq_id].hashes
        for n in [n for n in own if n // cache.block_size <= len(hashes)]:
            self._kept[hashes[n // cache.block_size - 1]] = own.pop(n)
        if len(self._kept) > 2 * cache.pool.num_blocks:  # many belong to blocks that were evicted
            self._kept = {key: states for key, states in self._kept.items() if cache.pool.lookup(key) is not None}

    def num_known(self, hashes: list[bytes]) -> int:
        """Number of leading blocks among these hashes whose ends have states."""
        return next((i for i, key in enumerate(hashes) if key not in self._kept), len(hashes))

    def at(self, key: bytes) -> list[torch.Tensor]:
        """The states at a block's end."""
        return self._kept[key]

    def drop(self, seq_id: int) -> None:
        """Drop the noted states of a sequence that has ended or will be read again."""
        self._waiting.pop(seq_id, None)

    def forget(self) -> None:
        """Drop all kept states, because the weights have changed."""
        self._kept.clear()
