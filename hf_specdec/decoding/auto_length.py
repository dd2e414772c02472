"""AutoLength: the fastest draft lengths by measured costs and acceptance ("auto")."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from ..core.sequence import Sequence
from .acceptance import AcceptanceEstimates, DraftedStep
from .draft_length import DraftLengthPolicy
from .step_cost import StepCost


@dataclass
class Menu:
    """What the rows of a step may draft.

    Attributes:
        gains: float [B, K], accepted tokens that drafting to depth d adds to drafting to d - 1.
        nodes: float [B, K], packed tokens that depth d adds.
        backlogs: [B], tokens that the drafter has to catch up with before it can draft.
        room: [B], the deepest that each row may draft.
        asks: bool [B], rows whose drafts take the drafter's time. The drafts of the other rows are known already.
        drafter: which drafter is asked; see `AutoLength.of_drafting`.
    """

    gains: np.ndarray
    nodes: np.ndarray
    backlogs: np.ndarray
    room: np.ndarray
    asks: np.ndarray
    drafter: int = 0

    @classmethod
    def of_one(cls, gains: np.ndarray, nodes: np.ndarray, backlogs: np.ndarray, room: np.ndarray) -> Menu:
        """The menu of a single drafter."""
        return cls(gains, nodes, backlogs, room, np.ones(len(room), dtype=bool))


class AutoLength(DraftLengthPolicy):
    """The fastest lengths, by measured step costs and acceptance.

    Where other sequences take the place of those that end, the fastest lengths give the most expected tokens per second. Each
    further draft token of a row has a gain (the probability that it and all tokens before it are accepted) and a cost. Tokens are
    sorted by gain per packed token; of all prefixes of that order, at each depth of drafting, the one with the most expected
    tokens per second is chosen. So an easy row drafts far while a hard row beside it does not draft.

    A static batch whose rows end together, at their maximum length, takes as long as its slowest row. There the fastest lengths
    make the product of the remaining steps and the time of a step smallest: a row ahead of the slowest one does not draft.

    A row that is not worth drafting for is probed with one token now and then; each failed probe doubles the pause before the
    next. Time lost against plain decoding, including the time of choosing, is charged to an account, which earns `ALLOWANCE` of the
    time spent and is credited with time saved. No step may cost more than the account holds, which bounds the loss on text where
    nothing is accepted.

    Args:
        longest: deepest draft there can be.
        clock: seconds, to charge the time of choosing; None: it is not charged.
    """

    needs_observations = True
    ALLOWANCE = 0.01  # share of the time that drafts may waste
    CREDIT = 0.75  # plain steps that may be wasted at the start
    MOST_SAVED = 8.0  # plain steps; upper limit of the account
    LONGEST_PAUSE = 64  # steps between two probes of a row
    SPEEDS = 256  # how many speeds of a static batch are compared
    PREFIXES = 256  # how many prefixes of the order are compared
    HORIZON = 32  # steps over which the cost of the drafter catching up is spread
    FIRST_DRAFT = 1  # draft length in the prompt's step, before any cost is known
    UNTIMED = 2  # longest draft before the cost of drafting is known
    DOUBT = 64  # steps without drafting after which the estimated extra cost is halved
    EVERY_PLAIN = 8  # every 8th step without drafts is timed
    PROMISES = 8.0  # initial weight, in tokens, of the belief that `_soonest`'s promises are kept
    PROMISE_MEMORY = 0.97  # decay per step of what is known about promises
    ENDED_MEMORY = 0.9  # decay of the counts of how rows ended
    LONGEST_STALE = 256  # steps between two measurements of a plain step while drafting pays
    LESS_OFTEN = 2  # factor by which that interval grows
    OUTLIER = 1.5  # a step of several rows is charged at most this many times its estimate
    FIRST_PAUSE = 4  # times LESS_OFTEN: the first interval when texts reach another octave of length

    def __init__(self, longest: int, clock: Callable[[], float] | None = None):
        self.cost, self.clock = StepCost(), clock or (lambda: 0.0)
        self.acceptance = AcceptanceEstimates(longest)
        self.account = self.CREDIT
        self.num_steps = 0
        self._last_drafted = 0
        self._plain_pauses: dict[int, int] = {}  # by octave of the texts' length; see `_schedule_plain`
        self._plain_due: dict[int, int] = {}
        self._quiet_until, self._quiet_rows = 0, frozenset()
        self._static = False
        # Tokens that the slowest row of a static batch gained by drafts, and that it was expected to gain.
        self._gained = np.full(2, self.PROMISES)
        self._expected_gain = 0.0  # of the step under way
        self._ended = np.array([1.0, 0.0])  # how rows that could end early ended: early, at their maximum length
        # Candidate depths of the deepest draft: every depth at first, then with growing gaps.
        self._depths = np.unique(np.minimum(longest, [1, 2, 3, 4, 5, 6, 8, 10, 12, 16, 24, 32, longest]))

    # ---- choosing ---------------------------------------------------------------------------------------------------

    def begin_batch(self) -> None:
        """See DraftLengthPolicy."""
        self._static = True

    def _end_together(self, sequences: list[Sequence]) -> bool:
        """True if the rows of a static batch are expected to end at their maximum length: as they must, or as earlier ones did."""
        if not self._static:
            return False
        return self._ended[1] > self._ended[0] or not any(seq.eos_token_ids for seq in sequences)

    def limits(self, sequences: list[Sequence], caps: list[int]) -> list[int]:
        """Depths that maximise the expected tokens per second, plus the probes that are due and affordable."""
        if not any(caps) or self.is_plain(sequences):
            return [0] * len(sequences)
        began = self.clock()
        chosen = self._chosen(sequences, caps)
        self._charge(self.clock() - began, len(sequences))
        return chosen

    def _look_at(self, sequences: list[Sequence]) -> None:
        """From now on, costs are those of steps of these rows."""
        self.cost.look_at(len(sequences), sum([len(seq.tokens) for seq in sequences]))

    def _charge(self, seconds: float, num_rows: int) -> None:
        """Charge the time of choosing, or of learning from what was chosen."""
        if self.cost.target:
            self.account -= seconds / self.cost.of_plain(num_rows)

    def _chosen(self, sequences: list[Sequence], caps: list[int]) -> list[int]:
        """`limits` of rows that may draft."""
        rows = self.acceptance.rows(sequences)
        gains, nodes = self.acceptance.expected(rows)
        backlogs = self.acceptance.backlogs(rows, sequences)
        room = np.asarray(caps)
        if not self.cost.target:  # no costs are known: draft only in a step that reads a prompt, where it costs little
            begins = [seq.num_generated == 0 for seq in sequences]
            return np.where(begins, np.minimum(room, self.FIRST_DRAFT), 0).tolist()
        if not self.cost.drafting:
            room = np.minimum(room, self.UNTIMED)
        if self._end_together(sequences):
            left = tokens_left(sequences)
            chosen, _ = self._soonest(Menu.of_one(gains, nodes, backlogs, room), left)
            room = np.where(left == left.max(), room, 0)  # another row's probe would gain nothing
        else:
            chosen, _ = self._fastest(Menu.of_one(gains, nodes, backlogs, room))
        return self._with_probes(chosen, rows, nodes, backlogs - self._unread(rows, sequences), room).tolist()

    def is_plain(self, sequences: list[Sequence]) -> bool:
        """True if the account is empty, a plain step is due to be measured, or these rows wait for a probe."""
        self._look_at(sequences)
        return self._must_be_plain() or self._is_quiet(sequences)

    @property
    def spendable(self) -> float:
        """How much time the next step may waste, in plain steps."""
        return self.account

    def _must_be_plain(self) -> bool:
        return self.account <= 0 or self._plain_is_due()

    def _plain_is_due(self) -> bool:
        """True if a plain step is to be measured, so that its cost stays known."""
        return bool(self.cost.target) and self.num_steps >= self._plain_due.get(self.cost.octave, 0)

    def _is_quiet(self, sequences: list[Sequence]) -> bool:
        """True if these rows did not draft in the last step and no probe is due: the choice would be the same."""
        return self.num_steps < self._quiet_until and all(seq.id in self._quiet_rows for seq in sequences)

    def _fastest(self, menu: Menu) -> tuple[np.ndarray, float]:
        """int [B]: the depths with the most expected tokens per second; and their speed, 1 for plain decoding."""
        num_rows, longest = menu.gains.shape
        worth = np.minimum.accumulate(menu.gains / np.maximum(menu.nodes, 1e-9), axis=1)  # depths are taken in order
        allowed = np.arange(longest) < menu.room[:, None]
        order = np.argsort(-worth.T, axis=None, kind="stable")  # ties: shallow first
        order = order[allowed.T.ravel()[order]]
        depth, row = np.divmod(order, num_rows)
        asks = menu.asks[row]
        taken = (depth < self._depths[:, None]) | ~asks  # [depths, tokens]
        won = (menu.gains[row, depth] * taken).cumsum(1)
        packed = num_rows + (menu.nodes[row, depth] * taken).cumsum(1)
        missed = ((depth == 0) * asks * menu.backlogs[row]).cumsum() / self.HORIZON
        ends = np.unique(np.linspace(0, len(order) - 1, min(len(order), self.PREFIXES)).astype(np.int64))
        asked = (taken & asks).cumsum(1)[:, ends]
        extra = self._extra(num_rows, packed[:, ends], self._depths[:, None], asked, missed[ends], menu.drafter)
        rates = np.where(extra <= self.spendable, (num_rows + won[:, ends]) / (1.0 + extra), 0.0)
        which, end = np.unravel_index(rates.argmax(), rates.shape)
        if rates[which, end] <= num_rows:
            return np.zeros(num_rows, dtype=np.int64), 1.0
        prefix = slice(ends[end] + 1)
        depths = np.bincount(row[prefix][taken[which, prefix]], minlength=num_rows)
        return depths, float(rates[which, end]) / num_rows

    def _soonest(self, menu: Menu, left: np.ndarray) -> tuple[np.ndarray, float]:
        """int [B]: the depths with which the row that ends last ends soonest; and the speed of that row, 1 for plain decoding.

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
        drafts = depth > 0
        added = np.take_along_axis(packed[None], depth[:, :, None], 2)[:, :, 0].sum(1)
        asked = depth * menu.asks
        missed = ((asked > 0) * menu.backlogs).sum(1) / self.HORIZON
        extra = self._extra(num_rows, num_rows + added, asked.max(1), asked.sum(1), missed, menu.drafter)
        # The row that ends last is the one with the least luck, so it gains less than expected: discount by what such rows gained.
        real = 1.0 + (rates - 1.0) * min(self._gained[0] / self._gained[1], 1.0)
        times = np.where(reached & ((extra <= self.spendable) | ~drafts.any(1)), (1.0 + extra) / real, np.inf)
        best = int(times.argmin())
        self._expected_gain = float(rates[best]) - 1.0
        return depth[best], float(1.0 / times[best])

    def _with_probes(self, chosen: np.ndarray, rows: np.ndarray, nodes, backlogs, room) -> np.ndarray:
        """`chosen`, plus one token for rows whose pause is over, as far as the account allows."""
        due = (chosen == 0) & (room > 0) & (self.num_steps % self.acceptance.pauses[rows] == 0)
        waiting = np.flatnonzero(due)
        if not len(waiting):
            return chosen
        waiting = waiting[np.argsort(self.acceptance.last_drafted[rows[waiting]], kind="stable")]
        before = self._extra_of(chosen, nodes, backlogs)
        while len(waiting):
            probed = chosen.copy()
            probed[waiting] = 1
            if self._extra_of(probed, nodes, backlogs) - before <= self.account:
                return probed
            waiting = waiting[: len(waiting) // 2]
        return chosen

    def _extra_of(self, lengths: np.ndarray, nodes: np.ndarray, backlogs: np.ndarray) -> float:
        """`_extra` of a step with these depths."""
        packed = len(lengths) + (nodes * (np.arange(nodes.shape[1]) < lengths[:, None])).sum()
        return float(self._extra(len(lengths), packed, lengths.max(), lengths.sum(), (backlogs * (lengths > 0)).sum()))

    def _extra(self, num_rows: int, num_packed, depth, num_asked, backlog, drafter: int = 0):
        """Extra time of a step over a plain one, in plain steps. While nothing is drafted, nothing is measured, so the estimate
        is discounted more and more."""
        plain = self.cost.of_target(num_rows, num_rows)
        drafting = self.of_drafting(drafter, num_rows, depth, num_asked, backlog)
        seconds = self.cost.of_target(num_rows, num_packed) - plain + drafting
        return seconds / plain * 0.5 ** ((self.num_steps - self._last_drafted) / self.DOUBT)

    def of_drafting(self, drafter: int, num_rows: int, depth, num_asked, backlog):
        """Seconds that a drafter takes for these sizes. Here there is one drafter."""
        return self.cost.drafting.of_draft(depth, num_asked, backlog)

    # ---- learning ---------------------------------------------------------------------------------------------------

    def observe(self, step: DraftedStep) -> None:
        """Update acceptance, costs and the account."""
        drafted = any(step.limits)
        if not drafted and (self._must_be_plain() or self._is_quiet(step.sequences)):  # nothing was chosen
            self._observe_plain(step.sequences, step.seconds)
        else:
            self._look_at(step.sequences)
            if drafted:
                began = self.clock()
                self._observe_drafts(step)
                self._charge(self.clock() - began, len(step.sequences))
            else:
                self._observe_plain(step.sequences, step.seconds)
            self._settle_quiet(step.sequences, chose_none=not drafted)
        self.num_steps += 1

    def wants_plain_time(self) -> bool:
        """See DraftLengthPolicy: every few steps."""
        return self.num_steps % self.EVERY_PLAIN == 0 or not self.cost.target or self._plain_is_due()

    def _observe_plain(self, sequences: list[Sequence], seconds: float | None) -> None:
        self._settle(1.0, 1.0)
        if seconds is not None and self.wants_plain_time():
            self._look_at(sequences)
            self.cost.observe_target(len(sequences), len(sequences), seconds)
            self._schedule_plain()

    def _observe_drafts(self, step: DraftedStep) -> None:
        limits, new_tokens = np.asarray(step.limits), np.asarray(step.num_new)
        rows = self.acceptance.rows(step.sequences)
        asked = limits > 0
        backlogs = self.acceptance.backlogs(rows, step.sequences) - new_tokens  # as it was when drafting began
        backlog, unread = int(backlogs[asked].sum()), int(self._unread(rows, step.sequences)[asked].sum())
        depth, num_asked = int(limits.max()), int(limits.sum())
        self.cost.drafting.observe_draft(depth, num_asked, backlog, step.drafting_seconds)
        self._last_drafted = self.num_steps
        num_rows, packed = len(rows), len(rows) + int(step.nodes.sum())
        if step.seconds is not None:
            self.cost.observe_target(num_rows, packed, step.seconds - step.drafting_seconds)
            if self.cost.target:
                plain, target = self.cost.of_target(num_rows, np.array([num_rows, packed]))
                drafting, with_prompts = self.cost.drafting.of_draft(
                    depth, num_asked, np.array([backlog - unread, backlog])
                )
                if not self.cost.drafting:
                    drafting = with_prompts = min(step.drafting_seconds, plain)  # it may have compiled something
                spent = target + drafting
                # With several rows the estimate's error would be too large for the account: charge what the step took without
                # reading prompts, whether that is more or less, but at most `OUTLIER` times the estimate.
                if num_rows > 1:
                    spent = min(step.seconds - (with_prompts - drafting), self.OUTLIER * spent)
                progress = self._progress(step)
                self._settle(float(spent / plain), progress)
                self._settle_promise(step.sequences, progress)
            if packed == num_rows:
                self._schedule_plain()
        self.acceptance.observe(rows, step, self.num_steps, self.LONGEST_PAUSE)

    def _progress(self, step: DraftedStep) -> float:
        """The plain steps that a step with drafts stands for."""
        if not self._end_together(step.sequences):
            return float(np.mean(step.num_new))
        left, num_new = tokens_left(step.sequences), np.asarray(step.num_new)
        return float((left + num_new).max() - left.max())

    def _settle_promise(self, sequences: list[Sequence], progress: float) -> None:
        """Compare what the slowest row of a static batch gained with what was expected; without drafts, forget it slowly."""
        if not self._end_together(sequences) or len(sequences) == 1:
            return
        if self._expected_gain > 0.0:
            self._gained = self.PROMISE_MEMORY * self._gained + [max(progress - 1.0, 0.0), self._expected_gain]
        else:
            self._gained += 0.002 * (self._gained[1] - self._gained[0]) * np.array([1.0, 0.0])

    def _settle_quiet(self, sequences: list[Sequence], chose_none: bool) -> None:
        """If no row was worth drafting for, skip the choice until a probe is due."""
        self._quiet_until, self._quiet_rows = 0, frozenset()
        if chose_none:
            pause = int(self.acceptance.pauses[self.acceptance.rows(sequences)].min())
            self._quiet_until = (self.num_steps // pause + 1) * pause
            self._quiet_rows = frozenset(seq.id for seq in sequences)

    def _unread(self, rows: np.ndarray, sequences: list[Sequence]) -> np.ndarray:
        """int [B]: prompt tokens that the drafter has not read. Reading them is not charged to the account: it is small against
        the target's own reading of the prompt, and not decoding time."""
        return np.where(self.acceptance.last_drafted[rows] < 0, [seq.prompt_length for seq in sequences], 0)

    def _settle(self, spent: float, emitted: float) -> None:
        """Update the account after a step that took as long as `spent` plain steps and emitted `emitted` tokens per row."""
        spent = min(spent, 1.0 + self.MOST_SAVED)  # one outlier must not stop drafting for good
        self.account = min(self.account + self.ALLOWANCE * spent + emitted - spent, self.MOST_SAVED)

    def _schedule_plain(self) -> None:
        """A plain step was measured: schedule the next one with texts of about this length, at growing intervals."""
        octave = self.cost.octave
        pause = self._plain_pauses.get(octave, self.FIRST_PAUSE if self._plain_pauses else 1)
        self._plain_pauses[octave] = min(self.LESS_OFTEN * pause, self.LONGEST_STALE)
        self._plain_due[octave] = self.num_steps + self._plain_pauses[octave]

    def forget(self, seq: Sequence) -> None:
        """Drop the row's estimates, and note how it ended."""
        self.acceptance.forget(seq)
        if seq.finished and seq.eos_token_ids:
            self._ended *= self.ENDED_MEMORY
            self._ended[int(len(seq.tokens) >= seq.max_length)] += 1.0


def tokens_left(sequences: list[Sequence]) -> np.ndarray:
    """int [B]: tokens that each row may still write."""
    return np.array([seq.max_length - len(seq.tokens) for seq in sequences])
