"""The clock by which steps are timed."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

_FINE = 1e-5  # seconds; Windows counts a thread's time in ticks of 16 ms


def clock_for(device: torch.device) -> Callable[[], float]:
    """A function that returns seconds.

    On a CPU it counts the CPU time of the calling thread, which other programs and threads do not change. The calling thread takes part
    in every matrix product, so its CPU time is the time that a step takes on an idle machine. On other devices the host only waits, so
    the function counts wall-clock time.
    """
    own_time = device.type == "cpu" and time.get_clock_info("thread_time").resolution <= _FINE
    return time.thread_time if own_time else time.perf_counter


class StepTimer:
    """Times a step and the drafting in it, without waiting for the device.

    A step ends when the verification result has reached the host, so the clock measures all of it on every device. On CUDA
    drafting runs asynchronously; two events in the stream time it, and are read after the result has arrived. A step in which
    something was prepared for later ones, such as a CUDA graph, does not count.
    """

    preparations = 0  # how often anything was prepared in this process; whoever prepares counts up

    def __init__(self, device: torch.device):
        self._events, self._clock = None, clock_for(device)
        if device.type == "cuda":
            self._events = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        self._begin = self._proposed = 0.0
        self._before = 0
        self._counts = self._has_proposed = False

    def start(self, counts: bool = True) -> None:
        """Start timing, before drafting, if the time of this step counts. Reading the clock after a forward takes 5 µs."""
        self._counts, self._has_proposed = counts, False
        if not counts:
            return
        self._before = StepTimer.preparations
        self._begin = self._proposed = self._clock()
        if self._events:
            self._events[0].record()

    def proposed(self) -> None:
        """Mark the end of drafting (or of queueing it). Left out by steps without drafts."""
        self._proposed, self._has_proposed = self._clock(), True
        if self._events:
            self._events[1].record()

    def stop(self) -> tuple[float, float] | None:
        """(seconds of the step, seconds of its drafting); None if they do not count. Call after the step's result has reached the host."""
        if not self._counts or self._before != StepTimer.preparations:
            return None
        total, drafting = self._clock() - self._begin, self._proposed - self._begin
        if self._events and self._has_proposed:
            drafting = max(drafting, self._events[0].elapsed_time(self._events[1]) / 1e3)
        return total, min(drafting, total)
