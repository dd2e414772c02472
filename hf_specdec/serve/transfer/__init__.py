"""Disaggregated prefill: a producer reads prompts and holds their KV; a consumer pulls the KV and generates the answer.

The producer's answer contains `kv_transfer_params` (vLLM's name): where the prompt's blocks are, a digest of each block, and a fingerprint
of the model. The consumer pulls the blocks it lacks into its own pool and compares the digests. It then continues as if it had found all
but the last prompt token in its prefix cache, and reads that token itself. So its text and its number of steps are those of a single
server. If the drafter reads the target's features (EAGLE, MTP), the KV of its own cache is pulled too; other drafters need nothing.

With `"in_chunks": true` the producer announces a long prompt after its first chunk. The consumer then asks for the blocks, the producer
offers them after each chunk, and they are pulled while the next chunk is read.

Why no wrong KV is ever used, whatever happens to the blocks in the meantime:

* The producer's row refers to its blocks while it is read and held. A full block of a prompt is written in one step and never again, and
  it is offered after that step. Only a preemption, the end of holding or a failure takes blocks away. They may then be overwritten
  while they are pulled, so the consumer compares each block with the digest of the offer after its last byte has arrived. A digest says
  what the producer computed for this part of this prompt; where those bytes were then is irrelevant.
* A preempted row gets new block tables. The producer notices that, and offers the blocks again once the row has read its text again.
* The consumer's blocks belong to its row, and other rows may share them only after the digests of the whole prompt agree. If it gives up
  while bytes are still coming, the blocks stay taken until the transfer has ended or failed, because NIXL cannot stop a read: otherwise the
  bytes would land in another row.
* The pools are allocated whole and registered once, so that no address changes.

If anything fails, the consumer reads the prompt itself.
"""

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

    @classmethod
    def of(cls, config: dict[str, Any], decoder: SpeculativeDecoder) -> Transfers:
        """Over NIXL. `config`: `KVTransferConfig.kv_connector_extra_config`."""
        return cls(decoder, NixlLink(), **{key: value for key, value in config.items() if key.endswith("_seconds")})

    def poll(self) -> list[RequestChoice]:
        """Read messages, free what is held too long, begin and finish pulls. Returns what can run now. Call inside `decoder.active()`."""
        for message in self.pools.link.messages():
            # One that is not understood is from another version: its sender waits a while, then reads the prompt itself.
            if not self._handle(message):
                logger.warning("A message from another engine is not understood: %.200s", message)
        self.producer.release()
        return self.consumer.poll()

    def _handle(self, message: str) -> bool:
        """Handle a message. False: it is malformed."""
        try:
            fields = json.loads(message)
        except (ValueError, RecursionError):
            return False
        producer, consumer = self.producer, self.consumer
        for handle, types in (  # the first field of a message is named after its kind
            (producer.done, {"done": str}),
            (producer.wanted, {"want": str, "from": str, "first": int}),
            (consumer.offered, {"offer": str, "first": int, "blocks": list, "digests": list}),
            (consumer.refused, {"gone": str}),
        ):
            if isinstance(fields, dict) and all(type(fields.get(name)) is kind for name, kind in types.items()):
                handle(*(fields[name] for name in types))
                return True
        return False

    @property
    def is_busy(self) -> bool:
        """True if a prompt is offered or pulled, or blocks wait for the end of a transfer, so that `poll` must be called."""
        return bool(self.producer.prompts or self.consumer.pulling or self.consumer.stopped)

    def close(self) -> None:
        """Free what is held, and give up what is pulled."""
        self.producer.close()
        self.consumer.close()
