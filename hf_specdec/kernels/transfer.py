"""Copies from the host to a device that do not wait for the device: through pinned memory, in stream order."""

from __future__ import annotations

import functools
import itertools
from typing import Any

import numpy as np
import torch


def upload(values: Any, device: torch.device | str) -> torch.Tensor:
    """Copy values to the device, as a tensor.

    Args:
        values: a numpy array (on a CPU, the result shares its memory), a tensor on the host, or a list of numbers.
    """
    host = _on_host(values)
    device = torch.device(device)
    return host.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else host.to(device)


def upload_together(arrays: list[np.ndarray], device: torch.device) -> list[torch.Tensor]:
    """Copy several arrays to the device at once; each keeps its dtype and shape."""
    # Kernels assume 16-byte alignment.
    starts = [0, *itertools.accumulate(-(-array.nbytes // 16) * 16 for array in arrays)]
    host = torch.empty(starts[-1], dtype=torch.uint8, pin_memory=device.type == "cuda")
    memory = host.numpy()
    for array, start in zip(arrays, starts, strict=False):
        memory[start : start + array.nbytes].view(array.dtype).reshape(array.shape)[:] = array
    there = host.to(device, non_blocking=True)
    return [
        there[start : start + array.nbytes].view(_torch_type(array.dtype)).view(array.shape)
        for array, start in zip(arrays, starts, strict=False)
    ]


@functools.cache
def _torch_type(dtype: np.dtype) -> torch.dtype:
    return torch.from_numpy(np.empty(0, dtype)).dtype


def upload_into(buffer: torch.Tensor, values: Any) -> None:
    """Overwrite a buffer. `values` may be changed as soon as this returns."""
    host = _on_host(values)
    buffer.copy_(host.pin_memory() if buffer.is_cuda else host, non_blocking=True)


class HostStaging:
    """Fills the same buffer on the device repeatedly, with one copy each time. `buffer`: uint8, contiguous."""

    def __init__(self, buffer: torch.Tensor):
        self._buffer = buffer
        self._host = torch.empty(0 if buffer.is_cuda else len(buffer), dtype=torch.uint8)

    def fresh(self) -> np.ndarray:
        """Zeroed bytes on the host to write to. On CUDA they are pinned, and never those that an earlier copy may still read."""
        if self._buffer.is_cuda:
            self._host = torch.empty(len(self._buffer), dtype=torch.uint8, pin_memory=True)
        array = self._host.numpy()
        array[:] = 0
        return array

    def send(self) -> None:
        """Copy the bytes written since `fresh` to the buffer."""
        self._buffer.copy_(self._host, non_blocking=True)


def _on_host(values: Any) -> torch.Tensor:
    if isinstance(values, torch.Tensor):
        return values
    return torch.from_numpy(np.ascontiguousarray(values)) if isinstance(values, np.ndarray) else torch.tensor(values)
