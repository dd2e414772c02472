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
