"""Choose the implementation of an operation for a device: the plain torch definition, the Triton kernels or the native library.

Also the small helpers of launches. Nothing here imports Triton.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import importlib.util
import os
from collections.abc import Callable
from typing import Any, Generic, ParamSpec, TypeVar

import torch

from .native import library, why_not_loaded

VARIABLE = "HF_SPECDEC_KERNELS"
CHOICES = ("reference", "triton", "native")

Args = ParamSpec("Args")
Result = TypeVar("Result")


class operation(Generic[Args, Result]):  # a decorator
    """A tensor operation: calls the function of its name that serves the device of its first tensor argument.

    `definition` is in an operation's `reference.py`. Functions of the same name and arguments are in `triton.py` beside it, which is
    imported where it runs, and, if `native`, in `native.py`.

    Args:
        serves: True if the kernel takes these arguments; otherwise the definition runs. None: it takes all.
    """

    def __init__(
        self, definition: Callable[Args, Result], serves: Callable[..., bool] | None = None, native: bool = False
    ):
        functools.update_wrapper(self, definition)
        self._name, self._folder = definition.__name__, definition.__module__.rpartition(".")[0]
        self._serves, self._native = serves, native
        self._modules: dict[str, Any] = {}

    def __call__(self, *args: Args.args, **kwargs: Args.kwargs) -> Result:
        for tensor in args:
            if isinstance(tensor, torch.Tensor):
                break
        else:
            raise TypeError(f"{self._name} needs a tensor among its positional arguments.")
        if self._serves is not None and uses_triton(tensor.device) and not self._serves(*args, **kwargs):
            return self._imported("reference")(*args, **kwargs)
        return self.on(tensor.device)(*args, **kwargs)

    def on(self, device: torch.device, native: bool = True) -> Callable[Args, Result]:
        """The implementation for a device, for callers that choose once for many calls. `native`: the native library may be used."""
        if uses_triton(device):
            return self._imported("triton")
        return self._imported("native" if self._native and native and uses_native(device) else "reference")

    def _imported(self, name: str) -> Callable[Args, Result]:
        if name not in self._modules:
            self._modules[name] = importlib.import_module(f"{self._folder}.{name}")
        return getattr(self._modules[name], self._name)  # at each call: a test may have replaced it


def uses_triton(device: torch.device) -> bool:
    """True if the operations run as Triton kernels on `device`.

    The default is True on CUDA devices of compute capability 8.0 or above if Triton is installed. The environment variable
    HF_SPECDEC_KERNELS overrides it: "triton", "reference" or "native". On a CPU, Triton also needs TRITON_INTERPRET=1 (for tests).

    Raises:
        ValueError: HF_SPECDEC_KERNELS has another value.
        ImportError: HF_SPECDEC_KERNELS asks for Triton, which is not installed.
    """
    choice = os.environ.get(VARIABLE)
    if choice is None:
        return device.type == "cuda" and _is_served(device.index)
    if choice in ("reference", "native"):
        return False
    if choice not in CHOICES:
        raise ValueError(f"{VARIABLE} must be one of {', '.join(CHOICES)}, not {choice!r}.")
    if importlib.util.find_spec("triton") is None:
        raise ImportError(f"{VARIABLE}=triton needs Triton: pip install 'hf-specdec[gpu]'")
    return device.type == "cuda" or os.environ.get("TRITON_INTERPRET") == "1"


def uses_native(device: torch.device) -> bool:
    """True if operations run in the native library on `device`: on CPUs, where it was compiled.

    HF_SPECDEC_KERNELS overrides this: "native" requires the library, and the other values exclude it.

    Raises:
        ImportError: HF_SPECDEC_KERNELS asks for the library, which is missing or does not load.
    """
    if device.type != "cpu":
        return False
    choice = os.environ.get(VARIABLE)
    if choice == "native" and library() is None:
        raise ImportError(f"{VARIABLE}=native: {why_not_loaded()}.")
    return choice in (None, "native") and library() is not None


@functools.cache
def _is_served(index: int | None) -> bool:
    # Tile sizes are tuned for NVIDIA GPUs.
    installed = importlib.util.find_spec("triton") is not None and torch.version.hip is None
    return installed and torch.cuda.get_device_capability(index) >= (8, 0)


def can_capture_steps(device: torch.device) -> bool:
    """True if decoding steps on this device can be CUDA graphs: only the Triton kernels read batch shapes on the device."""
    return device.type == "cuda" and uses_triton(device)


def current(device: torch.device) -> contextlib.AbstractContextManager:
    """A context in which Triton launches on `device`: Triton ignores where the tensors are and uses the current device."""
    return torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext()


def next_power_of_two(n: int) -> int:
    """The smallest power of two that is at least n and at least 1."""
    return 1 << max(n - 1, 0).bit_length()


def ceil_div(a: int, b: int) -> int:
    """a / b, rounded up."""
    return -(-a // b)


def as_bytes(flags: torch.Tensor | None) -> torch.Tensor | None:
    """View booleans as bytes without a copy: Triton handles bytes more simply."""
    return flags.view(torch.uint8) if flags is not None and flags.dtype == torch.bool else flags
