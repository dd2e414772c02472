"""Attention weights of a finished text, for `output_attentions`: the model itself reads the text once more."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from transformers.cache_utils import DynamicCache

from ..core.names import CACHE
from ..model.encoder_decoder import is_encoder_decoder
from ..model.packed_model import PackedModel
from ..model.self_test import evaluating


def check_attention_weights(target: PackedModel, is_more: bool) -> None:
    """Raise ValueError if `attention_weights` could not compute them. `is_more`: rows are more than token ids that the model has not read
    yet."""
    why, shared = None, bool(getattr(target.config, "num_kv_shared_layers", 0))
    if target.config._attn_implementation != "eager":
        why = "transformers forms them with attn_implementation='eager' only: load the model with it"
    elif is_more:
        why = "the prompt must be token ids without a cache, virtual tokens, or rows with adapters of their own"
    elif target.ranks is not None or target.recurrent is not None or target.segments or shared:
        why = f"{type(target.model).__name__} is sharded, or has layers that do not attend to keys of their own"
    if why is not None:
        raise ValueError(
            f"output_attentions cannot be served with speculative_config: {why}; or leave output_attentions out."
        )


@torch.no_grad()
def attention_weights(
    target: PackedModel, prompts: torch.Tensor, ids: torch.Tensor, inputs: dict[str, Any]
) -> dict[str, tuple]:
    """What `generate()` returns for `output_attentions`, by name: for every step and layer the weights [B, heads, queries, keys]. The first
    step's queries are the prompts. A later step has one query, and the keys that the layer's cache has then.

    Paged attention forms no weights. So the model reads the prompts and then all that was written, in two forwards of its own.

    Args:
        prompts, ids: int64 [B, S] and [B, S + n], without and with what was written.
        inputs: the arguments that `generate()` prepared for the model's forward.
    """
    model: Any = target.model
    with_encoder, count = is_encoder_decoder(model), ids.shape[1] - 1 - prompts.shape[1]
    names = ("decoder_attentions", "cross_attentions") if with_encoder else ("attentions",)
    inputs = {**inputs, "use_cache": True, "output_attentions": True}
    if not with_encoder:
        inputs[CACHE] = DynamicCache(config=target.config)
    cache = inputs[CACHE].self_attention_cache if with_encoder else inputs[CACHE]
    with evaluating(model), target.reading():
        given = model.prepare_inputs_for_generation(prompts, is_first_iteration=True, **inputs)
        output = model(**given, return_dict=True)
        steps = {name: [tuple(output.get(name) or ())] for name in names}
        if count:
            inputs = model._update_model_kwargs_for_generation(output, inputs, with_encoder, num_new_tokens=count)
            given = model.prepare_inputs_for_generation(ids[:, :-1], next_sequence_length=count, **inputs)
            output = model(**given, return_dict=True)
    for name in names if count else ():
        if not output.get(name):  # a model that returns none
            steps[name] += [()] * count
            continue
        windows = [getattr(layer, "sliding_window", None) for layer in cache.layers]
        grows = name != "cross_attentions"
        by_layer = [_by_query(*pair, grows) for pair in zip(output[name], windows, strict=True)]
        steps[name] += zip(*by_layer, strict=True)
    encoder = {"encoder_attentions": inputs["encoder_outputs"].get("attentions")} if with_encoder else {}
    return {name: tuple(steps[name]) for name in names} | encoder


def _by_query(weights: torch.Tensor, window: int | None, grows: bool) -> list[torch.Tensor]:
    """The weights [B, heads, n, keys] of n queries as n tensors [B, heads, 1, keys], where the last queries' own keys are not seen by those
    before (`grows`), and a cache holds the keys of a `window` only."""
    ends = weights.shape[3] - np.arange(weights.shape[2])[::-1] if grows else [weights.shape[3]] * weights.shape[2]
    starts = [max(end - window, 0) if grows and window is not None else 0 for end in ends]
    return [weights[:, :, i : i + 1, start:end] for i, (start, end) in enumerate(zip(starts, ends, strict=True))]
