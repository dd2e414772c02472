"""MovedPools: the pools whose blocks move between engines: their addresses, digests of blocks, and the model's fingerprint."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import xxhash

from ...cache import PagedStaticCache
from ...candidate_generators.base import Transferable, moved_caches
from ...core.rows import RowInput
from ...core.sequence import Sequence
from ...decoding.decoder import SpeculativeDecoder
from ...model.options.fingerprints import fingerprints
from .nixl_link import NixlLink, Piece

_WARM_UP = -1  # id of the sequence whose forward pass allocates the pools
_PROTOCOL = 3  # version of the messages; engines with different versions refuse each other


@dataclass
class TransferStatistics:
    """Counts so far."""

    pulled: int = 0  # requests whose KV was pulled
    recomputed: int = 0  # requests that read their prompt themselves, because the pull failed
    expired: int = 0  # prompts that were held and that no consumer pulled in time
    bytes: int = 0  # size of the pulls
    seconds: float = 0.0  # their duration


class MovedPools:
    """The pools of the target's cache, and of the cache of a drafter that reads features. Engines with the same `fingerprint` can
    exchange KV. Raises ValueError: the KV of this model or drafter cannot be moved.
    """

    def __init__(self, decoder: SpeculativeDecoder, link: NixlLink):
        if decoder.target.ranks is not None or decoder.target.recurrent is not None:
            what = "sharded over ranks" if decoder.target.ranks is not None else "recurrent"
            raise ValueError(f"kv_transfer_config: the keys and values of a model that is {what} cannot be moved.")
        moved = moved_caches(decoder.generator)
        if moved is None:
            raise ValueError(
                f"kv_transfer_config: what a drafter of method {decoder.config.method!r} keeps of a prompt cannot be moved. Use "
                "none, ngram, suffix, draft_model, eagle, eagle3, mtp with one module, or another method that reads no hidden states."
            )
        self.decoder, self.link = decoder, link
        self.block_size = decoder.config.block_size
        self._registered: tuple[Any, str] = (None, "")
        self._allocate()
        # All that must be equal for KV to be exchanged.
        shapes = [[(*pool.shape[1:], str(pool.dtype)) for pool in _pools(cache)] for cache in self.caches]
        config, model = decoder.config, decoder.target.model
        settings = [_PROTOCOL, config.method, config.block_size, shapes, config.target_quantization]
        weights = b"".join(fingerprints(list(model.parameters())))
        self.fingerprint = hashlib.sha256(json.dumps(settings, default=str).encode() + weights).hexdigest()

    @property
    def caches(self) -> list[PagedStaticCache]:
        """The caches whose blocks are moved: the target's, and that of a drafter that reads features."""
        return [self.decoder.cache, *(moved_caches(self.decoder.generator) or [])]

    def read_features(self, seq: Sequence, count: int) -> None:
        """Let the drafter read the first `count` tokens of a prompt, if it reads features."""
        if isinstance(self.decoder.generator, Transferable):
            self.decoder.generator.read_features(seq, count)

    def _allocate(self) -> None:
        """Allocate all blocks of all pools now, by a forward pass over one token, so that they have addresses that do not change."""
        decoder = self.decoder
        with decoder.active():
            if not decoder.cache.is_allocated:
                row = RowInput(_WARM_UP, np.zeros(1, dtype=np.int64), 0)
                for cache in self.caches:
                    cache.add(_WARM_UP)
                    cache.reserve(_WARM_UP, 1)
                try:
                    output = decoder.target.forward([row], decoder.cache)
                    if isinstance(decoder.generator, Transferable):
                        decoder.generator.warm_up(row, output)
                finally:
                    for cache in self.caches:
                        cache.remove(_WARM_UP)
            for cache in self.caches:
                cache.grow_to_the_end()

    def address(self) -> str:
        """This process's address for peers. The first call registers the pools."""
        identity = tuple(cache.identity for cache in self.caches)
        if self._registered[0] != identity:
            self._registered = identity, self.link.register([pool for cache in self.caches for pool in _pools(cache)])
        return self._registered[1]

    def addresses(self) -> list[list[int]]:
        """The pools' addresses in this process's memory, by cache."""
        return [[pool.data_ptr() for pool in _pools(cache)] for cache in self.caches]

    def num_blocks(self, count: int) -> int:
        """Number of blocks that hold `count` tokens."""
        return -(-count // self.block_size)

    def digests(self, cache: PagedStaticCache, blocks: list[int]) -> list[str]:
        """A hash of the bytes of each block, over all pools of a cache."""
        size, digests = self.block_size, []
        for block in blocks:
            hasher = xxhash.xxh3_128()
            for pool in _pools(cache):
                rows = pool[block * size : (block + 1) * size].contiguous()
                hasher.update(rows.view(torch.uint8).cpu().numpy().data)
            digests.append(hasher.hexdigest())
        return digests

    def pieces(self, cache: PagedStaticCache, addresses: list[int], ours: list[int], theirs: list[int]) -> list[Piece]:
        """Runs of bytes that move a peer's blocks `theirs` into `ours`, adjacent ones joined. Raises ValueError: it has other pools."""
        pieces: list[Piece] = []
        for pool, there in zip(_pools(cache), addresses, strict=True):
            num_bytes = pool[0].nbytes * self.block_size
            last = None
            for mine, block in zip(ours, theirs, strict=True):
                here, remote = pool.data_ptr() + mine * num_bytes, there + block * num_bytes
                if last is not None and last.here + last.size == here and last.there + last.size == remote:
                    last.size += num_bytes
                else:
                    last = Piece(here, remote, num_bytes)
                    pieces.append(last)
        return pieces


def _pools(cache: PagedStaticCache) -> list[torch.Tensor]:
    layers: list[Any] = list(cache.layers)
    return [pool for layer in layers for pool in layer.pools]
