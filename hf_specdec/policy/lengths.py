"""Draft lengths that are given: fixed, and by batch size. Those that are measured are in fastest.py."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from ..core.sequence import Sequence


@dataclass
class DraftedStep:
    """One verified step in which some row was asked to draft, as policies see it.

    Attributes:
        limits: how deep each was asked to draft.
        nodes: int [B, D], drafted nodes of each row at depth 1, 2, .. D.
        accepted: per row, how many drafted tokens were accepted.
        num_new: per row, tokens emitted.
        seconds: time of the whole step, drafting included; None if it also read prompts and cannot be compared.
        drafting_seconds: time of the drafting in it, choosing included.
        num_more: verified nodes that no drafter was asked for.
    """

    sequences: list[Sequence]
    limits: list[int]
    nodes: np.ndarray
    accepted: list[int]
    num_new: list[int]
    seconds: float | None = None
    drafting_seconds: float = 0.0
    num_more: int = 0


class DraftLengthPolicy:
    """Decides how deep each row drafts. This base class uses a fixed length: as deep as the row may.

    A policy changes speed, never the text: greedy and coupled output does not depend on drafts, and rejection sampling keeps
    its distribution for any draft. Unless it `needs_observations`, `limits` has no side effects: it may be called twice for a step.
    """

    needs_observations: ClassVar[bool] = False
    holds = False  # whether the present step need not be timed: it is chosen by what is known, for one row or without drafts

    def begin_batch(self) -> None:
        """The sequences that are added next are a static batch: they start together, and no others take the place of those that end."""

    def is_plain(self, sequences: list[Sequence]) -> bool:
        """True if `limits` would be 0 for every row, whatever the caps: known without looking at them."""
        return False

    def limits(self, sequences: list[Sequence], caps: list[int]) -> list[int]:
        """Depth of each row's next draft, between 0 and its cap: the most that the row can use."""
        return caps

    def observe(self, step: DraftedStep) -> None:
        """Learn from a verified step in which some row was asked to draft."""

    def observe_held(self, num_drafted: int, num_accepted: int) -> None:
        """A step of one row that was asked to draft while this policy `holds`: how deep its draft was, and how many tokens of it were
        accepted."""

    def observe_plain(self, sequences: list[Sequence], seconds: float | None) -> None:
        """A step in which no row was asked to draft took so long; None: it was not timed."""

    def observe_prompts(self, num_tokens: int, seconds: float) -> None:
        """A step that also read prompts, `num_tokens` tokens in all, took so long."""

    def num_still(self) -> int:
        """How many of the steps after this one, which does not draft, will neither draft nor be timed while its rows stay the same."""
        return 0

    def pass_by(self, num_steps: int) -> None:
        """So many of the still steps were made."""

    def needs_plain_step(self) -> bool:
        """True if nothing should be drafted in the next step, so that a plain one can be measured."""
        return False

    def wants_plain_time(self) -> bool:
        """True if the time of the next step is useful even if the step does not draft. Otherwise the clock is not read."""
        return True

    def forget(self, seq: Sequence) -> None:
        """The sequence leaves."""


class LengthPerBatchSize(DraftLengthPolicy):
    """K by the number of rows that decode in the step.

    Args:
        ranges: [[first, last, K], ..] from 1 on without gaps; the last K also holds for larger batches.
    """

    def __init__(self, ranges: list[list[int]]):
        self.lasts = np.array([last for _, last, _ in ranges[:-1]], dtype=np.int64)
        self.lengths = [k for _, _, k in ranges]

    def limits(self, sequences: list[Sequence], caps: list[int]) -> list[int]:
        """The table's K for this many rows, within each cap."""
        k = self.lengths[int(np.searchsorted(self.lasts, len(sequences)))]
        return [min(k, cap) for cap in caps]
