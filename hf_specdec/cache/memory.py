"""Zeroed memory for pools. On a CPU it is address space, which takes memory page by page as it is written."""

from __future__ import annotations

import mmap
import os
import sys
from collections.abc import Iterable
from pathlib import Path

import torch

_OVERCOMMITTING = ("linux", "darwin")  # systems that do not count address space as used memory
_OVERCOMMIT = Path("/proc/sys/vm/overcommit_memory")
_MAP_NORESERVE = {"linux": 0x4000, "darwin": 0x40}


def takes_memory_when_written(tensors: Iterable[torch.Tensor]) -> bool:
    """True if pools on the device of these tensors (a model's weights) take memory only page by page, as they are written.

    False on accelerators, on systems that count address space as memory (Windows, `vm.overcommit_memory=2`), and under a limit of
    address space (`ulimit -v`).
    """
    if sys.platform not in _OVERCOMMITTING or any(tensor.device.type != "cpu" for tensor in tensors):
        return False
    import resource  # missing on Windows

    if resource.getrlimit(resource.RLIMIT_AS)[0] != resource.RLIM_INFINITY:
        return False
    return not (_OVERCOMMIT.exists() and _OVERCOMMIT.read_text().strip() == "2")


def free_bytes(device: torch.device) -> int | None:
    """Free memory of a device; None if the system does not say."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    if device.type != "cpu" or "SC_AVPHYS_PAGES" not in getattr(os, "sysconf_names", ()):
        return None
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def zeros(shape: tuple[int, ...], like: torch.Tensor) -> torch.Tensor:
    """Zeros with the dtype and device of `like`. On a CPU, pages that are never written take no memory.

    Raises:
        MemoryError: the system refuses this much address space. The message says what to do.
    """
    count = torch.Size(shape).numel()
    if like.device.type != "cpu" or sys.platform not in _OVERCOMMITTING or not count:
        return like.new_zeros(shape)
    return torch.frombuffer(_address_space(count * like.element_size()), dtype=like.dtype).view(shape)


def _address_space(num_bytes: int) -> mmap.mmap:
    """Private anonymous memory, which is freed with the last tensor that uses it."""
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE[sys.platform]
    try:
        memory = mmap.mmap(-1, num_bytes, flags=flags)
    except OSError as error:
        raise MemoryError(
            f"The system refused {num_bytes / 2**30:.1f} GiB of address space for a layer's keys, values or states ({error.strerror}). "
            "Bound the KV pool with num_blocks, or lower max_new_tokens."
        ) from error
    if hasattr(mmap, "MADV_NOHUGEPAGE"):  # otherwise a row's first token could take 2 MiB in every layer
        memory.madvise(mmap.MADV_NOHUGEPAGE)
    return memory
