"""Prefill and decode apart: a producer reads prompts and holds their keys and values; a consumer pulls them and goes on.

The producer's answer carries `kv_transfer_params` (vLLM's word): where the blocks of the prompt are, a digest of each, and a fingerprint
of the model. The consumer pulls the blocks it lacks into blocks of its own, compares the digests, and then has what it would have after
sharing a prefix of all but the last prompt token, which it reads itself. So its text and its number of steps are those of one server.
Of a drafter that reads the target's features (EAGLE, MTP) the rows of its own cache move too; other drafters need nothing.

Whatever fails on the way (a producer that is gone or has let go of the blocks, blocks that were overwritten) ends in the consumer reading
the prompt itself. Digests are compared after the last byte has come, so that no failure can end in other keys than the producer's.
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

_WARM_UP = -1  # id of the sequence by which pools come into being


@dataclass
class Piece:
    """Bytes of a block run: its address here, its address there, and how many."""

    here: int
    there: int
    size: int


class Link(Protocol):
    """Moves bytes between processes: NIXL (`nixl_link`)."""

    def register(self, pools: list[torch.Tensor]) -> str:
        """Make pools readable for others. Returns what they need to know of this process, as text."""
        ...

    def start(self, peer: str, pieces: list[Piece], message: str) -> Any:
        """Begin to read from a peer, who gets `message` once all is read. Returns a handle.

        Raises:
            ConnectionError: the peer cannot be reached.
        """
        ...

    def is_done(self, handle: Any) -> bool:
        """True once all bytes are here.

        Raises:
            ConnectionError: they will not come.
        """
        ...

    def drop(self, handle: Any) -> None:
        """Forget a handle; what it has not read is not read any more."""
        ...

    def tell(self, peer: str, message: str) -> None:
        """Send a message to a peer, if it can be reached."""
        ...

    def messages(self) -> list[str]:
        """What peers have sent since the last call."""
        ...


@dataclass
class _Held:
    """A prompt's blocks that wait for a consumer."""

    choice: Choice
    until: float


@dataclass
class _Coming:
    """A request whose blocks are being pulled."""

    choice: Choice
    params: dict[str, Any]
    until: float
    started: float = 0.0
    handle: Any = None
    begun: list[tuple[PagedStaticCache, int, list[str]]] = field(default_factory=list)  # cache, first block, digests


@dataclass
class TransferStatistics:
    """What has moved so far."""

    pulled: int = 0  # requests
    recomputed: int = 0
    expired: int = 0
    bytes: int = 0
    seconds: float = 0.0


class Transfers:
    """The prompts that an engine hands over, and those that it takes over.

    Args:
        hold_seconds: for which a prompt's blocks wait for a consumer.
        pull_seconds: after which a consumer reads the prompt itself.

    Raises:
        ValueError: the model's or the drafter's state cannot be moved.
    """

    def __init__(self, decoder: SpeculativeDecoder, link: Link, hold_seconds: float = 60.0, pull_seconds: float = 20.0):
        if decoder.target.ranks is not None or decoder.target.recurrent is not None:
            what = "sharded over ranks" if decoder.target.ranks is not None else "recurrent"
            raise ValueError(f"kv_transfer_config: the keys and values of a model that is {what} cannot be moved.")
        moved = decoder.generator.moved_caches()
        if moved is None:
            raise ValueError(
                f"kv_transfer_config: what a drafter of method {decoder.config.method!r} keeps of a prompt cannot be moved. There are "
                "none, ngram, suffix, draft_model, eagle, eagle3, mtp with one module, and others that read no hidden states."
            )
        self.decoder, self.link = decoder, link
        self.hold_seconds, self.pull_seconds = hold_seconds, pull_seconds
        self.id = uuid.uuid4().hex
        self.held: dict[str, _Held] = {}
        self.coming: list[_Coming] = []
        self.statistics = TransferStatistics()
        self._registered: tuple[Any, str] | None = None
        self._allocate()
        self.fingerprint = self._fingerprint()

    @property
    def caches(self) -> list[PagedStaticCache]:
        """The target's cache, and the drafter's that read features."""
        return [self.decoder.cache, *(self.decoder.generator.moved_caches() or [])]

    def _allocate(self) -> None:
        """Let all pools come into being: the first forward makes them."""
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
        """Of everything that must be equal for keys and values to mean the same."""
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
        """Keep the blocks of a prompt that has been read. Call inside `active()`. Returns the consumer's `kv_transfer_params`."""
        seq = choice.sequence
        count = seq.prompt_length - 1
        self.decoder.generator.read_features(seq, count)
        size = self.decoder.config.block_size
        blocks = [cache.tables[seq.id].blocks[: -(-count // size)] for cache in self.caches]
        key = f"{self.id}/{seq.id}"
        self.held[key] = _Held(choice, time.monotonic() + self.hold_seconds)
        return {
            "do_remote_prefill": True, "do_remote_decode": False, "remote_engine_id": self.id, "remote_request_id": key,
            "remote_agent": self._peer(), "fingerprint": self.fingerprint, "num_tokens": count,
            "prompt": digest(seq.tokens[: seq.prompt_length]), "remote_blocks": blocks,
            "pools": [[pool.data_ptr() for pool in _pools(cache)] for cache in self.caches],
            "digests": [_digests(cache, own) for cache, own in zip(self.caches, blocks, strict=True)],
        }  # fmt: skip

    def _peer(self) -> str:
        """What a consumer needs to know; pools are registered again if they have moved."""
        identity = tuple(cache.identity for cache in self.caches)
        if self._registered is None or self._registered[0] != identity:
            self._registered = identity, self.link.register([pool for cache in self.caches for pool in _pools(cache)])
        return self._registered[1]

    def _release(self) -> None:
        """Free what consumers have read, and what none has come for."""
        for key in self.link.messages():
            held = self.held.pop(key, None)
            if held is not None:
                self.decoder.remove(held.choice.sequence)
        now = time.monotonic()
        for key in [key for key, held in self.held.items() if held.until < now]:
            logger.warning("Nobody has come for the keys of a prompt within %.0f s: they are freed.", self.hold_seconds)
            self.statistics.expired += 1
            self.decoder.remove(self.held.pop(key).choice.sequence)

    # ---- the consumer -----------------------------------------------------------------------------------------------

    def expect(self, choice: Choice, params: dict[str, Any]) -> None:
        """A request comes with another engine's `kv_transfer_params`.

        Raises:
            ValueError: they are of another model, or are no such parameters.
        """
        try:
            fingerprint, count = params["fingerprint"], params["num_tokens"]
            prompt, lengths = params["prompt"], [len(each) for each in (*params["remote_blocks"], *params["digests"])]
        except (KeyError, TypeError) as error:
            raise ValueError(
                f"kv_transfer_params lacks {error}: pass on what the prefill server has answered."
            ) from None
        if fingerprint != self.fingerprint:
            raise ValueError(
                "kv_transfer_params come from a server with another model, precision, block size or method: prefill and decode servers "
                "need the same weights and the same speculative configuration."
            )
        seq = choice.sequence
        needed = -(-count // self.decoder.config.block_size) if type(count) is int else -1
        if count != seq.prompt_length - 1 or prompt != digest(seq.tokens) or set(lengths) != {needed}:
            raise ValueError("kv_transfer_params are of another prompt: send both servers the same one.")
        if count < 1:
            raise ValueError("kv_transfer_params: a prompt of one token has nothing to move.")
        self.coming.append(_Coming(choice, params, time.monotonic() + self.pull_seconds))

    def cancel(self, choice: Choice) -> bool:
        """Drop a request that is coming. False: it is not."""
        found = next((each for each in self.coming if each.choice is choice), None)
        if found is None:
            return False
        self.coming.remove(found)
        self._give_up(found)
        return True

    def poll(self) -> list[Choice]:
        """Look after everything under way. Returns the requests that can run now. Call inside `active()`."""
        self._release()
        ready = []
        for each in list(self.coming):
            try:
                if each.handle is None and not each.begun and not self._begin(each):
                    continue
                if each.handle is not None and not self.link.is_done(each.handle):
                    if time.monotonic() < each.until:
                        continue
                    raise ConnectionError(f"its bytes have not come within {self.pull_seconds:.0f} s")
                self._finish(each)
                self.statistics.pulled += 1
            except (ConnectionError, ValueError) as error:
                logger.warning("A prompt is read here, because its keys could not be pulled: %s.", error)
                self.statistics.recomputed += 1
                self._give_up(each)
            self.coming.remove(each)
            ready.append(each.choice)
        return ready

    def _begin(self, each: _Coming) -> bool:
        """Take blocks and begin to pull into them. False: no blocks are free now."""
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
        self._peer()
        each.started = time.monotonic()
        self.statistics.bytes += sum(piece.size for piece in pieces)
        if pieces:
            each.handle = self.link.start(each.params["remote_agent"], pieces, each.params["remote_request_id"])
        else:  # all of it is known here
            self.link.tell(each.params["remote_agent"], each.params["remote_request_id"])
        return True

    def _finish(self, each: _Coming) -> None:
        """All bytes have come: they must be the producer's."""
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
                    "what came is not what the prefill server had; it may have let go of the blocks meanwhile"
                )
        for cache in self.caches:
            cache.tables[seq.id].length = count
            cache.register_prefix(seq.id, seq.tokens, count)
        self.decoder.statistics[seq.id].num_cached_tokens = count

    def _give_up(self, each: _Coming) -> None:
        """Free what a request has taken; it will read its prompt itself."""
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
        """True if something is held or on its way, so that `poll` must be called."""
        return bool(self.held or self.coming)

    def close(self) -> None:
        """Free everything."""
        for held in self.held.values():
            self.decoder.remove(held.choice.sequence)
        self.held.clear()
        for each in self.coming:
            self._give_up(each)
        self.coming.clear()


def _pools(cache: PagedStaticCache) -> list[torch.Tensor]:
    return [pool for layer in cache.layers if layer.is_initialized for pool in (layer.keys, layer.values)]


def _pieces(pool: torch.Tensor, there: int, own: list[int], theirs: list[int], first: int, size: int) -> list[Piece]:
    """Block runs of one pool, as few as there are."""
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
