"""Checkpoints of z-lab, DeepSpec, SpecForge and speculators: reading their settings, and loading the drafter."""

from __future__ import annotations

import logging
import pickle
from functools import partial
from typing import Any

import torch

from ...model.packed_model import PackedModel
from ..checkpoints import target_parts
from ..checkpoints.files import MASK_EMBEDDING, Checkpoint, Plan, register_format, renaming
from ..checkpoints.keys import FLAG, IDS, KIND, LAYERS, NAMES, NUMBER, Key, Table, integer, keys, one_of
from ..checkpoints.layers import LoadedHead, keys_of_layers, loaded, read_layer_config, table_scale
from ..checkpoints.target_parts import trained_for
from .head import MARKOV_TYPES, BlockHead, DFlashDrafter, DFlashLayout
from .streams import is_streams

logger = logging.getLogger(__name__)

_MUSE = "muse_glimmer_assistant"  # transformers' own DFlash, with names of its own
_canonical = renaming(
    (r"encoder\.fc\.weight$", "fc.weight"),
    (r"encoder\.output_norm_enc\.weight$", "hidden_norm.weight"),
    (r"(logit_head|domino_head)\.", ""),  # of the extra heads in early files, and of speculators' Domino
    (r"verifier_(norm|lm_head)\.weight$", None),  # some trainers leave them in the file
    (r"(?=prefix_gru\.|embed_proj\.)", "domino."),
)
_KINDS = ("dflash", "dflash2", "dspark", "dflare", "pard2")  # of speculators
_PROJECTORS = {
    **dict.fromkeys(
        ("DFlashDraftModel", "DFlashSpeculator", "MuseGlimmerAssistantModel", "DFlareDraftModel", "DFlareSpeculator",
         "Pard2DraftModel", "Pard2Speculator")
    ),
    **dict.fromkeys(("DSparkDraftModel", "DSparkSpeculator", "Qwen3DSparkModel", "Gemma4DSparkModel"), "dspark"),
    **dict.fromkeys(("DFlash2DraftModel", "DFlash2Speculator"), "dflash2"),
    "DominoDraftModel": "domino",
}  # fmt: skip
_HEAD_KEYS = {
    "dspark": {
        "markov_rank": Key(integer(0), places=("markov_rank", "dspark_markov_rank")),
        "markov_head_type": Key(one_of(*MARKOV_TYPES), default="vanilla"),
        **keys(FLAG, "enable_confidence_head", "confidence_head_with_markov"),
        "confidence_head_alpha": Key(NUMBER, default=0.0),
    },
    "domino": {**keys(integer(0), "emb_dim", "gru_hidden_dim"), "pure_draft_prefix_len": Key(integer(0))},
    "dflash2": keys(integer(), "conv_kernel_size", "conv_group_size", "selector_rank", "selector_top_k"),
}
_TABLE = Table(
    {
        "kind": Key(one_of(*_KINDS), places=KIND),
        "architectures": Key(NAMES, default=[], places=(".architectures",)),
        "projector": Key(one_of("dflash", "dspark", "domino", "dflash2"), places=("projector_type",)),
        "block_size": Key(integer(0), places=("block_size", "dspark_block_size")),
        "mask_token_id": Key(
            integer(0), default=..., places=("mask_token_id", "dspark_noise_token_id", "pard_token", "ptd_token_id"),
        ),
        # z-lab and DeepSpec count the layers whose outputs are read, and -1 for the embeddings; speculators and vLLM those whose inputs are
        "tapped": Key(
            IDS,
            places=("target_layer_ids + 1", "dspark_target_layer_ids + 1", "aux_hidden_state_layer_ids",
                    ".eagle_aux_hidden_state_layer_ids", "layer_ids"),
        ),
        **keys(integer(), "num_target_layers", "target_hidden_size", "draft_vocab_size", "swa_window_size"),
        "sample_from_anchor": Key(FLAG, places=("sample_from_anchor", "query_zero_predicts_next", "not dspark_bonus_anchor")),
        "causal": Key(FLAG, places=("is_causal", "causal")),
        **keys(FLAG, "shift_label", "sliding_window_non_causal", "use_swa"),
        **keys(NUMBER, "input_embedding_scale", "final_logit_softcapping"),
        "output_multiplier": Key(NUMBER, default=1.0),
        "attention_value_scale": Key(NUMBER, default=1.0),
        "use_heterogeneous_kv": Key(FLAG, tensor="layers.0.self_attn.k_proj_target.weight"),
        "sinks": Key(
            FLAG, places=("attention_sink_bias", "add_swa_attention_sink_bias"), tensor="layers.0.self_attn.attention_sink_bias"
        ),
        "attention_bias": Key(
            FLAG, places=(".attention_bias", f"{LAYERS}.attention_bias"), tensor="layers.0.self_attn.o_proj.bias"
        ),
        **_HEAD_KEYS["dspark"],
        **_HEAD_KEYS["domino"],
        **_HEAD_KEYS["dflash2"],
    },
    section="dflash_config",
    only={"use_aux_hidden_state": True},
    # the number of heads says the first; the others are for training
    nothing=frozenset({
        "attention_mode", "lambda_base_start", "lambda_base_decay_ratio", "auf", "progressive_gamma", "gamma_start", "gamma_max",
        "ce_alpha", "kd_alpha", "kd_temperature", "target_feat_dropout",
    }),
)  # fmt: skip


def is_dflash(checkpoint: Checkpoint) -> bool:
    """Whether it is in one of the formats of DFlash and its relatives."""
    if is_streams(checkpoint):
        return True
    kind = checkpoint.config.get("speculators_model_type")
    if kind is not None:
        return kind in _KINDS
    if checkpoint.config.get("model_type") == _MUSE:
        return True
    has_norms = "hidden_norm.weight" in checkpoint and "layers.0.self_attn.q_norm.weight" in checkpoint
    return has_norms or "dflash_config" in checkpoint.config


register_format(
    "DFlash, DFlash2, DSpark, Domino, DFlare, PARD-2 (z-lab/*-DFlash*, DeepSpec, SpecForge, speculators: hidden_norm, fc; Muse Glimmer's "
    "assistant; DeepSeek-V4's DSpark: mtp.0.main_proj)",
    "dflash",
    is_dflash,
)


def default_target_layers(num_target_layers: int, num_layers: int) -> list[int]:
    """The target's layers (0-based outputs) that a checkpoint without a list reads: z-lab's `build_target_layer_ids`."""
    if num_layers == 1:
        return [num_target_layers // 2]
    return [round(1 + i * (num_target_layers - 4) / (num_layers - 1)) for i in range(num_layers)]


def read_layout(checkpoint: Checkpoint, target: PackedModel, embedding_scale: float | None = None) -> DFlashLayout:
    """The settings of a checkpoint.

    Args:
        embedding_scale: factor of the target's embedding rows; None: as the checkpoint or its origin says.

    Raises:
        CheckpointError: a key is missing or does not fit the target, or the format is another drafter's.
    """
    plan = Plan(checkpoint, _canonical)
    given = (_TABLE | keys_of_layers(plan)).read(checkpoint, plan)
    config: Any = read_layer_config(checkpoint, plan, "qwen3")
    config.attention_bias = "layers.0.self_attn.o_proj.bias" in plan
    is_muse = checkpoint.config.get("model_type") == _MUSE
    if is_muse:
        config.vocab_size = target.vocab_size
        given.causal = bool(given.causal)
        if config.sliding_window:
            config.sliding_window += 1  # the distance of the farthest key, in transformers
    heads = _heads(checkpoint, given, plan)
    is_dflash2, non_causal = heads.get("projector_type") == "dflash2", given.sliding_window_non_causal
    sliding_is_causal = not (is_dflash2 and given.kind is not None if non_causal is None else non_causal)
    if given.use_swa and "sliding_attention" not in config.layer_types:
        window = (checkpoint.section(LAYERS) or checkpoint.config).get("sliding_window")
        config.layer_types = ["sliding_attention"] * config.num_hidden_layers
        config.sliding_window, sliding_is_causal = given.swa_window_size or window, False
    num_layers, tapped = target.config.num_hidden_layers, given.tapped
    if tapped is None and given.kind is None and not is_muse:
        tapped = [i + 1 for i in default_target_layers(num_layers, config.num_hidden_layers)]
    is_dspark, from_anchor = heads.get("projector_type") == "dspark", given.sample_from_anchor
    if given.shift_label is None and given.kind is not None and heads.get("projector_type") == "domino":
        given.shift_label = True
    scale = given.input_embedding_scale if embedding_scale is None else embedding_scale
    if scale is None and "embed_tokens.weight" in plan:
        scale = table_scale(config)
    embeddings = target_parts.target_embeddings(target)
    if scale is None and hasattr(embeddings, "embed_norm"):
        scale = 1.0  # Muse Glimmer's rows without their norm
    scales_rows = hasattr(embeddings, "embed_scale") and "embed_tokens.weight" not in plan
    if scales_rows and scale is None:
        # z-lab's earlier code and vLLM read the rows that a target like Gemma scales, and cap logits as it does; speculators
        # and z-lab's newer files, DFlash2 among them, read the rows of the table.
        scaled = given.kind is None and not is_dflash2
        scale, how = (None, "scaled, as the target does,") if scaled else (1.0, "as they are")
        logger.info(
            "%s: it reads the target's embeddings %s like drafters of its format; 'input_embedding_scale' overrides this.",
            checkpoint.name, how,
        )  # fmt: skip
    cap = getattr(target.config, "final_logit_softcapping", None) if scales_rows and scale is None else None
    layout = DFlashLayout(
        layers=config,
        # its writer's default: 8 of speculators, 16 of z-lab's DFlash2; 0: there is none
        block_size=(8 if given.kind else 16 if is_dflash2 else 0) if given.block_size is None else given.block_size,
        mask_token_id=given.mask_token_id,
        tapped=tuple(tapped or ()),
        # DSpark is trained to predict from the anchor's slot too; others only if config.json says so
        from_anchor=is_dspark or bool(given.shift_label) if from_anchor is None else from_anchor,
        causal=(False, sliding_is_causal) if given.causal is None else (given.causal, given.causal),
        like_speculators=given.kind is not None,
        heads=heads,
        draft_vocab_size=given.draft_vocab_size,
        embedding_scale=scale,
        logit_scale=given.output_multiplier,
        value_scale=given.attention_value_scale,
        sinks=frozenset(
            i for i in range(config.num_hidden_layers) if f"layers.{i}.self_attn.attention_sink_bias" in plan
        ),
        softcap=given.final_logit_softcapping or cap,
        fused_by_layer="fusion_weights" in plan,
        target_keys="layers.0.self_attn.k_proj_target.weight" in plan,
    )
    _check(checkpoint, given, layout, target)
    return layout


def _heads(checkpoint: Checkpoint, given: Any, plan: Plan) -> dict[str, Any]:
    """The keys of the DSpark, Domino or DFlash2 parts, `projector_type` tells which; {} if the file has none of these."""
    named = {_PROJECTORS.get(name, name) for name in given.architectures} | {given.projector, given.kind}
    named -= {None, "dflash", "dflare", "pard2"}
    if len(named) > 1 or not named <= set(_HEAD_KEYS) or (named and given.projector == "dflash"):
        raise checkpoint.error(
            f"config.json has architectures = {given.architectures}, with projector_type {given.projector!r}; known are "
            f"{', '.join(_PROJECTORS)}."
        )
    projector = next(iter(named), None)
    # speculators writes the sizes of Domino's head, whether there is one or not
    others = _HEAD_KEYS.keys() - {projector, "domino" if given.projector == "dflash" else None}
    for head in others:
        for key, spec in _HEAD_KEYS[head].items():
            if (value := getattr(given, key)) not in (None, False, 0, spec.default):
                raise checkpoint.error(f"config.json has {key} = {value!r}, but it is no drafter with this head.")
    if projector is None:
        return {}
    is_own = given.kind is None
    defaults = {
        "dspark": {
            "markov_rank": 0 if is_own else 256,
            "enable_confidence_head": given.confidence_head_alpha > 0 or not is_own,
            "confidence_head_with_markov": not is_own,
        },
        "domino": {"pure_draft_prefix_len": 0 if is_own else 1},
        "dflash2": {"conv_kernel_size": 2, "conv_group_size": 16, "selector_rank": 256, "selector_top_k": 16},
    }[projector]
    heads = {key: getattr(given, key) for key in _HEAD_KEYS[projector]}
    heads |= {key: value for key, value in defaults.items() if heads[key] is None}
    if projector == "domino":
        if given.kind is not None and given.shift_label is False:
            raise checkpoint.error("has shift_label false, with which Domino's head was shown the tokens it predicts.")
        # Weights that are read: the state by the GRU, the bottleneck by the last layer.
        for key, tensor in (("emb_dim", "embed_proj.2.weight"), ("gru_hidden_dim", "prefix_gru.weight_hh_l0")):
            held = plan.matrix(f"domino.{tensor}")[1] if f"domino.{tensor}" in plan else heads[key]
            if not heads[key] or heads[key] != held:
                raise checkpoint.error(f"has {key} = {heads[key]}, but its {tensor} reads {held} numbers.")
    reads_markov = heads.get("enable_confidence_head") and heads["confidence_head_with_markov"]
    if reads_markov and not heads["markov_rank"]:
        raise checkpoint.error("has confidence_head_with_markov true and no Markov head (markov_rank 0).")
    return {"projector_type": projector} | heads


def _check(checkpoint: Checkpoint, given: Any, layout: DFlashLayout, target: PackedModel) -> None:
    """Raise CheckpointError if keys contradict one another, or do not fit the target."""
    num_layers, anchor, label = target.config.num_hidden_layers, given.sample_from_anchor, given.shift_label
    if layout.num_tokens < 1:
        raise checkpoint.error(f"has block_size {given.block_size}, which leaves nothing to draft.")
    if layout.heads.get("projector_type") == "dflash2" and (layout.from_anchor or "d2t" in checkpoint):
        what = "the anchor's slot predicts" if layout.from_anchor else "there is a draft vocabulary (d2t)"
        raise checkpoint.error(f"says that {what}, which DFlash2's selector does not have.")
    if given.num_target_layers not in (None, num_layers):
        raise checkpoint.error(f"was made for a target of {given.num_target_layers} layers; this one has {num_layers}.")
    if not layout.tapped:
        raise checkpoint.error("names no layers of the target to read (aux_hidden_state_layer_ids).")
    if min(layout.tapped) < 0 or max(layout.tapped) > num_layers:
        raise checkpoint.error(
            f"reads hidden states {list(layout.tapped)}, but the target has {num_layers} layers. It is for another target."
        )
    if given.use_swa and not layout.layers.sliding_window:
        raise checkpoint.error("has use_swa true and no swa_window_size or sliding_window.")
    if given.causal is not None and given.causal is given.sliding_window_non_causal:
        raise checkpoint.error(
            f"config.json has sliding_window_non_causal = {given.causal} beside is_causal or causal."
        )
    if None not in (anchor, label) and anchor != label and layout.heads.get("projector_type") != "dspark":
        raise checkpoint.error(
            f"config.json has shift_label = {label}, but says {anchor} to whether the anchor's slot predicts."
        )
    if given.input_embedding_scale not in (None, layout.embedding_scale):
        raise checkpoint.error(
            f"config.json has input_embedding_scale = {given.input_embedding_scale}, but speculative_config says {layout.embedding_scale}."
        )
    target_parts.check_target(checkpoint, target, given.target_hidden_size, None)


def _mask_embedding(checkpoint: Checkpoint, plan: Plan, layout: DFlashLayout) -> torch.Tensor | None:
    """What a file has in place of the mask token's embedding [H], a tensor or a file beside the weights; None: nothing."""
    source, there = plan.sources.pop("mask_embedding", None), checkpoint.folder / MASK_EMBEDDING
    mask: Any = None if source is None else checkpoint.tensor(source)
    if there.exists():
        if mask is not None:
            raise checkpoint.error(f"has both a tensor {source} and a file {MASK_EMBEDDING}.")
        try:
            mask = torch.load(there, map_location="cpu", weights_only=True)
        except (pickle.UnpicklingError, RuntimeError, EOFError, ValueError, OSError) as error:
            raise checkpoint.error(f"its {MASK_EMBEDDING} is no plain file of a tensor: {error}") from error
        if isinstance(mask, dict):
            if mask.get("mask_token_id", layout.mask_token_id) != layout.mask_token_id:
                raise checkpoint.error(
                    f"its {MASK_EMBEDDING} is for token {mask['mask_token_id']}, config.json has mask_token_id {layout.mask_token_id}."
                )
            mask = mask.get("embedding", mask.get("mask_embedding"))
    elif mask is None:
        return None
    width = layout.layers.hidden_size
    if not isinstance(mask, torch.Tensor) or mask.numel() != width or not mask.is_floating_point():
        raise checkpoint.error(f"its mask embedding is no tensor of {width} numbers.")
    return mask.flatten()


def load_dflash(
    checkpoint: Checkpoint, layout: DFlashLayout, target: PackedModel, prepack_weights: bool | None
) -> LoadedHead:
    """Load the drafter of a checkpoint on the target's device and in its dtype. Raises CheckpointError: it is inconsistent or does not
    fit the target; nothing was loaded."""
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
    if layout.fused_by_layer and feature_size != config.hidden_size:
        raise checkpoint.error(f"has width {config.hidden_size}, but sums hidden states of width {feature_size}.")
    mask = _mask_embedding(checkpoint, plan, layout)
    table: Any = target_parts.target_embeddings(target)
    rows = (owns["embed_tokens"] or table.weight.shape)[0]
    if layout.mask_token_id >= rows:
        raise checkpoint.error(f"has mask_token_id {layout.mask_token_id}, but there are {rows} embeddings.")

    def run(drafter: DFlashDrafter) -> BlockHead:
        for layer in drafter.layers if layout.value_scale != 1.0 else ():
            attention: Any = layer.self_attn
            attention.o_proj.weight.mul_(layout.value_scale)
        if mask is not None:
            drafter.mask = mask.to(drafter.norm.weight) * (layout.embedding_scale or 1.0)
        return BlockHead(drafter, layout, prepack_weights)

    stated = layout.draft_vocab_size, config.vocab_size
    make = partial(DFlashDrafter, layout, feature_size, owns=owns)
    return loaded(checkpoint, plan, target, config, make, run, stated, layout.embedding_scale)
