"""Recurrent and convolutional states between our cache and transformers' caches."""

from __future__ import annotations

import torch
from transformers.cache_utils import DynamicCache

from ..cache import PagedStaticCache
from ..cache.state_pool import KeptStates
from ..core.sequence import Sequence


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


def fill_states(cache: DynamicCache, rows: list[KeptStates]) -> None:
    """Write the rows' states to transformers' cache, which has a layer for each."""
    for layer in rows[0].conv:
        conv = torch.stack([row.conv[layer] for row in rows])
        cache.update_conv_state(conv, layer, conv_kernel_size=conv.shape[-1])
    for layer in rows[0].recurrent:
        cache.update_recurrent_state(torch.stack([row.recurrent[layer] for row in rows]), layer)
