"""Consumer: requests whose prompts' blocks are pulled from a producer."""

from __future__ import annotations

import json
import logging
import time
from dataclasses import dataclass, field
from typing import Any

from ...cache import OutOfBlocks, PagedStaticCache
from ...core.ranks import digest
from ..engine.request import RequestChoice
from .pools import MovedPools, TransferStatistics

logger = logging.getLogger(__name__)

_ASK_AGAIN_SECONDS = 1.0  # without progress, ask again: the producer may have ended, or a message may be lost


@dataclass
class Pull:
    """A request whose blocks are being pulled. Times are `time.monotonic`'s."""

    choice: RequestChoice
    params: dict[str, Any]  # the producer's kv_transfer_params
    until: float  # when to give up
    offers: dict[int, tuple[list[int], list[str]]] = field(default_factory=dict)  # by block: numbers there, digests
    have: int = 0  # leading blocks that have arrived and been checked
    handle: Any = None  # the running transfer, which brings blocks `have` to `end` - 1; None if none is running
    end: int = 0
    wanted: list[list[str]] = field(default_factory=list)  # per block of the running transfer, its digest in each cache
    started: float = 0.0  # when the running transfer began
    asked: float = 0.0  # when the producer was last asked for blocks of a prompt that comes in chunks
    refused: bool = False  # the producer no longer has the prompt, or has sent a malformed offer

    @property
    def name(self) -> str:
        """By which the producer knows the prompt."""
        return self.params["remote_request_id"]

    @property
    def peer(self) -> str:
        """The producer's address."""
        return self.params["remote_agent"]


class Consumer:
    """The requests that wait for their prompts' KV. `stopped`: transfers that were given up but still run, and the blocks that they write
    to.
    """

    def __init__(self, pools: MovedPools, pull_seconds: float, statistics: TransferStatistics):
        self.pools, self.pull_seconds, self.statistics = pools, pull_seconds, statistics
        self.pulling: list[Pull] = []
        self.stopped: list[tuple[Any, list[tuple[PagedStaticCache, list[int]]]]] = []

    def expect(self, choice: RequestChoice, params: dict[str, Any]) -> None:
        """Let a request wait for its blocks; `poll` pulls them. Raises ValueError: the producer's kv_transfer_params are malformed, or
        belong to another model or prompt.
        """
        in_chunks = params.get("in_chunks") is True
        names = ["fingerprint", "num_tokens", "prompt", "remote_agent", "remote_request_id", "pools"]
        names += [] if in_chunks else ["remote_blocks", "digests"]
        passed_on = "pass on those that the prefill server has returned"
        for name in names:
            if name not in params:
                raise ValueError(f"kv_transfer_params lacks {name!r}: {passed_on}.")
        if params["fingerprint"] != self.pools.fingerprint:
            raise ValueError(
                "kv_transfer_params come from a server with another model, precision, block size or method: prefill and decode servers "
                "need the same weights and the same speculative configuration."
            )
        seq, count = choice.sequence, params["num_tokens"]
        if type(count) is not int or count != seq.prompt_length - 1 or params["prompt"] != digest(seq.tokens):
            raise ValueError("kv_transfer_params belong to another prompt: send the same prompt to both servers.")
        if count < 1:
            raise ValueError("kv_transfer_params: a prompt of one token has no KV to move.")
        pull = Pull(choice, params, time.monotonic() + self.pull_seconds)
        needed = self.pools.num_blocks(count)
        are_texts = all(isinstance(params[key], str) for key in ("remote_agent", "remote_request_id"))
        have_shape = _lengths(params["pools"], int) == [len(pools) for pools in self.pools.addresses()]
        offered = in_chunks or self._fits(pull, 0, params["remote_blocks"], params["digests"], needed)
        if not (are_texts and have_shape and offered):
            raise ValueError(f"kv_transfer_params are malformed: {passed_on}.")
        self.pulling.append(pull)

    def _fits(self, pull: Pull, first: int, blocks: Any, digests: Any, count: int | None = None) -> bool:
        """Store an offer and return True if it is well-formed, with `count` blocks unless that is None; else return False."""
        lengths = _lengths(blocks, int)
        if lengths is None or lengths != _lengths(digests, str) or len(lengths) != len(self.pools.caches):
            return False
        if len({*lengths, lengths[0] if count is None else count}) != 1:
            return False
        # It takes the place of earlier offers, whose blocks may have been freed.
        for i in range(lengths[0]):
            pull.offers[first + i] = [numbers[i] for numbers in blocks], [texts[i] for texts in digests]
        return True

    def offered(self, name: str, first: int, blocks: list[list[int]], digests: list[list[str]]) -> None:
        """A producer offers blocks of a prompt, from index `first` on."""
        for pull in self.pulling:
            if pull.name == name and not self._fits(pull, first, blocks, digests):
                pull.refused = True

    def refused(self, name: str) -> None:
        """The producer no longer has this prompt."""
        for pull in self.pulling:
            pull.refused |= pull.name == name

    def cancel(self, choice: RequestChoice) -> bool:
        """Stop pulling for a choice that has ended. False: it did not pull."""
        pull = next((pull for pull in self.pulling if pull.choice is choice), None)
        if pull is None:
            return False
        self.pulling.remove(pull)
        self._give_up(pull)
        return True

    def poll(self) -> list[RequestChoice]:
        """Begin, continue and finish pulls. Call inside `decoder.active()`. Returns the requests that can run now."""
        for stopped in list(self.stopped):
            handle, taken = stopped
            if self.pools.link.drop(handle):
                for cache, blocks in taken:
                    cache.pool.release(blocks)
                self.stopped.remove(stopped)
        ready = []
        for pull in list(self.pulling):
            try:
                if not self._advance(pull):
                    continue
                seq, count = pull.choice.sequence, pull.params["num_tokens"]
                # The row continues after the pulled tokens, and other rows may share them.
                for cache in self.pools.caches:
                    cache.tables[seq.id].length = count
                    cache.register_prefix(seq.id, seq.tokens, count)
                self.pools.decoder.statistics[seq.id].num_cached_tokens = count
                self.statistics.pulled += 1
            except (ConnectionError, ValueError) as error:
                logger.warning("This server reads a prompt itself, because its KV could not be pulled: %s.", error)
                self.statistics.recomputed += 1
                self._give_up(pull)
            self.pulling.remove(pull)
            ready.append(pull.choice)
        return ready

    def _advance(self, pull: Pull) -> bool:
        """Do what can be done now; True if all blocks are here. ConnectionError: the producer is gone; ValueError: wrong bytes arrived."""
        needed = self.pools.num_blocks(pull.params["num_tokens"])
        if not pull.choice.is_added and not self._begin(pull):
            return False
        if pull.handle is not None and self.pools.link.is_done(pull.handle):
            self._check(pull)
        if pull.have == needed:
            return True
        if pull.refused:
            raise ConnectionError("the prefill server has given up the prompt")
        if pull.handle is None:
            self._start(pull, needed)
        now = time.monotonic()
        if now > pull.until:
            raise ConnectionError(f"no bytes have arrived within {self.pull_seconds:.0f} s")
        if pull.params.get("in_chunks") and now > pull.asked + _ASK_AGAIN_SECONDS:
            self._ask(pull)
        return False

    def _begin(self, pull: Pull) -> bool:
        """Take blocks for the whole prompt. False if they are not free now."""
        decoder, seq, count = self.pools.decoder, pull.choice.sequence, pull.params["num_tokens"]
        decoder.add(seq)
        matched = decoder.share_prefix(seq)
        try:
            for cache in self.pools.caches:
                cache.reserve(seq.id, count)
        except OutOfBlocks:
            decoder.remove(seq)
            if time.monotonic() < pull.until and not pull.refused:
                return False
            raise ConnectionError("no blocks were free") from None
        self.pools.address()  # registers the pools
        pull.choice.is_added, pull.have = True, matched // self.pools.block_size
        if pull.have == self.pools.num_blocks(count):  # the prefix cache has all of it
            self.pools.link.tell(pull.peer, json.dumps({"done": pull.name}))
        elif pull.params.get("in_chunks"):
            self._ask(pull)
        return True

    def _ask(self, pull: Pull) -> None:
        pull.asked = time.monotonic()
        wish = {"want": pull.name, "from": self.pools.address(), "first": pull.have}
        if not self.pools.link.tell(pull.peer, json.dumps(wish)):
            raise ConnectionError("the prefill server cannot be reached")

    def _start(self, pull: Pull, needed: int) -> None:
        """Pull the next offered blocks, if any. The end of the last transfer tells the producer to free its blocks."""
        pull.end = pull.have
        while pull.end in pull.offers and pull.end < needed:
            pull.end += 1
        if pull.end == pull.have:
            return
        seq, pieces = pull.choice.sequence, []
        for i, cache in enumerate(self.pools.caches):
            ours = cache.tables[seq.id].blocks[pull.have : pull.end]
            theirs = [pull.offers[index][0][i] for index in range(pull.have, pull.end)]
            pieces += self.pools.pieces(cache, pull.params["pools"][i], ours, theirs)
        message = json.dumps({"done": pull.name}) if pull.end == needed else ""
        pull.wanted = [pull.offers[index][1] for index in range(pull.have, pull.end)]
        pull.started = time.monotonic()
        pull.handle = self.pools.link.start(pull.peer, pieces, message)
        self.statistics.bytes += sum(piece.size for piece in pieces)

    def _check(self, pull: Pull) -> None:
        seq = pull.choice.sequence
        self.statistics.seconds += time.monotonic() - pull.started
        self.pools.link.drop(pull.handle)
        pull.handle = None
        for i, cache in enumerate(self.pools.caches):
            blocks = cache.tables[seq.id].blocks[pull.have : pull.end]
            if self.pools.digests(cache, blocks) != [digests[i] for digests in pull.wanted]:
                raise ValueError(
                    "the blocks have changed since they were offered; the prefill server may have freed them"
                )
        pull.have = pull.end
        pull.until = time.monotonic() + self.pull_seconds
        pull.asked = time.monotonic()

    def _give_up(self, pull: Pull) -> None:
        """Free a request's blocks, those that are still written to once that ends, and tell the producer that it need not hold its own."""
        seq = pull.choice.sequence
        if pull.handle is not None and not self.pools.link.drop(pull.handle):
            taken = [(cache, list(cache.tables[seq.id].blocks)) for cache in self.pools.caches]
            for cache, blocks in taken:
                cache.pool.retain(blocks)
            self.stopped.append((pull.handle, taken))
        pull.handle = None
        self.pools.link.tell(pull.peer, json.dumps({"done": pull.name}))
        if pull.choice.is_added:
            self.pools.decoder.remove(seq)
            pull.choice.is_added = False

    def close(self) -> None:
        """Give up all pulls."""
        for pull in self.pulling:
            self._give_up(pull)
        self.pulling.clear()


def _lengths(lists: Any, kind: type) -> list[int] | None:
    """The lengths of lists that hold values of one type; None if they are anything else."""
    if not isinstance(lists, list) or not all(isinstance(values, list) for values in lists):
        return None
    fit = all(type(value) is kind for values in lists for value in values)
    return [len(values) for values in lists] if fit else None
