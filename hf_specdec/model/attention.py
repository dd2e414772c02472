"""The attention function that we register with transformers as "hf_specdec": it reads the pages of a packed batch."""

from __future__ import annotations

from transformers import AttentionInterface
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

from ..cache.paged_layer import tokens_first
from ..core.names import ATTENTION_NAME
from .architectures import layer_window
from .options.compiled import TRACED, traced_attention
from .packed_batch import PackedBatch


def paged_attention_forward(
    module, query, key, value, attention_mask, scaling=None, dropout=0.0, specdec=None, **kwargs
):
    """Attend to the pages of the packed batch `specdec`; without it, plain sdpa. Arguments as transformers passes them.

    Returns: ([1, T, H, Dv], None) from query [1, H, T, D] and key, value [1, Hk, T, ..], which are in the cache already.
    """
    if specdec is TRACED:
        return traced_attention(query, key, value, scaling=scaling, **kwargs), None
    if specdec is None:
        from transformers.integrations.sdpa_attention import sdpa_attention_forward

        return sdpa_attention_forward(
            module, query, key, value, attention_mask, scaling=scaling, dropout=dropout, **kwargs
        )
    batch: PackedBatch = specdec
    batch.attention_calls += 1
    layer = batch.cache.layers[module.layer_idx]
    if key.shape[1] != layer.keys.shape[1]:  # JetMoE repeats its keys per expert after they were cached
        raise RuntimeError(f"attention reads {key.shape[1]} key heads, and the cache holds {layer.keys.shape[1]}")
    window = kwargs["sliding_window"] if "sliding_window" in kwargs else _window_of(module, batch.cache.windows)
    scaling = query.shape[-1] ** -0.5 if scaling is None else scaling
    attend, packed = batch.on(query.device).attend, tokens_first(query)
    options = {"window": window, "softcap": kwargs.get("softcap"), "sinks": kwargs.get("s_aux")}
    if batch.invariant is None:
        out = attend(packed, layer.keys, layer.values, batch, scaling, **options)
    else:
        with batch.invariant.direct():
            out = attend(packed, layer.keys, layer.values, batch, scaling, **options)
    return out[None].contiguous(), None  # as transformers' own functions: layers reshape it, and some take views


def _window_of(module, known: dict[int, int | None]) -> int | None:
    """The layer's sliding window. `known` keeps the windows by layer, because every layer asks in every step."""
    if module.layer_idx not in known:
        known[module.layer_idx] = layer_window(module)
    return known[module.layer_idx]


AttentionInterface.register(ATTENTION_NAME, paged_attention_forward)
AttentionMaskInterface.register(ATTENTION_NAME, sdpa_mask)
