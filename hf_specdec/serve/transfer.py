"""Disaggregated prefill: a producer reads prompts and holds their KV; a consumer pulls the KV and generates the answer.

The producer's answer contains `kv_transfer_params` (vLLM's name): where the prompt's blocks are, a digest of each block, and a fingerprint
of the model. The consumer pulls the blocks it lacks into its own pool and compares the digests. It then continues as if it had found all
but the last prompt token in its prefix cache, and reads that token itself. So its text and its number of steps are those of a single
server. If the drafter reads the target's features (EAGLE, MTP), the KV of its own cache is pulled too; other drafters need nothing.

If anything fails (the producer has ended, has freed the blocks, or has overwritten them), the consumer reads the prompt itself. Digests are
compared after the last byte has arrived, so a failure never leads to wrong KV.
"""

from __future__ import annotations

import hashlib
import json
import logging
import time
import uuid
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import torch
import xxhash

from ..cache import OutOfBlocks, PagedStaticCache
from ..core.ranks import digest
from ..core.rows import RowInput
from ..decoding.decoder import SpeculativeDecoder
from ..model.options.fingerprints import fingerprints
from .request import Choice

logger = logging.getLogger(__name__)

_WARM_UP = -1  # id of the sequence whose forward pass allocates the pools


@dataclass
class Piece:
    """A run of bytes: its address in this process, its address in the peer, and its size."""

    here: int
    there: int
    size: int


class Link(Protocol):
    """Moves bytes between processes. `NixlLink` is the implementation in use."""

    def register(self, pools: list[torch.Tensor]) -> str:
        """Let peers read these pools. Returns this process's address, as text: the `peer` of the other methods."""
        ...

    def start(self, peer: str, pieces: list[Piece], message: str) -> Any:
        """Begin to read from a peer's memory; the peer gets `message` once all is read. Returns a handle.

        Raises:
            ConnectionError: the peer cannot be reached.
        """
        ...

    def is_done(self, handle: Any) -> bool:
        """True once all bytes have arrived.

        Raises:
            ConnectionError: the transfer has failed.
        """
        ...

    def drop(self, handle: Any) -> None:
        """Release a handle; a transfer that is still running is cancelled."""
        ...

    def tell(self, peer: str, message: str) -> None:
        """Send a message to a peer; do nothing if it cannot be reached."""
        ...

    def messages(self) -> list[str]:
        """The messages from peers since the last call."""
        ...


@dataclass
class _Held:
    """A prompt whose blocks wait for a consumer until the time `until` (`time.monotonic`)."""

    choice: Choice
    until: float


@dataclass
class _Pull:
    """A request whose blocks are being pulled.

    Attributes:
        params: the producer's kv_transfer_params.
        until: when to give up (`time.monotonic`).
        started: when the transfer began.
        handle: of the link; None before the transfer and after it, or if no bytes were needed.
        begun: for each cache whose blocks are taken: the cache, the index of the first block to pull, the digests of all blocks.
    """

    choice: Choice
    params: dict[str, Any]
    until: float
    started: float = 0.0
    handle: Any = None
    begun: list[tuple[PagedStaticCache, int, list[str]]] = field(default_factory=list)


@dataclass
class TransferStatistics:
    """Counts so far.

    Attributes:
        pulled: requests whose KV was pulled.
        recomputed: requests that read their prompt themselves, because the pull failed.
        expired: prompts that were held and that no consumer pulled in time.
        bytes, seconds: size and duration of the pulls.
    """

    pulled: int = 0
    recomputed: int = 0
    expired: int = 0
    bytes: int = 0
    seconds: float = 0.0


class Transfers:
    """An engine's side of disaggregated prefill: the prompts that it holds for others, and those that it pulls.

    Args:
        link: moves the bytes.
        hold_seconds: how long a prompt's blocks wait for a consumer; then they are freed.
        pull_seconds: how long a request waits for its blocks; then it reads the prompt itself.

    Attributes:
        held: prompts that wait for a consumer, by the request id that the consumer was told.
        pulling: requests whose blocks are being pulled.
        fingerprint: equal for engines that can exchange KV.

    Raises:
        ValueError: the KV of this model or drafter cannot be moved.
    """

    def __init__(self, decoder: SpeculativeDecoder, link: Link, hold_seconds: float = 60.0, pull_seconds: float = 20.0):
        if decoder.target.ranks is not None or decoder.target.recurrent is not None:
            what = "sharded over ranks" if decoder.target.ranks is not None else "recurrent"
            raise ValueError(f"kv_transfer_config: the keys and values of a model that is {what} cannot be moved.")
        moved = decoder.generator.moved_caches()
        if moved is None:
            raise ValueError(
                f"kv_transfer_config: what a drafter of method {decoder.config.method!r} keeps of a prompt cannot be moved. Use "
                "none, ngram, suffix, draft_model, eagle, eagle3, mtp with one module, or another method that reads no hidden states."
            )
        self.decoder, self.link = decoder, link
        self.hold_seconds, self.pull_seconds = hold_seconds, pull_seconds
        self.id = uuid.uuid4().hex
        self.held: dict[str, _Held] = {}
        self.pulling: list[_Pull] = []
        self.statistics = TransferStatistics()
        self._registered: tuple[Any, str] | None = None
        self._allocate()
        self.fingerprint = self._fingerprint()

    @property
    def caches(self) -> list[PagedStaticCache]:
        """The caches whose blocks are moved: the target's, and that of a drafter that reads features."""
        return [self.decoder.cache, *(self.decoder.generator.moved_caches() or [])]

    def _allocate(self) -> None:
        """Allocate all pools now, by a forward pass over one token, so that they have addresses."""
        decoder = self.decoder
        with decoder.active():
            if decoder.cache.is_allocated:
                return
            row = RowInput(_WARM_UP, np.zeros(1, dtype=np.int64), 0)
            for cache in self.caches:
                cache.add(_WARM_UP)
                cache.reserve(_WARM_UP, 1)
            try:
                output = decoder.target.forward([row], decoder.cache)
                decoder.generator.warm_up(row, output)
            finally:
                for cache in self.caches:
                    cache.remove(_WARM_UP)

    def _fingerprint(self) -> str:
        """A hash of everything that must be equal for KV to be exchanged: weights, shapes, method, block size, quantization."""
        model, config = self.decoder.target.model, self.decoder.config
        shapes = [
            [[*layer.keys.shape[1:], *layer.values.shape[1:], str(layer.keys.dtype)] for layer in cache.layers]
            for cache in self.caches
        ]
        settings = json.dumps([config.method, config.block_size, shapes, config.target_quantization], default=str)
        weights = fingerprints(list(model.parameters()))
        return hashlib.sha256(settings.encode() + b"".join(weights)).hexdigest()

    # ---- the producer -----------------------------------------------------------------------------------------------

    def hold(self, choice: Choice) -> dict[str, Any]:
        """Keep the blocks of a prompt that has been read. Call inside `decoder.active()`. Returns the consumer's kv_transfer_params."""
        seq = choice.sequence
        count = seq.prompt_length - 1
        self.decoder.generator.read_features(seq, count)
        size = self.decoder.config.block_size
        blocks = [cache.tables[seq.id].blocks[: -(-count // size)] for cache in self.caches]
        key = f"{self.id}/{seq.id}"
        self.held[key] = _Held(choice, time.monotonic() + self.hold_seconds)
        return {
            "do_remote_prefill": True, "do_remote_decode": False, "remote_engine_id": self.id, "remote_request_id": key,
            "remote_agent": self._address(), "fingerprint": self.fingerprint, "num_tokens": count,
            "prompt": digest(seq.tokens[: seq.prompt_length]), "remote_blocks": blocks,
            "pools": [[pool.data_ptr() for pool in _pools(cache)] for cache in self.caches],
            "digests": [_digests(cache, own) for cache, own in zip(self.caches, blocks, strict=True)],
        }  # fmt: skip

    def _address(self) -> str:
        """This process's address for peers. Registers the pools if they are new or have been allocated again."""
        identity = tuple(cache.identity for cache in self.caches)
        if self._registered is None or self._registered[0] != identity:
            self._registered = identity, self.link.register([pool for cache in self.caches for pool in _pools(cache)])
        return self._registered[1]

    def _release(self) -> None:
        """Free the prompts that consumers have read, and those that nobody has pulled in time."""
        for key in self.link.messages():
            held = self.held.pop(key, None)
            if held is not None:
                self.decoder.remove(held.choice.sequence)
        now = time.monotonic()
        for key in [key for key, held in self.held.items() if held.until < now]:
            logger.warning(
                "No decode server has read the KV of a prompt within %.0f s: it is freed.", self.hold_seconds
            )
            self.statistics.expired += 1
            self.decoder.remove(self.held.pop(key).choice.sequence)

    # ---- the consumer -----------------------------------------------------------------------------------------------

    def expect(self, choice: Choice, params: dict[str, Any]) -> None:
        """Let a request wait for its blocks; `poll` pulls them.

        Args:
            params: the producer's kv_transfer_params.

        Raises:
            ValueError: they are malformed, or belong to another model or prompt.
        """
        try:
            fingerprint, count = params["fingerprint"], params["num_tokens"]
            prompt, lengths = params["prompt"], [len(each) for each in (*params["remote_blocks"], *params["digests"])]
        except (KeyError, TypeError) as error:
            raise ValueError(
                f"kv_transfer_params lacks {error}: pass on those that the prefill server has returned."
            ) from None
        if fingerprint != self.fingerprint:
            raise ValueError(
                "kv_transfer_params come from a server with another model, precision, block size or method: prefill and decode servers "
                "need the same weights and the same speculative configuration."
            )
        seq = choice.sequence
        needed = -(-count // self.decoder.config.block_size) if type(count) is int else -1
        if count != seq.prompt_length - 1 or prompt != digest(seq.tokens) or set(lengths) != {needed}:
            raise ValueError("kv_transfer_params belong to another prompt: send the same prompt to both servers.")
        if count < 1:
            raise ValueError("kv_transfer_params: a prompt of one token has no KV to move.")
        self.pulling.append(_Pull(choice, params, time.monotonic() + self.pull_seconds))

    def cancel(self, choice: Choice) -> bool:
        """Stop pulling for a request. False if it is not being pulled."""
        found = next((each for each in self.pulling if each.choice is choice), None)
        if found is None:
            return False
        self.pulling.remove(found)
        self._give_up(found)
        return True

    def poll(self) -> list[Choice]:
        """Free what is no longer held, begin and finish pulls. Call inside `decoder.active()`. Returns the requests that can run now."""
        self._release()
        ready = []
        for each in list(self.pulling):
            try:
                if each.handle is None and not each.begun and not self._begin(each):
                    continue
                if each.handle is not None and not self.link.is_done(each.handle):
                    if time.monotonic() < each.until:
                        continue
                    raise ConnectionError(f"its bytes have not arrived within {self.pull_seconds:.0f} s")
                self._finish(each)
                self.statistics.pulled += 1
            except (ConnectionError, ValueError) as error:
                logger.warning("This server reads a prompt itself, because its KV could not be pulled: %s.", error)
                self.statistics.recomputed += 1
                self._give_up(each)
            self.pulling.remove(each)
            ready.append(each.choice)
        return ready

    def _begin(self, each: _Pull) -> bool:
        """Take blocks and begin to pull into them. False if no blocks are free now.

        Raises:
            ConnectionError: the peer cannot be reached, or no blocks were free in time.
        """
        decoder, seq, count = self.decoder, each.choice.sequence, each.params["num_tokens"]
        size = decoder.config.block_size
        decoder.add(seq)
        each.choice.is_added = True
        matched = decoder.share_prefix(seq)
        try:
            for cache in self.caches:
                cache.reserve(seq.id, count)
        except OutOfBlocks:
            decoder.remove(seq)
            each.choice.is_added = False
            if time.monotonic() < each.until:
                return False
            raise ConnectionError("no blocks were free") from None
        pieces, first = [], matched // size
        for index, cache in enumerate(self.caches):
            own, theirs = cache.tables[seq.id].blocks, each.params["remote_blocks"][index]
            pools = zip(_pools(cache), each.params["pools"][index], strict=True)
            pieces += [piece for pool, there in pools for piece in _pieces(pool, there, own, theirs, first, size)]
            each.begun.append((cache, first, each.params["digests"][index]))
        self._address()  # registers the pools
        each.started = time.monotonic()
        self.statistics.bytes += sum(piece.size for piece in pieces)
        if pieces:
            each.handle = self.link.start(each.params["remote_agent"], pieces, each.params["remote_request_id"])
        else:  # the prefix cache has all of it
            self.link.tell(each.params["remote_agent"], each.params["remote_request_id"])
        return True

    def _finish(self, each: _Pull) -> None:
        """Check the bytes that have arrived, and register them as the KV of the row.

        Raises:
            ValueError: they are not what the producer had.
        """
        seq, count = each.choice.sequence, each.params["num_tokens"]
        size = self.decoder.config.block_size
        if each.handle is not None:
            self.statistics.seconds += time.monotonic() - each.started
            self.link.drop(each.handle)
            each.handle = None
        for cache, first, wanted in each.begun:
            blocks = cache.tables[seq.id].blocks[first : -(-count // size)]
            if _digests(cache, blocks) != wanted[first:]:
                raise ValueError(
                    "the blocks have changed since the prefill server announced them; it may have freed them"
                )
        for cache in self.caches:
            cache.tables[seq.id].length = count
            cache.register_prefix(seq.id, seq.tokens, count)
        self.decoder.statistics[seq.id].num_cached_tokens = count

    def _give_up(self, each: _Pull) -> None:
        """Free the blocks that a request has taken, and tell the producer that it need not hold its own."""
        if each.handle is not None:
            self.link.drop(each.handle)
            each.handle = None
        self.link.tell(each.params["remote_agent"], each.params["remote_request_id"])
        if each.choice.is_added:
            self.decoder.remove(each.choice.sequence)
            each.choice.is_added = False

    # ---- the end ----------------------------------------------------------------------------------------------------

    @property
    def is_busy(self) -> bool:
        """True if a prompt is held or pulled, so that `poll` must be called."""
        return bool(self.held or self.pulling)

    def close(self) -> None:
        """Free all held prompts, and stop all pulls."""
        for held in self.held.values():
            self.decoder.remove(held.choice.sequence)
        self.held.clear()
        for each in self.pulling:
            self._give_up(each)
        self.pulling.clear()


def _pools(cache: PagedStaticCache) -> list[torch.Tensor]:
    """The pools of keys and of values of all layers, in order; each [slots, ...]."""
    return [pool for layer in cache.layers if layer.is_initialized for pool in (layer.keys, layer.values)]


def _pieces(pool: torch.Tensor, there: int, own: list[int], theirs: list[int], first: int, size: int) -> list[Piece]:
    """The runs of bytes to read for one pool; runs that are adjacent on both sides are joined.

    Args:
        there: address of the peer's pool.
        own, theirs: the row's blocks here and at the peer.
        first: index of the first block to read.
        size: tokens of a block.
    """
    num_bytes = pool[0].nbytes * size
    pieces: list[Piece] = []
    for mine, block in zip(own[first : len(theirs)], theirs[first:], strict=True):
        here, remote = pool.data_ptr() + mine * num_bytes, there + block * num_bytes
        last = pieces[-1] if pieces else None
        if last is not None and last.here + last.size == here and last.there + last.size == remote:
            last.size += num_bytes
        else:
            pieces.append(Piece(here, remote, num_bytes))
    return pieces


def _digests(cache: PagedStaticCache, blocks: list[int]) -> list[str]:
    """A digest of each block's keys and values in all layers."""
    size, found = cache.block_size, []
    for block in blocks:
        hasher = xxhash.xxh3_128()
        for pool in _pools(cache):
            rows = pool[block * size : (block + 1) * size].contiguous()
            hasher.update(rows.view(torch.uint8).cpu().numpy())
        found.append(hasher.hexdigest())
    return found
