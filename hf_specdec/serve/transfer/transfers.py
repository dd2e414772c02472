"""Transfers: an engine's side of disaggregated prefill."""

from __future__ import annotations

import json
import logging
import uuid
from typing import Any

from ...decoding.decoder import SpeculativeDecoder
from ..engine.request import RequestChoice
from .consumer import Consumer
from .nixl_link import NixlLink
from .pools import MovedPools, TransferStatistics
from .producer import Producer

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
        hold_seconds: how long a prompt's blocks wait for a consumer; then they are freed.
        pull_seconds: how long a request waits for blocks; then it reads the prompt itself.

    Raises:
        ValueError: the KV of this model or drafter cannot be moved.
    """

    def __init__(
        self, decoder: SpeculativeDecoder, link: NixlLink, hold_seconds: float = 60.0, pull_seconds: float = 20.0
    ):
        self.pools, self.statistics = MovedPools(decoder, link), TransferStatistics()
        self.producer = Producer(self.pools, uuid.uuid4().hex, hold_seconds, self.statistics)
        self.consumer = Consumer(self.pools, pull_seconds, self.statistics)

    def poll(self) -> list[RequestChoice]:
        """Read messages, free what is held too long, begin and finish pulls. Returns what can run now. Call inside `decoder.active()`."""
        producer, consumer = self.producer, self.consumer
        handlers = {
            "done": producer.done, "want": producer.wanted, "offer": consumer.offered, "gone": consumer.refused
        }  # fmt: skip
        for message in self.pools.link.messages():
            kind, values = _parsed(message)
            if kind is None:  # from another version: its sender waits a while, then reads the prompt itself
                logger.warning("A message from another engine is not understood: %.200s", message)
            else:
                handlers[kind](*values)
        producer.release()
        return consumer.poll()

    @property
    def is_busy(self) -> bool:
        """True if a prompt is held or pulled, or blocks wait for the end of a transfer, so that `poll` must be called."""
        return bool(self.producer.held or self.consumer.pulling or self.consumer.stopped)

    def close(self) -> None:
        self.producer.close()
        self.consumer.close()


def _parsed(message: str) -> tuple[str | None, list[Any]]:
    """The kind of a message, None if it is malformed, and the values of its fields."""
    try:
        fields = json.loads(message)
    except ValueError:
        return None, []
    for kind, types in _FIELDS.items():
        if isinstance(fields, dict) and all(type(fields.get(name)) is wanted for name, wanted in types.items()):
            return kind, [fields[name] for name in types]
    return None, []
