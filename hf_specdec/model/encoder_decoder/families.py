"""Families of encoder-decoder models: where their decoder's layers are, and how it counts positions."""

from __future__ import annotations

import copy
from dataclasses import dataclass, replace
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
        passes_on: what the names of further arguments begin with, which the model gives to its decoder.
    """

    positions: str
    layers: str = "layers"
    cross: str = "encoder_attn"
    itself: str = "self_attn"
    prefix: str = "decoder_"
    passes_on: str = ""


_T5 = Family("bias", "block", "layer.1.EncDecAttention", "layer.0.SelfAttention")
FAMILIES: dict[str, Family] = {
    **dict.fromkeys(("bart", "mbart", "plbart", "marian", "pegasus", "blenderbot", "blenderbot-small", "trocr"), Family("table")),
    **dict.fromkeys(("m2m_100", "speech_to_text"), Family("ids")),
    **dict.fromkeys(("whisper", "moonshine"), Family("argument")),
    "t5gemma": Family("argument", cross="cross_attn"),
    "gpt2": Family("argument", "h", "crossattention", "attn"),
    "bert": Family("argument", "encoder.layer", "crossattention.self", "attention.self"),
    **dict.fromkeys(("t5", "mt5", "umt5", "longt5"), _T5),
}  # fmt: skip
_PAIRS = {"vision-encoder-decoder", "speech-encoder-decoder", "encoder-decoder"}  # of two models
_DECODERS = {"WhisperForCausalLM": Family("argument", prefix="")}


def is_encoder_decoder(model: PreTrainedModel | PreTrainedConfig) -> bool:
    """True if an encoder reads the caller's input, and a decoder writes the text; of a model or its configuration."""
    config = model if isinstance(model, PreTrainedConfig) else model.config
    return bool(getattr(config, "is_encoder_decoder", False))


def shares_vocabulary(config: Any) -> bool:
    """True if the encoder's ids mean what the decoder's do. Two models with equally many ids are taken to have one tokenizer."""
    if config.model_type in _PAIRS:
        return getattr(config.encoder, "vocab_size", None) == config.decoder.vocab_size
    return getattr(config, "share_encoder_decoder_embeddings", True)


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
    config, name, of_part = model.config, type(model).__name__, {}
    if config.model_type in _PAIRS:  # whose decoder is a model of any type
        config, of_part = config.decoder, {"passes_on": "decoder_"}
        name += f" with {config.model_type!r}"
        if not getattr(config, "use_learned_position_embeddings", True):
            of_part["positions"] = "ids"
    if config.model_type not in FAMILIES:
        raise UnsupportedModel(
            f"{name} is an encoder-decoder model of another family than {', '.join(FAMILIES)}. Call generate() without speculative_config."
        )
    return replace(FAMILIES[config.model_type], **of_part)


def decoder_of(model: Any, family: Family) -> Any:
    """The module that has the decoder's layers."""
    decoder = model.get_decoder()
    return decoder if hasattr(decoder, family.layers.partition(".")[0]) else decoder.get_decoder()


def mask_of_cross(given: dict[str, Any]) -> str:
    """Which argument of a call of the attention to the encoder's output is its mask."""
    return next((name for name in ("encoder_attention_mask", "mask") if name in given), "attention_mask")


def decoder_layers(model: Any, family: Family) -> nn.ModuleList:
    """The decoder's layers."""
    return decoder_of(model, family).get_submodule(family.layers)


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
    if positions not in ("table", "ids") and not (family and family.passes_on):  # a pair's decoder counts its cache
        return [0] * len(columns)
    pad = model.config.get_text_config(decoder=True).pad_token_id
    has_hole = any(len(places) <= places[-1] - places[0] for places in columns)
    by_ids = positions == "ids" and (any(places[0] for places in columns) or any(pad in ids[:-1] for ids in prompts))
    if has_hole or by_ids:
        raise UnsupportedModel(
            f"{type(model).__name__} counts positions in padded prompts of its decoder in its own way: pass them without padding, or "
            "call generate() without speculative_config."
        )
    return [int(places[0]) for places in columns]
