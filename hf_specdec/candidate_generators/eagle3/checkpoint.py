"""EAGLE-3 and P-EAGLE checkpoints: three dialects of config.json, how they are recognised and loaded."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ...core.output import PackedOutput, Taps
from ...model.packed_head import PackedHead
from ...model.packed_model import PackedModel
from ..checkpoints import layers as head_layers
from ..checkpoints import target_parts
from ..checkpoints.files import Checkpoint, Plan, register_format
from ..checkpoints.target_parts import DraftVocabulary, trained_for
from .head import Eagle3Head, Eagle3Options

logger = logging.getLogger(__name__)

_LAYERS = "transformer_layer_config"
_LAYER_IDS = "eagle_aux_hidden_state_layer_ids"
_MASK_TOKENS = ("mask_token_id", "pard_token", "ptd_token_id")


def canonical_name(name: str) -> str | None:
    """The module's name of a tensor: `layers.0` for `midlayer`, no prefix `model.`; None for tensors that drafting does not need.

    `t2d` is for training. Some files have a `hidden_norm` in later layers, which no forward uses.
    """
    name = name.removeprefix("model.")
    if name.startswith("midlayer."):
        return "layers.0." + name.removeprefix("midlayer.")
    unused = name == "t2d" or (name.endswith(".hidden_norm.weight") and not name.startswith("layers.0."))
    return None if unused else name


def is_eagle3(checkpoint: Checkpoint) -> bool:
    plan = Plan(checkpoint, canonical_name)
    return "layers.0.hidden_norm.weight" in plan and "layers.0.self_attn.o_proj.weight" in plan


register_format(
    "EAGLE-3, P-EAGLE (yuhuili/EAGLE3-*, SpecForge: midlayer.hidden_norm; speculators: layers.0.hidden_norm)",
    "eagle3",
    is_eagle3,
)


def read_options(
    checkpoint: Checkpoint,
    plan: Plan,
    target: PackedModel,
    mask_token: int | None = None,
    recycle_normed: bool | None = None,
) -> Eagle3Options:
    """The head's options. Missing keys have the defaults of the format's own trainers.

    Args:
        mask_token: for a P-EAGLE head whose config.json has none.
        recycle_normed: whether the normed output is fed back; None: as the checkpoint says (see `_recycles_normed`).

    Raises:
        CheckpointError: a bad value, or one that contradicts the tensors.
    """
    config = checkpoint.config
    kind = config.get("speculators_model_type")
    if _option(checkpoint, "norm_before_fc", False) and _option(checkpoint, "fc_norm", False):
        raise checkpoint.error("config.json asks for both norm_before_fc and fc_norm, which exclude each other.")
    if kind == "peagle" and "mask_hidden" not in plan:
        raise checkpoint.error("is a P-EAGLE head (speculators_model_type peagle) without mask_hidden.")
    head_layers.check_flags(
        checkpoint,
        plan,
        {"fc_norm": "fc_norm.0.weight", "norm_before_fc": "input_norm.weight", "parallel_drafting": "mask_hidden",
         "attention_bias": "layers.0.self_attn.q_proj.bias"},
    )  # fmt: skip
    if _option(checkpoint, "use_aux_hidden_state", True):
        taps = Taps(layers=_tapped_layers(checkpoint, target.config.num_hidden_layers))
    else:
        taps = Taps(last_hidden=True)
    return Eagle3Options(
        taps=taps,
        norm_before_residual=bool(_option(checkpoint, "norm_before_residual", kind == "eagle3")),
        norm_output=_recycles_normed(checkpoint) if recycle_normed is None else recycle_normed,
        logit_scale=checkpoint.number("logit_scale", 1.0),
        mask_token=_mask_token(checkpoint, mask_token) if "mask_hidden" in plan else None,
        window_stays=kind == "eagle3" and "sliding_attention" in (checkpoint.section(_LAYERS).get("layer_types") or ()),
    )


def _recycles_normed(checkpoint: Checkpoint) -> bool:
    """Whether a draft step reads the normed output of the one before.

    In speculators' format, in SGLang and in vLLM `norm_output` means this. SpecForge also writes it, into the original format, but
    with another meaning (a norm before the language-model head), and trains with the state before the norm. Files with its
    class name and without `recycle_normed`, which `hf-specdec train` writes, are taken to be SpecForge's.
    """
    config = checkpoint.config
    stated = _option(checkpoint, "recycle_normed", None)
    if stated is not None:
        return bool(stated)
    is_specforge = (
        "LlamaForCausalLMEagle3" in (config.get("architectures") or ()) and "speculators_model_type" not in config
    )
    return bool(_option(checkpoint, "norm_output", False)) and not is_specforge


def _option(checkpoint: Checkpoint, key: str, default: Any) -> Any:
    """A key from config.json or its `eagle_config`."""
    for place in (checkpoint.config, checkpoint.section("eagle_config")):
        if place.get(key) is not None:
            return place[key]
    return default


def _tapped_layers(checkpoint: Checkpoint, num_layers: int) -> tuple[int, ...]:
    """Indices of the hidden states to read: i is the input of the target's layer i, which is the output of layer i - 1.

    Ids at the top level of config.json (vLLM, speculators) are such indices. Ids in `eagle_config` (SGLang, SpecForge,
    ModelOpt) name layers whose outputs are read, so they are one less.
    """
    inputs = checkpoint.config.get(_LAYER_IDS)
    outputs = checkpoint.section("eagle_config").get(_LAYER_IDS)
    for ids in (inputs, outputs):
        if ids is not None and not (isinstance(ids, list) and all(type(i) is int for i in ids)):
            raise checkpoint.error(f"{_LAYER_IDS} is {ids!r}, not a list of layers.")
    if inputs:
        layers = sorted(inputs)
        if outputs and layers != sorted(i + 1 for i in outputs):
            logger.warning(
                "%s: %s is %s at the top level of config.json (inputs of layers) and %s in eagle_config (outputs), which name "
                "other layers; the first is used.", checkpoint.name, _LAYER_IDS, inputs, outputs,
            )  # fmt: skip
    elif outputs:
        layers = sorted(i + 1 for i in outputs)
    else:
        layers = sorted((2, num_layers // 2, num_layers - 3))
    if layers[0] < 0 or layers[-1] > num_layers:
        raise checkpoint.error(
            f"reads hidden states {layers} (0: the embeddings, i: after i layers), but the target has {num_layers} layers."
            + trained_for(checkpoint)
        )
    return tuple(layers)


def _mask_token(checkpoint: Checkpoint, given: int | None) -> int:
    for key in _MASK_TOKENS:
        token = _option(checkpoint, key, None)
        if token is not None:
            if type(token) is not int or token < 0:
                raise checkpoint.error(f"{key} is {token!r}, not a token id.")
            if given not in (None, token):
                raise checkpoint.error(
                    f"{key} is {token} in its config.json, but speculative_config says mask_token_id {given}."
                )
            return token
    if given is None:
        raise checkpoint.error(
            "drafts in parallel (it has mask_hidden), but config.json names no mask token: give 'mask_token_id' in speculative_config."
        )
    return given


@dataclass(eq=False)
class LoadedEagle3:
    """A loaded head.

    Attributes:
        lm_head: the head's own, or the target's.
        mask_features: [H], in place of features in P-EAGLE's mask rows; None for EAGLE-3.
    """

    head: PackedHead
    module: Eagle3Head
    options: Eagle3Options
    lm_head: nn.Module
    vocabulary: DraftVocabulary
    mask_features: torch.Tensor | None

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Logits [n, Vd] from the module's outputs [n, H]."""
        logits = self.lm_head(hidden if self.module.norm_output else self.module.norm(hidden))
        return logits if self.options.logit_scale == 1.0 else logits * self.options.logit_scale

    def joined_states(self, output: PackedOutput, index: torch.Tensor) -> torch.Tensor:
        """The tapped hidden states [n, L * Ht], concatenated, of the packed tokens `index` [n] in a target forward."""
        layers = [output.layers[i] for i in self.options.taps.layers]
        if not layers:
            assert output.last_hidden is not None
            layers = [output.last_hidden]
        return target_parts.gather_features(layers, index, self.head.device, self.head.dtype)


def load_eagle3(
    checkpoint: Checkpoint,
    target: PackedModel,
    prepack_weights: bool | None = None,
    mask_token: int | None = None,
    recycle_normed: bool | None = None,
) -> LoadedEagle3:
    """Load an EAGLE-3 or P-EAGLE head on the target's device, in its dtype.

    Args:
        mask_token, recycle_normed: see `read_options`.

    Raises:
        CheckpointError: it is incomplete, contradicts itself, or is for another target.
    """
    plan = Plan(checkpoint, canonical_name)
    source = plan.sources.pop("d2t", None)
    offsets = None if source is None else checkpoint.tensor(source)
    options = read_options(checkpoint, plan, target, mask_token, recycle_normed)
    config = head_layers.read_layer_config(checkpoint, plan)
    _check_target(checkpoint, plan, options, target, is_mapped=offsets is not None)
    vocabulary, lm_head = _vocabulary(checkpoint, plan, target, offsets, config.hidden_size)
    device, dtype = target_parts.device_and_dtype(target)
    sizes = max(1, len(options.taps.layers)), target.config.hidden_size
    module = target_parts.built(checkpoint, plan, target, lambda: Eagle3Head(config, plan, options, *sizes))
    module.rotary = head_layers.RotaryPositions(checkpoint, config, device)
    table = module.embed_tokens if "embed_tokens.weight" in plan else None
    module.embeddings = head_layers.embeddings_of(checkpoint, target, table, config.hidden_size)
    # P-EAGLE's mask rows have no target states to fuse, so its generator fuses the features of the text.
    fuse = module.fuse if options.mask_token is None else None
    head = PackedHead(
        module, config, config.num_hidden_layers, False, prepack_weights, device=device, dtype=dtype, fuse=fuse
    )
    return LoadedEagle3(
        head, module, options, lm_head or module.lm_head, vocabulary, _mask_features(checkpoint, module, options)
    )


def _check_target(
    checkpoint: Checkpoint, plan: Plan, options: Eagle3Options, target: PackedModel, is_mapped: bool
) -> None:
    """Raise CheckpointError if the head does not fit the target's width, number of layers or vocabulary (which d2t may map)."""
    given = checkpoint.config.get("target_hidden_size")
    sizes = [plan.matrix("embed_tokens.weight")[0]] if "embed_tokens.weight" in plan else []
    sizes += list(checkpoint.shape("t2d")[:1]) if "t2d" in checkpoint else []
    target_parts.check_target(checkpoint, target, given, None)
    for size in sizes:
        target_parts.check_vocabulary(checkpoint, target, min(size, target.vocab_size) if is_mapped else size)
    if "fc.weight" not in plan or not options.taps.layers:
        return
    width, columns = target.config.hidden_size, plan.matrix("fc.weight")[1]
    if columns != width * len(options.taps.layers):
        raise checkpoint.error(
            f"fc reads {columns} numbers per token; the target's hidden states after {options.taps.layers} layers have "
            f"{len(options.taps.layers)} × {width}." + trained_for(checkpoint)
        )


def _vocabulary(
    checkpoint: Checkpoint, plan: Plan, target: PackedModel, offsets: torch.Tensor | None, width: int
) -> tuple[DraftVocabulary, nn.Module | None]:
    """The draft vocabulary, and the target's language-model head if the checkpoint has none."""
    if "lm_head.weight" in plan:
        size = plan.matrix("lm_head.weight")[0]
        if offsets is None and size == checkpoint.config.get("draft_vocab_size") != head_layers.vocab_size_of(
            checkpoint
        ):
            raise checkpoint.error(f"has logits for a draft vocabulary of {size} tokens, but no table d2t.")
        return target_parts.draft_vocabulary(checkpoint, target, offsets, size), None
    if offsets is not None:
        raise checkpoint.error("has a draft vocabulary (d2t), but no lm_head.weight for it.")
    if width != target.config.hidden_size:
        raise checkpoint.error(
            f"has no lm_head.weight, and the target's reads hidden states of width {target.config.hidden_size}, not {width}."
        )
    return DraftVocabulary(target.vocab_size), target_parts.target_head(target)


def _mask_features(checkpoint: Checkpoint, module: Eagle3Head, options: Eagle3Options) -> torch.Tensor | None:
    """P-EAGLE's fused `mask_hidden` [H]; None for EAGLE-3."""
    if options.mask_token is None:
        return None
    rows, _ = head_layers.embedding_shape(module.embeddings.table)
    if options.mask_token >= rows:
        raise checkpoint.error(
            f"its mask token {options.mask_token} is not among the {rows} tokens that have embeddings."
        )
    with torch.no_grad():
        return module.fuse(module.mask_hidden.flatten())
