"""StatePlan: how the layers with a state read the rows of one forward, made once and used by every such layer.

Parts of prompts are read in chunk form; all other tokens stand in `Lines`, which are read one by one after kept states.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch

from ...cache import PagedStaticCache
from ...cache.state_pool import Base
from ...core.rows import RowInput
from ...kernels.recurrent import Walk
from ...kernels.transfer import upload
from ..functions import kept

_BEFORE, _NO_TOKEN = -1, -2  # instead of a parent's column


@dataclass
class Lines:
    """All tokens that are read one by one after a kept state, as lines [n, T] of tokens that descend from one state each.

    Lines are padded on the right, which no real token sees, and T is at least 2: for one token the layers would take another path.

    Attributes:
        packed: numpy [n, T], each token's packed index (padding: 0).
        lengths: numpy [n].
        bases: where each line starts.
        slots: numpy [n, T], each token's slot; -1: not kept.
        parents: numpy [n, T], the column of each token's parent; -1: the state before the line.
        states: numpy [n, T], where the recurrent state after each token goes; -1: it is not kept.
        depths: numpy [n, T], how many tokens of its line each token descends from (padding: -1).
    """

    packed: np.ndarray
    lengths: np.ndarray
    bases: list[Base]
    slots: np.ndarray
    parents: np.ndarray
    states: np.ndarray
    depths: np.ndarray

    @property
    def is_chain(self) -> bool:
        """True if each token follows the one before it."""
        return bool((self.parents == np.arange(self.parents.shape[1]) - 1).all())

    def windows(self, size: int) -> np.ndarray:
        """The last `size` inputs of the convolution at each token: columns [n, T, size] of (those before the line, the line)."""
        count, length = self.parents.shape
        if self.is_chain:
            one = np.arange(length)[:, None] + 1 + np.arange(size)
            return np.broadcast_to(one, (count, length, size))
        windows = np.empty((count, length + 1, size), dtype=np.int64)
        windows[:, 0] = np.arange(size)  # before the line
        lines = np.arange(count)
        for column in range(length):
            windows[:, column + 1, :-1] = windows[lines, self.parents[:, column] + 1, 1:]
            windows[:, column + 1, -1] = size + column
        return windows[:, 1:]

    @kept
    def on(self, device: torch.device) -> LinesOnDevice:
        """The same as tensors; made once per step, not per layer."""
        return LinesOnDevice(self, device)


class LinesOnDevice:
    """Index tensors of `Lines`.

    Attributes:
        bases, states: slots [n] of the lines' bases.
        replays: for the first, second, .. token that the states have not read: the lines that have one (None: all), and their slots.
        real: (lines, columns) of the tokens that are not padding, and `targets`, their packed indices.
        kept: (lines, columns) of all tokens that have slots, and `slots`.
    """

    def __init__(self, lines: Lines, device: torch.device):
        self.of, self.device = lines, device
        send = self._send
        self.packed, self.bases = send(lines.packed), send(np.array([base.slot for base in lines.bases]))
        self.states, self.replays = send(np.array([base.state for base in lines.bases])), []
        for index in range(max(len(base.replayed) for base in lines.bases)):
            has = [i for i, base in enumerate(lines.bases) if len(base.replayed) > index]
            slots = send(np.array([lines.bases[i].replayed[index] for i in has]))
            self.replays.append((None if len(has) == len(lines.bases) else send(np.array(has)), slots))
        real = np.nonzero(np.arange(lines.packed.shape[1]) < lines.lengths[:, None])
        self.real, self.targets = (send(real[0]), send(real[1])), send(lines.packed[real])
        kept_places = self._kept_places = np.nonzero(lines.slots >= 0)
        self.kept, self.slots = (send(kept_places[0]), send(kept_places[1])), send(lines.slots[kept_places])

    def _send(self, array: np.ndarray, dtype: Any = np.int64) -> torch.Tensor:
        return upload(np.ascontiguousarray(array, dtype=dtype), self.device)

    @functools.cached_property
    def levels(self) -> list[tuple]:
        """The tokens by depth, to read each level with one rule call: (lines, columns) of its tokens; their parents' indices in the level
        before, in the first level lines (None: all in order); which tokens' recurrent states are kept (None: all), and where."""
        of, levels, before = self.of, [], len(self.of.bases)
        places = np.zeros_like(of.depths)  # a token's index in its level
        for level in range(int(of.depths.max()) + 1):
            lines, columns = np.nonzero(of.depths == level)
            places[lines, columns] = np.arange(len(lines))
            parents = lines if level == 0 else places[lines, of.parents[lines, columns]]
            into = of.states[lines, columns]
            kept = np.flatnonzero(into >= 0)
            same = len(parents) == before and bool((parents == np.arange(before)).all())
            levels.append((
                (self._send(lines), self._send(columns)), None if same else self._send(parents),
                None if len(kept) == len(lines) else self._send(kept), self._send(into[kept]),
            ))  # fmt: skip
            before = len(lines)
        return levels

    @kept
    def windows(self, size: int) -> tuple[torch.Tensor, torch.Tensor | None]:
        """`Lines.windows` [m, size] of the kept tokens, and [n, T, size] of all tokens (None for chains)."""
        windows = self.of.windows(size)
        return self._send(windows[self._kept_places]), None if self.of.is_chain else self._send(windows)

    # ---- as the kernels read them: what a line's state has not read yet, followed by the line, as one walk ----

    @functools.cached_property
    def walk(self) -> tuple[torch.Tensor, Walk, torch.Tensor]:
        """Slots int64 [n, R] of tokens whose inputs are read first, of which lines that have fewer skip the last ones; a walk over R + T
        columns; and where the inputs of the T tokens are kept, int32 [n, T], -1: nowhere."""
        replays, parents, into, saved = walk_columns(self.of)
        sent = (self._send(columns, np.int32) for columns in (parents, into, saved))
        walk = Walk(*sent, num_saved=int(saved.max(initial=-1)) + 1)
        return self._send(replays), walk, self._send(self.of.slots, np.int32)

    @kept
    def windows_of(self, size: int) -> torch.Tensor:
        """`Lines.windows`, int32 [n, T, size]."""
        return self._send(self.of.windows(size), np.int32)


def walk_columns(lines: Lines) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """numpy: the slots of replayed tokens [n, R], and `parents`, `into` and `saved` of a Walk over R + T columns."""
    count, width = lines.packed.shape
    most = max(len(base.replayed) for base in lines.bases)
    replays = np.zeros((count, most), dtype=np.int64)
    parents = np.full((count, most + width), _NO_TOKEN)
    into, saved = np.full(parents.shape, -1), np.full(parents.shape, -1)
    real = np.arange(width) < lines.lengths[:, None]
    for line, base in enumerate(lines.bases):
        number = len(base.replayed)
        replays[line, :number] = base.replayed
        parents[line, :number] = np.arange(number) + _BEFORE
        first = number - 1 if number else _BEFORE  # after the replayed tokens, or the state itself
        lines_of_parents = np.where(lines.parents[line] < 0, first, lines.parents[line] + most)
        parents[line, most:] = np.where(real[line], lines_of_parents, _NO_TOKEN)
    into[:, most:] = np.where(real, lines.states, -1)
    numbers = 0
    for line in range(count):
        columns = np.flatnonzero(parents[line] != _NO_TOKEN)
        apart = parents[line, columns[1:]]
        again = np.unique(apart[(apart != columns[:-1]) & (apart >= 0)])
        saved[line, again] = numbers + np.arange(len(again))
        numbers += len(again)
    return replays, parents, into, saved


# ---- the rows of a forward ----


@dataclass
class PromptPart:
    """A part of a prompt, which is read in chunk form.

    Attributes:
        first, end: its packed tokens.
        base: what is before it; None: the text begins here.
        slot, state: where the last inputs of the convolution and the recurrent state after it go.
    """

    first: int
    end: int
    base: Base | None
    slot: int
    state: int


@dataclass
class StatePlan:
    """The prompts' parts and the other tokens of a forward. `num_calls`: how many layers have followed it."""

    prompts: list[PromptPart]
    lines: Lines | None
    num_calls: int = 0


def make_plan(inputs: list[RowInput], starts: list[int], cache: PagedStaticCache, chunks_continue: bool) -> StatePlan:
    """Take slots for the states that this forward writes, and find the states it starts from.

    Args:
        starts: B + 1 numbers, each row's first packed token.
        chunks_continue: the layers' chunk form can start from a state. If not, only a text's beginning is read in it.

    Raises:
        RuntimeError: a row starts where no state was kept.
    """
    prompts, pieces, states = [], [], cache.states
    assert states is not None
    for row, first in zip(inputs, starts[:-1], strict=True):
        count = row.num_tokens
        num_chunked = min(row.prompt, count) if chunks_continue or row.start == 0 else 0
        # States that a later step may start from: after the row's last token, and after each token with logits of its own.
        kept = np.arange(max(count - max(row.logits, 1), num_chunked), count)
        if num_chunked:  # the others follow the prompt
            kept = np.concatenate([[num_chunked - 1], kept])
        after = _bases(row, num_chunked)
        # `states.base` raises an error, before anything has changed, if a state was not kept.
        bases = {
            length: states.base(row.seq_id, length) for length in {row.start, *after.tolist()} if length <= row.start
        }
        length = min(cache.tables[row.seq_id].length, row.start)
        slots, into = np.full(count, -1), np.full(count, -1)
        counts, last = (row.start + kept + 1).tolist(), row.start + row.tokens.shape[0]
        slots[kept], into[kept] = states.take(row.seq_id, row.start, length, counts, last)
        if num_chunked:
            # If the pool keeps one state per row, the prompt's state is stored there until the row's last own token replaces it.
            state = into[num_chunked - 1] if into[num_chunked - 1] >= 0 else into.max()
            base = bases[row.start] if row.start else None
            prompts.append(PromptPart(first, first + num_chunked, base, int(slots[num_chunked - 1]), int(state)))
            bases[row.start + num_chunked] = Base(int(slots[num_chunked - 1]), int(state), [])
        if num_chunked < count:
            pieces.append(
                _Piece(row, num_chunked, first + num_chunked, slots[num_chunked:], into[num_chunked:], after, bases)
            )
    return StatePlan(prompts, _lines(pieces) if pieces else None)


class _Piece(NamedTuple):
    """The tokens of a row after its first `num_chunked`."""

    row: RowInput
    num_chunked: int
    first: int  # packed index of the first one
    slots: np.ndarray  # [t], theirs; -1: none
    into: np.ndarray  # [t], where the recurrent states after them go; -1: nowhere
    after: np.ndarray  # [t], how many tokens have been read where each one's line starts (see `_bases`)
    bases: dict[int, Base]  # number of tokens read → what to continue from


def _inner(row: RowInput, num_chunked: int) -> np.ndarray | None:
    """bool [t, t]: which of the row's t tokens after its first `num_chunked` each of them descends from, itself excluded."""
    if row.visibility is None:
        return None
    seen = row.visibility[num_chunked:, row.visibility.shape[1] - (row.num_tokens - num_chunked) :]
    return np.tril(seen, -1)


def _bases(row: RowInput, num_chunked: int) -> np.ndarray:
    """For each token after the row's first `num_chunked`: the number of tokens in the state from which its line starts."""
    count = row.num_tokens - num_chunked
    inner = _inner(row, num_chunked)
    if inner is None or row.visibility is None:
        return np.full(count, row.start + num_chunked)
    region = row.visibility.shape[1]
    outer = row.visibility[num_chunked:, : region - count]
    # The last visible token before these, as a number of tokens read; none: the text before the region.
    last = np.where(outer.any(1), outer.shape[1] - np.argmax(outer[:, ::-1], axis=1), 0) if outer.shape[1] else 0
    bases = np.broadcast_to(row.start + row.num_tokens - region + last, (count,))
    oldest = np.where(inner.any(1), np.argmax(inner, axis=1), np.arange(count))  # the first ancestor among these
    return bases[oldest]


def _lines(pieces: list[_Piece]) -> Lines:
    """Put the pieces into lines, one for each row and base state."""
    packed, parents, depths, slots, states, bases = [], [], [], [], [], []
    for piece in pieces:
        inner = _inner(piece.row, piece.num_chunked)
        count = len(piece.slots)
        if inner is None:
            above, depth = np.arange(count) - 1, np.arange(count)
        else:
            above = np.where(inner.any(1), count - 1 - np.argmax(inner[:, ::-1], axis=1), -1)
            depth = inner.sum(1)
        for start in np.unique(piece.after).tolist():
            members = np.flatnonzero(piece.after == start)
            column = np.full(count + 1, -1)  # the last entry: the parent -1
            column[members] = np.arange(len(members))
            packed.append(piece.first + members)
            parents.append(column[above[members]])
            depths.append(depth[members])
            slots.append(piece.slots[members])
            states.append(piece.into[members])
            bases.append(piece.bases[start])
    lengths = np.array([len(row) for row in packed])
    width = max(int(lengths.max()), 2)

    def padded(arrays: list[np.ndarray], value: int | None) -> np.ndarray:
        out = np.empty((len(arrays), width), dtype=np.int64)
        out[:] = np.arange(width) - 1 if value is None else value
        for line, array in zip(out, arrays, strict=True):
            line[: len(array)] = array
        return out

    return Lines(
        padded(packed, 0), lengths, bases, padded(slots, -1), padded(parents, None), padded(states, -1), padded(depths, -1)
    )  # fmt: skip
