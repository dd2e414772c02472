"""StatePool: convolutional and recurrent states of many sequences, in slots that are shared by all layers."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from typing import NamedTuple

import torch

from . import memory

ZERO_SLOT = 0  # the state before a text's first token: all zeros, never written


class Base(NamedTuple):
    """What a sequence continues from.

    Attributes:
        slot: slot of the convolution's last inputs.
        state: index of the recurrent state in its pool: a slot, or with `replays` a state.
        replayed: slots of the tokens that this recurrent state has not read yet.
    """

    slot: int
    state: int
    replayed: list[int]


@dataclass
class KeptStates:
    """A row's states after some tokens: per layer, the convolution's last inputs [channels, k], and the recurrent state where the
    layer has one."""

    conv: dict[int, torch.Tensor]
    recurrent: dict[int, torch.Tensor]

    @property
    def num_bytes(self) -> int:
        """Memory of all layers' states."""
        return sum(tensor.nbytes for tensor in (*self.conv.values(), *self.recurrent.values()))


class StatePool:
    """States of layers with a recurrence or a short convolution. One slot belongs to one token and holds something of every such layer.

    A sequence has a slot for each token that may turn out to be its last one: for its own last token and for each draft. A slot
    holds the last inputs of the convolutions, and the recurrent states after the token. With `replays` it holds the token's inputs of
    the recurrences instead, and each sequence has one state, after its last own token: accepted drafts are read again, by the same
    rule, when the sequence continues. That takes a fraction of the memory and more time.

    Slots are found by the number of tokens read. Asking for a state that was not kept raises an error; it is never approximated. The
    pools are made at the first write, as large as was reserved. They grow only if slots run out, and are freed with the cache.

    Attributes:
        conv: per layer, the last inputs of its convolution [slots, channels, k].
        recurrent: per layer, its recurrent states [slots, ..], with `replays` [states, ..]; no entry for layers that only convolve.
        inputs: with `replays`, per layer, the inputs of its recurrence [slots, ..] each.
    """

    def __init__(self, replays: bool = False) -> None:
        self.replays = replays
        self.conv: dict[int, torch.Tensor] = {}
        self.recurrent: dict[int, torch.Tensor] = {}
        self.inputs: dict[int, tuple[torch.Tensor, ...]] = {}
        self.num_slots = self.num_states = 1
        self._free: list[int] = []
        self._free_states: list[int] = []
        self._slots: dict[int, dict[int, int]] = {}  # sequence id → number of tokens read → slot
        self._states: dict[int, tuple[int, int]] = {}  # with `replays`: sequence id → (number of tokens read, state)

    @property
    def num_used(self) -> int:
        """Slots that belong to a sequence's token."""
        return self.num_slots - 1 - len(self._free)

    @property
    def num_bytes(self) -> int:
        """Memory of all slots."""
        return sum(pool.nbytes for pool in self._pools())

    def _pools(self) -> list[torch.Tensor]:
        inputs = [tensor for layer in self.inputs.values() for tensor in layer]
        return [*self.conv.values(), *self.recurrent.values(), *inputs]

    def reserve(self, num_rows: int, num_drafts: int) -> None:
        """Make room for sequences with drafts of `num_drafts` nodes: slots for the nodes, for the last token and for the one before it, and
        with `replays` one state each. Call it before any slot is used."""
        self._add_slots(num_rows * (num_drafts + 2) - len(self._free))
        if self.replays:
            self._add_states(num_rows - len(self._free_states))

    def _add_slots(self, count: int) -> None:
        self._free += range(self.num_slots + count - 1, self.num_slots - 1, -1)
        self.num_slots += max(count, 0)
        if not self.replays:
            self.num_states = self.num_slots

    def _add_states(self, count: int) -> None:
        self._free_states += range(self.num_states + count - 1, self.num_states - 1, -1)
        self.num_states += max(count, 0)

    # ---- records ----------------------------------------------------------------------------------------------------

    def holds(self, seq_id: int, num_tokens: int) -> bool:
        """True if the sequence can continue after that many tokens."""
        slots = self._slots.get(seq_id, {})
        if num_tokens == 0 or not self.replays:
            return num_tokens == 0 or num_tokens in slots
        first = self._states.get(seq_id, (num_tokens + 1, 0))[0]
        return first <= num_tokens and all(count in slots for count in range(first, num_tokens + 1))

    def base(self, seq_id: int, num_tokens: int) -> Base:
        """What a sequence continues from after its first `num_tokens` tokens.

        Raises:
            RuntimeError: its state there was not kept.
        """
        if num_tokens == 0:
            return Base(ZERO_SLOT, ZERO_SLOT, [])
        slots = self._slots.get(seq_id, {})
        if not self.holds(seq_id, num_tokens):
            raise RuntimeError(
                f"The recurrent state of sequence {seq_id} after {num_tokens} tokens was not kept; there are states after "
                f"{sorted(slots) or 'no'} tokens. preempt() the sequence, so that its text is read again."
            )
        if not self.replays:
            return Base(slots[num_tokens], slots[num_tokens], [])
        first, state = self._states[seq_id]
        return Base(slots[num_tokens], state, [slots[count] for count in range(first + 1, num_tokens + 1)])

    def copy(self, seq_id: int, num_tokens: int) -> KeptStates | None:
        """Copies of a sequence's states after that many tokens; None if no tensors hold them."""
        base = self.base(seq_id, num_tokens) if self.holds(seq_id, num_tokens) else None
        if base is None or base.replayed:
            return None
        pools = ((self.conv, base.slot), (self.recurrent, base.state))
        return KeptStates(*({layer: pool[slot].clone() for layer, pool in layers.items()} for layers, slot in pools))

    def take(
        self, seq_id: int, start: int, first_kept: int, counts: list[int], num_own: int
    ) -> tuple[list[int], list[int]]:
        """Take slots for the states after `counts` tokens, which a forward will write. All counts are greater than `start`.

        Frees the slots after more than `start` tokens, which belonged to drafts, and those after fewer than `first_kept` tokens.

        Args:
            num_own: number of tokens that have been read once the sequence's last own token has been read; drafts come later.

        Returns: the slots, and where the recurrent state after each token goes (-1: nowhere).
        """
        held = self._slots.setdefault(seq_id, {})
        if self.replays and seq_id in self._states:
            first_kept = min(first_kept, self._states[seq_id][0])  # this forward may still replay these tokens
        for count in [count for count in held if count > start or count < first_kept]:
            self._free.append(held.pop(count))
        missing = len(counts) - len(self._free)
        if missing > 0:
            self._add_slots(max(missing, self.num_slots // 4))
        for count in counts:
            held[count] = self._free.pop()
        slots = [held[count] for count in counts]
        if not self.replays:
            return slots, slots
        if seq_id not in self._states and not self._free_states:
            self._add_states(max(1, self.num_states // 4))
        state = self._states[seq_id][1] if seq_id in self._states else self._free_states.pop()
        self._states[seq_id] = num_own, state
        return slots, [state if count == num_own else -1 for count in counts]

    def commit(self, seq_id: int, start: int, offsets: list[int]) -> None:
        """Of the tokens from index `start` on, those at `start + offset` (ascending) stay and become `start`, `start + 1`, ..

        As for keys and values in `PagedStaticCache.commit`; here only records change.
        """
        if not offsets:
            return
        slots = self._slots.get(seq_id, {})
        kept = {count: slot for count, slot in slots.items() if count <= start}
        for index, offset in enumerate(offsets):
            if start + offset + 1 in slots:
                kept[start + index + 1] = slots[start + offset + 1]
        self._free += sorted(set(slots.values()) - set(kept.values()))
        self._slots[seq_id] = kept

    def drop(self, seq_id: int) -> None:
        """Forget a sequence's states."""
        self._free += self._slots.pop(seq_id, {}).values()
        if seq_id in self._states:
            self._free_states.append(self._states.pop(seq_id)[1])

    # ---- tensors ----------------------------------------------------------------------------------------------------

    def allocate(
        self, layer: int, conv: torch.Tensor, recurrent: torch.Tensor | None, inputs: tuple[torch.Tensor, ...] = ()
    ) -> None:
        """Make a layer's pools as large as the pool is now.

        Args:
            conv, recurrent, inputs: examples [.., channels, k] and [.., ..].
        """
        self.conv[layer] = _grown(self.conv.get(layer), conv, self.num_slots)
        if recurrent is not None:
            self.recurrent[layer] = _grown(self.recurrent.get(layer), recurrent, self.num_states)
        if self.replays:
            before = self.inputs.get(layer) or (None,) * len(inputs)
            self.inputs[layer] = tuple(
                _grown(b, given, self.num_slots) for b, given in zip(before, inputs, strict=True)
            )

    def load(self, seq_id: int, kept: KeptStates, num_tokens: int) -> None:
        """Let a sequence continue after its first `num_tokens` tokens from states that were computed elsewhere."""
        (slot,), (state,) = self.take(seq_id, 0, 0, [num_tokens], num_tokens)
        for layer, conv in kept.conv.items():
            recurrent = kept.recurrent.get(layer)
            if not self.is_allocated(layer):
                inputs = tuple(tensor[:1] for tensor in self.inputs.get(layer, ()))
                self.allocate(layer, conv[None], None if recurrent is None else recurrent[None], inputs)
            self.conv[layer][slot] = conv
            if recurrent is not None:
                self.recurrent[layer][state] = recurrent

    def is_allocated(self, layer: int) -> bool:
        """True if a layer's pools have all slots and states."""
        if layer not in self.conv or self.conv[layer].shape[0] < self.num_slots:
            return False
        if layer not in self.recurrent:
            return True
        # `load` may bring states from elsewhere before the shapes of any inputs are known
        has_inputs = not self.replays or bool(self.inputs.get(layer))
        return has_inputs and self.recurrent[layer].shape[0] >= self.num_states


def _grown(pool: torch.Tensor | None, example: torch.Tensor, size: int) -> torch.Tensor:
    larger = memory.zeros((size, *example.shape[1:]), example)
    if pool is not None:
        larger[: pool.shape[0]] = pool
    return larger


# ---- states of texts that are gone, for texts that begin alike ----


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
