"""AutoChoice: which drafter each row gets in a step, and how deep it drafts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from ..candidate_generators.auto.generator import AutoGenerator, Choice
from ..core.draft_trees import DraftTrees
from ..core.sequence import Sequence
from .auto_length import AutoLength, Menu, tokens_left
from .drafter_acceptance import DrafterAcceptance, promised_rates
from .lookups import Lookups
from .step_cost import DraftingCost, StepCost


@dataclass
class Asked:
    """One round of choosing: sequence id → row; each look-up's drafts and its seconds; the kinds [D, B] of all drafts (see
    `DrafterAcceptance`); and what was chosen."""

    order: dict[int, int]
    offers: list[DraftTrees]
    seconds: list[float]
    kinds: np.ndarray
    choice: Choice


class AutoChoice(AutoLength):
    """Chooses among an AutoGenerator's drafters as AutoLength chooses among lengths. `AutoMethod` adds the learning.

    Look-ups are asked first, so their drafts are known when the choice is made. The text that is then written judges all of them,
    whichever draft was verified. A look-up that takes longer than it saves, compared with the best of the other drafters, rests; its
    rests get longer. Drafters with weights are judged by their past drafts. One that a row does not use is tried on the row now and
    then, if it may be better there than the drafter in use.

    A single row gets the drafter and depth with the most expected tokens per second. In a batch, each row first gets the offer of
    the look-up from which it is expected to gain most. Then, for each drafter with weights, there is one more division of the rows:
    this drafter takes the rows that it serves better. The fastest division is used.

    The account of AutoLength bounds what wasted drafts may cost: `ALLOWANCE` of plain decoding. The bookkeeping of steps without drafts
    comes on top; where a step takes less than a millisecond, that shows.

    Args:
        generator: the drafters. This policy becomes its chooser.
        clock: see AutoLength.
    """

    RECHECKS = 16, 256  # steps after which a drafter is tried again on a row that another one serves: at first, at most
    MODEL_GUESS = 0.75  # acceptance of a drafter with weights before it has drafted: it is tried first
    LOOKUP_GUESS = 0.5  # of a look-up that does not say what it expects
    LESS_OFTEN = 4
    OVERDRAFT = 0.25  # plain steps by which one step may overdraw the account
    TRIED = 4  # a drafter is tried on at most one in this many rows at a time

    def __init__(self, generator: AutoGenerator, clock: Callable[[], float] | None = None):
        longest = generator.config.longest_draft or 1
        super().__init__(longest, clock)
        self.cost = StepCost(StepCost.FINE)
        self.names, self.num_lookups = generator.names, generator.num_lookups
        self.longest = generator.longest
        self.drafters = DrafterAcceptance(len(self.names), longest)
        self.drafting = [DraftingCost(dropped=2) for _ in self.names]  # of those with weights
        self.lookups = Lookups(self.num_lookups)
        self._rows: set[int] = set()  # ids of the sequences that have been asked for
        self._drafted_for: set[int] = set()  # those of them that the last choice drafted for
        self._knows_price = False  # whether a step with drafts has been timed
        self._asked: Asked | None = None
        self._able: np.ndarray | None = None  # bool [D, B], which drafters follow which rows; None: all follow all
        self._depth = np.arange(1, longest + 1)
        kinds = [self.LOOKUP_GUESS] * self.num_lookups + [self.MODEL_GUESS] * (len(self.names) - self.num_lookups)
        self._usual_kinds = DrafterAcceptance.kind(np.array(kinds))
        self.generator = generator

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
            self.lookups.wake()
        return caps if any(caps) and not self.is_plain(sequences) else [0] * len(sequences)

    def _is_quiet(self, sequences: list[Sequence]) -> bool:
        """As in the base, but only while all look-ups rest: one that is awake may find a match in any step."""
        return self.lookups.all_rest(self.num_steps) and super()._is_quiet(sequences)

    def is_awake(self, index: int) -> bool:
        """See Chooser."""
        return self.lookups.rests_until[index] <= self.num_steps

    def choose(
        self, sequences: list[Sequence], limits: list[int], offers: list[DraftTrees], seconds: list[float],
        scores: list[list[float] | None] | None = None,
    ) -> Choice:  # fmt: skip
        """See `candidate_generators.auto.generator.Chooser`."""
        began = self.clock()
        room, slots = np.asarray(limits), self.drafters.slots(sequences, self.num_steps)
        self._able = self.generator.able(sequences)
        kinds = np.repeat(self._usual_kinds[:, None], len(room), 1)
        for index, own in enumerate(scores or ()):
            if own is not None and any(offers[index].lengths):
                kinds[index] = DrafterAcceptance.kind(
                    promised_rates(np.asarray(own), np.asarray(offers[index].lengths))
                )
        if not self.cost.target:
            choice = Choice(np.zeros(len(room), dtype=np.int64), np.zeros(len(room), dtype=np.int64))
        else:
            choice = self._best(sequences, slots, kinds, offers, room)
        self._asked = Asked({seq.id: i for i, seq in enumerate(sequences)}, offers, seconds, kinds, choice)
        self._charge(self.clock() - began, len(sequences))
        return choice

    def _best(
        self, sequences: list[Sequence], slots: np.ndarray, kinds: np.ndarray, offers: list[DraftTrees], room: np.ndarray
    ) -> Choice:  # fmt: skip
        """The fastest division of the rows among the drafters, plus the trials that are due, promising and affordable."""
        won = self.drafters.survival(slots, kinds, self.num_steps)
        nodes, reach = self._nodes(offers, room)
        won *= nodes > 0
        if len(sequences) == 1:
            drafter, depth, rates = self._best_of_one(won[:, 0], nodes[:, 0], reach[:, 0], slots, sequences)
            choice, together = Choice(np.array([drafter]), np.array([depth])), False
            worth = np.maximum(rates - 1.0, 0.0)[:, None]
        else:
            price = self._price(len(room))
            worth = _worth(won, nodes, price, reach)
            choice, together = (
                self._best_of_many(won, nodes, reach, worth, slots, sequences),
                self._end_together(sequences),
            )
        self.lookups.value(worth, self.num_steps)
        self._wake(sequences, choice)
        if together:
            left = tokens_left(sequences)
            room = np.where(left == left.max(), room, 0)  # another row's trial would gain nothing
        return self._with_trials(choice, sequences, slots, kinds, worth, room)

    def _nodes(self, offers: list[DraftTrees], room: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """[D, B, K]: the nodes that each draft has at each depth; and int [D, B], how deep it may be."""
        nodes = np.zeros((len(self.names), len(room), len(self._depth)))
        for index, offer in enumerate(offers):
            counts = offer.nodes_by_depth[:, : len(self._depth)]
            nodes[index, :, : counts.shape[1]] = counts
        for index in self._models:
            nodes[index] = self.drafters.nodes(index)
        if self._able is not None:
            nodes *= self._able[:, :, None]
        known = [self._knows_price and (i < self.num_lookups or bool(self.drafting[i])) for i in range(len(self.names))]
        longest = np.where(known, self.longest, 1)  # one token at most until costs are known
        return nodes, np.minimum(room, longest[:, None])

    def _best_of_one(
        self, won: np.ndarray, nodes: np.ndarray, reach: np.ndarray, slots: np.ndarray, sequences: list[Sequence]
    ) -> tuple[int, int, np.ndarray]:
        """For a single row: (drafter, depth, float [D]: speed of each drafter at its best depth, 1 for plain decoding)."""
        plain = float(self.cost.of_target(1, 1))
        seconds = self.cost.of_target(1, 1.0 + nodes.cumsum(1)) - plain
        for index in self._models:
            backlog = (len(sequences[0].tokens) - int(self.drafters.read_up_to[slots[0], index])) / self.HORIZON
            seconds[index] += self.of_drafting(index, 1, self._depth, self._depth, backlog)
        extra = seconds / plain * self._doubt
        offered = (self._depth <= reach[:, None]) & (nodes > 0)
        rates = np.where(offered, (1.0 + won.cumsum(1)) / (1.0 + extra), 0.0)
        affordable = np.where(extra <= self.spendable, rates, 0.0)
        drafter, depth = divmod(int(affordable.argmax()), rates.shape[1])
        return drafter, (depth + 1 if affordable[drafter, depth] > 1.0 else 0), rates.max(1)

    def _best_of_many(
        self, won: np.ndarray, nodes: np.ndarray, reach: np.ndarray, worth: np.ndarray, slots: np.ndarray, sequences: list[Sequence]
    ) -> Choice:  # fmt: skip
        """The fastest of the divisions: all rows look up, or some ask a drafter with weights."""
        together, left = self._end_together(sequences), tokens_left(sequences)
        rows, lengths = np.arange(len(sequences)), np.array([len(seq.tokens) for seq in sequences])
        drafter = worth[: self.num_lookups].argmax(0) if self.num_lookups else np.full(len(rows), -1)
        value = worth[drafter, rows] if self.num_lookups else np.zeros(len(rows))
        found = value > 0
        nobody = np.zeros(len(rows), dtype=bool)

        def menu(index: int, asks: np.ndarray) -> tuple[Menu, np.ndarray]:
            whose = np.where(asks, index, drafter)
            has = (asks | found)[:, None]
            backlogs = (lengths - self.drafters.read_up_to[slots, index]) * asks
            own = Menu(won[whose, rows] * has, nodes[whose, rows] * has, backlogs, reach[whose, rows], asks, index)
            return own, whose

        menus = [menu(0, nobody)] if self.num_lookups else []
        menus += [menu(index, worth[index] > value) for index in self._models if (worth[index] > value).any()]
        best, speed, gain = Choice(np.zeros(len(rows), dtype=np.int64), np.zeros(len(rows), dtype=np.int64)), 1.0, 0.0
        for each, whose in menus:
            self._expected_gain = 0.0
            depth, faster = self._soonest(each, left) if together else self._fastest(each)
            if faster > speed:
                best, speed, gain = Choice(whose, depth), faster, self._expected_gain
        self._expected_gain = gain
        return best

    def _price(self, num_rows: int) -> float:
        """Cost of a packed token, in tokens of plain decoding."""
        plain, double = self.cost.of_target(num_rows, np.array([num_rows, 2 * num_rows]))
        return max(float(double - plain), 0.0) / float(plain)

    def _with_trials(
        self, best: Choice, sequences: list[Sequence], slots: np.ndarray, kinds: np.ndarray, worth: np.ndarray, room: np.ndarray
    ) -> Choice:  # fmt: skip
        """`best`, with one token of a drafter with weights for rows on which a trial is due, as far as the account allows. On a
        row that another drafter serves, the trial must be able to turn out better than that drafter."""
        hoped, lengths = None, np.array([len(seq.tokens) for seq in sequences])
        for index in self._models:
            acceptance = self.drafters
            served = (best.depth > 0) & (best.drafter != index)
            own = (best.depth > 0) & ~served
            acceptance.pauses[slots[own], index] = 1
            last = acceptance.drafted_at[slots, index]
            pause = np.where(
                served, np.maximum(acceptance.pauses[slots, index], self.RECHECKS[0]), acceptance.pauses[slots, index]
            )
            due = ~own & (room > 0) & ((last < 0) | (self.num_steps - last >= pause))
            if self._able is not None:
                due &= self._able[index]
            if due.any() and self.drafting[index]:
                hoped = self._hoped(slots, kinds, room, sequences) if hoped is None else hoped
                due &= hoped[index] > np.maximum(worth[best.drafter, np.arange(len(room))] * served, 0.0)
            waiting = np.flatnonzero(due)
            waiting = waiting[np.argsort(last[waiting], kind="stable")][: max(1, len(room) // self.TRIED)]
            read = acceptance.read_up_to[slots, index]
            # Reading the prompt is free for a single row only: reading all prompts of a batch may cost more than it gains in the call.
            if len(sequences) == 1:
                read = np.where(last < 0, [seq.prompt_length for seq in sequences], read)
            while len(waiting):
                backlog = int((lengths - read)[waiting].sum())
                lost = float(served[waiting].mean())  # what the other drafter would have gained, roughly
                if (
                    self._extra(len(room), len(room) + len(waiting), 1, len(waiting), backlog, index) + lost
                    <= self.spendable
                ):
                    mine = slots[waiting]
                    acceptance.pauses[mine, index] = np.minimum(2 * np.maximum(pause[waiting], 1), self.RECHECKS[1])
                    best = Choice(best.drafter.copy(), best.depth.copy())
                    best.drafter[waiting], best.depth[waiting] = index, 1
                    break
                waiting = waiting[: len(waiting) // 2]
        return best

    def _hoped(self, slots: np.ndarray, kinds: np.ndarray, room: np.ndarray, sequences: list[Sequence]) -> np.ndarray:
        """[D, B]: an optimistic estimate of what drafters with weights are worth to each row, in the unit of `worth`."""
        won = self.drafters.survival(slots, kinds, self.num_steps, hope=True)
        nodes, _ = self._nodes([], room)
        reach = np.minimum(room, self.longest[:, None])
        if len(room) == 1:
            *_, rates = self._best_of_one(won[:, 0] * (nodes[:, 0] > 0), nodes[:, 0], reach[:, 0], slots, sequences)
            return (rates - 1.0)[:, None]
        return _worth(won * (nodes > 0), nodes, self._price(len(room)), reach)

    @property
    def spendable(self) -> float:
        """What the account holds, but at least `OVERDRAFT`, enough for a short draft, so that a text that becomes easy is noticed."""
        return max(self.account, self.OVERDRAFT)

    @property
    def _doubt(self) -> float:
        """Factor on estimated extra times. It shrinks while nothing is drafted, because then nothing is measured."""
        return 0.5 ** ((self.num_steps - self._last_drafted) / self.DOUBT)

    def of_drafting(self, drafter: int, num_rows: int, depth, num_asked, backlog):
        """Seconds that a drafter with weights takes. The look-ups have been asked already."""
        return self.drafting[drafter].of_draft(depth, num_asked, backlog)

    def _wake(self, sequences: list[Sequence], choice: Choice) -> None:
        """Ask all look-ups again if a row was drafted for until now and no longer is, because its text has changed."""
        drafted = {seq.id for seq, depth in zip(sequences, choice.depth.tolist(), strict=True) if depth}
        if any(seq.id in self._drafted_for and seq.id not in drafted for seq in sequences):
            self.lookups.wake()
        self._drafted_for = drafted


def _worth(gains: np.ndarray, nodes: np.ndarray, price: float, reach: np.ndarray) -> np.ndarray:
    """[D, B]: the most that each draft is expected to gain, less the price of its tokens, at any depth within its reach; at least 0."""
    allowed = np.arange(gains.shape[2]) < reach[:, :, None]
    return np.where(allowed, (gains - price * nodes).cumsum(2), 0.0).max(2, initial=0.0)
