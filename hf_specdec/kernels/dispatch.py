"""Which implementation serves a device: the definitions in `reference`, or Triton's kernels."""

from __future__ import annotations

import importlib.util
import os

import torch

VARIABLE = "HF_SPECDEC_KERNELS"
CHOICES = ("reference", "triton")


def uses_triton(device: torch.device) -> bool:
    """Whether Triton kernels run on `device`.

    The environment variable HF_SPECDEC_KERNELS says "triton", or "reference", the default: the kernels have been checked
    in Triton's interpreter and compiled, but have not run on a GPU yet. On a CPU they need TRITON_INTERPRET=1 (tests).

    Raises:
        ValueError: another value.
        ImportError: Triton is asked for and not installed.
    """
    choice = os.environ.get(VARIABLE, "reference")
    if choice == "reference":
        return False
    if choice not in CHOICES:
        raise ValueError(f"{VARIABLE} must be one of {', '.join(CHOICES)}, not {choice!r}.")
    if importlib.util.find_spec("triton") is None:
        raise ImportError(f"{VARIABLE}=triton needs Triton: pip install 'hf-specdec[gpu]'")
    return device.type == "cuda" or os.environ.get("TRITON_INTERPRET") == "1"
