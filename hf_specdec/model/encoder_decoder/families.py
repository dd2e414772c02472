"""Families of encoder-decoder models: where their decoder's layers are, and how it counts positions."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch import nn
from transformers import AutoConfig, PreTrainedConfig, PreTrainedModel

from ...core.errors import UnsupportedModel


@dataclass(frozen=True)
class Family:
    """What the decoders of a family have in common.

    Attributes:
        positions: how a token's position reaches the model. "argument": as `decoder_position_ids`; "table": the decoder counts its
            cache for its table; "ids": its table counts tokens, and has a vector for padding; "bias": biases by distance.
        layers: the decoder's list of layers.
        cross: a layer's attention to the encoder's output.
        itself: a layer's attention to the text.
        prefix: what the names of the decoder's arguments begin with; "": the model is only a decoder, which reads another model's encoder.
    """

    positions: str
    layers: str = "layers"
    cross: str = "encoder_attn"
    itself: str = "self_attn"
    prefix: str = "decoder_"


_T5 = Family("bias", "block", "layer.1.EncDecAttention", "layer.0.SelfAttention")
FAMILIES: dict[str, Family] = {
    **dict.fromkeys(("bart", "mbart", "plbart", "marian", "pegasus", "blenderbot", "blenderbot-small"), Family("table")),
    **dict.fromkeys(("m2m_100", "speech_to_text"), Family("ids")),
    **dict.fromkeys(("whisper", "moonshine"), Family("argument")),
    "t5gemma": Family("argument", cross="cross_attn"),
    **dict.fromkeys(("t5", "mt5", "umt5", "longt5"), _T5),
}  # fmt: skip
_DECODERS = {"WhisperForCausalLM": Family("argument", prefix="")}


def is_encoder_decoder(model: PreTrainedModel | PreTrainedConfig) -> bool:
    """True if an encoder reads the caller's input, and a decoder writes the text; of a model or its configuration."""
    config = model if isinstance(model, PreTrainedConfig) else model.config
    return bool(getattr(config, "is_encoder_decoder", False))


def check_decoder_only(folder: str, instead: str, **origin: Any) -> None:
    """Raise UnsupportedModel for the folder or Hub id of an encoder-decoder model, of which transformers would load the decoder alone.

    Args:
        instead: what to do with such a model, for the message.
        origin: further arguments of `from_pretrained`.
    """
    if is_encoder_decoder(AutoConfig.from_pretrained(folder, **origin)):
        raise UnsupportedModel(f"{folder} is an encoder-decoder model: {instead}.")


def family_of(model: PreTrainedModel) -> Family | None:
    """The family of an encoder-decoder model, or of the decoder of one; None for other models.

    Raises:
        UnsupportedModel: it is of a family that is not known here.
    """
    if not is_encoder_decoder(model):
        return _DECODERS.get(type(model).__name__)
    if model.config.model_type not in FAMILIES:
        raise UnsupportedModel(
            f"{type(model).__name__} is an encoder-decoder model of another family than {', '.join(FAMILIES)}. Call generate() without "
            "speculative_config."
        )
    return FAMILIES[model.config.model_type]


def decoder_layers(model: Any, family: Family) -> nn.ModuleList:
    """The decoder's layers."""
    return getattr(model.get_decoder(), family.layers)


def text_config(model: PreTrainedModel) -> PreTrainedConfig:
    """The configuration of the part that writes text, with the number of its layers."""
    config, family = model.config.get_text_config(decoder=True), family_of(model)
    if family is not None:
        config = copy.copy(config)
        config.num_hidden_layers = len(decoder_layers(model, family))
    return config


def position_offsets(model: PreTrainedModel, columns: list[np.ndarray], prompts: list[list[int]]) -> list[int]:
    """Per row, position minus index of every token of the decoder's text.

    Args:
        columns: per row, the columns of the padded decoder prompts that hold its tokens.
        prompts: these tokens.

    Raises:
        UnsupportedModel: in this model, no such number exists.
    """
    family = family_of(model)
    positions = "table" if family is None else family.positions  # of others, only decoders whose tables count are asked
    if positions not in ("table", "ids"):
        return [0] * len(columns)
    pad = model.config.pad_token_id
    has_hole = any(len(places) <= places[-1] - places[0] for places in columns)
    by_ids = positions == "ids" and (any(places[0] for places in columns) or any(pad in ids[:-1] for ids in prompts))
    if has_hole or by_ids:
        raise UnsupportedModel(
            f"{type(model).__name__} counts positions in padded prompts of its decoder in its own way: pass them without padding, or "
            "call generate() without speculative_config."
        )
    return [int(places[0]) for places in columns]
