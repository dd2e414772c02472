"""The fewest bytes that an operation must move, from shapes alone."""

from __future__ import annotations

from typing import Any


def milliseconds_of(num_bytes: float, bandwidth: float) -> float:
    """How long `num_bytes` take at `bandwidth` bytes per second."""
    return 1e3 * num_bytes / bandwidth


def attention_bytes(rows: int, queries: int, keys: int, heads: int, kv_heads: int, width: int, itemsize: int) -> int:
    """Keys and values of every row once, queries and outputs once."""
    return itemsize * (rows * keys * kv_heads * 2 * width + rows * queries * heads * 2 * width)


def logits_bytes(rows: int, vocab: int, itemsize: int) -> int:
    """One read."""
    return rows * vocab * itemsize


def moved_bytes(slots: int, layers: int, kv_heads: int, width: int, itemsize: int) -> int:
    """Keys and values of so many slots in all layers, read and written."""
    return 2 * slots * layers * 2 * kv_heads * width * itemsize


def step_weight_bytes(model: Any) -> int:
    """Weights that a decoding step reads: all parameters, but the input embeddings where they are not the output's, too."""
    embeddings, head = model.get_input_embeddings().weight, model.get_output_embeddings().weight
    skipped = {embeddings.data_ptr()} - {head.data_ptr()}
    unique = {parameter.data_ptr(): parameter.nbytes for parameter in model.parameters()}
    return sum(size for place, size in unique.items() if place not in skipped)


def step_cache_bytes(config: Any, rows: int, keys: int, itemsize: int) -> int:
    """Keys and values that a step of `rows` rows with `keys` tokens each reads."""
    width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return rows * keys * config.num_hidden_layers * 2 * config.num_key_value_heads * width * itemsize
