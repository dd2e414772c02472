"""StatePool: convolutional and recurrent states of many sequences, in slots that are shared by all layers."""

from __future__ import annotations

import torch

ZERO_SLOT = 0  # the state before the first token; never written


class StatePool:
    """States of layers with a recurrence or a short convolution. One slot holds a state of every such layer.

    A sequence has a state after each token that may turn out to be its last one: after its own last token and after each draft.
    States are found by the number of tokens that they have read. A state that is not there raises; it is never guessed.
    The pool grows when slots run out, and is freed with the cache.

    Attributes:
        conv: per layer, the last inputs of its convolution [slots, channels, k].
        recurrent: per layer, its recurrent states [slots, ..]; no entry for layers that only convolve.
    """

    def __init__(self) -> None:
        self.conv: dict[int, torch.Tensor] = {}
        self.recurrent: dict[int, torch.Tensor] = {}
        self.num_slots = 1
        self.most_used = 0  # slots in use at one time
        self._free: list[int] = []
        self._slots: dict[int, dict[int, int]] = {}  # sequence id → number of tokens read → slot

    @property
    def num_used(self) -> int:
        """Slots that hold a sequence's state."""
        return self.num_slots - 1 - len(self._free)

    @property
    def num_bytes(self) -> int:
        """Memory of all slots."""
        return sum(pool.nbytes for pools in (self.conv, self.recurrent) for pool in pools.values())

    @property
    def bytes_per_slot(self) -> int:
        """Memory of one state of every layer."""
        return sum(pool[0].nbytes for pools in (self.conv, self.recurrent) for pool in pools.values())

    # ---- records ----------------------------------------------------------------------------------------------------

    def slot(self, seq_id: int, num_tokens: int) -> int:
        """The slot of a sequence's state after its first `num_tokens` tokens.

        Raises:
            RuntimeError: this state was not kept.
        """
        if num_tokens == 0:
            return ZERO_SLOT
        found = self._slots.get(seq_id, {})
        if num_tokens not in found:
            raise RuntimeError(
                f"The recurrent state of sequence {seq_id} after {num_tokens} tokens was not kept; there are states after "
                f"{sorted(found) or 'no'} tokens. preempt() the sequence, so that its text is read again."
            )
        return found[num_tokens]

    def holds(self, seq_id: int, num_tokens: int) -> bool:
        """True if the state after that many tokens is there."""
        return num_tokens == 0 or num_tokens in self._slots.get(seq_id, {})

    def take(self, seq_id: int, start: int, first_kept: int, counts: list[int]) -> list[int]:
        """Slots for the states after each of `counts` tokens, all of them more than `start`, which a forward will write.

        States after more than `start` tokens were guesses and are dropped; so are those after fewer than `first_kept`.
        """
        own = self._slots.setdefault(seq_id, {})
        for count in [count for count in own if count > start or count < first_kept]:
            self._free.append(own.pop(count))
        missing = len(counts) - len(self._free)
        if missing > 0:
            more = max(missing, self.num_slots // 4)
            self._free += range(self.num_slots + more - 1, self.num_slots - 1, -1)
            self.num_slots += more
        for count in counts:
            own[count] = self._free.pop()
        self.most_used = max(self.most_used, self.num_used)
        return [own[count] for count in counts]

    def commit(self, seq_id: int, start: int, offsets: list[int]) -> None:
        """Of the tokens from index `start` on, those at `start + offset` (ascending) stay and become `start`, `start + 1`, ..

        As for keys and values in `PagedStaticCache.commit`; here only records change.
        """
        if not offsets:
            return
        own = self._slots.get(seq_id, {})
        kept = {count: slot for count, slot in own.items() if count <= start}
        for index, offset in enumerate(offsets):
            if self.holds(seq_id, start + offset + 1):
                kept[start + index + 1] = own[start + offset + 1]
        self._free += sorted(set(own.values()) - set(kept.values()))
        self._slots[seq_id] = kept

    def drop(self, seq_id: int) -> None:
        """Forget a sequence's states."""
        self._free += self._slots.pop(seq_id, {}).values()

    def check(self) -> None:
        """Raise AssertionError unless each slot is free or in use exactly once."""
        used = [slot for own in self._slots.values() for slot in own.values()]
        assert sorted([*used, *self._free]) == list(range(1, self.num_slots)), "a state slot is lost or used twice"

    # ---- tensors ----------------------------------------------------------------------------------------------------

    def allocate(self, layer: int, conv: torch.Tensor, recurrent: torch.Tensor | None) -> None:
        """Make a layer's pools as large as the pool is now. `conv` [.., channels, k] and `recurrent` [.., ..]: examples."""
        self.conv[layer] = self._grown(self.conv.get(layer), conv)
        if recurrent is not None:
            self.recurrent[layer] = self._grown(self.recurrent.get(layer), recurrent)

    def is_allocated(self, layer: int) -> bool:
        """True if a layer's pools have all slots."""
        return layer in self.conv and self.conv[layer].shape[0] >= self.num_slots

    def _grown(self, pool: torch.Tensor | None, example: torch.Tensor) -> torch.Tensor:
        larger = example.new_zeros(self.num_slots, *example.shape[1:])
        if pool is not None:
            larger[: pool.shape[0]] = pool
        return larger
