"""DSpark in DeepSeek-V4's own checkpoints: stages of the target's kind of layer, whose residual is several streams, draft a block.

Formulas: DeepSeek-V4-Flash-DSpark (inference/model.py; DeepSeek-AI, 2026).
"""

from __future__ import annotations

import copy
import re
import sys
from typing import Any

import torch
from torch import nn

from ...core.names import CACHE
from ...model import architectures
from ...model.packed_model import PackedModel
from ..checkpoints import target_parts
from ..checkpoints.files import Checkpoint, Plan, counted, renaming
from ..checkpoints.keys import IDS, integer
from ..checkpoints.layers import Embeddings, LoadedHead, embeddings_of
from ..mtp.checkpoint import TargetTensors
from .head import BlockHead, ConfidenceHead, DFlashLayout, MarkovHead

_KEYS = {
    "dspark_block_size": integer(), "dspark_noise_token_id": integer(0), "dspark_target_layer_ids": IDS, "dspark_markov_rank": integer(),
}  # fmt: skip
_TENSOR = r"mtp\.(?P<i>\d+)\."
_canonical = renaming(
    (rf"{_TENSOR}(?P<rest>(main_(proj|norm)|norm|markov_head|confidence_head)\..*)", r"\g<rest>"),
    (rf"{_TENSOR}hc_head_(?P<rest>fn|base|scale)$", r"hc_head.hc_\g<rest>"),
    (rf"{_TENSOR}(?P<rest>.*)", r"layers.\g<i>.\g<rest>"),
    (r"(.*)\.hc_(attn|ffn)_(.*)", r"\1.\2_hc.\3"),
    (r"(.*)\.attn_norm\.(.*)", r"\1.input_layernorm.\2"),
    (r"(.*)\.ffn_norm\.(.*)", r"\1.post_attention_layernorm.\2"),
    (r"(.*)\.attn\.(.*)", r"\1.self_attn.\2"),
    (r"(.*)\.ffn\.(.*)", r"\1.mlp.\2"),
    (r"(.*)\.attn_sink$", r"\1.sinks"),
    (r"(.*)\.q_norm\.(.*)", r"\1.q_a_norm.\2"),
    (r"(.*\.self_attn)\.w([qo])_([ab])\.(.*)", r"\1.\2_\3_proj.\4"),
    (r"(.*\.self_attn)\.wkv\.(.*)", r"\1.kv_proj.\2"),
    (r"(.*)\.gate\.bias$", r"\1.gate.e_score_correction_bias"),
    (r"(.*\.shared_experts)\.w1\.(.*)", r"\1.gate_proj.\2"),
    (r"(.*\.shared_experts)\.w2\.(.*)", r"\1.down_proj.\2"),
    (r"(.*\.shared_experts)\.w3\.(.*)", r"\1.up_proj.\2"),
)


def is_streams(checkpoint: Checkpoint) -> bool:
    """True for a checkpoint that holds DeepSeek-V4's DSpark, beside the target or alone."""
    is_own = "speculators_model_type" not in checkpoint.config
    return is_own and any(re.match(rf"{_TENSOR}main_proj\.", name) for name in checkpoint.files)


class StreamDrafter(nn.Module):
    """The stages, and what comes before and after them, under transformers' names.

    Args:
        model: the target, whose classes are used.
        layers: configuration of the stages' layers.
        num_taps, rank: of the target's tapped layers, and of the Markov head.
    """

    embeddings: Embeddings
    embed_tokens = mask = None
    is_convolved = False

    def __init__(self, model: Any, layers: Any, num_taps: int, rank: int):
        super().__init__()
        decoder: Any = architectures.decoder_of(model)
        width, vocab = layers.hidden_size, layers.vocab_size
        kind = type(decoder.layers[-1])
        self.main_proj = nn.Linear(num_taps * width, width, bias=False)
        self.main_norm, self.norm = (type(decoder.norm)(width, eps=layers.rms_norm_eps) for _ in range(2))
        self.layers = nn.ModuleList(kind(layers, i) for i in range(layers.num_hidden_layers))
        self.hc_head = type(decoder.hc_head)(layers)
        self.markov_head = MarkovHead(vocab, vocab, rank, width, "vanilla")
        self.confidence_head = ConfidenceHead(width + rank, bias=False)
        self.num_streams, self.rotate = layers.hc_mult, sys.modules[kind.__module__].apply_rotary_pos_emb
        for layer in self.layers:
            vars(layer.self_attn)["sliding_window"] = None  # windows are in the masks of `BlockHead`

    @property
    def sequential(self) -> MarkovHead:
        """See DFlashDrafter."""
        return self.markov_head

    def before_head(self, hidden: torch.Tensor) -> torch.Tensor:
        """What the language-model head reads, from the block's hidden states, which the confidence head reads without a norm."""
        return self.norm(hidden)

    def confidence_features(self, hidden: torch.Tensor, previous: torch.Tensor) -> torch.Tensor:
        """See DFlashDrafter."""
        return torch.cat([hidden, self.markov_head.summary(previous)], dim=-1)


class StreamHead(BlockHead):
    """Runs the stages. A stage's keys are its values, too, in one head for all queries; those of the context come from its features."""

    module: Any

    @torch.no_grad()
    def context(self, features: torch.Tensor) -> torch.Tensor:
        return self.module.main_norm(self.module.main_proj(features))

    def _angles(self, position_ids: torch.Tensor, like: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.module.rotary(like, position_ids, layer_type="main")

    def write_context(self, batch: Any, features: torch.Tensor) -> torch.Tensor:
        angles = self._angles(batch.position_ids, features)
        with batch.cache.running(batch):
            for index, layer in enumerate(self.module.layers):
                attention: Any = layer.self_attn
                keys = self.module.rotate(attention.kv_norm(attention.kv_proj(features))[None, None], *angles)
                batch.cache.update(keys, keys, index)
        return features

    def forward_batch(self, batch: Any, *others: Any, features: torch.Tensor) -> torch.Tensor:
        hidden = features[None, :, None].repeat(1, 1, self.module.num_streams, 1)
        angles = {"main": self._angles(batch.position_ids, features)}
        with batch.cache.running(batch):
            for layer in self.module.layers:
                hidden = layer(
                    hidden, position_ids=batch.position_ids, position_embeddings=angles, attention_mask=None, specdec=batch,
                    **{CACHE: batch.cache},
                )  # fmt: skip
        return self.module.hc_head(hidden)[0]


def read_streams(checkpoint: Checkpoint, target: PackedModel) -> DFlashLayout:
    """The settings of a checkpoint, whose config.json is otherwise the target's. Raises CheckpointError: a key is missing, is not known
    or does not fit the target."""
    aliases = {key: value for key, value in checkpoint.config.items() if key.startswith("dspark_")}
    for key in [*_KEYS, *aliases]:
        if key not in _KEYS:
            raise checkpoint.error(
                f"config.json has {key} = {aliases[key]!r}, which DeepSeek-V4's DSpark does not have."
            )
        if not _KEYS[key].fits(aliases.get(key)):
            raise checkpoint.error(f"needs {_KEYS[key].name} as {key} in its config.json, not {aliases.get(key)!r}.")
    if target.config.model_type != "deepseek_v4":
        raise checkpoint.error(f"drafts for DeepSeek-V4; the target is of model_type {target.config.model_type!r}.")
    config: Any = copy.deepcopy(target.config)
    stages = (int(match["i"]) for match in map(re.compile(_TENSOR).match, checkpoint.files) if match)
    config.num_hidden_layers = counted(checkpoint, stages, "stage")
    config.layer_types = ["sliding_attention"] * config.num_hidden_layers
    config.mlp_layer_types = ["moe"] * config.num_hidden_layers
    tapped = tuple(index + 1 for index in aliases["dspark_target_layer_ids"])
    if not tapped or min(tapped) < 1 or max(tapped) > target.config.num_hidden_layers:
        raise checkpoint.error(
            f"reads layers {aliases['dspark_target_layer_ids']} of its target, which has {target.config.num_hidden_layers}."
        )
    return DFlashLayout(
        layers=config, block_size=aliases["dspark_block_size"], mask_token_id=aliases["dspark_noise_token_id"], tapped=tapped,
        from_anchor=True, causal=(False, False), like_speculators=True, heads={"markov_rank": aliases["dspark_markov_rank"]},
    )  # fmt: skip


def load_streams(
    source: Checkpoint, layout: DFlashLayout, target: PackedModel, prepack_weights: bool | None
) -> LoadedHead:
    """Load the stages on the target's device and in its dtype. Raises CheckpointError: they do not fit the target."""
    device, dtype = target_parts.device_and_dtype(target)
    model, config = target.model, layout.layers
    source.wanted = lambda name: name.startswith("mtp.")  # what else is there is the target's
    checkpoint = TargetTensors(source, dtype, {"gate_up_proj", "down_proj"}, "holds no tensors of DSpark.")
    plan, rank = Plan(checkpoint, _canonical), layout.heads["markov_rank"]
    module: Any = target_parts.built(
        checkpoint, plan, target, lambda: StreamDrafter(model, config, len(layout.tapped), rank),
        tuple(model._keep_in_fp32_modules_strict or ()),
    )  # fmt: skip
    decoder: Any = architectures.decoder_of(model)
    with torch.device(device):
        module.rotary = type(decoder.rotary_emb)(config)
    module.embeddings = embeddings_of(checkpoint, target, None, config.hidden_size)
    vocabulary = target_parts.DraftVocabulary(target.vocab_size)
    return LoadedHead(StreamHead(module, layout, prepack_weights), target_parts.target_head(target), vocabulary)
