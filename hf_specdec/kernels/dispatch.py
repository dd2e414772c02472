"""Choose the implementation of an operation for a device: the plain torch definition, the Triton kernels or the native library."""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import os

import torch

from .native import library, why_not_loaded

VARIABLE = "HF_SPECDEC_KERNELS"
CHOICES = ("reference", "triton", "native")


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


def runs_rewritten_layers(device: torch.device) -> bool:
    """True if compiled layers should first be rewritten to use our kernels."""
    return uses_triton(device)


def current(device: torch.device) -> contextlib.AbstractContextManager:
    """A context in which Triton launches on `device`: Triton ignores where the tensors are and uses the current device."""
    return torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext()
