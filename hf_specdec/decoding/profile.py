"""`profiled()`: torch's profiler, with a named range for every phase of a step."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from ..core.outcome import StepOutcome

PHASES = ("propose", "forward", "verify", "observe")


class Phases:
    """Is told where the phases of a step begin and end, and does nothing."""

    def begin(self, first: bool = False) -> None:
        """Go on after a pause. `first`: a step begins."""

    def end(self, phase: str) -> None:
        """A phase ends, and the next one begins."""

    def record(self, outcome: StepOutcome) -> None:
        """The step has ended."""


class _Ranges(Phases):
    """Opens a range for every phase: "specdec.propose" and so on. The second "verify" of a step keeps what was accepted."""

    def __init__(self):
        self._open: contextlib.ExitStack = contextlib.ExitStack()

    def begin(self, first: bool = False) -> None:
        self._finishes = not first
        self._enter("propose" if first else "verify")

    def end(self, phase: str) -> None:
        self._open.close()
        if phase in ("propose", "forward") or (phase == "verify" and self._finishes):
            self._enter(PHASES[PHASES.index(phase) + 1])

    def _enter(self, phase: str) -> None:
        self._open.close()  # what an exception has left open
        self._open.enter_context(record_function(f"specdec.{phase}"))


phases = Phases()  # of every decoder that is not traced


@contextlib.contextmanager
def profiled(**options: Any) -> Iterator[profile]:
    """Profile what is decoded inside, in this process, and print the most expensive operators and phases.

    Args:
        options: of `torch.profiler.profile`; by default the CPU's and CUDA's activities.
    """
    global phases
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if torch.cuda.is_available() else [])]
    before, phases = phases, _Ranges()
    try:
        with profile(**{"activities": activities, **options}) as profiler:
            yield profiler
    finally:
        phases = before
    print(profiler.key_averages().table(sort_by="cpu_time_total", row_limit=30))
