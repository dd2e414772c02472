"""HeadLearner: the interface through which the decoder lets its drafter's head learn between steps."""

from __future__ import annotations

from typing import Any, Protocol

from ..core.outcome import StepOutcome
from ..core.output import Taps
from ..core.sequence import Sequence


class HeadLearner(Protocol):
    """Learns from steps. `learning.Learner` is the implementation in use.

    Attributes:
        taps: hidden states of the target that it learns from.
    """

    taps: Taps

    @property
    def has_swap(self) -> bool:
        """Whether better weights wait for decoding to pause."""
        ...

    def swap(self) -> bool:
        """Put better weights in place, if there are any; called while no step is under way. Returns whether it did."""
        ...

    def observe(self, outcome: StepOutcome) -> None:
        """A step was verified."""
        ...

    def ended(self, seq: Sequence) -> None:
        """A sequence leaves, finished or not."""
        ...

    def between_steps(self) -> None:
        """Work for a bounded time."""
        ...

    def report(self) -> dict[str, Any]:
        """What was learnt, for statistics."""
        ...
