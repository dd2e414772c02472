"""Producer: prompts whose blocks others pull, while they are read and after."""

from __future__ import annotations

import json
import logging
import time
from dataclasses import dataclass
from typing import Any

from ...cache import BlockTable, OutOfBlocks
from ...core.ranks import digest
from ..engine.request import RequestChoice
from .pools import MovedPools, TransferStatistics

logger = logging.getLogger(__name__)


@dataclass
class OfferedPrompt:
    """A prompt whose blocks others may pull.

    Attributes:
        tables: per cache, the row's block table, which a preemption replaces.
        blocks, digests: per cache, those of the leading full blocks that have been read; once it is held, of all blocks.
        consumer: address of the consumer that asked for the blocks; None: none has asked yet.
        num_offered: how many leading blocks the consumer has or knows of.
        until: when to free it (`time.monotonic`); None while it is being read.
    """

    choice: RequestChoice
    tables: list[BlockTable]
    blocks: list[list[int]]
    digests: list[list[str]]
    consumer: str | None = None
    num_offered: int = 0
    until: float | None = None

    @property
    def num_blocks(self) -> int:
        return len(self.blocks[0])


class Producer:
    """The prompts that an engine reads for others (those announced, by the name that the consumer is told), and those that it holds for
    them.
    """

    def __init__(self, pools: MovedPools, engine_id: str, hold_seconds: float, statistics: TransferStatistics):
        self.pools, self.id, self.hold_seconds, self.statistics = pools, engine_id, hold_seconds, statistics
        self.reading: dict[str, OfferedPrompt] = {}
        self.held: dict[str, OfferedPrompt] = {}
        self._unwanted: list[RequestChoice] = []

    def has_read(self, rows: list[RequestChoice]) -> list[RequestChoice]:
        """After a step of these rows: offer the blocks that are complete. Call inside `decoder.active()`. Returns the choices announced
        in this step: their first blocks are complete, and `announcement` is set.
        """
        announced = []
        for choice in rows:
            if not asks_for_chunks(choice) or choice.output.finished():
                continue
            name = self._name(choice)
            prompt = self.reading.get(name) or self._new(choice)
            self._read_on(prompt)
            if name not in self.reading:
                if not prompt.num_blocks:
                    continue
                self.reading[name] = prompt
                choice.request.announcement = {**self._params(choice), "in_chunks": True}
                announced.append(choice)
            self._offer(name, prompt)
        return announced

    def _new(self, choice: RequestChoice) -> OfferedPrompt:
        tables = [cache.tables[choice.sequence.id] for cache in self.pools.caches]
        return OfferedPrompt(choice, tables, [[] for _ in tables], [[] for _ in tables])

    def _read_on(self, prompt: OfferedPrompt) -> None:
        """Note the full blocks that are complete now. After a preemption, begin again."""
        seq, size = prompt.choice.sequence, self.pools.block_size
        self._note_again_if_preempted(prompt)
        full = min(prompt.tables[0].length, seq.prompt_length - 1) // size
        try:
            self.pools.read_features(seq, full * size)
        except OutOfBlocks:  # the head reads the rest later
            full = min(full, *(table.length // size for table in prompt.tables))
        self._note(prompt, full)

    def _note_again_if_preempted(self, prompt: OfferedPrompt) -> None:
        """If the row has other blocks than before, forget those: they are noted and offered again."""
        fresh = self._new(prompt.choice)
        if any(new is not old for new, old in zip(fresh.tables, prompt.tables, strict=True)):
            prompt.tables, prompt.blocks, prompt.digests = fresh.tables, fresh.blocks, fresh.digests
            prompt.num_offered = 0

    def _note(self, prompt: OfferedPrompt, count: int) -> None:
        for i, cache in enumerate(self.pools.caches):
            new = prompt.tables[i].blocks[len(prompt.blocks[i]) : count]
            prompt.blocks[i] += new
            prompt.digests[i] += self.pools.digests(cache, new)

    def _offer(self, name: str, prompt: OfferedPrompt) -> None:
        """Tell the consumer about the blocks that it does not know of."""
        first = prompt.num_offered
        if prompt.consumer is None or first >= prompt.num_blocks:
            return
        prompt.num_offered = prompt.num_blocks
        offer = {
            "offer": name, "first": first, "blocks": [blocks[first:] for blocks in prompt.blocks],
            "digests": [digests[first:] for digests in prompt.digests],
        }  # fmt: skip
        self.pools.link.tell(prompt.consumer, json.dumps(offer))

    def forget(self, choice: RequestChoice) -> None:
        """A request has ended without its prompt being held: tell the consumer, who reads the prompt itself."""
        prompt = self.reading.pop(self._name(choice), None)
        if prompt is not None:
            self._refuse(self._name(choice), prompt.consumer)

    def _refuse(self, name: str, consumer: str | None) -> None:
        if consumer is not None:
            self.pools.link.tell(consumer, json.dumps({"gone": name}))

    def hold(self, choice: RequestChoice) -> dict[str, Any] | None:
        """Keep the blocks of a prompt that has been read. Call inside `decoder.active()`. Returns the consumer's kv_transfer_params; None
        if the head finds no blocks to read the prompt into: the row is then removed.
        """
        seq, name = choice.sequence, self._name(choice)
        count = seq.prompt_length - 1
        try:
            self.pools.read_features(seq, count)
        except OutOfBlocks:
            logger.warning("A prompt's KV cannot be held for a decode server, because no blocks are free.")
            self.forget(choice)
            self.pools.decoder.remove(seq)
            return None
        prompt = self.reading.pop(name, None) or self._new(choice)
        self._note_again_if_preempted(prompt)
        self._note(prompt, self.pools.num_blocks(count))
        prompt.until = time.monotonic() + self.hold_seconds
        self.held[name] = prompt
        self._offer(name, prompt)
        return {**self._params(choice), "remote_blocks": prompt.blocks, "digests": prompt.digests}

    def _name(self, choice: RequestChoice) -> str:
        return f"{self.id}/{choice.sequence.id}"

    def _params(self, choice: RequestChoice) -> dict[str, Any]:
        """What a consumer must know of a prompt before it asks for blocks."""
        seq = choice.sequence
        return {
            "do_remote_prefill": True, "do_remote_decode": False, "remote_engine_id": self.id,
            "remote_request_id": self._name(choice), "remote_agent": self.pools.address(), "fingerprint": self.pools.fingerprint,
            "num_tokens": seq.prompt_length - 1, "prompt": digest(seq.tokens[: seq.prompt_length]), "pools": self.pools.addresses(),
        }  # fmt: skip

    def take_unwanted(self) -> list[RequestChoice]:
        """The choices that are still being read, but whose consumer has given up; each is told once."""
        unwanted, self._unwanted = self._unwanted, []
        return unwanted

    def wanted(self, name: str, consumer: str, first: int) -> None:
        """A consumer asks for a prompt's blocks from index `first` on."""
        prompt = self.reading.get(name) or self.held.get(name)
        if prompt is None:
            self._refuse(name, consumer)
            return
        prompt.consumer, prompt.num_offered = consumer, first
        self._offer(name, prompt)

    def done(self, name: str) -> None:
        """A consumer has read a prompt, or no longer needs it: free it."""
        held = self.held.pop(name, None)
        if held is not None:
            self.pools.decoder.remove(held.choice.sequence)
        reading = self.reading.pop(name, None)
        if reading is not None:
            self._unwanted.append(reading.choice)

    def release(self) -> None:
        """Free the prompts that nobody has pulled in time."""
        now = time.monotonic()
        for name, held in list(self.held.items()):
            if held.until is not None and held.until < now:
                logger.warning("A prompt's KV is freed: no decode server has read it in %.0f s.", self.hold_seconds)
                self.statistics.expired += 1
                self.done(name)
                self._refuse(name, held.consumer)

    @property
    def awaits_consumer(self) -> bool:
        """True if an announced prompt was read a moment ago and no consumer has asked for it yet, so that one will ask soon."""
        soon = time.monotonic() + self.hold_seconds - 1
        return any(
            held.until is not None and held.until > soon and held.consumer is None
            for held in self.held.values()
            if asks_for_chunks(held.choice)
        )

    def close(self) -> None:
        for name in list(self.held):
            self.done(name)
        self.reading.clear()


def asks_for_chunks(choice: RequestChoice) -> bool:
    """True if a request's prompt is to be announced after its first chunk."""
    params = choice.request.params.kv_transfer_params or {}
    return bool(params.get("do_remote_decode") and params.get("in_chunks"))
