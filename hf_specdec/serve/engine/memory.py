"""How many KV blocks an engine's memory holds, beside the keys of what its rows attend to beside text."""

from __future__ import annotations

from ...decoding.decoder import SpeculativeDecoder

_MEMORY_SHARE = {"cpu": 0.5, "cuda": 0.8}  # share of the free memory that the KV cache may take by default
_IMAGES_SHARE = 0.25  # of that, for keys of images that stand beside those of text, if whole texts leave less


def num_blocks_for(
    decoder: SpeculativeDecoder, max_model_len: int, num_states: int, max_num_seqs: int, memory_bytes: int | None
) -> tuple[int, int]:
    """Numbers of KV blocks for `max_num_seqs` texts and for what they attend to beside text, or as many as the memory holds.

    Args:
        num_states: maximum number of states of an encoder's input, or of keys of an image that stand beside those of text; 0: neither.
        memory_bytes: for KV and recurrent states; None: a share of the free memory.

    Raises:
        ValueError: not one block, encoder's input or image fits, or the amount of free memory is unknown.
    """
    target, block_size, num_drafts = decoder.target, decoder.config.block_size, decoder.generator.max_draft_nodes
    per_source = -(-num_states // block_size)
    if decoder.config.num_blocks is not None:
        return decoder.config.num_blocks, max_num_seqs * per_source
    per_text = -(-(max_model_len + num_drafts) // block_size) + 1
    per_block = max(target.bytes_per_token(), 1) * block_size  # 0: no layer has keys
    if memory_bytes is None:
        free = target.free_bytes()
        if free is None:
            raise ValueError("This system does not say how much memory is free: pass kv_cache_memory_bytes.")
        memory_bytes = int(_MEMORY_SHARE[target.device.type] * free)
    target.cache_bytes = memory_bytes
    target.choose_states(max_num_seqs, num_drafts)
    states = target.bytes_of_states(num_drafts) * max_num_seqs + target.bytes_of_prefix_states()
    bytes_per_source = per_source * block_size * target.bytes_per_source_token() if per_source else 0
    num_texts = num_sources = max_num_seqs
    if bytes_per_source:  # as many rows as can have both
        num_sources = min(max_num_seqs, memory_bytes // (bytes_per_source + per_text * per_block))
        if target.family is None:  # many rows have no image, and most texts are short
            num_sources = min(max_num_seqs, max(num_sources, int(_IMAGES_SHARE * memory_bytes) // bytes_per_source, 1))
        else:
            num_texts = num_sources
        if not num_sources:
            raise ValueError(
                f"kv_cache_memory_bytes of {memory_bytes} does not hold the keys of one input of {num_states} states "
                f"({bytes_per_source} bytes) and of its text."
            )
    fitting = (memory_bytes - states - num_sources * bytes_per_source) // per_block
    if fitting < 1:
        beside = f" in addition to {states} bytes of recurrent states of {max_num_seqs} texts" if states else ""
        beside += f" in addition to {bytes_per_source} bytes of an image's keys" if bytes_per_source else ""
        raise ValueError(
            f"kv_cache_memory_bytes of {memory_bytes} holds no block of {block_size} tokens ({per_block} bytes){beside}."
        )
    return min(num_texts * per_text, fitting), num_sources * per_source
