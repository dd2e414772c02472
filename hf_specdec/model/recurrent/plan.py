"""StatePlan: how the layers with a state read the rows of one forward, made once and used by every such layer."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ...cache import PagedStaticCache
from ...cache.state_pool import Base
from ...core.rows import RowInput
from .lines import Level, Lines


@dataclass
class Prompt:
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

    prompts: list[Prompt]
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
        own = min(row.prompt, count) if chunks_continue or row.start == 0 else 0
        # States that a later step may start from: after the row's last token, and after each token with logits of its own.
        kept = np.arange(max(count - max(row.logits, 1), own), count)
        if own:  # the others follow the prompt
            kept = np.concatenate([[own - 1], kept])
        after = _bases(row, own)
        # `states.base` raises an error, before anything has changed, if a state was not kept.
        bases = {each: states.base(row.seq_id, each) for each in {row.start, *after.tolist()} if each <= row.start}
        length = min(cache.tables[row.seq_id].length, row.start)
        slots, into = np.full(count, -1), np.full(count, -1)
        counts, last = (row.start + kept + 1).tolist(), row.start + row.tokens.shape[0]
        slots[kept], into[kept] = states.take(row.seq_id, row.start, length, counts, last)
        if own:
            # If the pool keeps one state per row, the prompt's state is stored there until the row's last own token replaces it.
            state = into[own - 1] if into[own - 1] >= 0 else into.max()
            base = bases[row.start] if row.start else None
            prompts.append(Prompt(first, first + own, base, int(slots[own - 1]), int(state)))
            bases[row.start + own] = Base(int(slots[own - 1]), int(state), [])
        if own < count:
            pieces.append(_Piece(row, own, first + own, slots[own:], into[own:], after, bases))
    return StatePlan(prompts, _lines(pieces) if pieces else None)


@dataclass
class _Piece:
    """The tokens of a row after its first `own`.

    Attributes:
        first: packed index of the first one.
        slots, into: numpy [t], their slots, and where the recurrent states after them go; -1: not kept.
        after: numpy [t], how many tokens have been read where each one's line starts (see `_bases`).
        bases: number of tokens read → what to continue from.
    """

    row: RowInput
    own: int
    first: int
    slots: np.ndarray
    into: np.ndarray
    after: np.ndarray
    bases: dict[int, Base]


def _inner(row: RowInput, own: int) -> np.ndarray | None:
    """bool [t, t]: which of the row's t tokens after its first `own` each of them descends from, itself excluded."""
    if row.visibility is None:
        return None
    seen = row.visibility[own:, row.visibility.shape[1] - (row.num_tokens - own) :]
    return np.tril(seen, -1)


def _bases(row: RowInput, own: int) -> np.ndarray:
    """For each token after the row's first `own`: the number of tokens in the state from which its line starts."""
    count = row.num_tokens - own
    inner = _inner(row, own)
    if inner is None or row.visibility is None:
        return np.full(count, row.start + own)
    region = row.visibility.shape[1]
    outer = row.visibility[own:, : region - count]
    # The last visible token before these, as a number of tokens read; none: the text before the region.
    last = np.where(outer.any(1), outer.shape[1] - np.argmax(outer[:, ::-1], axis=1), 0) if outer.shape[1] else 0
    bases = np.broadcast_to(row.start + row.num_tokens - region + last, (count,))
    oldest = np.where(inner.any(1), np.argmax(inner, axis=1), np.arange(count))  # the first ancestor among these
    return bases[oldest]


def _lines(pieces: list[_Piece]) -> Lines:
    """Put the pieces into lines, one for each row and base state, and sort their tokens into levels."""
    packed, parents, depths, slots, states, bases = [], [], [], [], [], []
    for piece in pieces:
        inner = _inner(piece.row, piece.own)
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
    lengths = np.array([len(each) for each in packed])
    width = max(int(lengths.max()), 2)

    def padded(arrays: list[np.ndarray], value: int | None) -> np.ndarray:
        out = np.empty((len(arrays), width), dtype=np.int64)
        out[:] = np.arange(width) - 1 if value is None else value
        for own, array in zip(out, arrays, strict=True):
            own[: len(array)] = array
        return out

    above, depth, into = padded(parents, None), padded(depths, -1), padded(states, -1)
    levels, places = [], np.zeros_like(depth)  # places: a token's index in its level
    for level in range(int(depth.max()) + 1):
        lines, columns = np.nonzero(depth == level)
        places[lines, columns] = np.arange(len(lines))
        own = into[lines, columns]
        kept = np.flatnonzero(own >= 0)
        ancestors = lines if level == 0 else places[lines, above[lines, columns]]
        levels.append(Level(lines, columns, ancestors, kept, own[kept]))
    return Lines(padded(packed, 0), lengths, bases, padded(slots, -1), above, into, levels)
