"""The network of an MTP module: a layer of the target's own class between an embedding and the target's head."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import PretrainedConfig, PreTrainedModel

from ...model import architectures
from .layouts import MtpLayout


class PlainLayer(nn.Module):
    """A pre-norm layer with one attention and one dense MLP, for targets whose layers have several of each (LongCat-Flash)."""

    def __init__(self, parts: Any, config: PretrainedConfig, layer_idx: int):
        super().__init__()
        self.self_attn = type(parts.self_attn[0])(config, layer_idx)
        self.mlp = type(parts.mlps[0])(config)
        self.input_layernorm = copy.deepcopy(parts.input_layernorm[0]).to("meta")
        self.post_attention_layernorm = copy.deepcopy(parts.post_attention_layernorm[0]).to("meta")

    def forward(self, hidden_states: torch.Tensor, **attention) -> torch.Tensor:
        """Hidden states [1, T, H] to the same."""
        attended = self.self_attn(hidden_states=self.input_layernorm(hidden_states), **attention)[0]
        hidden_states = hidden_states + attended
        return hidden_states + self.mlp(self.post_attention_layernorm(hidden_states))


class Blocks(nn.Module):
    """A layer of several pre-norm blocks, one of them with attention, for targets whose layers are such blocks (Nemotron-H)."""

    def __init__(self, block_class: type[nn.Module], config: PretrainedConfig, index: int):
        super().__init__()
        self.blocks = nn.ModuleList(block_class(config, i) for i in range(len(config.layer_types)))
        for block in self.blocks:
            mixer: Any = block.mixer
            mixer.layer_idx = index

    def forward(self, hidden_states: torch.Tensor, **attention) -> torch.Tensor:
        """Hidden states [1, T, H] to the same."""
        for block in self.blocks:
            hidden_states = block(hidden_states, **attention)
        return hidden_states


class MtpModule(nn.Module):
    """x = layer(eh_proj([enorm(embedding); hnorm(hidden)])) and logits = lm_head(norm(x)).

    Its layer's KV is layer `index` of the drafter's cache.

    Args:
        shapes: [V, H] of the module's own embeddings and head; others are the target's (see `share`).
    """

    layer: Any

    def __init__(
        self, family: TargetFamily, layout: MtpLayout, index: int, sparse: bool, shapes: dict[str, tuple[int, int]]
    ):
        super().__init__()
        self.config = module_config(family.config, index, layout.attention, sparse)
        self.hidden_first, self.zero_first_embedding = layout.hidden_first, layout.zero_first_embedding
        width = self.config.hidden_size
        self.enorm, self.hnorm = family.new_norm(), family.new_norm()
        self.eh_proj = nn.Linear(2 * width, width, bias=False)
        self.layer = family.new_layer(self.config, index)
        self.norm = family.new_norm() if layout.has_norm else nn.Identity()
        if "embed_tokens" in shapes:
            self.embed_tokens = nn.Embedding(shapes["embed_tokens"][0], shapes["embed_tokens"][1])
        if "lm_head" in shapes:
            self.lm_head = nn.Linear(shapes["lm_head"][1], shapes["lm_head"][0], bias=False)
        self.shared: dict[str, nn.Module] = {}  # in a dict, so that the target's modules are not submodules
        self.rope_kind: dict[str, str] = {}

    def share(self, embed_tokens: nn.Module, lm_head: nn.Module) -> None:
        """Set the target's embeddings and head, for parts that the module does not have."""
        self.shared = {"embed_tokens": embed_tokens, "lm_head": lm_head} | dict(self.named_children())

    def borrowed(self) -> list[nn.Module]:
        """Modules that may be the target's own."""
        return [self.shared["embed_tokens"], self.shared["lm_head"]]

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Logits [n, V] from outputs of `forward` [n, H], after `norm`."""
        return self.shared["lm_head"](hidden)

    def add_rotary(self, rotary_class: type[nn.Module] | None) -> None:
        """Add the family's rotary embeddings, if it has any; checkpoints do not hold their frequencies."""
        self.rotary_emb = None if rotary_class is None else rotary_class(self.config)
        if rotary_class is None:
            return
        # three positions (time, height, width), which are equal in text
        self.has_sections = hasattr(self.rotary_emb, "mrope_section")
        # frequencies depend on the kind of attention
        if "layer_type" in inspect.signature(rotary_class.forward).parameters:
            self.rope_kind = {"layer_type": self.config.layer_types[self.layer.self_attn.layer_idx]}

    def forward(self, input_ids, features, position_ids, **attention) -> torch.Tensor:
        """x [1, T, H], before `norm`, from tokens [1, T] and the hidden states [1, T, H] before them."""
        embed = self.shared["embed_tokens"]
        embedded = embed(input_ids.to(embed.weight.device)).to(features)
        if self.zero_first_embedding:
            embedded = embedded.masked_fill((position_ids == 0)[..., None], 0)
        pair = (self.enorm(embedded), self.hnorm(features))
        hidden = self.eh_proj(torch.cat(pair[::-1] if self.hidden_first else pair, dim=-1))
        if self.rotary_emb is not None:
            positions = position_ids[None].expand(3, -1, -1) if self.has_sections else position_ids
            attention["position_embeddings"] = self.rotary_emb(hidden, positions, **self.rope_kind)
        out = self.layer(hidden, position_ids=position_ids, **attention)
        return out[0] if isinstance(out, tuple) else out


@dataclass
class TargetFamily:
    """The parts of a target that MTP modules are built from.

    Attributes:
        config: the model's; every module gets a copy for its one layer.
        last_layer, norm: the model's, to copy their types.
        float32: substrings of the names of tensors that stay in float32 (router corrections).
    """

    config: PretrainedConfig
    last_layer: nn.Module
    norm: nn.Module
    rotary: type[nn.Module] | None
    float32: tuple[str, ...]

    @classmethod
    def of(cls, model: PreTrainedModel, error: Callable[[str], Exception]) -> TargetFamily:
        """Take the parts from a model. If its decoder lacks the usual parts, `error` makes of a sentence what is raised."""
        decoder = architectures.decoder_of(model)
        layers, rotary = getattr(decoder, "layers", None), getattr(decoder, "rotary_emb", None)
        norm = getattr(decoder, "norm", getattr(decoder, "norm_f", None))
        is_blocks = layers is not None and hasattr(layers[-1], "mixer")
        if layers is None or norm is None or (rotary is None and not is_blocks):
            raise error(f"{type(model).__name__} has no layers, norm and rotary_emb to build MTP modules from.")
        config = model.config.get_text_config(decoder=True)
        kinds = getattr(config, "mtp_layers_block_type", None) or []
        if is_blocks and (kinds.count("full_attention") != 1 or set(kinds) - {"full_attention", "moe", "mlp"}):
            raise error(f"an MTP layer of the blocks {kinds} needs attention in one of them, and no state.")
        kept = [getattr(model, key, None) or () for key in ("_keep_in_fp32_modules", "_keep_in_fp32_modules_strict")]
        return cls(
            config=config,
            last_layer=layers[-1],
            norm=norm,
            rotary=None if rotary is None else type(rotary),
            float32=tuple(sorted({name for names in kept for name in names})),
        )

    def new_norm(self) -> nn.Module:
        """A norm like the model's last, on the meta device."""
        return copy.deepcopy(self.norm).to("meta")

    def new_layer(self, config: PretrainedConfig, index: int) -> nn.Module:
        """A layer of the model's type, whose KV is layer `index` of the cache."""
        if isinstance(getattr(self.last_layer, "self_attn", None), nn.ModuleList):
            return PlainLayer(self.last_layer, config, index)
        if hasattr(self.last_layer, "mixer"):
            return Blocks(type(self.last_layer), config, index)
        return type(self.last_layer)(config, layer_idx=index)


def module_config(config: PretrainedConfig, index: int, attention: str, sparse: bool) -> PretrainedConfig:
    """A copy of a model's configuration in which layer `index` has the attention and MLP of an MTP layer.

    Args:
        attention: for models with `layer_types` but without `mtp_layer_types`.
        sparse: whether the layer is a mixture of experts.
    """
    config, count = copy.deepcopy(config), index + 1
    if getattr(config, "mtp_layers_block_type", None) is not None:
        config.layer_types = config.mtp_layers_block_type
    elif getattr(config, "layer_types", None) is not None:
        kinds = getattr(config, "mtp_layer_types", None) or [attention]
        config.layer_types = [kinds[i % len(kinds)] for i in range(count)]
    if getattr(config, "indexer_types", None) is not None:  # no other layer's choice can be shared
        config.indexer_types = ["full"] * count
    if getattr(config, "mlp_layer_types", None) is not None:
        config.mlp_layer_types = ["sparse" if sparse else "dense"] * count
    if hasattr(config, "first_k_dense_replace"):
        config.first_k_dense_replace = 0 if sparse else count
    if hasattr(config, "mlp_only_layers"):
        config.mlp_only_layers, config.decoder_sparse_step = [] if sparse else list(range(count)), 1
    if hasattr(config, "moe_layer_start_index"):
        config.moe_layer_interval, config.moe_layer_end_index = 1, index
        config.moe_layer_start_index = 0 if sparse else count
    return config
