"""Where a run takes place, and how it measures."""

from __future__ import annotations

import logging
import os
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

from .budget import Budget

logger = logging.getLogger("hf_specdec.benchmark")

VARIABLE = "HF_SPECDEC_KERNELS"
FLUSHED = 256 * 2**20  # bytes, five times the L2 cache of an H100 or H200
WARM_MS, TIMED_MS = 25, 100
TOLERANCE = {"bf16": 1e-2, "fp16": 2e-3, "fp32": 1e-5}  # of norms, against float64


@dataclass
class Context:
    """One run.

    Attributes:
        device: what is checked and timed.
        toy: sizes that Triton's interpreter can do; times mean nothing then.
        budget: of the running section.
        bandwidth: bytes per second of a copy, read and written, once a section has measured it.
        warnings: what the package has warned of so far.
        generator: of random inputs, on the device; every draw is a fresh one.
    """

    device: torch.device
    toy: bool
    budget: Budget
    seed: int = 0
    bandwidth: float | None = None
    warnings: list[str] = field(default_factory=list)
    generator: torch.Generator = field(init=False)

    def __post_init__(self) -> None:
        self.generator = torch.Generator(self.device).manual_seed(self.seed)

    @property
    def on_gpu(self) -> bool:
        """Whether kernels are compiled, not interpreted."""
        return self.device.type == "cuda"

    @property
    def judges_times(self) -> bool:
        """Whether times are held against their aims."""
        return self.on_gpu and not self.toy

    def dtypes(self) -> dict[str, torch.dtype]:
        """What kernels are checked in."""
        found = {"bf16": torch.bfloat16, "fp16": torch.float16}
        return {**found, "fp32": torch.float32} if self.toy else found

    def randn(self, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """Fresh normal numbers on the device."""
        return torch.randn(shape, generator=self.generator, device=self.device).to(dtype)

    def randint(self, low: int, high: int, *shape: int) -> torch.Tensor:
        """Fresh int64 numbers in [low, high) on the device."""
        return torch.randint(low, high, shape, generator=self.generator, device=self.device)

    def number(self, high: int) -> int:
        """A fresh number in [0, high), on the host."""
        return int(self.randint(0, high, 1))

    def synchronize(self) -> None:
        """Wait for the device."""
        if self.on_gpu:
            torch.cuda.synchronize()

    def milliseconds(self, run: Callable[[], Any], flush: bool = True) -> float:
        """Median time of `run` on the device, as a CUDA graph, so that launches cost the host nothing; interpreted: one run by the
        clock.

        `flush`: before each, a buffer larger than the L2 cache is read, so that nothing of `run` is left there. Written, it would
        leave the cache full of changed lines, and their write-back would fall into the time: on an H100 reading 134 MB
        took 57.5 µs after 256 MB of zeros were written, 47.7 µs after as much was read.
        """
        if not self.on_gpu:
            return 1e3 * self.seconds(run)
        replay = captured(run)
        unrelated = torch.zeros(FLUSHED // 4 if flush else 0, device=self.device)
        total = torch.zeros((), device=self.device)

        def times(count: int) -> list[float]:
            events = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(count)]
            for begin, end in events:
                if flush:
                    torch.sum(unrelated, 0, out=total)
                begin.record()
                replay()
                end.record()
            self.synchronize()
            return [begin.elapsed_time(end) for begin, end in events]

        estimate = max(statistics.median(times(10)), 1e-3)
        times(min(max(int(WARM_MS / estimate), 1), 200))
        return statistics.median(times(min(max(int(TIMED_MS / estimate), 10), 500)))

    def seconds(self, run: Callable[[], Any]) -> float:
        """Wall time of one `run`, to the end of its work on the device."""
        self.synchronize()
        begin = time.perf_counter()
        run()
        self.synchronize()
        return time.perf_counter() - begin


def captured(run: Callable[[], Any]) -> Callable[[], Any]:
    """`run` as a CUDA graph; itself, with a warning, where it cannot be one."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(2):  # compiles, allocates
            run()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(graph):
            run()
    except RuntimeError as error:
        logger.warning("%s is timed without a graph, launches included: %s", run.__qualname__, error)
        return run
    return graph.replay


@contextmanager
def kernels(choice: str) -> Iterator[None]:
    """Inside, HF_SPECDEC_KERNELS is `choice`."""
    before = os.environ.get(VARIABLE)
    os.environ[VARIABLE] = choice
    try:
        yield
    finally:
        if before is None:
            del os.environ[VARIABLE]
        else:
            os.environ[VARIABLE] = before


def relative_error(out: torch.Tensor, wanted: torch.Tensor) -> float:
    """‖out − wanted‖ / ‖wanted‖ in float64; NaN where anything is NaN."""
    exact = wanted.double()
    return float((out.double() - exact).norm() / exact.norm().clamp(min=1e-300))


def worst(errors: list[float]) -> float:
    """The largest; NaN counts as infinite."""
    return max((float("inf") if error != error else error for error in errors), default=0.0)
