"""Recurrent and convolutional states between our cache and transformers' caches."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from transformers.cache_utils import Cache, DynamicCache, LinearAttentionCacheLayerMixin

from ..cache import PagedStaticCache
from ..core.sequence import Sequence


@dataclass
class KeptStates:
    """A row's states after some tokens: per layer, the convolution's last inputs [channels, k], and the recurrent state where the
    layer has one."""

    conv: dict[int, torch.Tensor]
    recurrent: dict[int, torch.Tensor]


def read_states(cache: PagedStaticCache, seq: Sequence, counts: list[int]) -> dict[int, KeptStates]:
    """Copies of a row's states after each of these numbers of tokens, where they were kept."""
    states, found = cache.states, {}
    for count in counts if states is not None else []:
        state = states.state(seq.id, count)
        if state is not None:
            pools = ((states.conv, states.base(seq.id, count).slot), (states.recurrent, state))
            copies = ({layer: pool[slot].clone() for layer, pool in each.items()} for each, slot in pools)
            found[count] = KeptStates(*copies)
    return found


def stateful_layers(cache: Cache) -> list[tuple[int, LinearAttentionCacheLayerMixin]]:
    """The layers of transformers' cache that hold states after some tokens, and their indices."""
    layers = enumerate(cache.layers)
    return [
        (i, layer)
        for i, layer in layers
        if isinstance(layer, LinearAttentionCacheLayerMixin) and layer.has_previous_state[0]
    ]


def load_states(cache: PagedStaticCache, seq: Sequence, source: Cache, row: int, num_tokens: int) -> None:
    """Copy a row's states after its first `num_tokens` tokens from transformers' cache."""
    states = cache.states
    if states is None:
        return
    (slot,), (state,) = states.take(seq.id, 0, 0, [num_tokens], num_tokens)
    for index, layer in stateful_layers(source):
        conv, recurrent = layer.conv_states[0], layer.recurrent_states[0]
        if not states.is_allocated(index):
            states.allocate(index, conv, recurrent)
        states.conv[index][slot] = conv[row]
        if recurrent is not None:
            states.recurrent[index][state] = recurrent[row]


def fill_states(cache: DynamicCache, rows: list[KeptStates]) -> None:
    """Write the rows' states to transformers' cache, which has a layer for each."""
    for layer in rows[0].conv:
        conv = torch.stack([row.conv[layer] for row in rows])
        cache.update_conv_state(conv, layer, conv_kernel_size=conv.shape[-1])
    for layer in rows[0].recurrent:
        cache.update_recurrent_state(torch.stack([row.recurrent[layer] for row in rows]), layer)
