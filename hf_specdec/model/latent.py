"""Latent attention (MLA) over pages, which hold compressed keys: absorbed products for few new tokens, expanded keys for many.

A head h has the keys [K_h c; r] and the values V_h c of a cached token's latent c and rotated key r (DeepSeek-V2, section 2.1; DeepSeek-AI,
2024). *Absorbed*: because q . (K_h c) = (K_h^T q) . c, queries attend to the pages [c; r] as to one key head, whose values are its first
columns, c; V_h is applied to the result. *Expanded*: keys and values of a row are computed from its latents, as the model does.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from ..cache.paged_layer import PagedLayer, tokens_first
from ..core.errors import UnsupportedModel
from ..kernels.attention import reference
from ..kernels.attention.inputs import AttentionRow
from .packed_batch import PackedBatch


def is_latent(module: nn.Module) -> bool:
    """True if a model, head or layer caches latents, which it expands to keys and values after they were cached.

    From then on its classes also expand no latents, which transformers' code cannot: the cache returns none.
    """
    kinds: set[Any] = {type(inner) for inner in module.modules() if hasattr(inner, "expand_kv")}
    for kind in kinds:
        if not hasattr(kind.expand_kv, "__wrapped__"):
            kind.expand_kv = _or_nothing(kind.expand_kv)
    return bool(kinds)


def _or_nothing(expand: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(expand)
    def call(module: nn.Module, latents: torch.Tensor, rotated: torch.Tensor) -> Any:
        return expand(module, latents, rotated) if latents.shape[2] else (latents, rotated)

    return call


def attend_latent(
    module: Any, query: torch.Tensor, layer: PagedLayer, batch: Any, attend: Callable[..., torch.Tensor], scaling: float,
    **options: Any,
) -> torch.Tensor:  # fmt: skip
    """Attention of one layer over its pages.

    Args:
        module: the layer's attention, with the names of transformers (`kv_b_proj`, `expand_kv`).
        query: [T, H, D], of all rows.
        batch: a PackedBatch or CapturedBatch.
        attend: the implementation of attention, with what `options` names.

    Returns: [T, H, Dv].

    Raises:
        UnsupportedModel: a forward that cannot look at its rows would have to expand their keys, because the layer's weights are not plain.
    """
    absorbs = _is_plain(module.kv_b_proj, query, module)
    if batch.captured or batch.invariant is not None:
        if not absorbs:
            what = "a CUDA graph" if batch.captured else "'deterministic'"
            raise UnsupportedModel(f"{what} needs a kv_b_proj that is a plain linear layer in the model's dtype.")
        return _absorbed(module, query, layer, batch, attend, scaling, options)
    rows = range(len(batch.inputs))
    few = [i for i in rows if absorbs and _is_absorbed(module, batch.inputs[i])]
    if len(few) == len(rows):
        return _absorbed(module, query, layer, batch, attend, scaling, options)
    out = query.new_empty(*query.shape[:2], module.v_head_dim)
    if few:
        part, tokens = batch.part(tuple(few), query.device)
        out[tokens] = _absorbed(module, query[tokens], layer, part, attend, scaling, options)
    described, masks = batch.plan(options.pop("window"), query, query)
    for i in sorted({*rows} - {*few}):
        row = described[i]
        latents = (reference.read_row(pool, row) for pool in (layer.keys, layer.values))
        keys, values = (tokens_first(states) for states in module.expand_kv(*latents))
        alone = AttentionRow(0, row.end - row.start, row.length, 0, None)
        own = query[row.start : row.end]
        out[row.start : row.end] = reference.paged_attention(own, keys, values, [alone], [masks[i]], scaling, **options)
    return out


def _is_absorbed(module: Any, row: Any) -> bool:
    """True if absorbed products take fewer multiplications for a row than expanded keys."""
    rank, rotated, values = module.kv_lora_rank, module.qk_rope_head_dim, module.v_head_dim
    expanded, count = module.qk_nope_head_dim + values, row.num_tokens
    length = row.start + count
    absorbed_keys, expanded_keys = 2 * rank + rotated, expanded + rotated  # multiplications per head, query and key
    return count * (expanded * rank + length * absorbed_keys) <= length * (expanded * rank + count * expanded_keys)


def _is_plain(linear: Any, query: torch.Tensor, module: Any) -> bool:
    """True if a layer's weight is all of it, here and now: not quantized, adapted, offloaded, sharded or cast when it is used."""
    if type(linear) is not nn.Linear or type(linear.weight) is not nn.Parameter or linear.bias is not None:
        return False
    shape = query.shape[1] * (module.qk_nope_head_dim + module.v_head_dim), module.kv_lora_rank
    weight = linear.weight
    hooked = linear._forward_hooks or linear._forward_pre_hooks
    return not hooked and (weight.shape, weight.dtype, weight.device) == (shape, query.dtype, query.device)


def _absorbed(
    module: Any, query: torch.Tensor, layer: PagedLayer, batch: PackedBatch, attend: Callable[..., torch.Tensor], scaling: float,
    options: dict[str, Any],
) -> torch.Tensor:  # fmt: skip
    unrotated = module.qk_nope_head_dim
    keys, values = module.kv_b_proj.weight.unflatten(0, (query.shape[1], -1)).split(
        [unrotated, module.v_head_dim], dim=1
    )
    folded = torch.bmm(query[..., :unrotated].transpose(0, 1), keys).transpose(0, 1)  # [T, H, rank]
    folded = torch.cat([folded, query[..., unrotated:]], dim=-1)
    out = attend(folded, layer.pools[0], layer.keys, batch, scaling, **options)
    return torch.bmm(out.transpose(0, 1), values.transpose(1, 2)).transpose(0, 1)
