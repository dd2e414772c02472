"""Time budgets: every section gets its share of what is left, and a section that overruns is stopped."""

from __future__ import annotations

import contextlib
import signal
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass


class OutOfTime(BaseException):
    """A section's time is over. No `Exception`: libraries that catch those must not swallow it."""


def share(name: str, waiting: list[str], weights: dict[str, float], seconds_left: float) -> float:
    """Seconds for section `name` out of those left for it and all that are `waiting` after it: what one saves, the rest get."""
    total = weights[name] + sum(weights[each] for each in waiting)
    return seconds_left * weights[name] / total


@dataclass
class Budget:
    """A section's time, from now on."""

    seconds: float

    def __post_init__(self) -> None:
        self._began = time.monotonic()

    @property
    def spent(self) -> float:
        """Seconds."""
        return time.monotonic() - self._began

    @property
    def left(self) -> float:
        """Seconds, negative when overrun."""
        return self.seconds - self.spent

    def check(self) -> None:
        """Raise OutOfTime when there is none left."""
        if self.left <= 0:
            raise OutOfTime

    @contextlib.contextmanager
    def alarm(self, grace: float = 5.0) -> Iterator[None]:
        """Inside, OutOfTime also interrupts what does not ask (a compilation), `grace` seconds after the budget's end.

        Only where signals can be had: in the main thread.
        """
        if threading.current_thread() is not threading.main_thread() or not hasattr(signal, "SIGALRM"):
            yield
            return

        def ring(*_):
            raise OutOfTime

        previous = signal.signal(signal.SIGALRM, ring)
        others, _ = signal.setitimer(signal.ITIMER_REAL, max(self.left, 0.0) + grace)
        try:
            yield
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0.0)
            signal.signal(signal.SIGALRM, previous)
            if others:  # somebody else's alarm (pytest's)
                signal.setitimer(signal.ITIMER_REAL, others)
