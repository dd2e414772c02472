"""Lookups: which look-ups are asked. A look-up that takes longer than it saves rests."""

from __future__ import annotations

import numpy as np


class Lookups:
    """What each look-up of method "auto" saves, and how long it takes.

    A look-up that takes longer than it saves, compared with the best of the other drafters, rests; each rest is longer than the one before.

    Attributes:
        seconds: float [L], time that each takes in a step in which it is asked.
        rests_until: L ints, the step in which it is asked again.
    """

    TRIAL = 8  # steps in which a look-up is asked before it is judged
    RESTS = 16, 256  # steps for which a look-up rests: the first time, and at most
    VALUE_MEMORY = 0.95  # decay of what a look-up is worth, per step
    TIME_MEMORY = 0.9  # decay of the time that it takes, per step

    def __init__(self, count: int):
        self.seconds = np.zeros(count)
        self.rests_until = [0] * count
        self._worth = np.zeros(count)  # share of a step that each is expected to save in a step
        self._asked_for = np.zeros(count, dtype=np.int64)  # steps since it last rested
        self._rest = np.full(count, self.RESTS[0])

    def awake(self, now: int) -> np.ndarray:
        """bool [L]: those that are asked in this step."""
        return np.array(self.rests_until, dtype=np.int64) <= now

    def all_rest(self, now: int) -> bool:
        """True if none is asked in this step."""
        return min(self.rests_until, default=now + 1) > now

    def wake(self) -> None:
        """Ask all again."""
        self.rests_until = [0] * len(self.rests_until)
        self._asked_for[:] = 0

    def value(self, worth: np.ndarray, now: int) -> None:
        """Note what each look-up that is awake adds to the best of the other drafters.

        Args:
            worth: [D, B], tokens that each drafter is expected to gain on each row in this step; look-ups come first.
        """
        best = worth.max(0)
        for index in np.flatnonzero(self.awake(now)).tolist():
            others = np.delete(worth, index, 0).max(0, initial=0.0)
            added = float(((best - others) / (1.0 + others)).mean())
            self._worth[index] += (1.0 - self.VALUE_MEMORY) * (added - self._worth[index])

    def settle(self, seconds: list[float], plain: float, now: int) -> float:
        """After a step: those that are worth less than their time rest. Returns the seconds of those that were asked.

        Args:
            seconds: [L], time that each took.
            plain: seconds of a plain step.
        """
        spent = 0.0
        for index in np.flatnonzero(self.awake(now)).tolist():
            own, known = seconds[index], float(self.seconds[index])
            self.seconds[index] = known + (1.0 - self.TIME_MEMORY) * (min(own, 4 * known) - known) if known else own
            spent += float(self.seconds[index])
            self._asked_for[index] += 1
            if self._asked_for[index] < self.TRIAL:
                continue
            if self._worth[index] >= self.seconds[index] / plain:
                self._rest[index] = self.RESTS[0]
            else:
                self.rests_until[index] = now + 1 + int(self._rest[index])
                self._rest[index] = min(2 * self._rest[index], self.RESTS[1])
                self._asked_for[index] = 0
        return spent
