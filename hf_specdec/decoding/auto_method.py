"""AutoMethod: the fastest drafter and draft length for each row and step, by measured costs and acceptance."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..candidate_generators.auto.generator import AutoGenerator, Choice
from ..core.draft_trees import DraftTrees
from ..core.sequence import Sequence
from .acceptance import AcceptanceEstimates, DraftedStep
from .auto_length import AutoLength, Menu, tokens_left
from .step_cost import FittedCost


@dataclass
class _Asked:
    """One round of choosing: what the look-ups offered, how long each took, the rates of acceptance they
    expect, and what was chosen, by sequence id."""

    order: dict[int, int]
    offers: list[DraftTrees]
    seconds: list[float]
    rates: list[np.ndarray | None]
    choice: Choice


class AutoMethod(AutoLength):
    """Chooses among an AutoGenerator's drafters as AutoLength chooses among lengths.

    Look-ups are asked first, so their drafts are known when the choice is made, and what they offer is compared with the text that
    is written, whichever draft was verified. One that takes longer than it saves rests, for longer and longer. Drafters with weights
    are judged by their past drafts. Each row gets the
    offer of the look-up that it is expected to gain most from; then, for each drafter with weights, the rows that it serves better
    are given to it, and the fastest of these divisions is taken. A drafter with weights that a row does not use is tried on it now
    and then.

    The account of AutoLength bounds what all of this may cost: on text that no drafter guesses it is not slower than plain decoding
    by more than `ALLOWANCE`.

    Args:
        generator: the drafters. This policy becomes its chooser.
        clock: see AutoLength.
    """

    RECHECKS = 32, 256  # steps after which a drafter is tried again on a row that another one serves: at first, at most
    MODEL_GUESS = 0.75  # acceptance of a drafter with weights before it has drafted: it is tried first
    TRIAL = 8  # steps in which a look-up is asked before it is judged
    RESTS = 16, 256  # steps for which a look-up rests: at first, at most
    VALUE_MEMORY = 0.9  # decay of what a look-up is worth, per step

    def __init__(self, generator: AutoGenerator, clock: Callable[[], float] | None = None):
        longest = generator.config.longest_draft or 1
        super().__init__(longest, clock)
        self.names, self.num_lookups = generator.names, generator.num_lookups
        self.longest = generator.longest
        lookups, models = range(self.num_lookups), range(self.num_lookups, len(self.names))
        self.estimates = [
            *(AcceptanceEstimates(longest) for _ in lookups),
            *(AcceptanceEstimates(longest, self.MODEL_GUESS) for _ in models),
        ]
        self.acceptance = self.estimates[self.num_lookups if len(self.names) > self.num_lookups else 0]
        self.drafting = [
            FittedCost(np.zeros(4), dropped=2) for _ in self.names
        ]  # of drafters with weights: see StepCost.drafting
        self.looking_up = [FittedCost(np.zeros(2)) for _ in lookups]
        self._value = np.zeros(self.num_lookups)  # tokens per row that each look-up is expected to save in a step
        self._asked_for = np.zeros(self.num_lookups, dtype=np.int64)  # steps since it last rested
        self._rests_until = np.zeros(self.num_lookups, dtype=np.int64)
        self._rest = np.full(self.num_lookups, self.RESTS[0])
        self._recheck = np.full(
            len(self.names), self.RECHECKS[0]
        )  # doubles with each try, until the drafter is chosen again
        self.steps = Counter[str]()  # row-steps by drafter
        self._rows: set[int] = set()  # ids of the sequences that have been asked for
        # Tokens that were accepted, and that a look-up expected, of the offers of those that say what they expect.
        self._kept_promises = np.ones((self.num_lookups, 2))
        self._knows_price = False  # whether a step with drafts has been timed
        self._asked: _Asked | None = None
        generator.chooser = self

    @property
    def _models(self) -> range:
        """Indices of the drafters with weights."""
        return range(self.num_lookups, len(self.names))

    # ---- choosing ---------------------------------------------------------------------------------------------------

    def limits(self, sequences: list[Sequence], caps: list[int]) -> list[int]:
        """The caps, within which `choose` chooses; 0 for all rows while drafting must pause. A row that begins wakes all look-ups."""
        begins = [seq.id for seq in sequences if seq.id not in self._rows]
        if begins:
            self._rows.update(begins)
            self._rests_until[:] = self._asked_for[:] = 0
        return caps if any(caps) and not self.is_plain(sequences) else [0] * len(sequences)

    def _is_quiet(self, sequences: list[Sequence]) -> bool:
        """As in the base, once all look-ups rest: a match may come at any step."""
        return not any(map(self.is_awake, range(self.num_lookups))) and super()._is_quiet(sequences)

    def is_awake(self, index: int) -> bool:
        """See Chooser."""
        return self.num_steps >= self._rests_until[index]

    def choose(
        self, sequences: list[Sequence], limits: list[int], offers: list[DraftTrees], seconds: list[float],
        scores: list[list[float] | None] | None = None,
    ) -> Choice:  # fmt: skip
        """See `candidate_generators.auto.generator.Chooser`."""
        began = self.clock()
        room, rows = np.asarray(limits), [each.rows(sequences) for each in self.estimates]
        rates = [
            None if own is None else promised_rates(np.asarray(own), np.asarray(offer.lengths))
            for own, offer in zip(scores or [None] * len(offers), offers, strict=True)
        ]
        if not self.cost.target:  # in a step that reads prompts, drafts cost little
            begins = np.array([seq.num_generated == 0 for seq in sequences])
            first = self.num_lookups if self._models else 0
            choice = Choice(np.full(len(room), first), np.where(begins, np.minimum(room, self.FIRST_DRAFT), 0))
        else:
            choice = self._best(sequences, rows, offers, rates, room)
        self._asked = _Asked({seq.id: i for i, seq in enumerate(sequences)}, offers, seconds, rates, choice)
        self._charge(self.clock() - began, len(sequences))
        return choice

    def _best(
        self, sequences: list[Sequence], rows: list[np.ndarray], offers: list[DraftTrees], rates: list[np.ndarray | None],
        room: np.ndarray,
    ) -> Choice:  # fmt: skip
        """The fastest division of the rows among the drafters, and the probes that are due and affordable."""
        together = self._end_together(sequences)
        left = tokens_left(sequences)
        best, speed = Choice(np.zeros(len(room), dtype=np.int64), np.zeros(len(room), dtype=np.int64)), 1.0
        for menu, drafter in self._menus(sequences, rows, offers, rates, room):
            depth, faster = self._soonest(menu, left) if together else self._fastest(menu)
            if faster > speed:
                best, speed = Choice(drafter, depth), faster
        if together:
            room = np.where(left == left.max(), room, 0)  # another row's probe would gain nothing
        return self._probed(best, sequences, rows, room)

    def _menus(
        self, sequences: list[Sequence], rows: list[np.ndarray], offers: list[DraftTrees], rates: list[np.ndarray | None],
        room: np.ndarray,
    ) -> list[tuple[Menu, np.ndarray]]:  # fmt: skip
        """Ways to divide the rows, as (menu, index of each row's drafter): all look up, or some ask a drafter with weights."""
        num_rows, longest = len(room), self.acceptance.longest
        plain, double = self.cost.of_target(num_rows, np.array([num_rows, 2 * num_rows]))
        price = max(float(double - plain), 0.0) / float(plain)  # of a packed token, in tokens
        gains, nodes = np.zeros((2, num_rows, longest))
        drafter, value = np.zeros(num_rows, dtype=np.int64), np.zeros(num_rows)
        for index, offer in enumerate(offers):
            own = np.zeros((num_rows, longest))
            counts = offer.nodes_by_depth[:, :longest]
            own[:, : counts.shape[1]] = counts
            within = room if self._knows_price else np.minimum(room, 1)
            won = self._gains(index, rows[index], rates[index]) * (own > 0)
            worth = _worth(won, own, price, within)
            self._value[index] *= self.VALUE_MEMORY
            self._value[index] += (1.0 - self.VALUE_MEMORY) * float(worth.mean())
            better = worth > value
            drafter, value = np.where(better, index, drafter), np.where(better, worth, value)
            gains, nodes = np.where(better[:, None], won, gains), np.where(better[:, None], own, nodes)
        nobody, nothing = np.zeros(num_rows, dtype=bool), np.zeros(num_rows)
        within = room if self._knows_price else np.minimum(room, 1)
        menus = [(Menu(gains, nodes, nothing, within, nobody), drafter)] if offers else []
        for index in self._models:
            won, own = self.estimates[index].expected(rows[index])
            known = self._knows_price and self.drafting[index]
            within = np.minimum(room, self.longest[index] if known else 1)  # one token at most until costs are known
            asks = _worth(won, own, price, within) > value
            if asks.any():
                menu = Menu(
                    np.where(asks[:, None], won, gains),
                    np.where(asks[:, None], own, nodes),
                    self.estimates[index].backlogs(rows[index], sequences) * asks,
                    np.where(asks, within, room if self._knows_price else np.minimum(room, 1)),
                    asks,
                    index,
                )
                menus.append((menu, np.where(asks, index, drafter)))
        return menus

    def _gains(self, index: int, rows: np.ndarray, rates: np.ndarray | None) -> np.ndarray:
        """[B, K]: the tokens that each depth of a look-up's offer is expected to add, by what the look-up says or by past offers."""
        if rates is None:
            return self.estimates[index].probabilities(rows).cumprod(1)
        kept, promised = self._kept_promises[index]
        return np.minimum(kept / promised, 1.0) * rates[:, None] ** np.arange(1, self.acceptance.longest + 1)

    def _probed(self, best: Choice, sequences: list[Sequence], rows: list[np.ndarray], room: np.ndarray) -> Choice:
        """`best`, with one token of a drafter with weights for rows on which it is due, as far as the account allows."""
        for index in self._models:
            estimates, mine = self.estimates[index], rows[index]
            idle = (best.depth == 0) & (self.num_steps % estimates.pauses[mine] == 0)
            served = (best.depth > 0) & (best.drafter != index)
            if ((best.depth > 0) & ~served).any():
                self._recheck[index] = self.RECHECKS[0]
            long_ago = self.num_steps - estimates.last_drafted[mine] >= self._recheck[index]
            due = (idle | (served & long_ago)) & (room > 0)
            waiting = np.flatnonzero(due)
            waiting = waiting[np.argsort(estimates.last_drafted[mine[waiting]], kind="stable")]
            backlogs = estimates.backlogs(mine, sequences) - self._unread_by(estimates, mine, sequences)
            while len(waiting):
                packed, backlog = len(room) + len(waiting), backlogs[waiting].sum()
                lost = float(served[waiting].mean())  # what the other drafter would have gained, roughly
                if self._extra(len(room), packed, 1, len(waiting), backlog, index) + lost <= self.account:
                    if served[waiting].any():
                        self._recheck[index] = min(2 * self._recheck[index], self.RECHECKS[1])
                    best = Choice(best.drafter.copy(), best.depth.copy())
                    best.drafter[waiting], best.depth[waiting] = index, 1
                    break
                waiting = waiting[: len(waiting) // 2]
        return best

    @staticmethod
    def _unread_by(estimates: AcceptanceEstimates, rows: np.ndarray, sequences: list[Sequence]) -> np.ndarray:
        """As `_unread`, for one of the drafters."""
        return np.where(estimates.last_drafted[rows] < 0, [seq.prompt_length for seq in sequences], 0)

    def of_drafting(self, drafter: int, num_rows: int, depth, num_asked, backlog):
        """Seconds that a drafter with weights takes. The look-ups have been asked already."""
        fixed, per_depth, per_token, per_backlog = self.drafting[drafter].coefficients
        return (num_asked > 0) * (fixed + per_depth * depth + per_backlog * backlog) + per_token * num_asked

    def _seconds_of_lookup(self, index: int, num_rows: int) -> float:
        return float(self.looking_up[index].coefficients @ np.array([1.0, num_rows]))

    # ---- learning ---------------------------------------------------------------------------------------------------

    def observe(self, step: DraftedStep) -> None:
        """Update acceptance, costs and the account."""
        asked, self._asked, was_free = self._asked, None, not self._must_be_plain()
        drafted = False
        if asked is None or not step.sequences:
            if step.seconds is not None and step.sequences:
                self._observe_plain(len(step.sequences), step.seconds)
        else:
            drafted = self._observe_choice(step, asked)
        if step.sequences and (drafted or not self._is_quiet(step.sequences)):
            self._settle_quiet(step.sequences, was_free and not drafted)
        self.num_steps += 1

    def _observe_choice(self, step: DraftedStep, asked: _Asked) -> bool:
        """Learn from a step in which drafters were asked. Returns whether any of them was chosen."""
        at = np.array([asked.order[seq.id] for seq in step.sequences])
        drafter, depth = asked.choice.drafter[at], np.where(np.asarray(step.limits) > 0, asked.choice.depth[at], 0)
        for index in range(self.num_lookups):
            self._observe_offer(step, index, asked, at)
        num_rows, drafted = len(at), depth > 0
        drafting = 0.0
        for index in np.unique(drafter[drafted & (drafter >= self.num_lookups)]).tolist():
            drafting += self._observe_model(step, index, np.where(drafter == index, depth, 0), sum(asked.seconds))
        for index, count in zip(*np.unique(drafter[drafted], return_counts=True), strict=True):
            self.steps[self.names[index]] += int(count)
        if drafted.any():
            self._last_drafted = self.num_steps
        if step.seconds is None:
            return bool(drafted.any())
        packed = num_rows + int(step.nodes.sum())
        self._knows_price |= packed > num_rows
        if drafted.any() or self._plain_is_due() or self.num_steps % self.EVERY_PLAIN == 0 or not self.cost.target:
            self.cost.observe_target(num_rows, packed, step.seconds - step.drafting_seconds)
            if packed == num_rows:
                self._schedule_plain()
        if self.cost.target:
            plain, spent = self.cost.of_target(num_rows, np.array([num_rows, packed]))
            spent += drafting + self._settle_lookups(num_rows, asked.seconds, float(plain))
            self._settle(float(spent / plain), self._progress(step))
        return bool(drafted.any())

    def _settle_lookups(self, num_rows: int, seconds: list[float], plain: float) -> float:
        """Let look-ups rest that are worth less than their time. Returns the seconds of those that were asked."""
        spent = 0.0
        for index, own in enumerate(seconds):
            if not self.is_awake(index):
                continue
            self.looking_up[index].observe((num_rows.bit_length(),), np.array([1.0, num_rows]), own)
            takes = self._seconds_of_lookup(index, num_rows)
            spent += takes
            self._asked_for[index] += 1
            if self._asked_for[index] < self.TRIAL:
                continue
            if self._value[index] >= takes / plain:
                self._rest[index] = self.RESTS[0]
            else:
                self._rests_until[index] = self.num_steps + 1 + self._rest[index]
                self._rest[index] = min(2 * self._rest[index], self.RESTS[1])
                self._asked_for[index] = 0
        return spent

    def _observe_offer(self, step: DraftedStep, index: int, asked: _Asked, at: np.ndarray) -> None:
        """Judge what a look-up offered by the text that was written."""
        offer, rates = asked.offers[index], asked.rates[index]
        counts = offer.nodes_by_depth[at]
        if not counts.shape[1]:
            return
        written = np.asarray(step.num_new)
        nodes = np.where(np.arange(counts.shape[1]) < written[:, None], counts, 0)  # deeper ones are not judged
        accepted = [
            len(offer.matching_path(row, seq.tokens[len(seq.tokens) - new :])) if offer.lengths[row] else 0
            for row, seq, new in zip(at.tolist(), step.sequences, step.num_new, strict=True)
        ]
        if rates is not None:
            promised = (rates[at][:, None] ** np.arange(1, nodes.shape[1] + 1) * (nodes > 0)).sum()
            self._kept_promises[index] = self.VALUE_MEMORY * self._kept_promises[index] + [sum(accepted), promised]
        seen = DraftedStep(step.sequences, (nodes > 0).sum(1).tolist(), nodes, accepted, step.num_new)
        estimates = self.estimates[index]
        estimates.observe(estimates.rows(step.sequences), seen, self.num_steps, self.LONGEST_PAUSE)

    def _observe_model(self, step: DraftedStep, index: int, limits: np.ndarray, lookup_seconds: float) -> float:
        """Learn from the drafts of a drafter with weights. Returns its estimated seconds, reading prompts left out."""
        estimates = self.estimates[index]
        rows, asks = estimates.rows(step.sequences), limits > 0
        backlogs = estimates.backlogs(rows, step.sequences) - np.asarray(step.num_new)  # as it was when drafting began
        unread = int(self._unread_by(estimates, rows, step.sequences)[asks].sum())
        depth, num_asked, backlog = int(limits.max()), int(limits.sum()), int(backlogs[asks].sum())
        features = np.array([1.0, depth, num_asked, backlog])
        seconds = max(step.drafting_seconds - lookup_seconds, 0.0)
        self.drafting[index].observe((depth, num_asked, backlog.bit_length()), features, seconds)
        nodes = np.where(asks[:, None], step.nodes, 0)
        accepted = np.where(asks, step.accepted, 0).tolist()
        own = DraftedStep(step.sequences, limits.tolist(), nodes, accepted, step.num_new)
        estimates.observe(rows, own, self.num_steps, self.LONGEST_PAUSE)
        return float(self.of_drafting(index, len(rows), depth, num_asked, backlog - unread))

    def forget(self, seq: Sequence) -> None:
        """Drop the row's estimates, and note how it ended."""
        super().forget(seq)
        self._rows.discard(seq.id)
        for estimates in self.estimates:
            estimates.forget(seq)

    # ---- for people -------------------------------------------------------------------------------------------------

    def report(self, num_rows: int = 1) -> dict[str, Any]:
        """What was measured: milliseconds of a plain step, of each further packed token and of each drafter; P(accepted) of a
        draft's first token; and how many drafts of rows each drafter made."""
        plain, double = 1e3 * self.cost.of_target(num_rows, np.array([num_rows, 2 * num_rows]))
        drafters = {}
        for index, name in enumerate(self.names):
            if index < self.num_lookups:
                milliseconds = 1e3 * self._seconds_of_lookup(index, num_rows)
            else:
                milliseconds = 1e3 * float(self.of_drafting(index, num_rows, 1, num_rows, 0))
            begin = self.estimates[index]._begin
            drafters[name] = {
                "milliseconds": milliseconds, "acceptance": float(begin[0] / begin[1]), "steps": self.steps[name],
            }  # fmt: skip
        return {"plain_ms": float(plain), "token_ms": float(double - plain) / num_rows, "drafters": drafters}


def promised_rates(scores: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """[B]: the rate a of acceptance per token with which a + a^2 + .. + a^n is the score; 0 without a draft.

    Args:
        scores: [B], how many tokens of each draft are expected to be accepted.
        lengths: [B], n.
    """
    depths = np.arange(1, max(int(lengths.max(initial=0)), 1) + 1)
    low, high = np.zeros(len(lengths)), np.ones(len(lengths))
    for _ in range(12):
        middle = (low + high) / 2
        enough = (middle[:, None] ** depths * (depths <= lengths[:, None])).sum(1) >= scores
        low, high = np.where(enough, low, middle), np.where(enough, middle, high)
    return np.where(lengths > 0, high, 0.0)


def _worth(gains: np.ndarray, nodes: np.ndarray, price: float, room: np.ndarray) -> np.ndarray:
    """[B]: the most that a row's draft is expected to gain, its packed tokens paid, at any depth within its room; at least 0."""
    allowed = np.arange(gains.shape[1]) < room[:, None]
    return np.where(allowed, (gains - price * nodes).cumsum(1), 0.0).max(1, initial=0.0)
