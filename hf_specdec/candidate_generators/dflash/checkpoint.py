"""Checkpoints of z-lab, SpecForge and speculators: reading their settings, and loading the drafter."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import PretrainedConfig, Qwen3Config

from ...model.packed_model import PackedModel
from ..checkpoints import target_parts
from ..checkpoints.files import Checkpoint, Plan, register_format
from ..checkpoints.layers import Embeddings, RotaryPositions, check_layer_count, embeddings_of
from ..checkpoints.target_parts import DraftVocabulary, layer_config, plain_rope, trained_for
from .head import MARKOV_TYPES, BlockHead, DFlashDrafter, DFlashLayout

# Keys in the configurations of z-lab and SpecForge besides those of the layers.
_OTHER_KEYS = ("block_size", "dflash_config", "num_target_layers", "target_hidden_size")
_QWEN3_KEYS = (
    "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "hidden_act",
    "max_position_embeddings", "rms_norm_eps",
)  # fmt: skip
# `draft_vocabulary` reads the vocabulary's tables; some trainers leave the verifier's norm and head in the file.
_NOT_IN_MODULE = ("d2t", "t2d", "verifier_norm.weight", "verifier_lm_head.weight")


def is_dflash(checkpoint: Checkpoint) -> bool:
    kind = checkpoint.config.get("speculators_model_type")
    if kind is not None:
        return kind in ("dflash", "dflash2", "dspark")  # "dflash2" is refused by name later
    has_norms = "hidden_norm.weight" in checkpoint and "layers.0.self_attn.q_norm.weight" in checkpoint
    return has_norms or "dflash_config" in checkpoint.config


register_format(
    "DFlash, DSpark, Domino (z-lab/*-DFlash*, SpecForge, speculators: hidden_norm, fc)", "dflash", is_dflash
)


def default_target_layers(num_target_layers: int, num_layers: int) -> list[int]:
    """The target's layers (0-based outputs) that a checkpoint without a list reads: z-lab's `build_target_layer_ids`."""
    if num_layers == 1:
        return [num_target_layers // 2]
    return [round(1 + i * (num_target_layers - 4) / (num_layers - 1)) for i in range(num_layers)]


def read_layout(checkpoint: Checkpoint, target: PackedModel) -> DFlashLayout:
    """The settings of a checkpoint.

    Raises:
        CheckpointError: a key is missing or does not fit the target, or the format is another drafter's.
    """
    kind = checkpoint.config.get("speculators_model_type")
    if kind is None:
        layout = _read_own(checkpoint, target)
    elif kind in ("dflash", "dspark"):
        layout = _read_speculators(checkpoint, kind)
    else:
        raise checkpoint.error(f"is of speculators type {kind!r}; method 'dflash' reads 'dflash' and 'dspark'.")
    _check(checkpoint, layout, target)
    return layout


def _read_own(checkpoint: Checkpoint, target: PackedModel) -> DFlashLayout:
    """z-lab's and SpecForge's configuration: the layers' keys at the top level, the drafter's in `dflash_config`."""
    config = checkpoint.config
    settings = checkpoint.section("dflash_config")
    layers = _read_layers(checkpoint, {k: v for k, v in config.items() if k not in _OTHER_KEYS})
    num_target_layers = config.get("num_target_layers") or target.config.num_hidden_layers
    if num_target_layers != target.config.num_hidden_layers:
        raise checkpoint.error(
            f"was made for a target of {num_target_layers} layers; this one has {target.config.num_hidden_layers}."
        )
    if not settings.get("use_aux_hidden_state", True):
        raise checkpoint.error(
            "has use_aux_hidden_state false: a drafter that does not read the target's layers is not supported."
        )
    taps = settings.get("target_layer_ids") or default_target_layers(num_target_layers, layers.num_hidden_layers)
    projector = settings.get("projector_type") or {"DSparkDraftModel": "dspark", "DominoDraftModel": "domino"}.get(
        (config.get("architectures") or [""])[0]
    )
    causal = bool(settings.get("causal", False))
    alpha = settings.get("confidence_head_alpha") or 0
    if not isinstance(alpha, (int, float)):
        raise checkpoint.error(f"needs a number 'confidence_head_alpha' in its configuration, not {alpha!r}.")
    return DFlashLayout(
        layers=layers,
        block_size=checkpoint.integer("block_size", config.get("block_size") or settings.get("block_size"), minimum=0),
        mask_token_id=checkpoint.integer("dflash_config.mask_token_id", settings.get("mask_token_id"), minimum=0),
        tapped=tuple(i + 1 for i in _integers(checkpoint, taps, "dflash_config.target_layer_ids")),
        # DSpark is trained to predict the next token from every slot; Domino only if config.json says so.
        from_anchor=projector == "dspark" or bool(settings.get("shift_label", False)),
        causal=(causal, True),
        window_from_anchor=False,
        starts_in_anchor_slot=False,
        heads={
            "markov_rank": 0,
            "enable_confidence_head": alpha > 0,
            "confidence_head_with_markov": False,
            **settings,
            "projector_type": projector,
        },
    )


def _read_speculators(checkpoint: Checkpoint, kind: str) -> DFlashLayout:
    """speculators' configuration: the layers' keys in `transformer_layer_config`, the drafter's at the top level."""
    config = checkpoint.config
    if not isinstance(config.get("transformer_layer_config"), dict):
        raise checkpoint.error("has no transformer_layer_config.")
    defaults = {
        "markov_rank": 256,
        "markov_head_type": "vanilla",
        "enable_confidence_head": True,
        "confidence_head_with_markov": True,
    }
    return DFlashLayout(
        layers=_read_layers(checkpoint, config["transformer_layer_config"]),
        block_size=checkpoint.integer("block_size", config.get("block_size", 8), minimum=0),
        mask_token_id=checkpoint.integer("mask_token_id", config.get("mask_token_id"), minimum=0),
        tapped=tuple(_integers(checkpoint, config.get("aux_hidden_state_layer_ids"), "aux_hidden_state_layer_ids")),
        from_anchor=bool(config.get("sample_from_anchor", kind == "dspark")),
        causal=(False, not config.get("sliding_window_non_causal", False)),
        window_from_anchor=True,
        starts_in_anchor_slot=True,
        heads={k: config.get(k, v) for k, v in defaults.items()} | {"projector_type": kind} if kind == "dspark" else {},
    )


def _read_layers(checkpoint: Checkpoint, values: dict[str, Any]) -> Qwen3Config:
    """The layers are always Qwen3's; the configuration's model type only sets defaults."""
    values = plain_rope(values)
    check_layer_count(checkpoint, values, Plan(checkpoint, _canonical))
    source = layer_config(checkpoint, values, "qwen3")
    with checkpoint.building():
        return _qwen3(checkpoint, source)


def _qwen3(checkpoint: Checkpoint, source: PretrainedConfig) -> Qwen3Config:
    rope = getattr(source, "rope_parameters", None) or {}
    rope = rope.get("sliding_attention", rope)  # if kinds of layers differ, speculators uses this one
    if rope.get("partial_rotary_factor", 1.0) != 1.0:
        raise checkpoint.error("rotates only a part of each head (partial_rotary_factor), which Qwen3's layers do not.")
    layer_types = getattr(source, "layer_types", None) or ["full_attention"] * source.num_hidden_layers
    window = getattr(source, "sliding_window", None)
    unknown = set(layer_types) - {"full_attention", "sliding_attention"}
    if unknown or len(layer_types) != source.num_hidden_layers:
        raise checkpoint.error(f"has layer_types {layer_types} for {source.num_hidden_layers} layers.")
    if "sliding_attention" in layer_types and not window:
        raise checkpoint.error("has sliding_attention layers and no sliding_window (or use_sliding_window false).")
    return Qwen3Config(
        **{key: getattr(source, key) for key in _QWEN3_KEYS},
        head_dim=getattr(source, "head_dim", None) or source.hidden_size // source.num_attention_heads,
        rope_parameters=rope,
        attention_bias=getattr(source, "attention_bias", False),
        use_sliding_window=window is not None,
        sliding_window=window,
        layer_types=list(layer_types),
    )


def _integers(checkpoint: Checkpoint, values: Any, key: str) -> list[int]:
    if not isinstance(values, list) or not values:
        raise checkpoint.error(f"needs a list of layers {key!r} in its configuration, not {values!r}.")
    return [checkpoint.integer(key, value, minimum=0) for value in values]


def _check(checkpoint: Checkpoint, layout: DFlashLayout, target: PackedModel) -> None:
    if layout.num_tokens < 1:
        raise checkpoint.error(f"has block_size {layout.block_size}, which leaves nothing to draft.")
    num_layers = target.config.num_hidden_layers
    if max(layout.tapped) > num_layers:
        raise checkpoint.error(
            f"reads hidden states {list(layout.tapped)}, but the target has {num_layers} layers. It is for another target."
        )
    heads = layout.heads
    if heads.get("markov_rank"):
        checkpoint.integer("markov_rank", heads["markov_rank"], minimum=0)
    if (
        heads.get("enable_confidence_head")
        and heads.get("confidence_head_with_markov")
        and not heads.get("markov_rank")
    ):
        raise checkpoint.error("has confidence_head_with_markov true and no Markov head (markov_rank 0).")
    if heads.get("markov_rank") and heads.get("markov_head_type", "vanilla") not in MARKOV_TYPES:
        raise checkpoint.error(
            f"has markov_head_type {heads['markov_head_type']!r}; known are {', '.join(MARKOV_TYPES)}."
        )
    if heads.get("projector_type") == "domino":
        checkpoint.integer("dflash_config.pure_draft_prefix_len", heads.get("pure_draft_prefix_len", 0), minimum=0)
        plan = Plan(checkpoint, _canonical)
        # Weights that are read: the state by the GRU, the bottleneck by the last layer.
        for key, tensor in (("emb_dim", "embed_proj.2.weight"), ("gru_hidden_dim", "prefix_gru.weight_hh_l0")):
            size = checkpoint.integer(f"dflash_config.{key}", heads.get(key), minimum=0)
            held = plan.matrix(f"domino.{tensor}")[1] if f"domino.{tensor}" in plan else size
            if size < 1 or size != held:
                raise checkpoint.error(f"has dflash_config.{key} = {size}, but its {tensor} reads {held} numbers.")


def _canonical(name: str) -> str | None:
    name = name.removeprefix("logit_head.")  # prefix of the extra heads in early files
    if name in _NOT_IN_MODULE:
        return None
    return f"domino.{name}" if name.startswith(("prefix_gru.", "embed_proj.")) else name


@dataclass(eq=False)
class LoadedDFlash:
    """A loaded drafter; embeddings and language-model head are the target's if the file has none."""

    head: BlockHead
    embeddings: Embeddings
    lm_head: nn.Module
    vocabulary: DraftVocabulary


def load_dflash(
    checkpoint: Checkpoint, layout: DFlashLayout, target: PackedModel, prepack_weights: bool | None
) -> LoadedDFlash:
    """Load the drafter of a checkpoint on the target's device and in its dtype.

    Raises:
        CheckpointError: it is inconsistent or does not fit the target; nothing was loaded.
    """
    config = layout.layers
    plan = Plan(checkpoint, _canonical)
    owns = {
        key: plan.matrix(f"{key}.weight") if f"{key}.weight" in plan else None for key in ("embed_tokens", "lm_head")
    }
    target_parts.check_target(checkpoint, target, None if all(owns.values()) else config.hidden_size, config.vocab_size)
    feature_size = target.config.hidden_size
    reads = plan.matrix("fc.weight")[1] if "fc.weight" in plan else None
    if reads not in (None, len(layout.tapped) * feature_size):
        raise checkpoint.error(
            f"fc.weight reads {reads} numbers, but {len(layout.tapped)} of the target's layers have "
            f"{len(layout.tapped) * feature_size}. It is for another target." + trained_for(checkpoint)
        )
    shared_head: Any = target_parts.target_head(target)
    size = (owns["lm_head"] or tuple(shared_head.weight.shape))[0]
    vocabulary = target_parts.draft_vocabulary(
        checkpoint, target, _offsets(checkpoint, layout, bool(owns["lm_head"])), size
    )
    table: Any = target_parts.target_embeddings(target)
    rows = (owns["embed_tokens"] or table.weight.shape)[0]
    if layout.mask_token_id >= rows:
        raise checkpoint.error(f"has mask_token_id {layout.mask_token_id}, but there are {rows} embeddings.")
    rotary = RotaryPositions(checkpoint, config, target_parts.device_and_dtype(target)[0])
    drafter = target_parts.built(checkpoint, plan, target, lambda: DFlashDrafter(layout, feature_size, size, owns))
    embeddings = embeddings_of(checkpoint, target, drafter.embed_tokens, config.hidden_size)
    return LoadedDFlash(
        head=BlockHead(drafter, layout, rotary, prepack_weights),
        embeddings=embeddings,
        lm_head=shared_head if drafter.lm_head is None else drafter.lm_head,
        vocabulary=vocabulary,
    )


def _offsets(checkpoint: Checkpoint, layout: DFlashLayout, has_head: bool) -> torch.Tensor | None:
    """The table d2t [Vd] of a reduced vocabulary, or None."""
    if "d2t" not in checkpoint:
        declared = checkpoint.config.get("draft_vocab_size")
        if declared is not None and declared < layout.layers.vocab_size:
            raise checkpoint.error(f"has draft_vocab_size {declared} and no table d2t of these tokens.")
        return None
    if not has_head:
        raise checkpoint.error("has a draft vocabulary (d2t) and no lm_head.weight for it.")
    return checkpoint.tensor("d2t").to(torch.long)
