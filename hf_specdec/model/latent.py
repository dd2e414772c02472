"""Latent attention (MLA) over pages, which hold compressed keys: absorbed products for few new tokens, expanded keys for many.

A head h has the keys [K_h c; r] and the values V_h c of a cached token's latent c and rotated key r (DeepSeek-V2, section 2.1; DeepSeek-AI,
2024). *Absorbed*: because q . (K_h c) = (K_h^T q) . c, queries attend to the pages [c; r] as to one key head, whose values are its first
columns, c; V_h is applied to the result. *Expanded*: keys and values of a row are computed from its latents, as the model does.
Indexers (DeepSeek-V3.2; DeepSeek-AI, 2025) select, among a row's keys, those that each of its tokens attends to.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from ..cache.paged_layer import INDEX, PagedLayer, tokens_first
from ..core.errors import UnsupportedModel
from ..core.names import CACHE
from ..kernels.attention import reference
from ..kernels.attention.inputs import AttentionRow
from ..kernels.attention.reference import read_row
from .functions import change_method
from .packed_batch import PackedBatch


def by_row(forward: Callable[..., Any]) -> Callable[..., Any]:
    """The forward of an indexer, which over pages returns, for each row, int64 [t, k]: the keys of each token by their index in the row.

    With other caches it is the same function.
    """

    @functools.wraps(forward)
    def select(indexer: Any, *inputs: Any, **given: Any) -> Any:
        cache: Any = given.get(CACHE)
        batch = getattr(cache, "batch", None)
        if batch is None or batch.gather:
            return forward(indexer, *inputs, **given)
        if batch.captured or batch.invariant is not None:
            raise UnsupportedModel(
                "Layers that select their keys (indexers) run neither in CUDA graphs nor with 'deterministic'. Leave the key out."
            )
        hidden, queries, angles, mask, *positions = inputs  # Dots3-Note names the last, and gives none
        # Every key is written before any row is scored, because rows may share blocks.
        forward(indexer, hidden, queries, angles, mask[..., :0], *positions, **given)
        rows, masks = batch.plan(cache.window, hidden[0, :, None], hidden[0, :, None])
        selected = []
        for row, mask_of_row in zip(rows, masks, strict=True):
            tokens = slice(row.start, row.end)
            seen = hidden.new_zeros(1, row.length) if mask_of_row is None else mask_of_row
            keys = _KeysOf(cache.layers[indexer.layer_idx], row)
            turned = tuple(angle[:, tokens] for angle in angles)
            part = (
                hidden[:, tokens],
                queries[:, tokens],
                turned,
                seen[None],
                *(position[:, tokens] for position in positions),
            )
            selected.append(forward(indexer, *part, **given | {CACHE: keys})[0].long())
        return selected

    return select


class _KeysOf:
    """A cache for the indexer of one layer and one row, whose keys are in the pages already."""

    def __init__(self, layer: PagedLayer, row: AttentionRow):
        self._layer, self._row = layer, row

    def update_indexer(self, states: torch.Tensor, layer_idx: int) -> torch.Tensor:
        """The keys [1, S, width] of the row."""
        return read_row(self._layer.further[INDEX], self._row)[0]


def is_latent(module: nn.Module) -> bool:
    """True if a model, head or layer caches latents, which it expands to keys and values after they were cached.

    From then on its classes also expand no latents, which transformers' code cannot: the cache returns none. Its indexers select by row.
    """
    layers: list[Any] = [inner for inner in module.modules() if hasattr(inner, "expand_kv")]
    for layer in layers:
        change_method(type(layer), "expand_kv", _or_nothing)
        if getattr(layer, "indexer", None) is not None:
            change_method(type(layer.indexer), "forward", by_row)
    return bool(layers)


def _or_nothing(expand: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(expand)
    def call(module: nn.Module, latents: torch.Tensor, rotated: torch.Tensor) -> Any:
        return expand(module, latents, rotated) if latents.shape[2] else (latents, rotated)

    return call


def attend_latent(
    module: Any, query: torch.Tensor, layer: PagedLayer, batch: Any, attend: Callable[..., torch.Tensor], scaling: float,
    selected: list[torch.Tensor] | None = None, **options: Any,
) -> torch.Tensor:  # fmt: skip
    """Attention of one layer over its pages.

    Args:
        module: the layer's attention, with the names of transformers (`kv_b_proj`, `expand_kv`).
        query: [T, H, D], of all rows.
        batch: a PackedBatch or CapturedBatch.
        attend: the implementation of attention, with what `options` names.
        selected: for each row, the keys of its tokens (see `indexed.by_row`); None: all that they see.

    Returns: [T, H, Dv].

    Raises:
        RuntimeError, UnsupportedModel: a captured or deterministic forward would have to expand keys row by row, because the layer's
            weights are not plain.
    """
    absorbs = _is_plain(module.kv_b_proj, query, module)
    if batch.captured or batch.invariant is not None:
        if not absorbs:
            why = "its kv_b_proj is no plain linear layer in the model's dtype, so keys are expanded row by row"
            raise RuntimeError(why) if batch.captured else UnsupportedModel(f"'deterministic' cannot be used: {why}.")
        return _absorbed(module, query, layer, batch, attend, scaling, options)
    rows = range(len(batch.inputs))
    num_keys = [None if selected is None else selected[i].shape[1] for i in rows]
    few = {i for i in rows if absorbs and _is_absorbed(module, batch.inputs[i], num_keys[i])}
    if selected is None and len(few) == len(rows):
        return _absorbed(module, query, layer, batch, attend, scaling, options)
    out = query.new_empty(*query.shape[:2], module.v_head_dim)
    if few and selected is None:
        part, tokens = batch.part(tuple(sorted(few)), query.device)
        out[tokens] = _absorbed(module, query[tokens], layer, part, attend, scaling, options)
    described, masks = batch.plan(options.pop("window"), query, query)
    for i, (row, mask) in enumerate(zip(described, masks, strict=True)):
        tokens = slice(row.start, row.end)
        if selected is not None and i in few:
            out[tokens] = _absorbed_selected(module, query[tokens], layer, row, mask, selected[i], scaling, options)
        elif i not in few:
            if selected is not None:
                only = query.new_full((row.end - row.start, row.length), float("-inf")).scatter_(1, selected[i], 0)
                mask = only if mask is None else only + mask
            out[tokens] = _expanded(module, query[tokens], layer, row, mask, scaling, options)
    return out


def _is_absorbed(module: Any, row: Any, num_keys: int | None = None) -> bool:
    """True if absorbed products take fewer multiplications for a row than expanded keys. `num_keys`: how many it reads, if not all."""
    rank, rotated, values = module.kv_lora_rank, module.qk_rope_head_dim, module.v_head_dim
    expanded, count = module.qk_nope_head_dim + values, row.num_tokens
    length = row.start + count
    absorbed_keys, expanded_keys = 2 * rank + rotated, expanded + rotated  # multiplications per head, query and key
    absorbed = count * (expanded * rank + (num_keys or length) * absorbed_keys)
    return absorbed <= length * (expanded * rank + count * expanded_keys)


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
    folded = _folded(module, query)
    return _unfolded(module, attend(folded, layer.pools[0], layer.keys, batch, scaling, **options))


def _absorbed_selected(module, query, layer, row: AttentionRow, mask, selected, scaling, options) -> torch.Tensor:
    """Each token reads the keys that it has selected, and no others."""
    count, num_keys = selected.shape
    slots = selected + row.first_slot if row.slots is None else row.slots[selected]
    seen = query.new_zeros(count, num_keys) if mask is None else mask.gather(1, selected)
    folded, alone = _folded(module, query), AttentionRow(0, 1, num_keys, 0, None)
    outputs = []
    for token in range(count):
        keys = layer.pools[0].index_select(0, slots[token])
        masks = [seen[token].expand(query.shape[1], -1)]
        values = keys[..., : module.kv_lora_rank]
        one = folded[token : token + 1]
        outputs.append(reference.paged_attention(one, keys, values, [alone], masks, scaling, **options))
    return _unfolded(module, torch.cat(outputs))


def _expanded(module, query, layer, row: AttentionRow, mask, scaling, options) -> torch.Tensor:
    latents = (reference.read_row(pool, row) for pool in (layer.keys, layer.values))
    keys, values = (tokens_first(states) for states in module.expand_kv(*latents))
    alone = AttentionRow(0, row.end - row.start, row.length, 0, None)
    return reference.paged_attention(query, keys, values, [alone], [mask], scaling, **options)


def _folded(module: Any, query: torch.Tensor) -> torch.Tensor:
    """Queries [T, H, rank + rotated] of latents, from those of keys [T, H, D]."""
    unrotated = module.qk_nope_head_dim
    weights = module.kv_b_proj.weight.unflatten(0, (query.shape[1], -1))[:, :unrotated]
    folded = torch.bmm(query[..., :unrotated].transpose(0, 1), weights).transpose(0, 1)
    return torch.cat([folded, query[..., unrotated:]], dim=-1)


def _unfolded(module: Any, latents: torch.Tensor) -> torch.Tensor:
    """[T, H, Dv] from sums of latents [T, H, rank]."""
    weights = module.kv_b_proj.weight.unflatten(0, (latents.shape[1], -1))[:, module.qk_nope_head_dim :]
    return torch.bmm(latents.transpose(0, 1), weights.transpose(1, 2)).transpose(0, 1)
