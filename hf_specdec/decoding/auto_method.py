"""AutoMethod: the fastest drafter and draft length for each row and step, by measured costs and acceptance."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from copy import copy
from typing import Any

import numpy as np

from ..candidate_generators.auto.generator import AutoGenerator
from ..core.sequence import Sequence
from .acceptance import DraftedStep
from .auto_choice import Asked, AutoChoice
from .auto_memory import AutoMemory


class AutoMethod(AutoChoice):
    """The policy of method "auto": chooses as `AutoChoice` does, and learns costs and acceptance from every step.

    Time spent in steps without drafts counts, too. Drafters that keep the hidden states of every token cost something in every step;
    while that is more than they gain, they rest: they stop following the running texts, and do not follow new ones.

    Args:
        generator, clock: see AutoChoice.
        memory: keeps what was learnt from process to process; None: it is not kept.

    Attributes:
        heads_follow: see `candidate_generators.auto.generator.Chooser`.
        steps: drafter → number of its drafts, counted per row.
    """

    FOLLOWED_MEMORY = 0.9  # decay of the time that heads take to follow a step
    LEAST_FOLLOWED = 0.005  # share of a plain step: heads that take less never rest
    HEADS_REST_AT = -0.25  # plain steps in the account
    SINCE_A_HEAD = 8  # heads rest only after this many steps without a draft of theirs
    NOISE = 1.25  # up to so many times its estimate, the time of a step of several rows counts as noise
    SETTLED = 0.1  # share of `_overrun` that one step is charged

    def __init__(
        self, generator: AutoGenerator, clock: Callable[[], float] | None = None, memory: AutoMemory | None = None
    ):
        super().__init__(generator, clock)
        self.heads_follow, self._followed, self._head_drafted = True, 0.0, 0
        self._overrun = 0.0  # noise that is not charged yet, in seconds; negative if steps were shorter than estimated
        self.steps = Counter[str]()
        self.memory = memory
        if memory is not None:
            memory.restore(self)
        generator.chooser = self

    # ---- what steps cost --------------------------------------------------------------------------------------------

    def followed(self, seconds: float, num_rows: int) -> None:
        """See Chooser. The time is charged; heads rest if it is too much. `observe` wakes them."""
        if not self.cost.target:
            return
        share = seconds / self.cost.of_plain(num_rows)
        self._followed += (1.0 - self.FOLLOWED_MEMORY) * (min(share, 0.5) - self._followed)
        self.account -= min(share, 0.5)
        dear = self._followed > self.LEAST_FOLLOWED and self.num_steps - self._head_drafted >= self.SINCE_A_HEAD
        if dear and self.account <= self.HEADS_REST_AT:
            self.heads_follow = False

    # ---- learning ---------------------------------------------------------------------------------------------------

    def observe(self, step: DraftedStep) -> None:
        """Update acceptance, costs and the account."""
        if self._asked is None and step.seconds is None and step.sequences:  # nothing was asked and nothing was timed
            quiet = self._is_quiet(step.sequences)
            if quiet or self._must_be_plain():
                self._quiet_until = self._quiet_until if quiet else 0
                self._settle(1.0, 1.0)
                self.heads_follow |= self.account >= self.CREDIT
                self.num_steps += 1
                return
        asked, self._asked, was_free = self._asked, None, not self._must_be_plain()
        began, drafted = self.clock(), False
        if step.sequences:
            self._look_at(step.sequences)
        if asked is None or not step.sequences:
            if step.sequences:
                self._observe_plain(step.sequences, step.seconds)
        else:
            drafted = self._observe_choice(step, asked)
            self._charge(self.clock() - began, len(step.sequences))
        if step.sequences and (drafted or not self._is_quiet(step.sequences)):
            self._settle_quiet(step.sequences, was_free and not drafted)
        self.heads_follow |= self.account >= self.CREDIT
        self.num_steps += 1

    def _observe_choice(self, step: DraftedStep, asked: Asked) -> bool:
        """Learn from a step in which drafters were asked. Returns whether any of them was chosen."""
        at = np.array([asked.order[seq.id] for seq in step.sequences])
        drafter, depth = asked.choice.drafter[at], np.where(np.asarray(step.limits) > 0, asked.choice.depth[at], 0)
        slots = self.drafters.slots(step.sequences, self.num_steps)
        num_rows, drafted = len(at), depth > 0
        offered, accepted = self._judged(step, asked, at, drafter)
        drafting = 0.0
        for index in np.unique(drafter[drafted & (drafter >= self.num_lookups)]).tolist():
            limits = np.where(drafter == index, depth, 0)
            drafting += self._observe_model(step, index, slots, limits, sum(asked.seconds))
        # A row that has ended was cut short, which says nothing about its last draft.
        written = np.where([seq.finished for seq in step.sequences], 0, step.num_new)
        self.drafters.observe(slots, asked.kinds[:, at], offered, accepted, written, self.num_steps)
        for index in drafter[drafted].tolist():
            self.steps[self.names[index]] += 1
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
            spent += drafting + self.lookups.settle(asked.seconds, float(plain), self.num_steps)
            if num_rows > 1:
                spent = self._charged(spent, step.seconds)
            progress = self._progress(step)
            self._settle(float(spent / plain), progress)
            self._settle_promise(step.sequences, progress)
        return bool(drafted.any())

    def _charged(self, estimate: float, seconds: float) -> float:
        """Seconds that the account is charged for a step of several rows.

        The account cannot bear the error of estimates alone. If each step were charged its own time, a few long ones would end
        drafting. So the noise, what differs from the estimate by less than `NOISE`, is charged over later steps. The rest is charged now.
        """
        beyond = max(seconds - self.NOISE * estimate, 0.0)
        self._overrun += seconds - beyond - estimate
        charged = estimate + beyond + self.SETTLED * self._overrun
        self._overrun *= 1.0 - self.SETTLED
        return charged

    def _judged(
        self, step: DraftedStep, asked: Asked, at: np.ndarray, drafter: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        """int [D, B] each: how deep the draft of each drafter was, and how far it agrees with the text that was written."""
        offered, accepted = np.zeros((2, len(self.names), len(at)), dtype=np.int64)
        new = [seq.tokens[len(seq.tokens) - count :] for seq, count in zip(step.sequences, step.num_new, strict=True)]
        for index, offer in enumerate(asked.offers):
            if offer.num_nodes:
                offered[index] = (offer.nodes_by_depth[at] > 0).sum(1)
                accepted[index] = [
                    len(offer.matching_path(row, text)) for row, text in zip(at.tolist(), new, strict=True)
                ]
        rows = np.flatnonzero(drafter >= self.num_lookups)
        offered[drafter[rows], rows] = (step.nodes[rows] > 0).sum(1)
        accepted[drafter[rows], rows] = np.asarray(step.accepted)[rows]
        return offered, accepted

    def _observe_model(
        self, step: DraftedStep, index: int, slots: np.ndarray, limits: np.ndarray, lookup_seconds: float
    ) -> float:
        """Learn what the drafts of a drafter with weights cost. Returns its estimated seconds, reading prompts left out."""
        asks = np.flatnonzero(limits)
        lengths = np.array([len(seq.tokens) for seq in step.sequences])[asks]
        begun, first = lengths - np.asarray(step.num_new)[asks], self.drafters.drafted_at[slots[asks], index] < 0
        backlog = int((begun - self.drafters.read_up_to[slots[asks], index]).sum())
        unread = int(np.array([seq.prompt_length for seq in step.sequences])[asks][first].sum())
        depth, num_asked = int(limits.max()), int(limits.sum())
        seconds = max(step.drafting_seconds - lookup_seconds, 0.0)
        self._head_drafted = self.num_steps
        self.drafting[index].observe_draft(depth, num_asked, backlog, seconds)
        self.drafters.asked(index, slots[asks], limits[asks], step.nodes[asks], lengths, self.num_steps)
        return float(self.of_drafting(index, len(slots), depth, num_asked, max(backlog - unread, 0)))

    def _settle_quiet(self, sequences: list[Sequence], chose_none: bool) -> None:
        """If no row was worth drafting for, skip the choice until a trial is due."""
        self._quiet_until, self._quiet_rows = 0, frozenset()
        if chose_none and self._models:
            slots = self.drafters.slots(sequences, self.num_steps)
            models = slice(self.num_lookups, None)
            due = self.drafters.drafted_at[slots, models] + self.drafters.pauses[slots, models]
            self._quiet_until = max(int(due.min()), self.num_steps + 1)
        elif chose_none:
            self._quiet_until = min(self.lookups.rests_until)
        self._quiet_rows = frozenset(seq.id for seq in sequences)

    def forget(self, seq: Sequence) -> None:
        """Drop the row's estimates, and note how it ended. What was learnt is kept once no row is left."""
        super().forget(seq)
        self._rows.discard(seq.id)
        self.drafters.forget(seq)
        if self.memory is not None and not self._rows:
            self.memory.keep(self)

    # ---- memory -----------------------------------------------------------------------------------------------------

    def state(self) -> dict[str, Any]:
        """What was learnt of the model and the machine, as JSON; empty before a step was timed."""
        return (
            {}
            if not self.cost.target
            else {
                "target": self.cost.target.state(),
                "drafting": [cost.state() for cost in self.drafting],
                "looking_up": self.lookups.seconds.tolist(),
                "gained": self._gained.tolist(),
                "drafters": self.drafters.state(),
            }
        )

    def load(self, state: dict[str, Any]) -> None:
        """Go on from an earlier `state`.

        Raises:
            KeyError, TypeError, ValueError: the state is not of a policy with these drafters. Nothing of it is then taken over.
        """
        if len(state["drafting"]) != len(self.drafting) or len(state["looking_up"]) != self.num_lookups:
            raise ValueError("costs of other drafters")
        sizes = [(octave, rows, tokens) for (octave, rows, tokens), *_ in state["target"]]
        # Read it into copies: an error in a later part must not leave the earlier ones behind.
        drafters, costs = copy(self.drafters), [copy(each) for each in (self.cost.target, *self.drafting)]
        drafters.load(state["drafters"])
        for cost, own in zip(costs, [state["target"], *state["drafting"]], strict=True):
            cost.load(own)
        seconds, gained = (np.array([float(each) for each in state[name]]) for name in ("looking_up", "gained"))
        self.drafters, self.cost.target, self.drafting = drafters, costs[0], costs[1:]
        self.lookups.seconds, self._gained = seconds, gained
        self._knows_price = any(tokens > rows for _, rows, tokens in sizes)
        self._plain_pauses = {octave: self.LONGEST_STALE for octave, *_ in sizes}
        self._plain_due = dict.fromkeys(self._plain_pauses, self.num_steps + self.LONGEST_STALE)

    # ---- for people -------------------------------------------------------------------------------------------------

    def report(self, num_rows: int = 1) -> dict[str, Any]:
        """What was measured: milliseconds of a plain step, of each further packed token and of each drafter; P(accepted) of a
        draft's first token; and how many drafts of rows each drafter made. What no step has shown yet is None."""
        plain, double = 1e3 * self.cost.of_target(num_rows, np.array([num_rows, 2 * num_rows]))
        drafters = {}
        for index, name in enumerate(self.names):
            if index < self.num_lookups:
                seconds = float(self.lookups.seconds[index]) or None
            else:
                seconds = float(self.of_drafting(index, num_rows, 1, num_rows, 0)) if self.drafting[index] else None
            drafters[name] = {
                "milliseconds": seconds and 1e3 * seconds, "acceptance": self.drafters.acceptance(index), "steps": self.steps[name],
            }  # fmt: skip
        return {"plain_ms": float(plain), "token_ms": float(double - plain) / num_rows, "drafters": drafters}
