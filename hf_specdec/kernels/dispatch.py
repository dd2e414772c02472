"""Which implementation serves a device: the definitions in `reference`, or Triton's kernels."""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import os

import torch

VARIABLE = "HF_SPECDEC_KERNELS"
CHOICES = ("reference", "triton")


def uses_triton(device: torch.device) -> bool:
    """Whether Triton kernels run on `device`.

    By default on CUDA devices of compute capability 8.0 or above, where Triton is installed. The environment variable
    HF_SPECDEC_KERNELS says otherwise: "triton" or "reference". On a CPU they need TRITON_INTERPRET=1 (tests).

    Raises:
        ValueError: another value.
        ImportError: Triton is asked for and not installed.
    """
    choice = os.environ.get(VARIABLE)
    if choice is None:
        return device.type == "cuda" and _is_served(device.index)
    if choice == "reference":
        return False
    if choice not in CHOICES:
        raise ValueError(f"{VARIABLE} must be one of {', '.join(CHOICES)}, not {choice!r}.")
    if importlib.util.find_spec("triton") is None:
        raise ImportError(f"{VARIABLE}=triton needs Triton: pip install 'hf-specdec[gpu]'")
    return device.type == "cuda" or os.environ.get("TRITON_INTERPRET") == "1"


@functools.cache
def _is_served(index: int | None) -> bool:
    installed = importlib.util.find_spec("triton") is not None and torch.version.hip is None  # sizes are NVIDIA's
    return installed and torch.cuda.get_device_capability(index) >= (8, 0)


def current(device: torch.device) -> contextlib.AbstractContextManager:
    """Inside, kernels are launched on the device: Triton launches on the current one, wherever the tensors are."""
    return torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext()
