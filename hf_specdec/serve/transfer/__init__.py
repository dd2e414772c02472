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

from .transfers import Transfers

__all__ = ["Transfers"]
