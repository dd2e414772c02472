"""How likely drafts are to be accepted: rates common to all texts, how a row differs from them, and the chance that a drafter pays."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from ..core.sequence import Sequence


class Acceptance:
    """Posteriors per drafter, row and depth, with forgetting.

    Common to all texts, per drafter, kind of draft and depth: P(a draft token is rejected | those before it were accepted). Per row and
    drafter, a factor: how much more or less often tokens are rejected in this row.

    A few drafts say little about a row, so its factor is shrunk: (rejected + P) / (rejections expected + P), where P is the number of
    rejections expected among `WEIGHT` more tokens. The largest of several noisy estimates is usually too large, so with separate rates
    for each row and depth the choice would follow the noise. A row's counts decay with each draft, and with each step without one.

    A draft has one of `KINDS` kinds. If the drafter says how much it expects to be accepted, the kind is the rate per token that it
    promises: kind k is at first believed to have the rate (k + 1/2) / KINDS.

    Besides, a row has a chance to be one of the rows on which the drafter saves time: at first the share of such rows, then multiplied
    by the likelihood of the failed drafts since one was right, under the hope that the drafter is better than known (`hope`).

    Figures are kept in arrays with one line per row, so that a large batch costs no more Python than a small one.

    Args:
        guesses: [D], rate per token of a drafter of which nothing is known.
        longest: K, the deepest possible draft.
        nodes: [D], or one number for all: nodes at every depth of a draft of which nothing is known.
    """

    KINDS = 8
    MEMORY = 0.99  # decay of a drafter's counts per draft: it follows the texts within 100 drafts
    ROW_MEMORY = 0.95  # decay of a row's counts per draft: a row may change within 20 drafts
    ROW_AGEING = 0.998  # decay of a row's counts per step without a draft: a text changes within 500 tokens ..
    AGEING = 0.997  # .. and a trial of one token is worth its price again within 300
    # judged tokens that the common rate is worth against a row's own: on real texts 20 to 40 foretell best, unlike rows of a batch
    # need fewer
    WEIGHT = 10.0
    HOPE = 0.7  # rejections of a drafter of which more is hoped than known, as a share of those known
    DEEPEST = -9.0  # log likelihood that no run of failures falls below, so that it ages within 300 tokens
    PRIOR = 6.0  # judged tokens that a guess is worth
    MOST_AT_ONCE = 8  # at most this many drafts of a step decay the counts
    ROWS = 0.95  # decay of the share of rows on which a drafter pays, per row that ends
    _PAID = np.array([[1.0], [2.0]])  # assumed at first: a drafter saves time on one of two rows

    def __init__(self, guesses: np.ndarray, longest: int, nodes: np.ndarray | float = 1.0):
        self.num_drafters, self.longest = len(guesses), longest
        self.usual_kinds = self.kind(guesses)
        self.guesses = (np.arange(self.KINDS) + 0.5) / self.KINDS
        # [K + 1, KINDS - 1]: how many tokens of a draft of n are accepted at the least rate of each kind but the first
        self._promises = (np.arange(1, self.KINDS) / self.KINDS) ** np.arange(1, longest + 1)[:, None]
        self._promises = np.concatenate([np.zeros((1, self.KINDS - 1)), self._promises.cumsum(0)])
        # rejected and judged tokens by drafter, kind and depth
        self.counts = np.zeros((2, self.num_drafters, self.KINDS, longest))
        # for drafters that are asked for a depth: nodes drafted at each depth, drafts that had any, and drafts asked to be that deep
        self.shape = np.ones((3, self.num_drafters, longest))
        self.shape[0] *= np.reshape(nodes, (-1, 1))
        # rows on which a drafter saved time, and rows on which it was asked
        self.paid = np.repeat(self._PAID, self.num_drafters, 1)
        self._rates: np.ndarray | None = None
        self._slot: dict[int, int] = {}
        self._free: list[int] = []
        self._rows = np.zeros((16, 3, self.num_drafters))  # tokens rejected, rejections expected, tokens judged
        # of the failed drafts since one was right: their number, and log likelihood under hope
        self._runs = np.zeros((16, 2, self.num_drafters))
        self.saved = np.zeros((16, 2, self.num_drafters))  # plain steps that drafts saved, and drafts or asks
        self.judged_at = np.zeros((16, self.num_drafters), dtype=np.int64)  # step of the last judged draft
        # tokens that the drafter has read; 0: it never drafted
        self.read_up_to = np.zeros((16, self.num_drafters), dtype=np.int64)

    @classmethod
    def kind(cls, rates: np.ndarray) -> np.ndarray:
        """int: the kind of drafts that promise these rates per token."""
        return np.minimum(np.asarray(rates) * cls.KINDS, cls.KINDS - 1).astype(np.int64)

    def promised_kinds(self, scores: np.ndarray, lengths: np.ndarray) -> np.ndarray:
        """int [B]: the kinds of drafts of `lengths` tokens, of which `scores` are expected to be accepted. A draft of n tokens that are
        accepted at the rate a has the score a + a^2 + .. + a^n."""
        return (self._promises[np.minimum(lengths, self.longest)] <= scores[:, None]).sum(1)

    # ---- rows -------------------------------------------------------------------------------------------------------

    def slots(self, sequences: list[Sequence], now: int) -> np.ndarray:
        """int [B]: each sequence's line in the arrays; a new sequence gets one."""
        return np.array([self._slot[seq.id] if seq.id in self._slot else self._enter(seq, now) for seq in sequences])

    def slot(self, row: int) -> int:
        """The line of a sequence that has one, by its id."""
        return self._slot[row]

    def _enter(self, seq: Sequence, now: int) -> int:
        slot = self._free.pop() if self._free else len(self._slot)
        if slot >= len(self._rows):
            for name in ("_rows", "_runs", "saved", "judged_at", "read_up_to"):
                lines = getattr(self, name)
                setattr(self, name, np.concatenate([lines, np.zeros_like(lines)]))
        self._slot[seq.id] = slot
        for lines in (self._rows, self._runs, self.saved, self.read_up_to):
            lines[slot] = 0
        self.judged_at[slot] = now
        return slot

    def __contains__(self, seq: Sequence) -> bool:
        return seq.id in self._slot

    @property
    def num_rows(self) -> int:
        """Sequences that have a line."""
        return len(self._slot)

    def forget(self, seq: Sequence) -> None:
        """Free the sequence's line, and count on which rows drafters have saved time."""
        slot = self._slot.pop(seq.id, None)
        if slot is not None:
            self._free.append(slot)
            self.paid += (1.0 - self.ROWS) * (self._PAID - self.paid)
            self.paid += self.saved[slot] > 0

    # ---- estimates --------------------------------------------------------------------------------------------------

    @property
    def rates(self) -> np.ndarray:
        """[D, KINDS, K]: P(rejected | accepted before) in all texts. A depth with few samples is like its kind, a kind like the guess."""
        rates = self._rates
        if rates is None:
            rejected, judged = self.counts
            kind = (rejected.sum(2) + self.PRIOR * (1.0 - self.guesses)) / (judged.sum(2) + self.PRIOR)
            rates = self._rates = (rejected + self.PRIOR * kind[:, :, None]) / (judged + self.PRIOR)
        return rates

    def survival(self, slots: np.ndarray, kinds: np.ndarray, now: int) -> np.ndarray:
        """[D, B, K]: P(all tokens of a draft up to each depth are accepted). `kinds`: int [D, B], of the rows' drafts."""
        age = self.ROW_AGEING ** np.maximum(now - self.judged_at[slots], 0)
        aged = self._rows[slots] * age[:, None, :]
        prior = self.WEIGHT * (aged[:, 1] + 1e-3) / (aged[:, 2] + 1e-2)
        factor = (aged[:, 0] + prior) / (aged[:, 1] + prior)
        wrong = self.rates[np.arange(self.num_drafters)[:, None], kinds]
        survival = np.maximum(1.0 - wrong * factor.T[:, :, None], 1e-9).cumprod(2)
        # After n failures one after another no more than this, whatever other texts show: 0.44 for 5, 0.12 for 12.
        most = 20.0 / (20.0 + (self._runs[slots, 0] * age) ** 2)
        survival *= np.minimum(most.T / survival[:, :, 0], 1.0)[:, :, None]
        return survival

    @property
    def hope(self) -> np.ndarray:
        """[D, K]: `survival` if tokens of usual drafts are rejected only `HOPE` times as often as known."""
        return (1.0 - self.HOPE * self.rates[np.arange(self.num_drafters), self.usual_kinds]).cumprod(1)

    def log_likelihood(self, slots: np.ndarray, now: int) -> np.ndarray:
        """[D, B], at most 0: of the failed drafts since one was right, under hope. It ages, because texts change."""
        return (self._runs[slots, 1] * self.AGEING ** np.maximum(now - self.judged_at[slots], 0)).T

    @property
    def share_of_rows(self) -> np.ndarray:
        """[D]: share of the rows on which each drafter saves time."""
        return self.paid[0] / self.paid[1]

    @property
    def offered(self) -> np.ndarray:
        """[2, D, K]: P(a draft has a node at each depth), and how many nodes it has there, if it is asked to be that deep."""
        return self.shape[[1, 0]] / self.shape[2]

    def of_first_token(self, drafter: int) -> float | None:
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
            written: int [B], tokens added to each text; 0: do not learn from the row.
        """
        ends = np.minimum(offered, written)
        judged, rejected = np.minimum(accepted + 1, ends), accepted < ends
        drafters, rows = np.nonzero(judged)
        if not len(drafters):
            return
        kind, depth, failed = kinds[drafters, rows], judged[drafters, rows], rejected[drafters, rows]
        mine = np.arange(self.longest) < depth[:, None]
        wrong = self.rates[drafters, kind]
        expected, at = (wrong * mine).sum(1), slots[rows]
        age = np.maximum(now - self.judged_at[at, drafters], 0)
        self._rows[at, :, drafters] *= (self.ROW_MEMORY * self.ROW_AGEING**age)[:, None]
        self._rows[at, :, drafters] += np.stack([failed, expected, depth], axis=1)
        self.judged_at[at, drafters] = now
        # runs of drafts that are wrong from the first token
        run = self._runs[at, :, drafters] * np.stack([np.ones(len(at)), self.AGEING**age], axis=1)
        run += np.stack([np.ones(len(at)), np.log(np.clip(self.HOPE * wrong[:, 0], 1e-3, 0.99))], axis=1)
        run[:, 1] = np.maximum(run[:, 1], self.DEEPEST)
        self._runs[at, :, drafters] = run * (failed & (depth == 1))[:, None]
        self._count(drafters, kind, depth, failed, mine)

    def observe_steps(self, slot: int, drafter: int, drafts: list[tuple[int, int, int]], now: int) -> None:
        """Learn from one row's verified drafts of one drafter in several steps: (kind, depth, accepted tokens), in their order."""
        kind, offered, accepted = np.array(drafts).T
        depth, failed = np.minimum(accepted + 1, offered), accepted < offered
        mine, wrong = np.arange(self.longest) < depth[:, None], self.rates[drafter, kind]
        age, row, run = now - self.judged_at[slot, drafter], self._rows[slot, :, drafter], self._runs[slot, :, drafter]
        row *= self.ROW_MEMORY ** len(drafts) * self.ROW_AGEING**age
        row += self.ROW_MEMORY ** np.arange(len(drafts))[::-1] @ np.stack(
            [failed, (wrong * mine).sum(1), depth], axis=1
        )
        run *= 1.0, self.AGEING**age
        for wholly, hoped in zip((failed & (depth == 1)).tolist(), (self.HOPE * wrong[:, 0]).tolist(), strict=True):
            run += 1.0, math.log(min(max(hoped, 1e-3), 0.99))
            run *= wholly
        run[1] = max(run[1], self.DEEPEST)
        self.judged_at[slot, drafter] = now
        self._count(np.full(len(drafts), drafter), kind, depth, failed, mine)

    def _count(
        self, drafters: np.ndarray, kind: np.ndarray, depth: np.ndarray, failed: np.ndarray, mine: np.ndarray
    ) -> None:
        many = np.minimum(np.bincount(drafters, minlength=self.num_drafters), self.MOST_AT_ONCE)
        self.counts *= (self.MEMORY**many)[:, None, None]
        np.add.at(self.counts[1], (drafters, kind), mine)
        np.add.at(self.counts[0], (drafters[failed], kind[failed], depth[failed] - 1), 1.0)
        self._rates = None

    def asked(
        self, drafter: int, slots: np.ndarray, depths: np.ndarray, nodes: np.ndarray, lengths: np.ndarray
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
        self.shape[1, drafter, :width] += (nodes[:, :width] > 0).mean(0)
        self.shape[2, drafter] += (np.arange(self.longest) < depths[:, None]).mean(0)
        self.shape[:, drafter] += 1e-3
        self.read_up_to[slots, drafter] = lengths

    # ---- memory -----------------------------------------------------------------------------------------------------

    _KEPT = ("counts", "shape", "paid")

    def state(self) -> dict[str, Any]:
        """What all texts have in common, as JSON."""
        return {name: getattr(self, name).round(4).tolist() for name in self._KEPT}

    def load(self, state: dict[str, Any]) -> None:
        """Go on from an earlier `state`. Raises KeyError, OverflowError, TypeError, ValueError: the state has another shape, or values
        that are not valid counts. Nothing of it is then taken over."""
        values = {name: np.asarray(state[name], dtype=np.float64) for name in self._KEPT}
        for name, value in values.items():
            if value.shape != getattr(self, name).shape:
                raise ValueError("counts of other drafters")
            if not ((value >= (0.0 if name == "counts" else 1e-3)) & (value < 1e9)).all():
                raise ValueError("invalid counts")
        self.__dict__.update(values, _rates=None)
