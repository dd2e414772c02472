"""Training-time test: a head run several steps over whole texts, with attention as if it had drafted from every position.

At step 0 column t of a text reads (x_{t+1}, the target's feature at t); at step s it reads (x_{t+1+s}, its own output of step
s - 1) and has position t + s. A draft from column t has in its cache the rows of step 0 up to t, with the target's features,
and its own rows of steps 1 .. s. So a query attends to step 0 causally, and to its own column of later steps
(EAGLE-3, https://arxiv.org/abs/2503.01840; HASS, https://arxiv.org/abs/2408.15766).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import nn
from transformers import AttentionInterface

from .batch import Batch, Places

ATTENTION_NAME = "hf_specdec_unrolled"  # registered with transformers under this name


@dataclass
class LayerSteps:
    """One layer's keys and values so far: [B, Hkv, S, D] of step 0, those of later steps, and `widened` for `attend_merged`."""

    keys: torch.Tensor
    values: torch.Tensor
    own_keys: list[torch.Tensor] = field(default_factory=list)
    own_values: list[torch.Tensor] = field(default_factory=list)
    widened: tuple[torch.Tensor, torch.Tensor] | None = None


def attend(query, key, value, scaling: float | None, mask: torch.Tensor | None = None) -> torch.Tensor:
    """Attention [B, Hq, T, D]: causal within a step, or to the keys of `mask`, bool [B, 1, T, S]."""
    group = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(group, dim=1), value.repeat_interleave(group, dim=1)
    return F.scaled_dot_product_attention(query, key, value, attn_mask=mask, is_causal=mask is None, scale=scaling)


def widened(*states: torch.Tensor) -> list[torch.Tensor]:
    """States for attention outside autocast: at least float32 on CPUs, where its backward pass in bfloat16 is several times slower."""
    on_cpu = states[0].device.type == "cpu"
    return [state.to(torch.promote_types(state.dtype, torch.float32)) if on_cpu else state for state in states]


def attend_merged(
    query: torch.Tensor, steps: LayerSteps, scaling: float, mask: torch.Tensor | None = None
) -> torch.Tensor:
    """Attention [B, Hq, S, D] to step 0 (causal) and to each query's own column of later steps, with one softmax.

    Runs causal attention to step 0 with one additional key that all queries see. Its score is the log-sum-exp of the own
    column's scores; its value is a 1 in an additional dimension, so that this dimension of the output is the weight of the own
    column. No scores [S, S] are kept, and gradients are exact. The additional key comes first, so that the mask stays causal;
    an additional first query keeps it square.

    Args:
        mask: bool [B, 1, C, 1 + S], for queries of C columns: the additional key and the keys of step 0 that they see. Earlier steps have
            these columns first.
    """
    count, width = query.shape[2:]
    group = query.shape[1] // steps.keys.shape[1]
    stacked = (
        torch.stack([part[:, :, :count] for part in parts], dim=3) for parts in (steps.own_keys, steps.own_values)
    )
    own_keys, own_values = stacked  # [B, Hkv, S, s, D]
    grouped = query.unflatten(1, (-1, group))
    scores = torch.einsum("bkgtd,bktsd->bkgts", grouped, own_keys) * scaling
    scores = scores.to(torch.promote_types(scores.dtype, torch.float32))
    later = torch.einsum("bkgts,bktsd->bkgtd", scores.softmax(-1).to(own_values.dtype), own_values)
    if steps.widened is None:
        steps.widened = _with_sink(steps.keys, group), _with_sink(steps.values, group)
    wide_keys, wide_values = steps.widened
    sink = (scores.logsumexp(-1, keepdim=True) / scaling).flatten(1, 2).to(query.dtype)
    query = torch.cat([query, sink], dim=-1)
    if mask is None:
        query = F.pad(query, (0, 0, 1, 0))
    out = F.scaled_dot_product_attention(
        query, wide_keys, wide_values, attn_mask=mask, is_causal=mask is None, scale=scaling
    )[:, :, -count:]
    return out[..., :width] + out[..., width:] * later.flatten(1, 2)


def _with_sink(states: torch.Tensor, group: int) -> torch.Tensor:
    """[B, Hq, 1 + S, D + 1] from [B, Hkv, S, D]: zeros, but for a 1 at [0, D]."""
    out = F.pad(states, (0, 1, 1, 0))
    out[:, :, 0, -1] = 1.0
    return out.repeat_interleave(group, dim=1)


def unrolled_attention(
    module, query, key, value, attention_mask, scaling=None, dropout=0.0, *, unrolled=None, **kwargs
):
    """transformers' attention function. `unrolled` is the dictionary {layer: LayerSteps} of the running `unroll`; None: a mask says all."""
    scaling, dtype = query.shape[-1] ** -0.5 if scaling is None else scaling, query.dtype
    with torch.autocast(query.device.type, enabled=False):
        query, key, value = widened(query, key, value)
        steps = None if unrolled is None else unrolled.get(module.layer_idx)
        if steps is None:
            out = attend(query, key, value, scaling, attention_mask)
            if unrolled is not None:
                unrolled[module.layer_idx] = LayerSteps(key, value)
        else:
            steps.own_keys.append(key)
            steps.own_values.append(value)
            out = attend_merged(query, steps, scaling, attention_mask)
    return out.transpose(1, 2).to(dtype), None


AttentionInterface.register(ATTENTION_NAME, unrolled_attention)


def unroll(
    head: nn.Module,
    batch: Batch,
    features: torch.Tensor,
    num_steps: int,
    mask: tuple[int, torch.Tensor] | None = None,
    places: Places | None = None,
) -> Iterator[torch.Tensor]:
    """Yield the head's output [B, S, H] of every step, which is the next step's features; the first are from the target.

    The head is called with ids [B, S], features [B, S, H] and positions [1, S]; its layers use this attention.

    Args:
        mask: token and features [H] of all later steps (P-EAGLE); None: the text's tokens and the head's output.
        places: with `mask`, later steps run only its columns (`Places.runs`); the output is zero elsewhere.
    """
    steps: dict[int, LayerSteps] = {}
    seen = None
    for step in range(num_steps):
        tokens, positions = batch.ahead(batch.input_ids, 1 + step), batch.position_ids
        columns = None if mask is None or places is None else places.runs[step]
        if columns is not None:
            tokens = positions = columns
            if seen is None:  # later steps run the first of these columns
                before = torch.arange(batch.input_ids.shape[1], device=columns.device) <= columns[..., None]
                seen = F.pad(before, (1, 0), value=True)[:, None]
            seen = seen[:, :, : columns.shape[1]]
        if mask is not None and step:
            tokens, features = torch.full_like(tokens, mask[0]), mask[1].expand(*tokens.shape, -1)
        features = head(tokens, features, positions + step, attention_mask=seen, unrolled=steps)
        if columns is None:
            yield features
        else:
            whole = features.new_zeros(*batch.input_ids.shape, features.shape[-1])
            yield whole.scatter(1, columns[..., None].expand_as(features), features)
