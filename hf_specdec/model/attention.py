"""The attention function that we register with transformers as "hf_specdec": it reads the pages of a packed batch."""

from __future__ import annotations

import torch
from transformers import AttentionInterface
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

from ..core.names import ATTENTION_NAME
from ..kernels import invariant_reference
from ..kernels import reference as ops
from ..kernels.dispatch import uses_triton
from ..kernels.flash import flash_attention_for
from . import architectures
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
    window = kwargs["sliding_window"] if "sliding_window" in kwargs else architectures.layer_window(module)
    options = {
        "scaling": query.shape[-1] ** -0.5 if scaling is None else scaling,
        "softcap": kwargs.get("softcap"),
        "sinks": kwargs.get("s_aux"),
    }
    packed = query[0].transpose(0, 1)
    if batch.invariant is not None:
        with batch.invariant.direct():
            return _invariant_attention(packed, layer, batch, window, options)[None], None
    if batch.on(query.device).uses_triton:
        from ..kernels.attention import paged_attention

        inputs = batch.attention_inputs(query.device)
        attend = flash_attention_for(packed, layer.keys, layer.values, inputs, options["sinks"]) or paged_attention
        return attend(packed, layer.keys, layer.values, inputs, window=window, **options)[None], None
    group = query.shape[1] // key.shape[1]
    masks = batch.masks(window, group, query.dtype, query.device)
    slot_bytes = (layer.keys.stride(0) + layer.values.stride(0)) * query.element_size()
    padded = batch.padded(window, slot_bytes, query.dtype, query.device)
    out = ops.paged_attention(
        packed, layer.keys, layer.values, batch.rows(query.device), masks, padded=padded, **options
    )
    return out[None], None


def _invariant_attention(query, layer, batch: PackedBatch, window: int | None, options: dict) -> torch.Tensor:
    """[T, H, D] → [T, H, Dv]; each query's result has the same bits as if it were alone in the batch."""
    if uses_triton(query.device):
        from ..kernels.attention import paged_attention

        inputs = batch.attention_inputs(query.device)
        return paged_attention(query, layer.keys, layer.values, inputs, window=window, invariant=True, **options)
    lines = batch.lines(query.device)
    return invariant_reference.paged_attention(query, layer.keys, layer.values, lines, window=window, **options)


AttentionInterface.register(ATTENTION_NAME, paged_attention_forward)
AttentionMaskInterface.register(ATTENTION_NAME, sdpa_mask)
