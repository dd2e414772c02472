"""PrefixStates: recurrent states after the beginnings of texts, for other texts that begin with the same tokens."""

from __future__ import annotations

from collections import OrderedDict

from .state_pool import KeptStates


class PrefixStates:
    """States, each under the hash of the last block that it has read, least recently used first.

    A block's hash stands for all tokens from the text's beginning to the block's end, so a state is only ever found for exactly the
    tokens that it has read. A recurrent layer cannot use the keys and values of blocks, so a text shares a prefix only if both the
    prefix's blocks and its state are kept.

    Args:
        every: states are kept after multiples of this many tokens, a multiple of the block size.
        most_bytes: limit for the memory of all states.
    """

    def __init__(self, every: int, most_bytes: int):
        self.every, self.most_bytes = every, most_bytes
        self.num_bytes = 0
        self._states: OrderedDict[bytes, KeptStates] = OrderedDict()

    def __contains__(self, block_hash: bytes) -> bool:
        return block_hash in self._states

    def longest(self, block_hashes: list[bytes]) -> int:
        """Number of these leading blocks of a text up to and including the last one that has a state; 0 if none has."""
        return next((count for count in range(len(block_hashes), 0, -1) if block_hashes[count - 1] in self._states), 0)

    def get(self, block_hash: bytes) -> KeptStates:
        """The states after the block, which become the most recently used ones."""
        self._states.move_to_end(block_hash)
        return self._states[block_hash]

    def put(self, block_hash: bytes, states: KeptStates) -> None:
        """Keep states after the block. The least recently used states are dropped to make room."""
        if states.num_bytes > self.most_bytes or block_hash in self._states:
            return
        self._states[block_hash] = states
        self.num_bytes += states.num_bytes
        while self.num_bytes > self.most_bytes:
            self.num_bytes -= self._states.popitem(last=False)[1].num_bytes

    def forget(self) -> None:
        """Drop all, because contents can no longer be trusted."""
        self._states.clear()
        self.num_bytes = 0

    def check(self) -> None:
        """Raise AssertionError unless the memory is counted right and bounded."""
        assert self.num_bytes == sum(each.num_bytes for each in self._states.values()) <= self.most_bytes
