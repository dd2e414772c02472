"""Where the time of `generate()` goes, from a torch.profiler trace."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch.autograd import DeviceType  # pyright: ignore[reportPrivateImportUsage]
from torch.profiler import ProfilerActivity, profile

from .context import Context

# What a kernel's (or, on a CPU, an operation's) name says it is for; the first that fits.
KINDS = {
    "attention": ("attention", "merge_kernel", "fmha"),
    "verification": (
        "_choices_kernel",
        "_walk_kernel",
        "rejection",
        "sums_kernel",
        "draw_kernel",
        "_limits_kernel",
        "argmax",
    ),
    "cache": ("write_kernel", "move_kernel"),
    "linear layers": (
        "few_rows_kernel",
        "gated_kernel",
        "gemm",
        "gemv",
        "nvjet",
        "cutlass",
        "splitk",
        "xmma",
        "cublas",
        "aten::mm",
        "aten::addmm",
        "mkldnn",
        "linear",
    ),
    "norms": ("rms_norm_kernel",),
    "copies": ("memcpy", "memset", "copy_"),
}


def kind_of(name: str) -> str:
    """One of KINDS, or "other"."""
    lower = name.lower()
    return next((kind for kind, parts in KINDS.items() if any(part in lower for part in parts)), "other")


@dataclass
class Trace:
    """Seconds.

    Attributes:
        wall: of the call, without the profiler.
        busy: of kernels, all together.
        kinds: of kernels by kind.
        launches: how many kernels there were.
    """

    wall: float
    busy: float
    kinds: dict[str, float]
    launches: int


def trace(context: Context, call: Callable[[], Any]) -> Trace:
    """Profile one `call`, which has run before, and time another without the profiler."""
    wall = context.seconds(call)
    activities = [ProfilerActivity.CPU] + ([ProfilerActivity.CUDA] if context.on_gpu else [])
    with profile(activities=activities) as found:
        call()
        context.synchronize()
    wanted = DeviceType.CUDA if context.on_gpu else DeviceType.CPU
    kinds, launches = dict.fromkeys([*KINDS, "other"], 0.0), 0
    for event in found.key_averages():
        if event.device_type != wanted or getattr(event, "is_user_annotation", False):
            continue
        microseconds = event.self_device_time_total if context.on_gpu else event.self_cpu_time_total
        kinds[kind_of(event.key)] += microseconds * 1e-6
        launches += event.count
    return Trace(wall, sum(kinds.values()), kinds, launches)
