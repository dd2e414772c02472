"""How likely drafts of several drafters are to be accepted: rates common to all texts, and how a row differs from them."""

from __future__ import annotations

from typing import Any

import numpy as np

from ..core.sequence import Sequence


class DrafterAcceptance:
    """Per drafter, kind of draft and depth: P(a draft token is rejected | those before it were accepted), over all texts; and per
    row and drafter, a factor: how much more or less often tokens are rejected in this row.

    A few drafts say little about a row, so its factor is shrunk: (rejected + P) / (rejections expected + P), where P is the number of
    rejections expected among `WEIGHT` more tokens. The largest of several noisy estimates is usually too large, so with separate rates
    for each row and depth the choice would follow the noise. A row's counts decay with each draft, and with each step without one. They
    are replaced at once after a run of drafts that fail at the first token, if it is so long that the text must have changed.

    A draft has one of `KINDS` kinds. If the drafter says how much it expects to be accepted, the kind is the rate per token that it
    promises: kind k is at first believed to have the rate (k + 1/2) / KINDS.

    Args:
        num_drafters: D.
        longest: K, the deepest possible draft.
    """

    KINDS = 8
    MEMORY = 0.99  # decay of a drafter's counts per draft
    ROW_MEMORY = 0.93  # decay of a row's counts per draft
    AGEING = 0.998  # decay of a row's counts per step without a draft
    WEIGHT = 5.0  # judged tokens that the common rate is worth against a row's own
    SURPRISE = 0.01  # a run of failed drafts that is less likely than this means that the text has changed
    PRIOR = 6.0  # judged tokens that a guess is worth
    MOST_AT_ONCE = 8  # at most this many drafts of a step decay the counts

    def __init__(self, num_drafters: int, longest: int):
        self.longest, self.num_drafters = longest, num_drafters
        self.guesses = (np.arange(self.KINDS) + 0.5) / self.KINDS
        # rejected and judged tokens by drafter, kind and depth
        self.counts = np.zeros((2, num_drafters, self.KINDS, longest))
        # for drafters that are told how deep to draft: nodes drafted at each depth, and drafts asked to be that deep
        self.shape = np.ones((2, num_drafters, longest))
        self._rates: np.ndarray | None = None
        self._slot: dict[int, int] = {}
        self._free: list[int] = []
        self._rows = np.zeros((16, 3, num_drafters))  # tokens rejected, rejections expected, tokens judged
        # for the failed drafts since one was right: their number, rejections expected, log of the probability of this run
        self._runs = np.zeros((16, 3, num_drafters))
        self.judged_at = np.zeros((16, num_drafters), dtype=np.int64)  # step of the last judged draft
        self.drafted_at = np.full((16, num_drafters), -1, dtype=np.int64)  # step of the last draft asked for; -1: never
        self.read_up_to = np.zeros((16, num_drafters), dtype=np.int64)  # tokens that the drafter had read then
        self.pauses = np.ones((16, num_drafters), dtype=np.int64)

    @classmethod
    def kind(cls, rates: np.ndarray | float) -> np.ndarray:
        """int: the kind of drafts that promise these rates per token."""
        return np.minimum(np.asarray(rates) * cls.KINDS, cls.KINDS - 1).astype(np.int64)

    # ---- rows -------------------------------------------------------------------------------------------------------

    def slots(self, sequences: list[Sequence], now: int) -> np.ndarray:
        """int [B]: each sequence's line in the arrays; a new sequence gets one."""
        return np.array([self._slot[seq.id] if seq.id in self._slot else self._enter(seq, now) for seq in sequences])

    def _enter(self, seq: Sequence, now: int) -> int:
        slot = self._free.pop() if self._free else len(self._slot)
        if slot >= len(self._rows):
            for name in ("_rows", "_runs", "judged_at", "drafted_at", "read_up_to", "pauses"):
                own = getattr(self, name)
                setattr(self, name, np.concatenate([own, np.zeros_like(own)]))
        self._slot[seq.id] = slot
        self._rows[slot], self._runs[slot], self.judged_at[slot] = 0.0, 0.0, now
        self.drafted_at[slot], self.read_up_to[slot], self.pauses[slot] = -1, 0, 1
        return slot

    def forget(self, seq: Sequence) -> None:
        """Free the sequence's line."""
        if seq.id in self._slot:
            self._free.append(self._slot.pop(seq.id))

    # ---- estimates --------------------------------------------------------------------------------------------------

    @property
    def rates(self) -> np.ndarray:
        """[D, KINDS, K]: P(rejected | accepted before) in all texts. A depth with few samples is like its kind, a kind like the guess."""
        found = self._rates
        if found is None:
            rejected, judged = self.counts
            kind = (rejected.sum(2) + self.PRIOR * (1.0 - self.guesses)) / (judged.sum(2) + self.PRIOR)
            found = self._rates = (rejected + self.PRIOR * kind[:, :, None]) / (judged + self.PRIOR)
        return found

    def survival(self, slots: np.ndarray, kinds: np.ndarray, now: int, hope: bool = False) -> np.ndarray:
        """[D, B, K]: P(all tokens of a draft up to each depth are accepted).

        Args:
            kinds: int [D, B], of the rows' drafts.
            hope: return an optimistic estimate: the less is known about the row, the higher.
        """
        aged = self._rows[slots] * self.AGEING ** np.maximum(now - self.judged_at[slots], 0)[:, None, :]
        prior = self.WEIGHT * (aged[:, 1] + 1e-3) / (aged[:, 2] + 1e-2)
        rejected = aged[:, 0] + prior
        factor = rejected / (aged[:, 1] + prior)
        wrong = self.rates[np.arange(self.num_drafters)[:, None], kinds]
        if hope:
            factor = factor / (1.0 + 1.0 / np.sqrt(1.0 + aged[:, 0]))
        return np.maximum(1.0 - wrong * factor.T[:, :, None], 0.0).cumprod(2)

    def nodes(self, drafter: int) -> np.ndarray:
        """[K]: nodes that a draft of this drafter has at each depth, if it is asked to be that deep."""
        return self.shape[0, drafter] / self.shape[1, drafter]

    def acceptance(self, drafter: int) -> float | None:
        """Share of the judged first tokens of drafts that were accepted; None if no draft was judged."""
        rejected, judged = self.counts[:, drafter, :, 0].sum(1)
        return float(1.0 - rejected / judged) if judged else None

    # ---- learning ---------------------------------------------------------------------------------------------------

    def observe(
        self, slots: np.ndarray, kinds: np.ndarray, offered: np.ndarray, accepted: np.ndarray, written: np.ndarray, now: int
    ) -> None:  # fmt: skip
        """Learn from a step's drafts, including those that were not verified.

        Args:
            kinds, offered, accepted: int [D, B], each draft's kind, depth (0: no draft), and tokens that became text.
            written: int [B], tokens added to each text.
        """
        ends = np.minimum(offered, written)
        judged, rejected = np.minimum(accepted + 1, ends), accepted < ends
        drafters, rows = np.nonzero(judged)
        if not len(drafters):
            return
        kind, depth, failed = kinds[drafters, rows], judged[drafters, rows], rejected[drafters, rows]
        mine = np.arange(self.longest) < depth[:, None]
        expected = (self.rates[drafters, kind] * mine).sum(1)
        at = slots[rows]
        self._rows[at, :, drafters] *= (
            self.ROW_MEMORY * (self.AGEING ** np.maximum(now - self.judged_at[at, drafters], 0))[:, None]
        )
        self._rows[at, 0, drafters] += failed
        self._rows[at, 1, drafters] += expected
        self._rows[at, 2, drafters] += depth
        self.judged_at[at, drafters] = now
        self._notice_change(at, drafters, failed & (depth == 1), expected)
        many = np.minimum(np.bincount(drafters, minlength=self.num_drafters), self.MOST_AT_ONCE)
        self.counts *= (self.MEMORY**many)[:, None, None]
        np.add.at(self.counts[1], (drafters, kind), mine)
        np.add.at(self.counts[0], (drafters[failed], kind[failed], depth[failed] - 1), 1.0)
        self._rates = None

    def _notice_change(self, at: np.ndarray, drafters: np.ndarray, wrong: np.ndarray, expected: np.ndarray) -> None:
        """Count runs of drafts that are wrong from the first token. A very unlikely run replaces the row's earlier counts."""
        self._runs[at[~wrong], :, drafters[~wrong]] = 0.0
        at, drafters, expected = at[wrong], drafters[wrong], expected[wrong]
        usual = self._rows[at, :, drafters]
        chance = np.clip(expected * (usual[:, 0] + 0.5) / (usual[:, 1] + 0.5), 1e-3, 0.99)
        self._runs[at, :, drafters] += np.stack([np.ones(len(at)), expected, np.log(chance)], axis=1)
        run = self._runs[at, :, drafters]
        new = (run[:, 2] < np.log(self.SURPRISE)) & (usual[:, 2] > run[:, 0])
        self._rows[at[new], :, drafters[new]] = run[new][:, [0, 1, 0]]

    def asked(
        self, drafter: int, slots: np.ndarray, depths: np.ndarray, nodes: np.ndarray, lengths: np.ndarray, now: int
    ) -> None:
        """A drafter was asked for drafts.

        Args:
            depths: int [B], how deep (above 0).
            nodes: int [B, D], what it drafted.
            lengths: int [B], tokens of the texts now.
        """
        width = min(nodes.shape[1], self.longest)
        self.shape[:, drafter] *= self.MEMORY
        self.shape[0, drafter, :width] += nodes[:, :width].mean(0)
        self.shape[1, drafter] += (np.arange(self.longest) < depths[:, None]).mean(0)
        self.shape[:, drafter] += 1e-3
        self.drafted_at[slots, drafter], self.read_up_to[slots, drafter] = now, lengths

    # ---- memory -----------------------------------------------------------------------------------------------------

    def state(self) -> dict[str, Any]:
        """What all texts have in common, as JSON."""
        return {"counts": self.counts.round(4).tolist(), "shape": self.shape.round(4).tolist()}

    def load(self, state: dict[str, Any]) -> None:
        """Go on from an earlier `state`.

        Raises:
            ValueError: the state has another shape, or values that are not valid counts.
        """
        counts, shape = (np.asarray(state[name], dtype=np.float64) for name in ("counts", "shape"))
        if counts.shape != self.counts.shape or shape.shape != self.shape.shape:
            raise ValueError("counts of other drafters")
        if not (np.isfinite(counts).all() and np.isfinite(shape).all() and (counts >= 0).all() and (shape > 0).all()):
            raise ValueError("invalid counts")
        self.counts, self.shape, self._rates = counts, shape, None


def promised_rates(scores: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """[B]: the rate a of acceptance per token with which a + a^2 + .. + a^n is the score; 0 without a draft.

    Args:
        scores: [B], how many tokens of each draft are expected to be accepted.
        lengths: [B], n.
    """
    depths = np.arange(1, max(int(lengths.max(initial=0)), 1) + 1)
    low, high = np.zeros(len(lengths)), np.ones(len(lengths))
    for _ in range(6):
        middle = (low + high) / 2
        enough = (middle[:, None] ** depths * (depths <= lengths[:, None])).sum(1) >= scores
        low, high = np.where(enough, low, middle), np.where(enough, middle, high)
    return np.where(lengths > 0, high, 0.0)
