"""From the host to a device without waiting for what the device is at: through pinned memory, in the stream's order."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch


def upload(values: Any, device: torch.device | str) -> torch.Tensor:
    """A tensor on the device.

    Args:
        values: a numpy array (shared with the result on a CPU), a tensor on the host, or a list of numbers.
    """
    host = _on_host(values)
    device = torch.device(device)
    return host.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else host.to(device)


def upload_into(buffer: torch.Tensor, values: Any) -> None:
    """Overwrite a buffer; what it was read from may be changed at once."""
    host = _on_host(values)
    buffer.copy_(host.pin_memory() if buffer.is_cuda else host, non_blocking=True)


def _on_host(values: Any) -> torch.Tensor:
    if isinstance(values, torch.Tensor):
        return values
    return torch.from_numpy(np.ascontiguousarray(values)) if isinstance(values, np.ndarray) else torch.tensor(values)
