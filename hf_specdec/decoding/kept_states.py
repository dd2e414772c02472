"""Recurrent and convolutional states between our cache and transformers' caches."""

from __future__ import annotations

import torch
from transformers.cache_utils import DynamicCache

from ..cache import PagedStaticCache
from ..cache.state_pool import KeptStates
from ..core.sequence import Sequence


def read_states(cache: PagedStaticCache, seq: Sequence, counts: list[int]) -> dict[int, KeptStates]:
    """Copies of a row's states after each of these numbers of tokens, where they were kept."""
    if cache.states is None:
        return {}
    found = {count: cache.states.copy(seq.id, count) for count in counts}
    return {count: states for count, states in found.items() if states is not None}


def fill_states(cache: DynamicCache, rows: list[KeptStates]) -> None:
    """Write the rows' states to transformers' cache, which has a layer for each."""
    for layer in rows[0].conv:
        conv = torch.stack([row.conv[layer] for row in rows])
        cache.update_conv_state(conv, layer, conv_kernel_size=conv.shape[-1])
    for layer in rows[0].recurrent:
        cache.update_recurrent_state(torch.stack([row.recurrent[layer] for row in rows]), layer)
