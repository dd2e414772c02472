"""PEFT's virtual tokens (prompt tuning, P-tuning, prefix tuning): their keys and values are a cache that every row continues."""

from __future__ import annotations

from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.cache_utils import DynamicCache

from .core.errors import UnsupportedModel
from .core.names import CACHE
from .model.encoder_decoder import is_encoder_decoder

_KEYS_ALONE = ("PREFIX_TUNING", "CARTRIDGE")  # these learn keys and values, the others embeddings


@torch.no_grad()
def with_virtual_tokens(
    model: PreTrainedModel, input_ids: torch.Tensor, inputs: dict[str, Any]
) -> tuple[dict[str, Any], list[int] | None]:
    """The inputs of a call that PEFT serves with virtual tokens: a cache that holds them, and the mask of the whole text.

    Args:
        input_ids: int64 [B, S].
        inputs: what `generate()` prepared for the model's forward.

    Returns: the inputs, and by row how far positions are moved: PEFT counts padding after embeddings. None: `inputs` are as they were.

    Raises:
        UnsupportedModel: PEFT combines virtual tokens with an encoder, embeddings, a cache of the caller, or masked tokens inside a row.
    """
    # PEFT replaces this method on the model while it generates.
    prepare = vars(model).get("prepare_inputs_for_generation")
    adapted: Any = getattr(prepare, "__self__", None)
    config = getattr(adapted, "active_peft_config", None)
    if config is None or not config.is_prompt_learning:
        return inputs, None
    (rows, length), mask = input_ids.shape, inputs.get("attention_mask")
    mask = torch.ones_like(input_ids) if mask is None else mask
    padding = length - (mask != 0).sum(1)
    columns = torch.arange(length, device=mask.device)
    others = {
        "an encoder": is_encoder_decoder(model),
        "inputs_embeds": inputs.get("inputs_embeds") is not None,
        CACHE: getattr(inputs.get(CACHE), "_is_user_defined", False),
        "masked tokens inside a row": not torch.equal(mask != 0, columns >= padding[:, None]),
    }
    kind = config.peft_type.value
    for what, is_there in others.items():
        if is_there:
            raise UnsupportedModel(
                f"PEFT's {kind} adds virtual tokens before the text; with {what} too, call generate() without speculative_config."
            )
    cache: Any
    if kind in _KEYS_ALONE:
        given = adapted.get_prompt(rows)
        cache = DynamicCache([(layer.keys, layer.values) for layer in given.layers])
    else:
        embeds = adapted.get_prompt(1).to(model.dtype)
        cache = DynamicCache()
        model(inputs_embeds=embeds, use_cache=True, **{CACHE: cache})
        cache.batch_repeat_interleave(rows)
    cache._is_user_defined = True  # one to continue from
    positions = inputs.get("position_ids") if kind in _KEYS_ALONE else None
    return {
        **inputs,
        CACHE: cache,
        "attention_mask": torch.cat([mask.new_ones(rows, config.num_virtual_tokens), mask], dim=1),
        "position_ids": None if positions is None else positions + config.num_virtual_tokens,
    }, [0] * rows if kind in _KEYS_ALONE else padding.tolist()
