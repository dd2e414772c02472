"""Transfers: an engine's side of disaggregated prefill."""

from __future__ import annotations

import json
import logging
import uuid
from typing import Any

from ...cache import PagedStaticCache
from ...decoding.decoder import SpeculativeDecoder
from ..request import Choice
from .consumer import Consumer, Pull, TransferStatistics
from .link import Link
from .pools import MovedPools
from .producer import Producer, Prompt

logger = logging.getLogger(__name__)

_FIELDS: dict[str, dict[str, type]] = {  # of the messages, by kind; the first is named after the kind
    "done": {"done": str},
    "want": {"want": str, "from": str, "first": int},
    "offer": {"offer": str, "first": int, "blocks": list, "digests": list},
    "gone": {"gone": str},
}


class Transfers:
    """The prompts that an engine reads and holds for others, and those that it pulls.

    Args:
        link: moves the bytes.
        hold_seconds: how long a prompt's blocks wait for a consumer; then they are freed.
        pull_seconds: how long a request waits for blocks; then it reads the prompt itself.

    Raises:
        ValueError: the KV of this model or drafter cannot be moved.
    """

    def __init__(self, decoder: SpeculativeDecoder, link: Link, hold_seconds: float = 60.0, pull_seconds: float = 20.0):
        self.pools = MovedPools(decoder, link)
        self.producer = Producer(self.pools, uuid.uuid4().hex, hold_seconds)
        self._counts = TransferStatistics()
        self.consumer = Consumer(self.pools, pull_seconds, self._counts)

    @property
    def link(self) -> Link:
        """What moves the bytes."""
        return self.pools.link

    @property
    def caches(self) -> list[PagedStaticCache]:
        """The caches whose blocks are moved: the target's, and that of a drafter that reads features."""
        return self.pools.caches

    @property
    def held(self) -> dict[str, Prompt]:
        """Prompts that wait for a consumer, by the name that the consumer was told."""
        return self.producer.held

    @property
    def pulling(self) -> list[Pull]:
        """Requests whose blocks are being pulled."""
        return self.consumer.pulling

    @property
    def statistics(self) -> TransferStatistics:
        """Counts so far."""
        self._counts.expired = self.producer.expired
        return self._counts

    def poll(self) -> list[Choice]:
        """Read messages, free what is no longer held, begin and finish pulls. Call inside `decoder.active()`. Returns the requests that
        can run now."""
        for message in self.pools.link.messages():
            self._read(message)
        self.producer.release()
        return self.consumer.poll()

    def _read(self, message: str) -> None:
        """Handle a message. A malformed one (from another version) is ignored: its sender waits a while, then reads the prompt itself."""
        kind, values = _parsed(message)
        if kind == "done":
            self.producer.done(*values)
        elif kind == "want":
            self.producer.wanted(*values)
        elif kind == "offer":
            self.consumer.offered(*values)
        elif kind == "gone":
            self.consumer.refused(*values)
        else:
            logger.warning("A message from another engine is not understood: %.200s", message)

    @property
    def is_busy(self) -> bool:
        """True if a prompt is held or pulled, or blocks wait for the end of a transfer, so that `poll` must be called."""
        return bool(self.held or self.pulling or self.consumer.stopped)

    @property
    def expects_messages(self) -> bool:
        """True if `poll` must be called often, because a consumer is likely to ask for blocks just now."""
        return self.producer.awaits_consumer

    def close(self) -> None:
        """Free all held prompts, and stop all pulls."""
        self.producer.close()
        self.consumer.close()


def _parsed(message: str) -> tuple[str | None, list[Any]]:
    """The kind of a message, None if it is malformed, and the values of its fields."""
    try:
        found = json.loads(message)
    except ValueError:
        return None, []
    for kind, fields in _FIELDS.items():
        if isinstance(found, dict) and all(type(found.get(name)) is each for name, each in fields.items()):
            return kind, [found[name] for name in fields]
    return None, []
