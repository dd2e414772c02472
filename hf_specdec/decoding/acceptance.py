"""How likely a row's drafts are to be accepted, estimated from what happened to its last ones."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from ..core.sequence import Sequence

if TYPE_CHECKING:
    from .draft_length import DraftedStep


class AcceptanceEstimates:
    """Per row and depth: P(a draft token is accepted | its parent was), and how many nodes a draft has there.

    Counts fade, so that a row's text may change. Where a row has seen little at a depth, its own rate over all depths fills in
    (as that many rounds of evidence); where it has seen little at all, the rate that rows begin with. Rows live in the rows of a few
    arrays, so that a large batch costs no more Python than a small one.

    Args:
        longest: K, the deepest draft there can be.
    """

    MEMORY = 0.95  # of a count, per round of drafting
    PRIOR_ROUNDS = 2.0  # how many rounds of evidence a guess from elsewhere is worth
    FIRST_ROUNDS = 8  # of a row, which teach what rows begin with
    FIRST_GUESS = 0.6

    def __init__(self, longest: int):
        self.longest = longest
        self._slot: dict[int, int] = {}
        self._free: list[int] = []
        self._allocate(16)
        # What rows begin with: accepted and judged tokens [2] of their first rounds; nodes and rounds [2, K] that asked so deep.
        self._begin = np.array([self.FIRST_GUESS, 1.0]) * self.PRIOR_ROUNDS
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
        """Where the sequences' figures are, int [B]; unknown sequences get a place."""
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
        """Free the sequence's place."""
        if seq.id in self._slot:
            self._free.append(self._slot.pop(seq.id))

    def num_behind(self, rows: np.ndarray, sequences: list[Sequence]) -> np.ndarray:
        """int [B]: tokens written since the row last drafted; all of them if it never did."""
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
        """Learn from a verified step; `now` numbers it."""
        lengths = np.array([len(seq.tokens) for seq in step.sequences])
        finished = np.array(
            [seq.finished for seq in step.sequences]
        )  # cut short: what would have followed is not known
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
        """A row whose draft failed waits twice as long before its next probe; one that won something does not wait."""
        self.pauses[drafted] = np.where(succeeded, 1, np.minimum(2 * self.pauses[drafted], longest_pause))
