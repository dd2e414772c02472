"""EAGLE-1/2 and HASS checkpoints: how they are recognised and loaded."""

from __future__ import annotations

from ...model.packed_head import PackedHead
from ...model.packed_model import PackedModel
from ..checkpoints import layers, target_parts
from ..checkpoints.files import Checkpoint, Plan, register_format, renaming
from ..checkpoints.keys import FLAG, LAYERS, Key, Table, integer, one_of
from .head import EagleHead

# Names as in EAGLE's own files; speculators v0.1 has others.
_canonical = renaming(
    {
        "fusion_fc.": "fc.",
        "transformer.": "layers.0.",
        "embedding_layernorm.": "enorm.",
        "pre_lm_head_layernorm.": "norm.",
    }
)
_TABLE = Table(
    {
        "speculators_model_type": Key(
            one_of("eagle"), places=(".speculators_model_type", "speculators_config.algorithm")
        ),
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
    plan = Plan(checkpoint, _canonical)
    if "fc.weight" not in plan or "layers.0.self_attn.q_proj.weight" not in plan or "hidden_norm.weight" in plan:
        return False
    rows, columns = plan.matrix("fc.weight")
    return columns == 2 * rows == 2 * plan.matrix("layers.0.self_attn.q_proj.weight")[1]


register_format("EAGLE-1/2, HASS (yuhuili/EAGLE-*: fc [H, 2H], layers.0; speculators: fusion_fc)", "eagle", is_eagle)


def load_eagle(checkpoint: Checkpoint, target: PackedModel, prepack_weights: bool | None) -> layers.LoadedHead:
    """Load an EAGLE-1/2 head on the target's device, in its dtype."""
    plan = Plan(checkpoint, _canonical)
    settings = _TABLE.read(checkpoint, plan)
    config = layers.read_layer_config(checkpoint, plan)
    has_embeddings = "embed_tokens.weight" in plan
    vocab_size = plan.matrix("embed_tokens.weight")[0] if has_embeddings else settings.vocab_size
    target_parts.check_target(checkpoint, target, config.hidden_size, vocab_size)
    return layers.loaded(
        checkpoint, plan, target, config, lambda size: EagleHead(config, plan),
        lambda head: PackedHead(head, config, config.num_hidden_layers, prepack_weights),
    )  # fmt: skip
