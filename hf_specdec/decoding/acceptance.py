"""Estimates of how likely a row's drafts are to be accepted, from its recent drafts."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import numpy as np

from ..core.sequence import Sequence


@dataclass
class DraftedStep:
    """One verified step, as policies see it.

    Attributes:
        sequences: the B rows, with what was accepted.
        limits: how deep each was asked to draft.
        nodes: int [B, D], drafted nodes of each row at depth 1, 2, .. D.
        accepted: per row, how many drafted tokens were accepted.
        num_new: per row, tokens emitted.
        seconds: time of the whole step, drafting included; None if it also read prompts and cannot be compared.
        drafting_seconds: time of the drafting in it.
    """

    sequences: list[Sequence]
    limits: list[int]
    nodes: np.ndarray
    accepted: list[int]
    num_new: list[int]
    seconds: float | None = None
    drafting_seconds: float = 0.0

    @classmethod
    def of_plain(cls, sequences: list[Sequence], seconds: float | None) -> DraftedStep:
        """A step in which no row was asked to draft: a token each."""
        return cls(sequences, *_nothing_drafted(len(sequences)), seconds)


@functools.lru_cache(maxsize=512)
def _nothing_drafted(num_rows: int) -> tuple[list[int], np.ndarray, list[int], list[int]]:
    """limits, nodes, accepted and num_new of a plain step. They are shared, so do not write to them."""
    none = [0] * num_rows
    return none, np.empty((num_rows, 0), dtype=np.int64), none, [1] * num_rows


class AcceptanceEstimates:
    """Per row and depth: P(a draft token is accepted | its parent was), and how many nodes a draft has there.

    Counts decay, so that estimates follow changes in the text. The prior of a depth (worth `PRIOR_ROUNDS` rounds) is the row's rate
    over all depths; the prior of that rate is the rate of young rows. Figures are kept in a few arrays with one line per row, so
    that a large batch costs no more Python than a small one.

    Args:
        longest: K, the deepest possible draft.
        guess: the rate that is assumed before anything is known.
    """

    MEMORY = 0.95  # decay of a count per round of drafting
    PRIOR_ROUNDS = 2.0  # weight of a prior, in rounds
    FIRST_ROUNDS = 8  # a row's first rounds, from which the prior of new rows is learnt
    FIRST_GUESS = 0.6

    def __init__(self, longest: int, guess: float = FIRST_GUESS):
        self.longest = longest
        self._slot: dict[int, int] = {}
        self._free: list[int] = []
        self._allocate(16)
        # Priors of new rows: accepted and judged tokens [2] of first rounds; nodes and rounds [2, K] that asked for each depth.
        self._begin = np.array([guess, 1.0]) * self.PRIOR_ROUNDS
        self._shape = np.ones((2, longest))

    def _allocate(self, size: int) -> None:
        grown = getattr(self, "_counts", None)
        counts, state = np.zeros((size, 5, self.longest)), np.ones((size, 4), dtype=np.int64)
        if grown is not None:
            counts[: len(grown)], state[: len(grown)] = grown, self._state
        # accepted, judged, nodes, offered (rounds with any node), asked (rounds)
        self._counts, self._state = counts, state
        self.pauses, self.last_drafted, self._seen, self._rounds = state.T  # views

    def rows(self, sequences: list[Sequence]) -> np.ndarray:
        """int [B]: each sequence's line in the arrays; a new sequence gets one."""
        return np.array([self._slot[seq.id] if seq.id in self._slot else self._enter(seq) for seq in sequences])

    def _enter(self, seq: Sequence) -> int:
        slot = self._free.pop() if self._free else len(self._slot)
        if slot >= len(self._counts):
            self._allocate(2 * slot)
        self._slot[seq.id] = slot
        self._counts[slot] = 0
        self._state[slot] = (1, -1, 0, 0)
        return slot

    def forget(self, seq: Sequence) -> None:
        """Free the sequence's line."""
        if seq.id in self._slot:
            self._free.append(self._slot.pop(seq.id))

    def backlogs(self, rows: np.ndarray, sequences: list[Sequence]) -> np.ndarray:
        """int [B]: tokens written since the row last drafted; all of its tokens if it never did."""
        return np.array([len(seq.tokens) for seq in sequences]) - self._seen[rows]

    def probabilities(self, rows: np.ndarray) -> np.ndarray:
        """[B, K]: P(accepted at depth d | accepted up to d - 1)."""
        accepted, judged = self._counts[rows, 0], self._counts[rows, 1]
        begin = self._begin[0] / self._begin[1]
        own = (accepted.sum(1) + self.PRIOR_ROUNDS * begin) / (judged.sum(1) + self.PRIOR_ROUNDS)
        return (accepted + self.PRIOR_ROUNDS * own[:, None]) / (judged + self.PRIOR_ROUNDS)

    def expected(self, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """[B, K] each: tokens that drafting to depth d adds to the accepted ones, and nodes that it adds to the draft."""
        _, _, nodes, offered, asked = self._counts[rows].transpose(1, 0, 2)
        share = (offered + 1.0) / (asked + 1.0)
        size = (nodes + self._shape[0] / self._shape[1]) / (asked + 1.0)
        return share * self.probabilities(rows).cumprod(1), size

    def observe(self, rows: np.ndarray, step: DraftedStep, now: int, longest_pause: int) -> None:
        """Learn from a verified step, whose number is `now`."""
        lengths = np.array([len(seq.tokens) for seq in step.sequences])
        # a finished row was cut short, so its last round says nothing about acceptance
        finished = np.array([seq.finished for seq in step.sequences])
        asked = np.asarray(step.limits)
        mine = np.flatnonzero(asked > 0)
        drafted = rows[mine]
        self._seen[drafted], self.last_drafted[drafted] = lengths[mine], now
        mine = mine[~finished[mine]]
        if not len(mine):
            return
        drafted, depth = rows[mine], np.arange(self.longest)
        nodes = np.zeros((len(mine), self.longest))
        width = min(step.nodes.shape[1], self.longest)
        nodes[:, :width] = step.nodes[mine, :width]
        took = np.asarray(step.accepted)[mine]
        accepted = depth < took[:, None]
        judged = (depth <= took[:, None]) & (nodes > 0)
        wanted = depth < asked[mine, None]
        offered = nodes > 0
        self._counts[drafted, 2:] *= self.MEMORY
        judged_rows = offered[:, 0]
        self._counts[drafted[judged_rows], :2] *= self.MEMORY
        self._counts[drafted] += np.stack([accepted & judged, judged, nodes, offered, wanted], axis=1)
        self._learn_beginnings(drafted, accepted & judged, judged, nodes, wanted)
        self._schedule(drafted[judged_rows], took[judged_rows] > 0, longest_pause)
        self._rounds[drafted] += judged_rows

    def _learn_beginnings(self, drafted, accepted, judged, nodes, wanted) -> None:
        young = self._rounds[drafted] < self.FIRST_ROUNDS
        if young.any():
            self._begin = self.MEMORY * self._begin + [accepted[young].sum(), judged[young].sum()]
        self._shape = self.MEMORY * self._shape + np.stack([nodes.sum(0), wanted.sum(0)]) / len(drafted) + 1e-3

    def _schedule(self, drafted: np.ndarray, succeeded: np.ndarray, longest_pause: int) -> None:
        """After a failed draft a row waits twice as long before its next probe; after an accepted token it does not wait."""
        self.pauses[drafted] = np.where(succeeded, 1, np.minimum(2 * self.pauses[drafted], longest_pause))
