"""Zeroed memory for pools. On a CPU it is address space, whose pages come with the first write to them."""

from __future__ import annotations

import mmap
import sys
from collections.abc import Iterable
from pathlib import Path

import torch

_PROMISES_NOTHING = ("linux", "darwin")  # address space is not counted against the machine's memory
_OVERCOMMIT = Path("/proc/sys/vm/overcommit_memory")
_MAP_NORESERVE = {"linux": 0x4000, "darwin": 0x40}


def comes_when_written(tensors: Iterable[torch.Tensor]) -> bool:
    """Whether memory beside these tensors (a model's weights) is taken page by page as it is written.

    Not on devices, on systems that count address space as memory (Windows, `vm.overcommit_memory=2`), or under a limit of
    address space (`ulimit -v`).
    """
    return all(tensor.device.type == "cpu" for tensor in tensors) and _address_space_is_free()


def _address_space_is_free() -> bool:
    if sys.platform not in _PROMISES_NOTHING:
        return False
    import resource  # not there on Windows

    if resource.getrlimit(resource.RLIMIT_AS)[0] != resource.RLIM_INFINITY:
        return False
    return not (_OVERCOMMIT.exists() and _OVERCOMMIT.read_text().strip() == "2")


def zeros(shape: tuple[int, ...], like: torch.Tensor) -> torch.Tensor:
    """Zeros of `like`'s dtype on its device. On a CPU pages that are never written take no memory, and reading them gives zeros.

    Raises:
        MemoryError: the system gives no such address space; the message says what to do.
    """
    count = torch.Size(shape).numel()
    if like.device.type != "cpu" or sys.platform not in _PROMISES_NOTHING or not count:
        return like.new_zeros(shape)
    return torch.frombuffer(_address_space(count * like.element_size()), dtype=like.dtype).view(shape)


def _address_space(num_bytes: int) -> mmap.mmap:
    """Private anonymous memory; it goes back to the system with the last tensor on it."""
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE[sys.platform]
    try:
        memory = mmap.mmap(-1, num_bytes, flags=flags)
    except OSError as error:
        raise MemoryError(
            f"The system gives no {num_bytes / 2**30:.1f} GiB of address space for a layer's keys or values ({error.strerror}). "
            "Bound the KV pool with num_blocks, or lower max_new_tokens."
        ) from error
    if hasattr(mmap, "MADV_NOHUGEPAGE"):  # or else a row's first token could take 2 MiB in every layer
        memory.madvise(mmap.MADV_NOHUGEPAGE)
    return memory
