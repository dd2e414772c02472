"""The clock by which steps are timed."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

_FINE = 1e-5  # seconds; Windows counts a thread's time in ticks of 16 ms


def clock_for(device: torch.device) -> Callable[[], float]:
    """A function that returns seconds.

    On a CPU it counts the calling thread's own time, which other programs and threads do not disturb: the thread takes part in every
    product, so this is the time of a step on an idle machine. For other devices it is the time that passes, since the host waits.
    """
    own_time = device.type == "cpu" and time.get_clock_info("thread_time").resolution <= _FINE
    return time.thread_time if own_time else time.perf_counter
