"""Checkpoints of Gemma 4 assistants: how they are recognised, what their keys mean, and which of the target's layers they read."""

from __future__ import annotations

import dataclasses
from typing import Any

from transformers import AutoModelForCausalLM, PreTrainedModel

from ...model import architectures
from ...model.packed_model import PackedModel
from ..checkpoints.files import BAD_VALUES, Checkpoint, register_format
from ..checkpoints.keys import ANYTHING, FLAG, Key, Table, integer, one_of
from ..checkpoints.target_parts import check_target, device_and_dtype

TYPES = ("gemma4_assistant", "gemma4_unified_assistant")
# Keys of `text_config` besides the fields of transformers' class, which reads them.
_OF_LAYERS = {"model_type", "per_layer_config", "global_head_dim", "num_global_key_value_heads"}
TABLE = Table(
    {
        "model_type": Key(one_of(*TYPES), default=...),
        "backbone_hidden_size": Key(integer(), default=...),
        "text_config": Key(ANYTHING, default=...),
        "use_ordered_embeddings": Key(FLAG, default=False),
        "num_centroids": Key(integer()),
        "centroid_intermediate_top_k": Key(integer()),
    },
    has_layers=False,
)


def is_assistant(checkpoint: Checkpoint) -> bool:
    """Whether it is a Gemma 4 assistant."""
    return checkpoint.config.get("model_type") in TYPES


register_format(
    "Gemma 4 assistant (google/gemma-4-*-it-assistant: model_type gemma4_assistant, pre_projection, post_projection)",
    "gemma4_assistant",
    is_assistant,
)


def load_assistant(checkpoint: Checkpoint, target: PackedModel) -> PreTrainedModel:
    """transformers' model of an assistant, on the device and in the dtype for heads. Raises CheckpointError: a key without a meaning,
    tensors that do not fit, or another target's assistant."""
    device, dtype = device_and_dtype(target)
    check_target(
        checkpoint,
        target,
        TABLE.read(checkpoint).backbone_hidden_size,
        checkpoint.section("text_config").get("vocab_size"),
    )
    try:
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            checkpoint.folder, dtype=dtype, local_files_only=True, output_loading_info=True
        )
    except (*BAD_VALUES, OSError) as error:
        raise checkpoint.error(f"transformers cannot load it: {error}") from error
    model, report = loaded
    problems = [f"{kind.removesuffix('_keys')} {name}" for kind, names in report.items() for name in names]
    if problems:
        raise checkpoint.error(f"does not fit {type(model).__name__}: {'; '.join(problems[:12])}.")
    layers = model.config.text_config
    known = _OF_LAYERS | {field.name for field in dataclasses.fields(type(layers))}
    for name, value in checkpoint.section("text_config").items():
        if name not in known and value is not None and not TABLE.means_nothing(name):
            raise checkpoint.error(
                f"config.json has text_config.{name} = {value!r}, which {type(layers).__name__} does not have."
            )
    if layers.final_logit_softcapping is not None:
        raise checkpoint.error(
            f"has final_logit_softcapping = {layers.final_logit_softcapping!r}; only null is supported here."
        )
    _check_keys(checkpoint, model, target)
    return model.to(device).requires_grad_(False).eval()


def _check_keys(checkpoint: Checkpoint, model: Any, target: PackedModel) -> None:
    """Raise CheckpointError if the assistant's layers cannot read the target's keys."""
    if target.ranks is not None:
        raise checkpoint.error("reads keys of the whole target, and this target is sharded over several processes.")
    read, device = layers_with_keys(target), device_and_dtype(target)[0]
    for reader in (layer.self_attn for layer in model.model.layers):
        kind = reader.layer_type
        if kind not in read:
            raise checkpoint.error(
                f"reads keys of {kind}, and no layer of the target has any. It is for another target."
            )
        attention: Any = architectures.decoder_layers(target.model)[read[kind]].self_attn
        there = attention.q_proj.weight.device
        if there not in (device, reader.q_proj.weight.device):
            raise checkpoint.error(
                f"drafts on {device}, and the keys that it reads are on {there}: load the target on one device."
            )
        num_keys = attention.k_proj.weight.shape[0] // attention.head_dim
        if reader.head_dim != attention.head_dim or reader.config.num_attention_heads % num_keys:
            raise checkpoint.error(
                f"has {reader.config.num_attention_heads} heads of width {reader.head_dim} for {kind}; the target has {num_keys} of width "
                f"{attention.head_dim}. It is for another target."
            )


def layers_with_keys(target: PackedModel) -> dict[str, int]:
    """For each kind of attention, the index of the target's last layer of that kind with keys of its own: assistants read these."""
    count = target.config.num_hidden_layers - (getattr(target.config, "num_kv_shared_layers", 0) or 0)
    return {kind: index for index, kind in enumerate((getattr(target.config, "layer_types", None) or [])[:count])}
