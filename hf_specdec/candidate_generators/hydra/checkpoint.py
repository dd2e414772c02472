"""Hydra and Hydra++ checkpoints: how they are recognised and loaded."""

from __future__ import annotations

import re

from transformers import LlamaConfig

from ...model.packed_model import PackedModel
from ..checkpoints.files import Checkpoint, Plan, counted, register_format, share_equal
from ..checkpoints.keys import FLAG, Key, Table, one_of
from ..checkpoints.layers import RotaryPositions, embeddings_of, fit_biases
from ..checkpoints.target_parts import built, check_target, device_and_dtype
from .head import LLAMA_LIKE, HydraHeads, prefix_config

_BLOCK = re.compile(r"hydra_mlp\.(\d+)\.(\d+)\.(.+)$")
_LM_HEAD = re.compile(r"hydra_lm_head\.(\d+)\.(?:\d+\.)?(weight|bias)$")
_PREFIX = re.compile(r"prefix_embed+ing_layer\.(.+)$")  # the original code spells it with one d
_TABLE = Table(
    {"arch": Key(one_of("mlp", "prefix-mlp"), places=("hydra_head_arch",)), "grounded_heads": Key(FLAG)},
    only={"hidden_state_offset": 0},
    nothing=frozenset({"hydra_num_heads", "hydra_num_layers", "version", "model_type"}),  # tensors are counted
    has_layers=False,
)


def is_hydra(checkpoint: Checkpoint) -> bool:
    return checkpoint.any(r"hydra_mlp\.\d+\.\d+\.linear\.weight$")


register_format("Hydra, Hydra++ (ankner/hydra-*: hydra_mlp.{head}.{block}, hydra_lm_head.{head})", "hydra", is_hydra)


def _canonical(name: str, places: list[int]) -> str | None:
    """The module's name of a tensor; `places` are the blocks' indices in a head, ascending, where dropout modules count too."""
    if match := _BLOCK.match(name):
        return f"heads.{match[1]}.blocks.{places.index(int(match[2]))}.{match[3]}"
    if match := _LM_HEAD.match(name):
        return f"heads.{match[1]}.lm_head.{match[2]}"
    if match := _PREFIX.match(name):  # stored as a whole one-layer model; its embeddings are not used
        return None if match[1] == "embed_tokens.weight" else f"prefix.{match[1]}"
    return name


def load_hydra(checkpoint: Checkpoint, target: PackedModel) -> HydraHeads:
    """Load the heads of a checkpoint on the target's device, in its dtype. Raises CheckpointError: an architecture other than "mlp" and
    "prefix-mlp", tensors that do not fit, or heads for another target."""
    if checkpoint.config.get("speculators_model_type") == "hydra":
        raise checkpoint.error(
            "is of speculators type 'hydra', whose trainer shows a head the token that it predicts: it cannot draft."
        )
    has_prefix = checkpoint.any(_PREFIX.pattern)
    kind = "prefix-mlp" if has_prefix else "mlp"
    given = _TABLE.read(checkpoint)
    if given.arch not in (None, kind):
        raise checkpoint.error(f"has hydra_head_arch = {given.arch!r} and tensors of {kind!r}.")
    matches = [match for match in map(_BLOCK.match, checkpoint.names()) if match]
    places = sorted({int(match[2]) for match in matches})
    plan = Plan(checkpoint, lambda name: _canonical(name, places))
    first, lm_head = "heads.0.blocks.0.linear.weight", "heads.0.lm_head.weight"
    for canonical, name in ((first, f"hydra_mlp.0.{places[0]}.linear.weight"), (lm_head, "hydra_lm_head.0.weight")):
        if canonical not in plan:
            raise checkpoint.error(f"has no {name}.")
    (hidden_size, width), vocab_size = plan.matrix(first), plan.matrix(lm_head)[0]
    check_target(checkpoint, target, hidden_size, vocab_size)
    grounded = width > hidden_size
    if given.grounded_heads not in (None, grounded):
        raise checkpoint.error(
            f"config.json says grounded_heads = {not grounded}, but the first head reads width {width}."
        )
    prefix_config = _prefix_config(checkpoint, target, plan) if has_prefix else None
    num_heads = counted(checkpoint, (int(match[1]) for match in matches), "head")
    embeddings = embeddings_of(checkpoint, target, None, hidden_size)
    sizes = hidden_size, num_heads, len(places), vocab_size

    def make() -> HydraHeads:
        heads = HydraHeads(*sizes, grounded, embeddings, prefix_config)
        if heads.prefix is not None:
            fit_biases(heads.prefix, plan, "prefix.")
        return heads

    hydra = built(checkpoint, plan, target, make)
    share_equal(hydra)
    if hydra.prefix is not None and prefix_config is not None:
        hydra.prefix.rotary = RotaryPositions(checkpoint, prefix_config, device_and_dtype(target)[0])
    return hydra


def _prefix_config(checkpoint: Checkpoint, target: PackedModel, plan: Plan) -> LlamaConfig:
    """The configuration of the file's prefix layer."""
    gate, queries = (f"prefix.layers.0.{name}.weight" for name in ("mlp.gate_proj", "self_attn.q_proj"))
    model = target.config
    if model.model_type not in LLAMA_LIKE:
        raise checkpoint.error(
            f"has a prefix layer, which takes its settings from a target like Llama; this one's model_type is {model.model_type!r}."
        )
    for name in (gate, queries):
        if name not in plan:
            raise checkpoint.error(f"has no {name.replace('prefix.', 'prefix_embeding_layer.')}.")
    return prefix_config(model, plan.matrix(queries)[0] // model.num_attention_heads, plan.matrix(gate)[0])
