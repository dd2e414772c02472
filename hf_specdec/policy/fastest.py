"""Fastest: the drafter and the draft length of each row that give the most tokens per second, by measured costs and acceptance."""

from __future__ import annotations

import contextlib
import math
from collections import Counter
from collections.abc import Callable, Iterator
from copy import copy
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ..core.draft_trees import DraftTrees
from ..core.sequence import Sequence
from .acceptance import Acceptance
from .cost import DraftingCost, StepCost
from .lengths import DraftedStep, DraftLengthPolicy


@dataclass(frozen=True)
class Drafter:
    """What is known of a drafter before it drafts.

    Attributes:
        longest: its deepest draft.
        is_lookup: its drafts are known before the choice. Others are asked for the depth that was chosen.
        is_head: it reads hidden states of every token, so it has to follow a text from its beginning.
        guess: rate of acceptance per token that is assumed of it.
        most_nodes: the most nodes of a draft. Until it has drafted, they are assumed to be spread evenly over the depths.
    """

    name: str
    longest: int
    is_lookup: bool = False
    is_head: bool = False
    guess: float = 0.75
    most_nodes: int = 1


@dataclass
class Choice:
    """Which drafter each row uses in this step, and how deep it drafts.

    Attributes:
        drafter: int [B], index among the drafters.
        depth: int [B]; 0: no draft.
    """

    drafter: np.ndarray
    depth: np.ndarray

    @classmethod
    def nothing(cls, num_rows: int) -> Choice:
        """No row drafts."""
        return cls(np.zeros(num_rows, dtype=np.int64), np.zeros(num_rows, dtype=np.int64))


@dataclass
class Menu:
    """What the rows of a step may draft.

    Attributes:
        gains: float [B, K], accepted tokens that drafting to depth d adds to drafting to d - 1.
        nodes: float [B, K], packed tokens that depth d adds.
        backlogs: [B], tokens that the drafter has to catch up with before it can draft.
        room: [B], the deepest that each row may draft.
        asks: bool [B], rows whose drafts take the drafter's time. The drafts of the other rows are known already.
        drafter: which drafter is asked.
    """

    gains: np.ndarray
    nodes: np.ndarray
    backlogs: np.ndarray
    room: np.ndarray
    asks: np.ndarray
    drafter: int = 0


@dataclass
class Table:
    """How fast a single row is with every drafter, for each draft that it may offer. It is used for some steps, and notes what happens.

    Attributes:
        seq: the row.
        until: number of the first step that does not use the table.
        speed: indexed by drafter, by kind of draft, and by the draft's length less one: tokens in the time of a plain step.
        depth: indexed alike: the depth with that speed.
        won: indexed alike: tokens that are expected to be accepted up to that length.
        kinds: per drafter, the kind of a draft for which it makes no estimate.
        price: per look-up, see `Fastest._price`.
        patience: per look-up, how often it is asked in vain before it rests.
        left: how often it may still be asked in vain.
        trial: a drafter that is tried in the first of these steps.
        pays: whether a drafter that is asked for a depth is faster than plain decoding.
        is_timed, is_long: whether these steps are timed, and whether they are several.
        dearer: how much longer than by their parts steps with drafts are expected to take, as a factor of the extra time.
        able: see `Fastest.choose`, of the last step.
        asks, added: per look-up, how often it was asked, and the tokens that it added to the best of the other drafters.
        chosen: drafter, kind of draft and depth of the present step; depth 0: none.
        drafts: drafter → kind, depth and accepted tokens of the drafts that were chosen.
        offers: index, kind of draft, length of the text, and draft of look-ups.
        seconds: what the look-ups took in the present step.
    """

    seq: Sequence
    until: int
    speed: list[list[list[float]]]
    depth: list[list[list[int]]]
    won: list[list[list[float]]]
    kinds: list[int]
    price: list[float]
    patience: list[float]
    left: list[float]
    trial: int | None
    pays: bool
    is_timed: bool
    is_long: bool
    dearer: float
    able: np.ndarray | None
    asks: list[int]
    added: list[float]
    chosen: tuple[int, int, int] | None = None
    drafts: dict[int, list[tuple[int, int, int]]] = field(default_factory=dict)
    offers: list[tuple[int, int, int, DraftTrees]] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)

    @property
    def is_useful(self) -> bool:
        """Whether any drafter may be asked."""
        return self.pays or self.trial is not None or any(left > 0 for left in self.left)


@dataclass
class Asked:
    """One round of choosing: sequence id → row, look-ups' drafts and seconds, the kinds [D, B] of all drafts, and what was chosen."""

    order: dict[int, int]
    offers: list[DraftTrees]
    seconds: list[float]
    kinds: np.ndarray
    choice: Choice


class Fastest(DraftLengthPolicy):
    """Maximizes expected accepted tokens per second. The mathematics is in the package's docstring.

    Args:
        drafters: the look-ups come first.
        longest: K, the deepest draft there can be.
        clock: seconds, to charge the time of choosing; None: it is not charged.
        when_idle: called when the last row has left, with the policy.

    Attributes:
        steps: drafter → number of its drafts, counted per row.
    """

    needs_observations = True
    HORIZON = 32  # tokens: a row's text is expected to stay as it is for so long
    RISK = 0.01  # share of the tokens that rows may still write, at most 128 a row, that one trial may cost
    TRIED = 4  # a drafter is tried on at most one in this many rows at a time, and in one of so many steps with other drafts
    UNKNOWN = 0.15  # plain steps: a draft's time before one was measured
    UNREAD = 0.003  # plain steps: the same for a token that the drafter has to catch up with
    DOUBT = 64  # steps without drafts after which an estimated extra time is halved, at most twice
    TRIAL = 4  # asks without use after which the hope in a look-up is halved
    WORTH = 0.9  # decay per ask of what a look-up is worth, and of the times of look-ups, heads and choosing
    DEARER = 0.95  # decay per timed step of a single row of how much longer than by their parts steps take
    LEAST_FOLLOWED = 0.005  # share of a plain step: heads that take less may always follow
    LONGEST_QUIET = 64  # steps between two choices for rows that do not draft: longer texts change what drafts cost
    QUIET_SHARE = 0.002  # share of the time that choices and asks may take while nothing is chosen
    SAMPLED = 16  # steps between two measurements of plain steps, where nothing is drafted
    LONGEST_STALE = 256  # steps between two measurements of a plain step: the machine may become slower
    CHOOSING = 0.03  # share of the time of a single row that choices may take, once drafts are known to pay
    TIMED = 8  # drafts of a model that are timed before its cost is relied on for many steps
    MEASURED = 32  # steps that are timed before only one of a table's is
    ENDS = 0.98  # decay per row of how rows ended
    SPEEDS = 256  # how many speeds of a static batch are compared; and prefixes of the order of draft tokens

    def __init__(
        self, drafters: list[Drafter], longest: int, clock: Callable[[], float] | None = None,
        when_idle: Callable[[Fastest], None] | None = None,
    ):  # fmt: skip
        self.drafters, self.clock, self.when_idle = drafters, clock or (lambda: 0.0), when_idle
        self.num_lookups = sum(drafter.is_lookup for drafter in drafters)
        self.models = range(self.num_lookups, len(drafters))  # the drafters that are asked for a depth
        self.longest = np.array([drafter.longest for drafter in drafters])
        nodes = np.array([drafter.most_nodes for drafter in drafters]) / np.maximum(self.longest, 1)
        self.acceptance = Acceptance(np.array([drafter.guess for drafter in drafters]), longest, np.maximum(nodes, 1.0))
        self.cost, self.drafting = StepCost(), [DraftingCost() for _ in drafters]
        self.steps = Counter[str]()
        self.num_steps, self._tried_at = 0, -1
        self.holds = False
        self._table: Table | None = None
        self._drafted_at = np.zeros(len(drafters))  # step of each drafter's last draft
        self._depth = np.arange(1, longest + 1)
        self._depths = np.unique(np.minimum(longest, [1, 2, 3, 4, 5, 6, 8, 10, 12, 16, 24, 32, longest]))  # candidates
        self._knows_price = False  # whether a step with drafts has been timed
        self._static, self._asked, self._learns_costs = False, None, False
        self._written, self._ended = 512.0, 1.0  # tokens, and rows that ended before they had to; at first a guess
        self._quiet_until, self._quiet_rows, self._quiet_left, self._fresh_until = 0, frozenset[int](), 0, 0.0
        self._num_rows = 1  # of the last step
        self._of_fresh = 1.0  # tokens a step that heads may gain on a text that begins
        self._plain_pauses: dict[int, int] = {}  # by octave of the texts' length; see `_schedule_plain`
        self._plain_due: dict[int, int] = {}
        self._plain_at = 0  # step of the last measured plain step
        # plain steps that steps took longer than a plain one, and that they were expected to
        self._dearer = [0.0, 0.0]
        self._was_plain = True  # whether nobody was asked in the last step
        self._overhead = self._spent = 0.0  # seconds of choosing and of learning from it: usually, and in this step
        self._has_chosen = False
        self._followed = 0.0  # share of a plain step that heads take to follow
        self._prospects: dict[int, float] = {}  # sequence id → tokens a step that heads may gain
        # Per look-up: seconds of an ask, tokens gained a step, asks since it was useful, the step of the last ask, and timed asks.
        self.seconds, self._worth, self._idle, self._asked_at, self._timed = np.zeros((5, self.num_lookups))
        self._granted = np.zeros(self.num_lookups)  # asks left of those that a look-up has although it seldom pays
        self._drafted_for: set[int] = set()  # ids of the sequences that the last choice drafted for

    def begin_batch(self) -> None:
        """See DraftLengthPolicy."""
        self._static = True

    # ---- choosing ---------------------------------------------------------------------------------------------------

    def is_plain(self, sequences: list[Sequence]) -> bool:
        """True if these rows are quiet, no costs are known, or a plain step is due to be measured."""
        self.holds = False
        if not (self.num_steps < self._quiet_until and self._are_quiet(sequences)):
            self._look_at(sequences)
            if self.needs_plain_step():
                return True
            table = self._table_of(sequences)
            if table is None or table.is_useful:
                self.holds = table is not None and not table.is_timed and self.num_steps < table.until - 1
                return False
        self.holds = not self.wants_plain_time()
        return True

    def _table_of(self, sequences: list[Sequence]) -> Table | None:
        """The table that this step uses, if it is one of a single row that has a table."""
        table = self._table
        if table is None or len(sequences) > 1 or table.seq is not sequences[0] or self.num_steps >= table.until:
            return None
        return table

    def _are_quiet(self, sequences: list[Sequence]) -> bool:
        """True if the last choice for these sequences was not to draft. A sequence that begins counts as quiet if nothing was chosen for an
        earlier one that began with at least as much to write."""
        rows = self._quiet_rows
        for seq in [seq for seq in sequences if seq.id not in rows]:
            begins = seq not in self.acceptance and seq.drafter is None and self.num_steps < self._fresh_until
            if not begins or seq.max_length - len(seq.tokens) > self._quiet_left:
                return False
        return len(sequences) <= len(rows)

    def num_still(self) -> int:
        """See DraftLengthPolicy: until a choice is due, or the time of a plain step."""
        due = min(self._quiet_until, self._plain_at + self.SAMPLED, self._plain_due.get(self.cost.octave, 0))
        return due - self.num_steps - 1

    def pass_by(self, num_steps: int) -> None:
        """See DraftLengthPolicy."""
        self.num_steps += num_steps

    def limits(self, sequences: list[Sequence], caps: list[int]) -> list[int]:
        """The fastest depths. With look-ups or several drafters the caps, up to K: `choose` then chooses within them."""
        nothing = [0] * len(sequences)
        if not any(caps) or self.is_plain(sequences):
            return nothing
        begins = [seq not in self.acceptance for seq in sequences]
        if any(begins):
            self._idle[:] = 0.0  # a text that begins gives look-ups another chance
            plain = self.cost.of_plain(len(sequences))
            is_due = [self.num_steps >= self._due(index, plain) for index in range(self.num_lookups)]
            self._granted[is_due] = self.TRIAL
        if len(sequences) > 1 or sequences[0].drafter is not None:
            self._learn_from_table()
        elif self._table_of(sequences) is None and not self._renew(sequences[0], caps[0], begins):
            return nothing
        if self.num_lookups or len(self.drafters) > 1:
            return np.minimum(caps, len(self._depth)).tolist()
        return self.choose(sequences, caps, [], [], []).depth.tolist()

    def choose(
        self, sequences: list[Sequence], limits: list[int], offers: list[DraftTrees], seconds: list[float],
        scores: list[list[float] | None], able: np.ndarray | None = None,
    ) -> Choice:  # fmt: skip
        """The choice for each row.

        Args:
            limits: how deep each row may draft.
            offers: what each look-up proposes; nothing if it is not awake.
            seconds: how long each of them took; 0: it was not asked.
            scores: per look-up, how many tokens of each row's offer it expects to be accepted; None: it makes no estimate.
            able: bool [D, B], which drafters follow which rows; None: all follow all.
        """
        if self._table is not None:
            self._table.able, self._table.seconds = able, seconds
            return self._from_table(self._table, limits[0], offers, scores, able)
        began, begins = self.clock(), [seq not in self.acceptance for seq in sequences]
        room, slots = np.asarray(limits), self.acceptance.slots(sequences, self.num_steps)
        kinds = np.repeat(self.acceptance.usual_kinds[:, None], len(room), 1)
        for index, expected in enumerate(scores):
            if expected is not None and any(offers[index].lengths):
                kinds[index] = self.acceptance.promised_kinds(np.asarray(expected), np.asarray(offers[index].lengths))
        self._quiet_until = 0
        choice, quiet = self._best(sequences, slots, kinds, offers, room, able)
        if quiet and not any(seq.drafter for seq in sequences):
            self._be_quiet(sequences, quiet, begins)
        order = {seq.id: i for i, seq in enumerate(sequences)}
        self._asked = Asked(order, offers, seconds, kinds, choice)
        self._spent = self.clock() - began
        return choice

    def _best(self, sequences, slots, kinds, offers, room, able) -> tuple[Choice, float]:
        """The fastest division of the rows among the drafters, plus the trials that are worth their price; and the steps for which nothing
        need be chosen."""
        num_rows, left = len(room), tokens_left(sequences)
        won, nodes, reach, backlogs = drafts = self._drafts(sequences, slots, kinds, offers, room, able)
        hoped, now = self._rates(self._hoped(room, able), drafts, num_rows)
        worth = np.maximum(now.max(2) - 1.0, 0.0)
        reach_ends = self._reach_their_ends(left)
        choice = self._divided(won, nodes, reach, worth, backlogs, left if reach_ends else None)
        if reach_ends:
            room = np.where(left == left.max(), room, 0)  # another row's trial would gain nothing
        self._value_lookups(worth, choice)
        drafted = {seq.id for seq, depth in zip(sequences, choice.depth.tolist(), strict=True) if depth}
        if any(seq.id in self._drafted_for and seq.id not in drafted for seq in sequences):
            self._idle *= 0.5  # a text has changed
        self._drafted_for = drafted
        awake = any(map(self.is_awake, range(self.num_lookups)))
        choice, due = self._with_trials(
            choice, sequences, slots, worth, won[:, :, 0], hoped.max(2) - 1.0, backlogs, room, awake
        )
        return choice, 0.0 if choice.depth.any() or awake else due

    # ---- a single row -----------------------------------------------------------------------------------------------

    def _renew(self, seq: Sequence, room: int, begins: list[bool]) -> bool:
        """Learn from the steps of the last table, and make one for the next steps: so many that this takes `CHOOSING` of their time, and a
        quarter of them at the beginning of a text or after a trial. Returns False if no row is worth drafting for."""
        began, old = self.clock(), self._table
        slots = self.acceptance.slots([seq], self.num_steps)
        self._learn_from_table()
        able = old.able if old is not None and old.seq is seq else None
        kinds = np.tile(np.arange(Acceptance.KINDS), (len(self.drafters), 1))
        drafts = self._drafts(
            [seq] * Acceptance.KINDS, np.repeat(slots, Acceptance.KINDS), kinds, [], np.array([room]), able
        )
        hoped, rates = self._rates(self._hoped(np.array([room]), able), drafts, 1)
        won, _, _, backlogs = drafts
        speed = np.maximum.accumulate(rates, 2)
        depth = np.maximum.accumulate(np.where(rates >= speed, self._depth, 0), 2)
        usual = np.arange(len(rates)), self.acceptance.usual_kinds
        worth = np.maximum(speed[usual][:, -1:] - 1.0, 0.0)
        worth[: self.num_lookups, 0] = self._worth
        drafter = int(worth.argmax())
        best = Choice(np.array([drafter]), (worth[drafter] > 0).astype(np.int64))
        price = [self._price(index, self.cost.of_plain(1)) for index in range(self.num_lookups)]
        patience = [self._patience(index) for index in range(self.num_lookups)]
        left = [patience - self._aged_idle(index) for index, patience in enumerate(patience)]
        is_awake = any(count > 0 for count in left)
        tried, due = self._with_trials(
            best, [seq], slots, worth, won[usual][:, :1], hoped.max(2) - 1.0, backlogs[:, :1], np.array([room]), is_awake
        )  # fmt: skip
        trial = int(tried.drafter[0]) if tried is not best else None
        pays = bool(worth[self.num_lookups :].any())
        if trial is None and not pays and not is_awake:
            self._be_quiet([seq], due, begins)
            self._spent = self._charge(self.clock() - began)
            return False
        length = most = max(math.ceil(self._overhead / (self.CHOOSING * self.cost.of_plain(1))), 1)
        if begins[0] or trial is not None:
            length = max(most // 4, 1)
        is_new = pays and drafter >= self.num_lookups and self.drafting[drafter].count < self.TIMED
        if is_new:
            length = min(length, 2)
        is_timed = is_new or trial is not None or self.cost.target.count < self.MEASURED
        self._table = Table(
            seq=seq, until=self.num_steps + length, speed=speed.tolist(), depth=depth.tolist(), won=won.cumsum(2).tolist(),
            kinds=usual[1].tolist(), patience=patience, left=left, trial=trial, pays=pays, is_timed=is_timed,
            is_long=length > 1, price=price, dearer=self._factor, able=able,
            asks=[0] * self.num_lookups, added=[0.0] * self.num_lookups,
        )  # fmt: skip
        self.holds = not self._table.is_timed and length > 1
        self._spent = self._charge(self.clock() - began)
        return True

    def _from_table(
        self, table: Table, room: int, offers: list[DraftTrees], scores: list[list[float] | None], able: np.ndarray | None
    ) -> Choice:  # fmt: skip
        """The choice for a single row, from what is known already. Without look-ups it may be made twice in a step."""
        first = second = 1.0
        chosen = kind_of = depth = 0
        for index, drafter in enumerate(self.drafters):
            kind, length, nodes = table.kinds[index], min(room, drafter.longest), None
            if index < self.num_lookups:
                if table.left[index] <= 0:
                    continue
                table.asks[index] += 1
                table.left[index] -= 1
                offer, score = offers[index], scores[index]
                length = min(length, offer.row_depths[0])
                if length and score is not None:
                    kind = int(self.acceptance.promised_kinds(np.array(score), np.array(offer.lengths))[0])
                if length:
                    table.offers.append((index, kind, len(table.seq.tokens), offer))
                nodes = None if offer.is_chain else offer.lengths[0]
            if not length or (able is not None and not able[index, 0]):
                continue
            if nodes is None:
                speed, best = table.speed[index][kind][length - 1], table.depth[index][kind][length - 1]
            else:  # a tree is verified whole
                extra = float(self._extra(1, 1 + nodes, 0.0))
                speed, best = (1.0 + table.won[index][kind][length - 1]) / (1.0 + extra), length
            if speed > first:
                first, second, chosen, kind_of, depth = speed, first, index, kind, best
            elif speed > second:
                second = speed
        if table.trial is not None and (able is None or able[table.trial, 0]):
            chosen, kind_of, depth = table.trial, table.kinds[table.trial], 1
        elif depth and chosen < self.num_lookups:
            table.added[chosen] += first - second
            if first - second > table.price[chosen]:
                table.left[chosen] = table.patience[chosen]
        table.chosen = chosen, kind_of, depth
        return Choice(np.array([chosen]), np.array([depth]))

    def observe_held(self, num_drafted: int, num_accepted: int) -> None:
        """See DraftLengthPolicy. What was drafted is learnt from before the next table is made."""
        table = self._table
        assert table is not None and table.chosen is not None
        (drafter, kind, depth), table.chosen, table.trial = table.chosen, None, None
        if depth:
            self.steps[self.drafters[drafter].name] += 1
            self._drafted_at[drafter] = self.num_steps
            slot = self.acceptance.slot(table.seq.id)
            self.acceptance.read_up_to[slot, drafter] = len(table.seq.tokens)
        if num_drafted:
            table.drafts.setdefault(drafter, []).append((kind, num_drafted, num_accepted))
        self.num_steps += 1
        self._spent, self._was_plain = 0.0, not table.is_long

    def _observe_timed(self, step: DraftedStep, table: Table) -> None:
        """Learn from a timed step that used the table."""
        assert table.chosen is not None
        drafter, kind, depth = table.chosen
        speed = table.speed[drafter][kind][depth - 1] if depth else 0.0
        extra = (1.0 + table.won[drafter][kind][depth - 1]) / speed - 1.0 if speed else 0.0
        self._look_at(step.sequences)
        self._time_lookups(table.seconds)
        if depth and drafter >= self.num_lookups:
            seconds = max(step.drafting_seconds - sum(table.seconds) - self._spent, 0.0)
            slots = self.acceptance.slots(step.sequences, self.num_steps)
            self._observe_model(step, drafter, slots, np.array([depth]), seconds)
        if step.seconds is not None:
            packed, plain = 1 + int(step.nodes.sum()) + step.num_more, self.cost.of_plain(1)
            if table.trial is None:  # a drafter's first draft may compile kernels
                expected = sum(table.seconds) / plain + extra / table.dearer
                most = 1.5 * (1.0 + expected) - 1.0  # a step that a busy machine delays shows nothing
                seen = min((step.seconds - self._spent) / plain - 1.0, most), expected
                for i, value in enumerate(seen):
                    self._dearer[i] += (1.0 - self.DEARER) * (value - self._dearer[i])
            if packed > 1:
                self._observe_target(1, packed, step.seconds - step.drafting_seconds)
        num_drafted = 0 if step.sequences[0].finished else int((step.nodes[0] > 0).sum())
        self.observe_held(num_drafted, step.accepted[0])

    def _learn_from_table(self) -> None:
        """Learn from what look-ups offered and what was drafted in the steps of the table, which is then no longer used."""
        table, self._table = self._table, None
        if table is None:
            return
        slot = self.acceptance.slot(table.seq.id)
        seen: dict[int, list[tuple[int, int, int]]] = {}
        for index, kind, length, offer in table.offers:
            written = table.seq.tokens[length:]
            if written:
                accepted = min(len(offer.matching_path(0, written)), len(written))
                seen.setdefault(index, []).append((kind, min(offer.row_depths[0], len(written)), accepted))
        for drafter, drafts in table.drafts.items():
            if drafter >= self.num_lookups:
                seen[drafter] = drafts
            _, drafted, accepted = np.array(drafts).T
            spent = self._extra(1, 1 + drafted, self._of_drafting(drafter, 1, drafted, drafted))
            self.acceptance.saved[slot, :, drafter] += (accepted - spent).sum(), len(drafts)
        for drafter, drafts in seen.items():
            self.acceptance.observe_steps(slot, drafter, drafts, self.num_steps)
        for index, asks in enumerate(table.asks):
            if asks:
                self.acceptance.saved[slot, 1, index] += asks
                is_useful = table.added[index] / asks > table.price[index]
                self._granted[index] = self.TRIAL if is_useful else max(self._granted[index] - asks, 0)
                self._worth[index] += (1.0 - self.WORTH**asks) * (table.added[index] / asks - self._worth[index])
                if math.isfinite(table.left[index]):
                    self._idle[index] = max(table.patience[index] - table.left[index], 0.0)
                elif is_useful:
                    self._idle[index] = 0.0
                else:
                    self._idle[index] = self._aged_idle(index) + asks
                self._asked_at[index] = self.num_steps

    # ---- several rows -----------------------------------------------------------------------------------------------

    def _drafts(self, sequences, slots, kinds, offers, room, able) -> tuple[np.ndarray, ...]:
        """What the drafters may draft for the rows: [D, B, K], P(a token at each depth is accepted) and the nodes there; int [D, B], how
        deep a draft may be, and how many tokens the drafter has to catch up with."""
        chance, nodes = np.repeat(self.acceptance.offered[:, :, None], len(slots), 2)
        for index, offer in enumerate(offers):
            counts = offer.nodes_by_depth[:, : len(self._depth)]
            nodes[index, :, : counts.shape[1]], nodes[index, :, counts.shape[1] :] = counts, 0.0
            chance[index] = nodes[index] > 0
        won = self.acceptance.survival(slots, kinds, self.num_steps) * chance
        # One token at most until the price of a packed token is known, and trials only until a drafter's time is.
        longest = self.longest if self._knows_price else np.minimum(self.longest, 1)
        known = [index < self.num_lookups or bool(self.drafting[index]) for index in range(len(self.drafters))]
        reach = np.broadcast_to(np.minimum(room, (longest * known)[:, None]), kinds.shape)
        backlogs = np.array([len(seq.tokens) for seq in sequences]) - self.acceptance.read_up_to[slots].T
        return won, nodes, reach if able is None else reach * able, backlogs

    def _hoped(self, room: np.ndarray, able: np.ndarray | None) -> tuple[np.ndarray, ...]:
        """See `_drafts`: the same if drafters that are asked for a depth are as good as one may hope."""
        chance, nodes = self.acceptance.offered
        won, nodes = np.repeat(np.stack([self.acceptance.hope * chance, nodes])[:, :, None], len(room), 2)
        reach = np.minimum(room, self.longest[:, None]) * (1 if able is None else able)
        return won, nodes, reach, np.zeros_like(reach)

    def _rates(self, hoped: tuple[np.ndarray, ...], drafts: tuple[np.ndarray, ...], num_rows: int) -> list[np.ndarray]:
        """Of both: [D, B, K], tokens per row in the time of a plain step, if all `num_rows` rows drafted as one row does; 0 where it may
        not. With hope, drafting may take less than was measured."""
        won, nodes, reach, backlogs = [np.concatenate(parts, 1) for parts in zip(hoped, drafts, strict=True)]
        drafting = np.zeros_like(nodes)
        for index in self.models:
            times = num_rows, self._depth, num_rows * self._depth, num_rows * backlogs[index][:, None] / self.HORIZON
            drafting[index] = self._of_drafting(index, *times)
            drafting[index, : len(hoped[2][0])] *= self._doubt(self._drafted_at[index])
        extra = self._extra(num_rows, num_rows * (1.0 + nodes.cumsum(2)), drafting)
        rates = np.where((self._depth <= reach[:, :, None]) & (nodes > 0), (1.0 + won.cumsum(2)) / (1.0 + extra), 0.0)
        return np.split(rates, [len(hoped[2][0])], 1)

    def _of_drafting(self, drafter: int, num_rows: int, depth, num_asked, backlog=0):
        """Seconds that a drafter takes to draft, and to catch up with tokens that it has not read; look-ups have drafted already."""
        if drafter < self.num_lookups:
            return 0.0
        if not self.drafting[drafter]:
            per_token = 0.0 if self.drafters[drafter].is_head else self.UNREAD  # heads read long texts as they follow
            return self.cost.of_plain(num_rows) * (self.UNKNOWN * (np.asarray(num_asked) > 0) + per_token * backlog)
        return self.drafting[drafter].of_draft(depth, num_asked, backlog)

    def _extra(self, num_rows: int, num_packed, drafting):
        """Extra time of a step over a plain one, with `drafting` seconds of a drafter, choosing and learning, in plain steps."""
        plain = self.cost.of_plain(num_rows)
        doubt = self._doubt(self._drafted_at.max())
        added = self.cost.of_target(num_rows, num_packed) - self.cost.of_target(num_rows, num_rows)
        return (self._factor * (doubt * added + drafting) + self._of_choosing(num_rows)) / plain

    def _of_choosing(self, num_rows: int) -> float:
        """Seconds of choosing and of learning from it, as a share in a step."""
        return self._overhead if num_rows > 1 else min(self._overhead, self.CHOOSING * self.cost.of_plain(1))

    def _doubt(self, since: float) -> float:
        """Factor on an extra time that no draft has shown since that step, so that it is less and less certain."""
        return max(0.5 ** ((self.num_steps - since) / self.DOUBT), 0.25)

    def _reach_their_ends(self, left: np.ndarray) -> bool:
        """True if the rows of a static batch are expected to write all the tokens [B] that they may, by how often rows ended before."""
        return self._static and left.max() * self._ended < self._written

    def _divided(
        self, won: np.ndarray, nodes: np.ndarray, reach: np.ndarray, worth: np.ndarray, backlogs: np.ndarray, left: np.ndarray | None
    ) -> Choice:  # fmt: skip
        """The fastest of the divisions of several rows: all rows look up, or some ask a drafter that serves them better."""
        rows = np.arange(len(worth[0]))
        lookup = worth[: self.num_lookups].argmax(0) if self.num_lookups else np.zeros_like(rows)
        value = worth[lookup, rows] if self.num_lookups else np.zeros(len(rows))
        best, speed = Choice.nothing(len(rows)), 1.0
        for index in (0, *self.models) if self.num_lookups else self.models:
            asks = worth[index] > value if index >= self.num_lookups else np.zeros(len(rows), dtype=bool)
            if index >= self.num_lookups and not asks.any():
                continue
            whose, has = np.where(asks, index, lookup), (asks | (value > 0))[:, None]
            at = whose, rows
            menu = Menu(won[at] * has, nodes[at] * has, backlogs[index] * asks, reach[at], asks, index)
            depth, faster = self._fastest(menu) if left is None else self._soonest(menu, left)
            if faster > speed:
                best, speed = Choice(whose, depth), faster
        return best

    def _fastest(self, menu: Menu) -> tuple[np.ndarray, float]:
        """int [B]: the depths with the most expected tokens per second; and their speed, 1 for plain decoding.

        Draft tokens are sorted by gain per packed token. Of all prefixes of that order, at each depth of drafting, the one with the
        most expected tokens per second is chosen. So an easy row drafts far while a hard row beside it does not draft.
        """
        num_rows, longest = menu.gains.shape
        worth = np.minimum.accumulate(menu.gains / np.maximum(menu.nodes, 1e-9), axis=1)  # depths are taken in order
        allowed = np.arange(longest) < menu.room[:, None]
        order = np.argsort(-worth.T, axis=None, kind="stable")  # ties: shallow first
        order = order[allowed.T.ravel()[order]]
        if not len(order):
            return np.zeros(num_rows, dtype=np.int64), 1.0
        depth, row = np.divmod(order, num_rows)
        asks = menu.asks[row]
        taken = (depth < self._depths[:, None]) | ~asks  # [depths, tokens]
        won = (menu.gains[row, depth] * taken).cumsum(1)
        packed = num_rows + (menu.nodes[row, depth] * taken).cumsum(1)
        missed = ((depth == 0) * asks * menu.backlogs[row]).cumsum() / self.HORIZON
        ends = np.unique(np.linspace(0, len(order) - 1, min(len(order), self.SPEEDS)).astype(np.int64))
        asked = (taken & asks).cumsum(1)[:, ends]
        drafting = self._of_drafting(menu.drafter, num_rows, self._depths[:, None], asked, missed[ends])
        extra = self._extra(num_rows, packed[:, ends], drafting)
        rates = (num_rows + won[:, ends]) / (1.0 + extra)
        which, end = np.unravel_index(rates.argmax(), rates.shape)
        if rates[which, end] <= num_rows:
            return np.zeros(num_rows, dtype=np.int64), 1.0
        prefix = slice(ends[end] + 1)
        depths = np.bincount(row[prefix][taken[which, prefix]], minlength=num_rows)
        return depths, float(rates[which, end]) / num_rows

    def _soonest(self, menu: Menu, left: np.ndarray) -> tuple[np.ndarray, float]:
        """int [B]: the depths with which the row that ends last ends soonest; and the speed of that row, 1 for plain decoding. A static
        batch takes as long as its slowest row, so a row ahead of it does not draft.

        Args:
            left: [B], tokens that each row still has to write.
        """
        num_rows, longest = menu.gains.shape
        won = np.concatenate([np.zeros((num_rows, 1)), menu.gains.cumsum(1)], axis=1)  # [B, K + 1], by depth
        packed = np.concatenate([np.zeros((num_rows, 1)), menu.nodes.cumsum(1)], axis=1)
        slowest = int(left.argmax())
        # Candidates: the speeds, in tokens of the slowest row a step, at which one of the rows ends last. Each of the others then
        # drafts just deep enough to end with it or before.
        rates = np.unique(left[slowest] / np.maximum(left, 1)[:, None] * (1.0 + won))
        rates = np.append(1.0, rates[rates > 1.0])
        rates = rates[np.linspace(0, len(rates) - 1, min(len(rates), self.SPEEDS)).astype(np.int64)]
        needed = left / left[slowest] * rates[:, None] - 1.0  # [C, B], accepted tokens a step
        depth = (won[None, :, :] < needed[:, :, None] - 1e-9).sum(2)  # [C, B]
        reached = (depth <= np.minimum(menu.room, longest)).all(1)
        depth = np.minimum(depth, longest)
        added = np.take_along_axis(packed[None], depth[:, :, None], 2)[:, :, 0].sum(1)
        asked = depth * menu.asks
        missed = ((asked > 0) * menu.backlogs).sum(1) / self.HORIZON
        drafting = self._of_drafting(menu.drafter, num_rows, asked.max(1), asked.sum(1), missed)
        extra = self._extra(num_rows, num_rows + added, drafting)
        times = np.where(reached, (1.0 + extra) / rates, np.inf)
        best = int(times.argmin())
        return depth[best], float(1.0 / times[best])

    # ---- exploring --------------------------------------------------------------------------------------------------

    def _with_trials(
        self, best: Choice, sequences, slots, worth, expected, gains, backlogs, room, is_awake: bool
    ) -> tuple[Choice, float]:
        """`best`, with one token of a drafter for rows where a trial is worth its price; and the steps until another may be."""
        since = self.num_steps - self._tried_at  # 0: it is asked again in this step
        is_due = since >= self.TRIED or not since or not (best.depth.any() or is_awake)
        if not self.models or not is_due:
            return best, self.LONGEST_QUIET
        self._tried_at = self.num_steps
        num_rows, rows, soonest = len(room), np.arange(len(room)), float(self.LONGEST_QUIET)
        current = np.where(best.depth > 0, worth[best.drafter, rows], 0.0)
        likelihoods, shares = self.acceptance.log_likelihood(slots, self.num_steps), self.acceptance.share_of_rows
        gains, prospects = np.maximum(gains, 0.0), np.zeros(num_rows)
        left = np.minimum(tokens_left(sequences), self.HORIZON)
        heads = [index for index in self.models if self.drafters[index].is_head]
        self._of_fresh = max([float(shares[index] * gains[index].max()) for index in heads], default=0.0)
        for index in self.models:
            mine = (best.drafter == index) & (best.depth > 0)
            if index in heads:
                # heads let go for good, so failures count half
                patient = shares[index] * np.exp(0.5 * likelihoods[index])
                prospects = np.maximum(prospects, np.maximum(worth[index], patient * gains[index]))
            # the first trial measures the drafter for later texts too
            risk, least, horizon = (self.RISK, 0, left) if self.drafting[index] else (2 * self.RISK, 64, self.HORIZON)
            chance = shares[index] * np.exp(likelihoods[index])
            value = chance * horizon * (gains[index] - current) * (~mine & (room > 0))
            waiting = np.flatnonzero(value > 0)
            waiting = waiting[np.argsort(-value[waiting], kind="stable")][: max(1, num_rows // self.TRIED)]
            while len(waiting):
                count, backlog = len(waiting), backlogs[index, waiting].sum()
                drafting = self._of_drafting(index, num_rows, 1, count, backlog)
                price = num_rows * self._extra(num_rows, num_rows + count, drafting)
                # what is gained without it, less what it is expected to gain at once
                price += (current - expected[index])[waiting].sum()
                allowed = risk * np.clip(tokens_left(sequences), least, 128).sum()
                if value[waiting].sum() > price and price <= allowed:
                    best = Choice(best.drafter.copy(), best.depth.copy())
                    best.drafter[waiting], best.depth[waiting] = index, 1
                    current[waiting] = np.inf  # no other drafter is tried on these rows
                    break
                if count == 1 and price <= allowed:  # how long the likelihood must age until the value is the price
                    log = likelihoods[index, waiting[0]]
                    needed = log + math.log(max(float(price), 1e-9) / float(value[waiting[0]]))
                    if needed < 0 and log < 0:
                        soonest = min(soonest, math.log(needed / log) / math.log(Acceptance.AGEING))
                waiting = waiting[: len(waiting) // 2]
        if self._followed > self.LEAST_FOLLOWED:
            self._prospects.update((seq.id, float(p)) for seq, p in zip(sequences, prospects, strict=True))
        return best, soonest

    def _be_quiet(self, sequences: list[Sequence], steps: float, begins: list[bool]) -> None:
        """No row is worth drafting for: skip the choice until a trial may be due or a look-up wakes."""
        plain, fresh = self.cost.of_plain(len(sequences)), any(begins)
        for index, share in enumerate(self.acceptance.share_of_rows[: self.num_lookups].tolist()):
            fresh &= share < self._price(index, plain)
            patience, idle = self._patience(index), self._aged_idle(index)
            if patience:
                steps = min(steps, math.log(min(patience / max(idle, 1e-9), 1.0)) / math.log(Acceptance.AGEING))
        price = self._overhead + float(self.seconds.sum())  # of a choice, and of the asks before it
        most = 4 * self.LONGEST_STALE  # as a price may be wrong
        length = max(1, int(steps), min(int(price / plain / self.QUIET_SHARE), most))
        self._quiet_until, self._quiet_rows = self.num_steps + length, frozenset(seq.id for seq in sequences)
        if any(begins):
            self._quiet_left = int(tokens_left(sequences)[begins].max()) if fresh else 0
        self._fresh_until = min([self._due(index, plain) for index in range(self.num_lookups)], default=math.inf)

    # ---- look-ups and heads: what is paid in every step -------------------------------------------------------------

    def is_awake(self, index: int) -> bool:
        """True if a look-up may save more than it takes: by its worth, and by the hope that halves with `TRIAL` asks in vain."""
        if self._table is not None:
            return self._table.left[index] > 0
        return self._aged_idle(index) < self._patience(index)

    def _patience(self, index: int) -> float:
        """How often a look-up is asked in vain until it is hoped to save less than it takes."""
        missing = self._price(index, self.cost.of_plain(self._num_rows)) - float(self._worth[index])
        if missing <= 0:
            return math.inf
        hoped = self.TRIAL * math.log2(max(float(self.acceptance.share_of_rows[index]) / missing, 1.0))
        return max(hoped, self._aged_idle(index) + float(self._granted[index]))

    def _due(self, index: int, plain: float) -> float:
        """The step from which texts that begin let a look-up be asked, although it seldom pays: texts may be of another kind by then."""
        return float(self._asked_at[index] + self.TRIAL * self._price(index, plain) / self.QUIET_SHARE)

    def _aged_idle(self, index: int) -> float:
        return float(self._idle[index] * Acceptance.AGEING ** (self.num_steps - self._asked_at[index]))

    def _price(self, index: int, plain: float) -> float:
        """Tokens a row that asking a look-up costs, with the choice that follows."""
        seconds = self._factor * self.seconds[index] * self._doubt(self._asked_at[index])
        return float(seconds + self._of_choosing(self._num_rows)) / plain

    @property
    def _factor(self) -> float:
        """How much longer than by their parts steps with drafts take: what drafting leaves in the machine's caches makes the rest
        slower."""
        seen, expected = self._dearer
        return min(max((seen + 0.1) / (expected + 0.1), 0.5), 4.0)

    def _value_lookups(self, worth: np.ndarray, choice: Choice) -> None:
        """Note what each look-up that is awake adds to the best of the other drafters, on the rows for which it was chosen."""
        plain = self.cost.of_plain(worth.shape[1])
        second, best = np.sort(np.concatenate([np.zeros((1, worth.shape[1])), worth]), 0)[-2:]
        for index in range(self.num_lookups):
            if self.is_awake(index):
                chosen = (choice.depth > 0) & (choice.drafter == index) & (worth[index] >= best)
                added = float(((best - second) * chosen).mean())
                self._worth[index] += (1.0 - self.WORTH) * (added - self._worth[index])
                is_useful = added > self._price(index, plain)
                self._idle[index] = 0.0 if is_useful else self._aged_idle(index) + 1
                self._granted[index] = self.TRIAL if is_useful else max(self._granted[index] - 1, 0)
                self._asked_at[index] = self.num_steps

    def followed(self, seconds: float, num_rows: int) -> None:
        """Heads took so long to follow a step of `num_rows` rows."""
        if self.cost.target:
            share = seconds / self.cost.of_plain(num_rows)
            self._followed += (1.0 - self.WORTH) * (share - self._followed)

    def heads_follow(self, seq: Sequence | None) -> bool:
        """Whether heads follow the text (None: one that begins now): while they may gain what following takes. A head that misses some
        tokens cannot draft for that text again."""
        if self._followed <= self.LEAST_FOLLOWED:
            return True
        known = None if seq is None else self._prospects.get(seq.id)
        return (self._of_fresh if known is None else known) >= self._followed

    # ---- learning ---------------------------------------------------------------------------------------------------

    def needs_plain_step(self) -> bool:
        """See DraftLengthPolicy: at growing intervals."""
        is_due = self.num_steps >= self._plain_due.get(self.cost.octave, 0)
        return not self.cost.target or (is_due and not self._learns_costs)

    def wants_plain_time(self) -> bool:
        """See DraftLengthPolicy: not in every step, because learning from it takes time too, and not just after one that is not plain: what
        drafting leaves in the machine's caches makes it slower."""
        pause = self.SAMPLED // 4 if self._learns_costs else self.SAMPLED
        is_due = self.num_steps >= self._plain_at + pause or self.needs_plain_step()
        return self._was_plain and is_due

    def _look_at(self, sequences: list[Sequence]) -> None:
        """From now on, costs are those of steps of these rows."""
        self._num_rows = len(sequences)
        self.cost.look_at(len(sequences), sum([len(seq.tokens) for seq in sequences]))

    def _schedule_plain(self) -> None:
        """A plain step was measured: schedule the next one with texts of about this length, at growing intervals."""
        octave = self.cost.octave
        self._plain_pauses[octave] = min(
            2 * self._plain_pauses.get(octave, 4 if self._plain_pauses else 1), self.LONGEST_STALE
        )
        self._plain_due[octave] = self.num_steps + self._plain_pauses[octave]
        self._plain_at = self.num_steps

    def observe_prompts(self, num_tokens: int, seconds: float) -> None:
        """See DraftLengthPolicy."""
        self.cost.observe_prompts(num_tokens, seconds)

    def observe_plain(self, sequences: list[Sequence], seconds: float | None) -> None:
        """See DraftLengthPolicy."""
        if (
            seconds is not None
            and sequences
            and not self._spent
            and (self.wants_plain_time() or not self._learns_costs)
        ):
            self._look_at(sequences)
            self._observe_target(len(sequences), len(sequences), seconds)
        if self._asked is not None:
            self._charge(self._spent)
        self._asked, self._spent, self._was_plain = None, 0.0, True
        self.num_steps += 1

    def observe(self, step: DraftedStep) -> None:
        """Update acceptance and costs."""
        if self._table is not None and self._table.chosen is not None:
            return self._observe_timed(step, self._table)
        asked, self._asked = self._asked, None
        if asked is None or not step.sequences:
            return self.observe_plain(step.sequences, None)
        began = self.clock()
        if not (asked.choice.depth.any() or any(asked.seconds)):  # nobody was asked
            seconds = None if step.seconds is None or step.num_more else step.seconds - step.drafting_seconds
            spent, self._spent = self._spent, 0.0
            self.observe_plain(step.sequences, seconds)
            self._charge(spent + self.clock() - began)
            return None
        self._look_at(step.sequences)
        at = np.array([asked.order[seq.id] for seq in step.sequences])
        drafter, depth = asked.choice.drafter[at], np.where(np.asarray(step.limits) > 0, asked.choice.depth[at], 0)
        slots = self.acceptance.slots(step.sequences, self.num_steps)
        drafted = depth > 0
        offered, accepted = self._judged(step, asked, at, drafter)
        # A row that has ended was cut short, which says nothing about its last draft.
        written = np.where([seq.finished for seq in step.sequences], 0, step.num_new)
        drafting, num_rows = 0.0, len(slots)
        models = np.unique(drafter[drafted & (drafter >= self.num_lookups)]).tolist()
        limits = [np.where(drafter == index, depth, 0) for index in models]
        # Models that drafted in one step share its time as they would by what is known of them.
        usual = [
            max(float(self._of_drafting(index, num_rows, asked.max(), asked.sum())), 1e-9)
            for index, asked in zip(models, limits, strict=True)
        ]
        seconds = max(step.drafting_seconds - sum(asked.seconds) - self._spent, 0.0)
        for index, each, share in zip(models, limits, usual, strict=True):
            drafting += self._observe_model(step, index, slots, each, seconds * share / sum(usual))
        self.acceptance.observe(slots, asked.kinds[:, at], offered, accepted, written, self.num_steps)
        self.steps.update([self.drafters[index].name for index in drafter[drafted].tolist()])
        packed = num_rows + int(step.nodes.sum()) + step.num_more
        if step.seconds is not None:
            self._observe_target(num_rows, packed, step.seconds - step.drafting_seconds)
        self._time_lookups(asked.seconds)
        self.acceptance.saved[slots, 1, : self.num_lookups] += np.asarray(asked.seconds) > 0
        self._settle(slots, drafter, drafted, np.asarray(step.accepted), packed - step.num_more, drafting)
        self._drafted_at[drafter[drafted]] = self.num_steps
        self.num_steps += 1
        self._charge(self._spent + self.clock() - began)
        self._spent = 0.0
        return None

    def _charge(self, spent: float) -> float:
        """Note what choosing, and learning from it, took. Returns it."""
        if self._has_chosen:  # the first choice is slow
            known = self._overhead
            self._overhead += (1.0 - self.WORTH if known else 1.0) * (min(spent, 4 * known or spent) - known)
        self._has_chosen = True
        return spent

    def _observe_target(self, num_rows: int, num_packed: int, seconds: float) -> None:
        """A step with so many packed tokens took so long, drafting left out."""
        self.cost.observe_target(num_rows, num_packed, seconds)
        self._knows_price |= num_packed > num_rows
        if num_packed == num_rows:
            self._schedule_plain()

    def _time_lookups(self, seconds: list[float]) -> None:
        """Note what look-ups took that were asked."""
        for index, taken in enumerate(seconds):
            if taken:
                self._timed[index] += 1
                if self._timed[index] > 1:  # the first ask is slow
                    known, weight = self.seconds[index], max(1.0 - self.WORTH, 1.0 / (self._timed[index] - 1))
                    self.seconds[index] += weight * (min(taken, 4 * known or taken) - known)

    def _settle(self, slots, drafter, drafted, gained, packed: int, drafting: float) -> None:
        """Note what drafts saved on each row."""
        if drafted.any() and self.cost.target:
            num_rows, plain = len(slots), self.cost.of_plain(len(slots))
            spent = float(self.cost.of_target(num_rows, packed)) - plain + drafting + self._of_choosing(num_rows)
            saved = gained[drafted] - num_rows * spent / (plain * drafted.sum())
            self.acceptance.saved[slots[drafted], :, drafter[drafted]] += np.stack([saved, np.ones(len(saved))], axis=1)

    def _judged(
        self, step: DraftedStep, asked: Asked, at: np.ndarray, drafter: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        """int [D, B] each: how deep the draft of each drafter was, and how far it agrees with the text that was written."""
        offered, accepted = np.zeros((2, len(self.drafters), len(at)), dtype=np.int64)
        for index, offer in enumerate(asked.offers):
            if offer.num_nodes:
                offered[index] = (offer.nodes_by_depth[at] > 0).sum(1)
                accepted[index] = [
                    len(offer.matching_path(row, seq.tokens[len(seq.tokens) - count :]))
                    for row, seq, count in zip(at.tolist(), step.sequences, step.num_new, strict=True)
                ]
        rows = np.flatnonzero(drafter >= self.num_lookups)
        offered[drafter[rows], rows] = (step.nodes[rows] > 0).sum(1)
        accepted[drafter[rows], rows] = np.asarray(step.accepted)[rows]
        return offered, accepted

    def _observe_model(
        self, step: DraftedStep, index: int, slots: np.ndarray, limits: np.ndarray, seconds: float
    ) -> float:
        """Learn from the seconds of a drafter that was asked for these depths [B]. Returns its estimate of them, prompts left out."""
        asks = np.flatnonzero(limits)
        lengths = np.array([len(seq.tokens) for seq in step.sequences])[asks]
        read = self.acceptance.read_up_to[slots[asks], index]
        backlogs = lengths - np.asarray(step.num_new)[asks] - read
        depth, num_asked = int(limits.max()), int(limits.sum())
        self.drafting[index].observe_draft(depth, num_asked, int(backlogs.sum()), seconds)
        self.acceptance.asked(index, slots[asks], limits[asks], step.nodes[asks], lengths)
        unread = int(backlogs[read > 0].sum())
        return float(self._of_drafting(index, len(slots), depth, num_asked, unread))

    def forget(self, seq: Sequence) -> None:
        """Drop the row's estimates, and count how it ended."""
        if self._table is not None and self._table.seq is seq:
            self._learn_from_table()
        self._written = self.ENDS * self._written + seq.num_generated
        self._ended = self.ENDS * self._ended + (seq.finished and len(seq.tokens) < seq.max_length)
        self.acceptance.forget(seq)
        self._prospects.pop(seq.id, None)
        if self.when_idle is not None and not self.acceptance.num_rows:
            self.when_idle(self)

    # ---- memory -----------------------------------------------------------------------------------------------------

    def state(self) -> dict[str, Any]:
        """What was learnt of the model and the machine, as JSON; empty before a step was timed."""
        if not self.cost.target:
            return {}
        return {
            "target": self.cost.target.state(), "drafting": [cost.state() for cost in self.drafting],
            "looking_up": self.seconds.tolist(), "overhead": self._overhead, "following": self._followed,
            "acceptance": self.acceptance.state(),
        }  # fmt: skip

    def load(self, state: dict[str, Any]) -> None:
        """Go on from an earlier `state`. Raises KeyError, OverflowError, TypeError, ValueError: the state is not of a policy with these
        drafters. Nothing of it is then taken over."""
        if len(state["drafting"]) != len(self.drafting) or len(state["looking_up"]) != self.num_lookups:
            raise ValueError("costs of other drafters")
        sizes = [(int(octave), int(rows), int(tokens)) for (octave, rows, tokens), *_ in state["target"]]
        # Read it into copies: an error in a later part must not leave the earlier ones behind.
        acceptance, target, drafting = copy(self.acceptance), copy(self.cost.target), list(map(copy, self.drafting))
        acceptance.load(state["acceptance"])
        for cost, kept in zip([target, *drafting], [state["target"], *state["drafting"]], strict=True):
            cost.load(kept)
        times = np.array([*state["looking_up"], state["overhead"], state["following"]], dtype=np.float64)
        if not ((times >= 0.0) & (times < 1e6)).all():
            raise ValueError("invalid times")
        self.acceptance, self.cost.target, self.drafting = acceptance, target, drafting
        self.seconds, (self._overhead, self._followed) = times[:-2], times[-2:].tolist()
        self._timed[self.seconds > 0] = 1.0 / (1.0 - self.WORTH)
        self._knows_price = any(tokens > rows for _, rows, tokens in sizes)
        self._plain_pauses = {octave: self.LONGEST_STALE for octave, *_ in sizes}
        self._plain_due = dict.fromkeys(self._plain_pauses, self.num_steps + self.LONGEST_STALE)

    @contextlib.contextmanager
    def only_costs(self) -> Iterator[None]:
        """Inside the context, rows draft as they ask. Every drafted step is timed, and one plain step in a few. At the end, costs are kept
        and texts are forgotten."""
        when_idle, self.when_idle, known = self.when_idle, None, self.acceptance.state()
        self._learns_costs = True
        try:
            yield
        finally:
            self.when_idle, self._learns_costs = when_idle, False
        if self.cost.target:
            self.load({**self.state(), "acceptance": known})
        self.steps.clear()
        self._granted[:] = 0.0

    # ---- for people -------------------------------------------------------------------------------------------------

    def report(self, num_rows: int = 1) -> dict[str, Any]:
        """What was measured: milliseconds of a plain step, of each further packed token and of each drafter; P(accepted) of a
        draft's first token; and how many drafts of rows each drafter made. What no step has shown yet is None."""
        plain, double = 1e3 * self.cost.of_target(num_rows, np.array([num_rows, 2 * num_rows]))
        drafters = {}
        for index, drafter in enumerate(self.drafters):
            if drafter.is_lookup:
                seconds = float(self.seconds[index]) or None
            else:
                seconds = float(self.drafting[index].of_draft(1, num_rows, 0)) if self.drafting[index] else None
            drafters[drafter.name] = {
                "milliseconds": seconds and 1e3 * seconds, "acceptance": self.acceptance.of_first_token(index),
                "steps": self.steps[drafter.name],
            }  # fmt: skip
        return {"plain_ms": float(plain), "token_ms": float(double - plain) / num_rows, "drafters": drafters}


def tokens_left(sequences: list[Sequence]) -> np.ndarray:
    """int [B]: tokens that each row may still write."""
    return np.array([seq.max_length - len(seq.tokens) for seq in sequences])
