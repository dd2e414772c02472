"""Hashes of whole tensors, to find out whether a copy made from a tensor is still up to date.

Addresses and version counters are not enough: a write through `.data` or a numpy view changes neither. So every byte is
read, at memory speed. Two different contents have equal hashes with a probability of 2^-128 on a CPU and about 2^-62
elsewhere.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
import xxhash

from ..sharding import local

_CHUNK_BYTES = 4 << 20  # bytes that one thread hashes at a time
_WIDTH = 1 << 20  # words per row, which share a row key, on devices other than CPUs


def fingerprints(tensors: Sequence[torch.Tensor]) -> list[bytes]:
    """A hash of each tensor's contents, computed in as many threads as torch uses.

    Args:
        tensors: of any shape and dtype, on any device but "meta"; of a sharded one, this rank's shard. Shapes and dtypes do not enter
            the hash.
    """
    tensors = [local(tensor) for tensor in tensors]
    if all(tensor.device.type == "cpu" for tensor in tensors):
        return _on_cpu(tensors)
    return [_on_cpu([tensor])[0] if tensor.device.type == "cpu" else _on_device(tensor) for tensor in tensors]


def _on_cpu(tensors: Sequence[torch.Tensor]) -> list[bytes]:
    chunks: list[Any] = [_bytes(tensor).numpy() for tensor in tensors]
    pieces = [chunk[i : i + _CHUNK_BYTES] for chunk in chunks for i in range(0, max(len(chunk), 1), _CHUNK_BYTES)]
    threads = min(torch.get_num_threads(), len(pieces))
    if threads > 1:
        with ThreadPoolExecutor(threads) as pool:
            digests = list(pool.map(xxhash.xxh3_128_digest, pieces))
    else:
        digests = [xxhash.xxh3_128_digest(piece) for piece in pieces]
    hashes, first = [], 0
    for chunk in chunks:
        count = -(-max(len(chunk), 1) // _CHUNK_BYTES)
        hashes.append(xxhash.xxh3_128_digest(b"".join(digests[first : first + count])))
        first += count
    return hashes


def _on_device(tensor: torch.Tensor) -> bytes:
    """Multilinear hashing of 32-bit words modulo 2^64, first with a key per column, then with a key per row."""
    words = _bytes(tensor)
    words = torch.nn.functional.pad(words, (0, -len(words) % 4)).view(torch.int32)
    columns = _keys(0, _WIDTH, words.device)
    rows = words.split(_WIDTH)
    sums = torch.stack([(columns[:, : len(row)] * row).sum(1) for row in rows], dim=1)  # [2, rows]
    hashed = (sums * _keys(1, len(rows), words.device)).sum(1)
    return hashed.cpu().numpy().tobytes()


@functools.lru_cache(maxsize=16)
def _keys(stream: int, count: int, device: torch.device) -> torch.Tensor:
    """Random int64 [2, count], the same in every process."""
    generator = torch.Generator().manual_seed(0x5EED + stream)
    return torch.randint(-(2**63), 2**63 - 1, (2, count), generator=generator).to(device)


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor's bytes, uint8 [n]; a view if the tensor is contiguous."""
    return tensor.detach().reshape(-1).view(torch.uint8)
