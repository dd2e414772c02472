"""EAGLE-3 and P-EAGLE checkpoints: three dialects of config.json, how they are recognised and loaded."""

from __future__ import annotations

from typing import Any

import torch

from ...core.output import Taps
from ...model.packed_head import PackedHead
from ...model.packed_model import PackedModel
from ..checkpoints import layers as head_layers
from ..checkpoints import target_parts
from ..checkpoints.files import Checkpoint, Plan, register_format, renaming
from ..checkpoints.keys import FLAG, IDS, LAYERS, NAMES, NUMBER, Key, Table, integer, keys, one_of
from ..checkpoints.target_parts import trained_for
from .head import Eagle3Head, Eagle3Options, is_joining

_SPECFORGE = {"LlamaForCausalLMEagle3", "DeepseekV3ForCausalLMEagle3"}
_IDS = "eagle_aux_hidden_state_layer_ids"
canonical_name = renaming({"midlayer.": "layers.0."})
_TABLE = Table(
    {
        "kind": Key(one_of("eagle3", "peagle"), places=(".speculators_model_type", "speculators_config.algorithm")),
        "architectures": Key(NAMES, default=[], places=(".architectures",)),
        "vocab_size": Key(integer(), places=(".vocab_size", f"{LAYERS}.vocab_size")),
        "draft_vocab_size": Key(integer(), places=("draft_vocab_size", "truncated_vocab_size")),
        **keys(integer(), "target_hidden_size"),
        # Ids at the top level (vLLM, speculators) are those of layers whose inputs are read. In `eagle_config` (SGLang, SpecForge,
        # ModelOpt) and in DeepSpec's files, outputs are read.
        "tapped": Key(
            IDS,
            places=(f".{_IDS}", f"eagle_config.{_IDS} + 1", "layer_ids", ".target_layer_ids + 1", ".aux_hidden_state_layer_ids"),
        ),
        "use_aux_hidden_state": Key(FLAG, default=True),
        **keys(FLAG, "norm_before_residual", "norm_output", "recycle_normed"),
        "logit_scale": Key(NUMBER, default=1.0),
        "mask_token": Key(integer(0), places=("mask_token_id", "pard_token", "ptd_token_id")),
        "fc_norm": Key(FLAG, tensor="fc_norm.0.weight"),
        "norm_before_fc": Key(FLAG, tensor="input_norm.weight"),
        "parallel_drafting": Key(FLAG, tensor="mask_hidden"),
        "attention_bias": Key(
            FLAG, places=(".attention_bias", f"{LAYERS}.attention_bias"), tensor="layers.0.self_attn.q_proj.bias"
        ),
    },
    section="eagle_config",
    # ModelOpt's, whose head is this one with these values
    only={
        "use_input_layernorm_in_first_layer": True, "use_last_layernorm": True, "use_mtp_layernorm": False,
        "next_layer_regular": True, "parallel_draft_step": 1, "has_lm_head": True,
    },
    nothing=frozenset({
        "num_aux_hidden_states", "num_eagle_features", "num_target_layers", "draft_num_hidden_layers", "embed_requires_grad",
        "parallel_draft_heads_num_layers",
    }),
)  # fmt: skip


def is_eagle3(checkpoint: Checkpoint) -> bool:
    """Whether it is an EAGLE-3 head, by its first layer's `hidden_norm`."""
    plan = Plan(checkpoint, canonical_name)
    return "layers.0.hidden_norm.weight" in plan and "layers.0.self_attn.o_proj.weight" in plan


register_format(
    "EAGLE-3, P-EAGLE (yuhuili/EAGLE3-*, SpecForge: midlayer.hidden_norm; speculators, DeepSpec: layers.0.hidden_norm)",
    "eagle3",
    is_eagle3,
)


def load_eagle3(
    checkpoint: Checkpoint, target: PackedModel, prepack_weights: bool | None, mask_token: int | None,
    recycle_normed: bool | None,
) -> head_layers.LoadedHead:  # fmt: skip
    """Load an EAGLE-3 or P-EAGLE head on the target's device, in its dtype.

    Args:
        mask_token: for a P-EAGLE head whose config.json has none.
        recycle_normed: whether the normed output is fed back; None: as the checkpoint says.

    Raises:
        CheckpointError: it is incomplete, contradicts itself, or is for another target.
    """
    plan = Plan(checkpoint, canonical_name)
    given = (_TABLE | head_layers.keys_of_layers(plan)).read(checkpoint, plan)
    options = _options(checkpoint, given, plan, target, mask_token, recycle_normed)
    config = head_layers.read_layer_config(checkpoint, plan)
    for i in range(config.num_hidden_layers):  # some files have a norm that no forward uses
        if not is_joining(plan, i, config.hidden_size):
            plan.sources.pop(f"layers.{i}.hidden_norm.weight", None)
    _check_target(checkpoint, given, plan, options, target)
    sizes = max(1, len(options.taps.layers)), target.config.hidden_size

    def run(head: Eagle3Head) -> PackedHead:
        # P-EAGLE's mask rows have no target states to fuse, so its generator fuses the features of the text.
        fuse = head.fuse if options.mask_token is None else None
        return PackedHead(head, config, config.num_hidden_layers, prepack_weights, fuse=fuse)

    stated = given.draft_vocab_size, given.vocab_size
    loaded = head_layers.loaded(
        checkpoint, plan, target, config, lambda size: Eagle3Head(config, plan, options, *sizes), run, stated
    )
    if options.mask_token is not None:
        head: Any = loaded.head.module
        rows = len(head.embeddings.table.weight)
        if options.mask_token >= rows:
            raise checkpoint.error(
                f"its mask token {options.mask_token} is not among the {rows} tokens that have embeddings."
            )
        with torch.no_grad():
            head.mask_features = head.fuse(head.mask_hidden.flatten())
    return loaded


def _options(
    checkpoint: Checkpoint, given: Any, plan: Plan, target: PackedModel, mask_token: int | None, recycle_normed: bool | None
) -> Eagle3Options:  # fmt: skip
    """The head's options from the keys of config.json. Missing ones have the defaults of the format's own trainers."""
    if given.norm_before_fc and given.fc_norm:
        raise checkpoint.error("config.json asks for both norm_before_fc and fc_norm, which exclude each other.")
    has_mask, num_layers = "mask_hidden" in plan, target.config.num_hidden_layers
    if given.kind == "peagle" and not has_mask:
        raise checkpoint.error("is a P-EAGLE head (speculators_model_type peagle) without mask_hidden.")
    if None not in (given.mask_token, mask_token) and given.mask_token != mask_token:
        raise checkpoint.error(
            f"its config.json has mask token {given.mask_token}, but speculative_config says mask_token_id {mask_token}."
        )
    mask_token = mask_token if given.mask_token is None else given.mask_token
    if has_mask and mask_token is None:
        raise checkpoint.error(
            "drafts in parallel (it has mask_hidden), but config.json names no mask token: give 'mask_token_id' in speculative_config."
        )
    layers = sorted(given.tapped or (2, num_layers // 2, num_layers - 3))
    if given.use_aux_hidden_state and (layers[0] < 0 or layers[-1] > num_layers):
        raise checkpoint.error(
            f"reads hidden states {layers} (0: the embeddings, i: after i layers), but the target has {num_layers} layers."
            + trained_for(checkpoint)
        )
    # In speculators' format, in SGLang and in vLLM, `norm_output` says what is fed back. In SpecForge's files, which `recycle_normed`
    # tells from those of `hf-specdec train`, it says whether there is a norm before the language-model head; they feed back the
    # state before it.
    is_specforge = bool(_SPECFORGE & set(given.architectures)) and given.kind is given.recycle_normed is None
    stated = given.recycle_normed if recycle_normed is None else recycle_normed
    normed = given.norm_before_residual
    return Eagle3Options(
        taps=Taps(layers=tuple(layers)) if given.use_aux_hidden_state else Taps(last_hidden=True),
        norm_before_residual=given.kind == "eagle3" if normed is None else normed,
        norm_output=stated if stated is not None else bool(given.norm_output) and not is_specforge,
        logit_scale=given.logit_scale,
        mask_token=mask_token if has_mask else None,
        window_stays=given.kind == "eagle3" and "sliding_attention" in (checkpoint.section(LAYERS).get("layer_types") or ()),
        norm_before_head=not is_specforge or given.norm_output is not False,
        softcap=getattr(given, "final_logit_softcapping", None),
    )  # fmt: skip


def _check_target(checkpoint: Checkpoint, given: Any, plan: Plan, options: Eagle3Options, target: PackedModel) -> None:
    """Raise CheckpointError if the head does not fit the target's width, number of layers or vocabulary (which d2t may map)."""
    sizes = [plan.matrix("embed_tokens.weight")[0]] if "embed_tokens.weight" in plan else []
    sizes += list(checkpoint.shape("t2d")[:1]) if "t2d" in checkpoint else []
    sizes += [] if given.vocab_size is None else [given.vocab_size]
    target_parts.check_target(checkpoint, target, given.target_hidden_size, None)
    for size in sizes:
        target_parts.check_vocabulary(checkpoint, target, min(size, target.vocab_size) if "d2t" in plan else size)
    width, count = target.config.hidden_size, len(options.taps.layers)
    if "fc.weight" in plan and count and (columns := plan.matrix("fc.weight")[1]) != width * count:
        raise checkpoint.error(
            f"fc reads {columns} numbers per token; the target's hidden states after {options.taps.layers} layers have "
            f"{count} × {width}." + trained_for(checkpoint)
        )
