"""Producer: prompts whose blocks others pull, while they are read and after."""

from __future__ import annotations

import json
import logging
import time
from dataclasses import dataclass, field
from typing import Any

from ...cache import BlockTable, OutOfBlocks
from ...core.ranks import digest
from ..engine.request import RequestChoice
from .pools import MovedPools, TransferStatistics

logger = logging.getLogger(__name__)


@dataclass
class OfferedPrompt:
    """A prompt whose blocks others may pull. The first three lists are per cache."""

    choice: RequestChoice
    name: str  # by which a consumer asks for it
    tables: list[BlockTable] = field(default_factory=list)  # the row's, which a preemption replaces
    blocks: list[list[int]] = field(default_factory=list)  # full ones that have been read; once it is held, all
    digests: list[list[str]] = field(default_factory=list)  # of these blocks
    consumer: str | None = None  # address of the consumer that asked for the blocks
    num_offered: int = 0  # how many leading blocks the consumer has or knows of
    until: float | None = None  # when to free it (`time.monotonic`); None while it is being read


class Producer:
    """The prompts that an engine reads for others, once they are announced, and those that it holds for them, by name."""

    def __init__(self, pools: MovedPools, engine_id: str, hold_seconds: float, statistics: TransferStatistics):
        self.pools, self.id, self.hold_seconds, self.statistics = pools, engine_id, hold_seconds, statistics
        self.prompts: dict[str, OfferedPrompt] = {}
        # still being read, but their consumers have given up; the engine takes them
        self.unwanted: list[RequestChoice] = []

    def _prompt(self, choice: RequestChoice) -> OfferedPrompt:
        name = f"{self.id}/{choice.sequence.id}"
        return self.prompts.get(name) or OfferedPrompt(choice, name)

    def has_read(self, rows: list[RequestChoice]) -> list[RequestChoice]:
        """After a step of these rows: offer the blocks that are complete. Call inside `decoder.active()`. Returns the choices announced
        in this step: their first blocks are complete, and `announcement` is set.
        """
        announced = []
        for choice in rows:
            if not asks_for_chunks(choice) or choice.output.finished():
                continue
            prompt = self._prompt(choice)
            self._read_on(prompt)
            if prompt.name not in self.prompts and prompt.blocks[0]:
                self.prompts[prompt.name] = prompt
                choice.request.announcement = {**self._params(prompt), "in_chunks": True}
                announced.append(choice)
            self._offer(prompt)
        return announced

    def _read_on(self, prompt: OfferedPrompt) -> None:
        """Note the full blocks that are complete now."""
        seq, size = prompt.choice.sequence, self.pools.block_size
        full = min(self.pools.decoder.cache.tables[seq.id].length, seq.prompt_length - 1) // size
        try:
            self.pools.read_features(seq, full * size)
        except OutOfBlocks:  # the head reads the rest later
            full = min(full, *(cache.tables[seq.id].length // size for cache in self.pools.caches))
        self._note(prompt, full)

    def _note(self, prompt: OfferedPrompt, count: int) -> None:
        """Note the first `count` blocks. If the row has other blocks than before, it was preempted: forget those, and offer all again."""
        tables = [cache.tables[prompt.choice.sequence.id] for cache in self.pools.caches]
        if [id(table) for table in tables] != [id(table) for table in prompt.tables]:
            prompt.tables, prompt.blocks, prompt.digests = tables, [[] for _ in tables], [[] for _ in tables]
            prompt.num_offered = 0
        for cache, table, blocks, digests in zip(self.pools.caches, tables, prompt.blocks, prompt.digests, strict=True):
            new = table.blocks[len(blocks) : count]
            blocks += new
            digests += self.pools.digests(cache, new)

    def _offer(self, prompt: OfferedPrompt) -> None:
        """Tell the consumer about the blocks that it does not know of."""
        first = prompt.num_offered
        if prompt.consumer is None or first >= len(prompt.blocks[0]):
            return
        prompt.num_offered = len(prompt.blocks[0])
        offer = {
            "offer": prompt.name, "first": first, "blocks": [blocks[first:] for blocks in prompt.blocks],
            "digests": [digests[first:] for digests in prompt.digests],
        }  # fmt: skip
        self.pools.link.tell(prompt.consumer, json.dumps(offer))

    def forget(self, choice: RequestChoice) -> None:
        """A request has ended without its prompt being held: tell the consumer, who reads the prompt itself."""
        prompt = self._prompt(choice)
        self.prompts.pop(prompt.name, None)
        self._refuse(prompt.name, prompt.consumer)

    def _refuse(self, name: str, consumer: str | None) -> None:
        if consumer is not None:
            self.pools.link.tell(consumer, json.dumps({"gone": name}))

    def hold(self, choice: RequestChoice) -> dict[str, Any] | None:
        """Keep the blocks of a prompt that has been read. Call inside `decoder.active()`. Returns the consumer's kv_transfer_params; None
        if the head finds no blocks to read the prompt into: the row is then removed.
        """
        seq, prompt = choice.sequence, self._prompt(choice)
        count = seq.prompt_length - 1
        try:
            self.pools.read_features(seq, count)
        except OutOfBlocks:
            logger.warning("A prompt's KV cannot be held for a decode server, because no blocks are free.")
            self.forget(choice)
            self.pools.decoder.remove(seq)
            return None
        self._note(prompt, self.pools.num_blocks(count))
        prompt.until = time.monotonic() + self.hold_seconds
        self.prompts[prompt.name] = prompt
        self._offer(prompt)
        return {**self._params(prompt), "remote_blocks": prompt.blocks, "digests": prompt.digests}

    def _params(self, prompt: OfferedPrompt) -> dict[str, Any]:
        """What a consumer must know of a prompt before it asks for blocks."""
        seq = prompt.choice.sequence
        return {
            "do_remote_prefill": True, "do_remote_decode": False, "remote_engine_id": self.id,
            "remote_request_id": prompt.name, "remote_agent": self.pools.address(), "fingerprint": self.pools.fingerprint,
            "num_tokens": seq.prompt_length - 1, "prompt": digest(seq.tokens[: seq.prompt_length]), "pools": self.pools.addresses(),
        }  # fmt: skip

    def wanted(self, name: str, consumer: str, first: int) -> None:
        """A consumer asks for a prompt's blocks from index `first` on."""
        prompt = self.prompts.get(name)
        if prompt is None:
            self._refuse(name, consumer)
            return
        prompt.consumer, prompt.num_offered = consumer, first
        self._offer(prompt)

    def done(self, name: str) -> None:
        """A consumer has read a prompt, or no longer needs it: free it."""
        prompt = self.prompts.pop(name, None)
        if prompt is not None and prompt.until is not None:
            self.pools.decoder.remove(prompt.choice.sequence)
        elif prompt is not None:
            self.unwanted.append(prompt.choice)

    def release(self) -> None:
        """Free the prompts that nobody has pulled in time."""
        now = time.monotonic()
        for prompt in list(self.prompts.values()):
            if prompt.until is not None and prompt.until < now:
                logger.warning("A prompt's KV is freed: no decode server has read it in %.0f s.", self.hold_seconds)
                self.statistics.expired += 1
                self.done(prompt.name)
                self._refuse(prompt.name, prompt.consumer)

    @property
    def awaits_consumer(self) -> bool:
        """True if an announced prompt was read a moment ago and no consumer has asked for it yet, so that one will ask soon."""
        soon = time.monotonic() + self.hold_seconds - 1
        return any(
            prompt.until is not None
            and prompt.until > soon
            and prompt.consumer is None
            and asks_for_chunks(prompt.choice)
            for prompt in self.prompts.values()
        )

    def close(self) -> None:
        """Free all prompts."""
        for name in list(self.prompts):
            self.done(name)
        self.unwanted.clear()


def asks_for_chunks(choice: RequestChoice) -> bool:
    """True if a request's prompt is to be announced after its first chunk."""
    params = choice.request.params.kv_transfer_params or {}
    return bool(params.get("do_remote_decode") and params.get("in_chunks"))
