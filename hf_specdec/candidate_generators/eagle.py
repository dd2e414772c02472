"""EAGLE-1 and EAGLE-2 (Li et al. 2024), HASS: a head of one decoder layer continues the target's last hidden states; method `eagle`."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn
from transformers import PretrainedConfig
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from ..model.packed_head import PackedHead
from ..model.packed_model import PackedModel
from .base import DrafterContext
from .checkpoints.config import HeadConfig, proposed_length
from .checkpoints.files import Checkpoint, Plan, register_format, renaming
from .checkpoints.keys import FLAG, KIND, LAYERS, Key, Table, integer, one_of
from .checkpoints.layers import LayeredHead, LoadedHead, add_tables, decoder_layer, loaded, read_layer_config
from .checkpoints.target_parts import check_target, load_once
from .growing.features import FeatureGenerator
from .registry import register


class EagleHead(LayeredHead):
    """Decoder layers over fc([embedding; feature]), with the norms and biases that the checkpoint has.

    enorm, hnorm: on the embedding and on the feature (HASS's `add_para_norm`, speculators' `layernorms`).
    layers.0.input_layernorm: EAGLE's first layer has none.
    norm: after the last layer; its output goes to the language-model head and is fed back (absent in EAGLE's own heads).

    Args:
        plan: the checkpoint's tensors by these names.
    """

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
        add_tables(self, plan, width)

    def forward(self, input_ids, features, position_ids, **attention) -> torch.Tensor:
        """The feature after each token, [1, T, H]: a prediction of the target's final hidden state."""
        embedded = self.enorm(self.embeddings(input_ids, features))
        hidden = self.fc(torch.cat([embedded, self.hnorm(features)], dim=-1))
        position_embeddings = self.rotary(position_ids, hidden.dtype)
        for layer in self.layers:
            hidden = layer(hidden, position_ids=position_ids, position_embeddings=position_embeddings, **attention)
        return self.norm(hidden)


# Names as in EAGLE's own files; speculators v0.1 has others.
_canonical = renaming(
    (r"model\.", ""),
    (r"fusion_fc\.", "fc."),
    (r"transformer\.", "layers.0."),
    (r"embedding_layernorm\.", "enorm."),
    (r"pre_lm_head_layernorm\.", "norm."),
)
_TABLE = Table(
    {
        "speculators_model_type": Key(one_of("eagle"), places=KIND),
        "vocab_size": Key(integer(), places=("vocab_size", f"{LAYERS}.vocab_size")),
        "bias": Key(FLAG, tensor="fc.bias"),
        "fusion_bias": Key(FLAG, tensor="fc.bias"),
        "qkv_bias": Key(FLAG, tensor="layers.0.self_attn.q_proj.bias"),
        "add_para_norm": Key(FLAG, tensor="enorm.weight"),
        "layernorms": Key(FLAG, tensor="enorm.weight"),
    },
    section="eagle_config",
    only={"transformer_layer_architecture": "LlamaDecoderLayer"},
    nothing=frozenset({"attention_bias"}),
)


def is_eagle(checkpoint: Checkpoint) -> bool:
    """Whether it is an EAGLE-1 head: `fc` reads an embedding and a feature, and there is no `hidden_norm`."""
    plan = Plan(checkpoint, _canonical)
    if "fc.weight" not in plan or "layers.0.self_attn.q_proj.weight" not in plan or "hidden_norm.weight" in plan:
        return False
    rows, columns = plan.matrix("fc.weight")
    return columns == 2 * rows == 2 * plan.matrix("layers.0.self_attn.q_proj.weight")[1]


register_format("EAGLE-1/2, HASS (yuhuili/EAGLE-*: fc [H, 2H], layers.0; speculators: fusion_fc)", "eagle", is_eagle)


def load_eagle(checkpoint: Checkpoint, target: PackedModel, prepack_weights: bool | None) -> LoadedHead:
    """Load an EAGLE-1/2 head on the target's device, in its dtype."""
    plan = Plan(checkpoint, _canonical)
    settings = _TABLE.read(checkpoint, plan)
    config = read_layer_config(checkpoint, plan)
    has_embeddings = "embed_tokens.weight" in plan
    vocab_size = plan.matrix("embed_tokens.weight")[0] if has_embeddings else settings.vocab_size
    check_target(checkpoint, target, config.hidden_size, vocab_size)
    return loaded(
        checkpoint, plan, target, config, lambda size: EagleHead(config, plan),
        lambda head: PackedHead(head, config, config.num_hidden_layers, prepack_weights),
    )  # fmt: skip


@dataclass
class EagleConfig(HeadConfig):
    """EAGLE-1/2: a head of one decoder layer drafts from the target's final hidden states, in chains, static trees
    (EAGLE-1) or dynamic trees (EAGLE-2: `top_k`, `total_tokens`, `depth`)."""

    name = "eagle"
    requires = ("an EAGLE head trained for the target: 'model'",)


@register(EagleConfig)
class EagleGenerator(FeatureGenerator):
    """Drafts with an EAGLE-1/2 head. Logits come from the target's language-model head, or the checkpoint's own."""

    expands_alone = True

    def __init__(self, config: EagleConfig, target: PackedModel, context: DrafterContext | None = None):
        checkpoint = config.open_head()
        super().__init__(config.with_default_length(proposed_length(checkpoint)), target, context)
        self.use(load_once(config, target, lambda: load_eagle(checkpoint, target, config.prepack_weights)))
