"""Recurrent and convolutional states in transformers' own caches."""

from __future__ import annotations

from typing import Any

from transformers.cache_utils import Cache

from ...cache.state_pool import KeptStates


def stateful_layers(cache: Cache) -> list[tuple[int, Any]]:
    """The layers of transformers' cache that hold states after some tokens, and their indices."""
    layers = enumerate(cache.layers)
    return [(index, layer) for index, layer in layers if getattr(layer, "has_previous_state", {}).get(0, False)]


def states_of(cache: Cache, row: int) -> KeptStates:
    """Copies of a row's states after all tokens that the cache has seen."""
    kept = KeptStates({}, {})
    for index, layer in stateful_layers(cache):
        kept.conv[index] = layer.conv_states[0][row].clone()
        if layer.recurrent_states[0] is not None:
            kept.recurrent[index] = layer.recurrent_states[0][row].clone()
    return kept
