"""EAGLE-1 and EAGLE-2 (Li et al. 2024): one decoder layer continues the target's last hidden states; also HASS heads."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn
from transformers import PretrainedConfig
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from ..model.packed_head import PackedHead
from ..model.packed_model import PackedModel
from .base import DrafterContext
from .checkpoints.config import ProposedLengthConfig, proposed_length
from .checkpoints.files import Checkpoint, Plan, load_module, register_format
from .checkpoints.layers import (
    Embeddings,
    RotaryPositions,
    check_flags,
    decoder_layer,
    fit_biases,
    own_embeddings,
    read_layer_config,
    shared_embeddings,
    vocab_size_of,
)
from .checkpoints.target_parts import DraftVocabulary, check_target, draft_vocabulary, load_once, place_of, target_head
from .growing.features import FeatureGenerator
from .registry import register


@dataclass
class EagleConfig(ProposedLengthConfig):
    """EAGLE-1/2: a head of one decoder layer drafts from the target's final hidden states, in chains, static trees
    (EAGLE-1) or dynamic trees (EAGLE-2: `top_k`, `total_tokens`, `depth`)."""

    name = "eagle"
    requires = ("an EAGLE head trained for the target: 'model'",)


class EagleHead(nn.Module):
    """Decoder layers over fc([embedding; feature]). Which norms and biases there are, the file decides.

    enorm, hnorm: on the embedding and on the feature (HASS's `add_para_norm`, speculators' `layernorms`).
    layers.0.input_layernorm: EAGLE's first layer has none.
    norm: after the last layer; its output is read by the language-model head and fed back (EAGLE itself has none).

    Args:
        plan: the file's tensors by these names.
    """

    embeddings: Embeddings
    rotary: RotaryPositions

    def __init__(self, config: PretrainedConfig, plan: Plan):
        super().__init__()
        width = config.hidden_size

        def norm(name: str) -> nn.Module:
            return LlamaRMSNorm(width, config.rms_norm_eps) if f"{name}.weight" in plan else nn.Identity()

        self.enorm, self.hnorm, self.norm = norm("enorm"), norm("hnorm"), norm("norm")
        self.fc = nn.Linear(2 * width, width)
        self.layers = nn.ModuleList(decoder_layer(config, i) for i in range(config.num_hidden_layers))
        if "layers.0.input_layernorm.weight" not in plan:
            self.layers[0].input_layernorm = nn.Identity()
        if "embed_tokens.weight" in plan:
            self.embed_tokens = nn.Embedding(plan.shape("embed_tokens.weight")[0], width)
        if "lm_head.weight" in plan:
            self.lm_head = nn.Linear(width, plan.shape("lm_head.weight")[0])
        fit_biases(self, plan)

    def forward(self, input_ids, features, position_ids, **attention) -> torch.Tensor:
        """The feature after each token, [1, T, H]: what the target's final hidden state there is expected to be."""
        embedded = self.enorm(self.embeddings(input_ids, features))
        hidden = self.fc(torch.cat([embedded, self.hnorm(features)], dim=-1))
        position_embeddings = self.rotary(position_ids, hidden.dtype)
        for layer in self.layers:
            hidden = layer(hidden, position_ids=position_ids, position_embeddings=position_embeddings, **attention)
        return self.norm(hidden)


_RENAMED = {
    "fusion_fc.": "fc.",
    "transformer.": "layers.0.",
    "embedding_layernorm.": "enorm.",
    "pre_lm_head_layernorm.": "norm.",
}


def _canonical(name: str) -> str:
    """Names of EAGLE's own files, from those of speculators v0.1; some files have `model.` before all."""
    name = name.removeprefix("model.")
    for old, canonical in _RENAMED.items():
        if name.startswith(old):
            return canonical + name[len(old) :]
    return name


def is_eagle(checkpoint: Checkpoint) -> bool:
    """Whether a checkpoint is an EAGLE-1/2 head."""
    plan = Plan(checkpoint, _canonical)
    if "fc.weight" not in plan or "layers.0.self_attn.q_proj.weight" not in plan or "hidden_norm.weight" in plan:
        return False
    rows, columns = plan.matrix("fc.weight")
    return columns == 2 * rows == 2 * plan.matrix("layers.0.self_attn.q_proj.weight")[1]


register_format("EAGLE-1/2, HASS (yuhuili/EAGLE-*: fc [H, 2H], layers.0; speculators: fusion_fc)", "eagle", is_eagle)


@dataclass(eq=False)
class LoadedEagle:
    """A head that is ready to run, its language-model head, and what that one's logits mean."""

    head: PackedHead
    lm_head: nn.Module
    vocabulary: DraftVocabulary


def load_eagle(checkpoint: Checkpoint, target: PackedModel, prepack_weights: bool | None = None) -> LoadedEagle:
    """An EAGLE-1 head on the target's device, in its dtype."""
    plan = Plan(checkpoint, _canonical)
    check_flags(
        checkpoint,
        plan,
        {"bias": "fc.bias", "fusion_bias": "fc.bias", "qkv_bias": "layers.0.self_attn.q_proj.bias",
         "add_para_norm": "enorm.weight", "layernorms": "enorm.weight"},
    )  # fmt: skip
    config = read_layer_config(checkpoint, plan)
    has_embeddings, has_lm_head = "embed_tokens.weight" in plan, "lm_head.weight" in plan
    vocab_size = plan.shape("embed_tokens.weight")[0] if has_embeddings else vocab_size_of(checkpoint)
    check_target(checkpoint, target, config.hidden_size, vocab_size)
    vocabulary = DraftVocabulary(target.vocab_size)
    if has_lm_head:
        vocabulary = draft_vocabulary(checkpoint, target, None, plan.shape("lm_head.weight")[0])
    device, dtype = place_of(target)
    with torch.device("meta"):
        module = EagleHead(config, plan)
    load_module(module, plan, device, dtype)
    module.rotary = RotaryPositions(checkpoint, config, device)
    if has_embeddings:
        module.embeddings = own_embeddings(module.embed_tokens, target)
    else:
        module.embeddings = shared_embeddings(checkpoint, target, config.hidden_size)
    head = PackedHead(
        module, config, config.num_hidden_layers, prepack_weights=prepack_weights, device=device, dtype=dtype
    )
    return LoadedEagle(head, module.lm_head if has_lm_head else target_head(target), vocabulary)


@register(EagleConfig)
class EagleGenerator(FeatureGenerator):
    """Drafts with an EAGLE-1 head; logits are the target's own head (or the file's) over the predicted features."""

    config: EagleConfig

    def __init__(self, config: EagleConfig, target: PackedModel, context: DrafterContext | None = None):
        checkpoint = config.open_head(is_eagle)
        self.default_length = proposed_length(checkpoint)
        super().__init__(self.settled(config), target, context)
        self.loaded = load_once(config, target, lambda: load_eagle(checkpoint, target, config.prepack_weights))
        self.head = self.captured(self.loaded.head)
        self.lm_head, self.vocabulary = self.loaded.lm_head, self.loaded.vocabulary
        self.cache = self.new_cache(1, config.block_size)

    def settled(self, config: EagleConfig) -> EagleConfig:
        """With the checkpoint's draft length, where the user gave none."""
        return config.with_default_length(self.default_length)
