"""Decoder layers of draft heads, built from config.json and the tensors in the file."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import DeepseekV3Config, Gemma4TextConfig, LlamaConfig, PretrainedConfig, Qwen3Config
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3DecoderLayer
from transformers.models.gemma4.modeling_gemma4 import Gemma4TextDecoderLayer
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRotaryEmbedding
from transformers.models.qwen3.modeling_qwen3 import Qwen3DecoderLayer

from ...model.packed_head import PackedHead
from ...model.packed_model import PackedModel
from . import target_parts
from .files import BAD_VALUES, Checkpoint, Plan
from .keys import FLAG, LAYER_KEYS, LAYERS, NAME, NUMBER, Key, Table, integer

# What is taken of a configuration that describes the layers, or a whole language model.
_KEYS = [key for key in LAYER_KEYS if key not in ("model_type", "use_sliding_window", "max_window_layers")]

# Keys that only some kinds of layers have. DeepSpec's layers for Gemma 4 attend to the whole text, all of them, and have the widths of
# the target's layers that do. Their tensors say what per_layer_config says.
GEMMA4 = Table(
    {
        name: Key(kind, places=(f".{name}",))
        for kind, names in (
            (integer(), ("global_head_dim", "num_global_key_value_heads")), (NUMBER, ("final_logit_softcapping",)),
            (NAME, ("hidden_activation",)), (FLAG, ("attention_k_eq_v",)),
        )
        for name in names
    },
    only={"enable_moe_block": False, "hidden_size_per_layer_input": 0, "num_kv_shared_layers": 0},
    nothing=frozenset({
        "per_layer_config", "vocab_size_per_layer_input", "top_k_experts", "use_double_wide_mlp", "use_bidirectional_attention",
    }),
)  # fmt: skip
LATENT = Table(
    {
        name: Key(integer(), places=(f".{name}", f"{LAYERS}.{name}"))
        for name in ("q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
    },
    only={"rope_interleave": True},
    nothing=frozenset({
        "n_group", "topk_group", "topk_method", "scoring_func", "routed_scaling_factor", "moe_layer_freq", "aux_loss_alpha", "seq_aux",
        "ep_size", "num_nextn_predict_layers",
    }),
)  # fmt: skip


def keys_of_layers(plan: Plan) -> Table:
    """The keys that only the file's kind of layers has: Gemma 4's, DeepSeek's with latent attention, or none."""
    if "layers.0.layer_scalar" in plan:
        return GEMMA4
    return LATENT if "layers.0.self_attn.kv_a_proj_with_mqa.weight" in plan else Table({})


def read_layer_config(checkpoint: Checkpoint, plan: Plan, kind: str | None = None) -> PretrainedConfig:
    """The configuration of a head's layers: Gemma 4's, DeepSeek's or Llama's, or Qwen3's if the file has `q_norm`.

    Keys that are missing have the defaults of Llama or Qwen3, whatever the target is, since the heads were trained that way (a
    missing `rope_theta` is 10000). A configuration in speculators' format names a model type, whose defaults are used.

    Args:
        plan: the file's tensors, the layers' under `layers.{i}.`.
        kind: "qwen3", with the defaults of the configuration's model type; None: as the tensors say.

    Raises:
        CheckpointError: values that do not describe a layer.
    """
    nested = checkpoint.section(LAYERS)
    more = keys_of_layers(plan)
    known = LAYER_KEYS | more.keys
    given = {key: value for key, value in target_parts.plain_rope(nested or checkpoint.config).items() if key in known}
    count, uses_window = given.get("num_hidden_layers"), given.get("use_sliding_window")
    held = len({name.split(".")[1] for name in plan.sources if name.startswith("layers.")})
    if count is not None and count > held:
        raise checkpoint.error(
            f"config.json has num_hidden_layers = {count}, but the file has tensors of {held} of them."
        )
    if more is GEMMA4:
        return _gemma4_config(checkpoint, given, held)
    if more is LATENT and kind is None:
        return _latent_config(checkpoint, given)
    class_name = kind or ("qwen3" if "layers.0.self_attn.q_norm.weight" in plan else "llama")
    if given.get("layer_types"):  # often copied from the target, with a value for each of the target's layers
        given["layer_types"] = given["layer_types"][:count]
    if nested or kind:
        whole = target_parts.layer_config(checkpoint, given, class_name)
        given |= {key: getattr(whole, key, None) for key in _KEYS}
    values = {key: given[key] for key in _KEYS if given.get(key) is not None}
    kinds, window = values.pop("layer_types", None), values.pop("sliding_window", None)
    # speculators' DFlash uses that of sliding layers for all
    _one_rope(checkpoint, values, ["sliding_attention"] if nested and kind else kinds)
    out_proj, heads = "layers.0.self_attn.o_proj.weight", values.get("num_attention_heads")
    if "head_dim" not in values and out_proj in plan and heads:
        values["head_dim"] = plan.matrix(out_proj)[1] // heads
    config = target_parts.layer_config(checkpoint, values, class_name)
    if kinds is not None and set(kinds) != {"full_attention"}:
        fits = set(kinds) <= {"full_attention", "sliding_attention"} and len(kinds) == config.num_hidden_layers
        if not fits or not window or uses_window is False:
            raise checkpoint.error(
                f"its layer_types {kinds} with sliding_window {window} (use_sliding_window {uses_window}) cannot be run."
            )
        config.layer_types, config.sliding_window = kinds, window
    _check_rotation(checkpoint, config)
    return config


def _check_rotation(checkpoint: Checkpoint, config: Any) -> None:
    part, is_latent = rotated_width(config), isinstance(config, DeepseekV3Config)
    if not 0 < part <= config.head_dim or part % 2 or (is_latent and part < config.head_dim):
        raise checkpoint.error(
            f"rotates {part} of a head's {config.head_dim} dimensions (partial_rotary_factor), which cannot be run."
        )


def rotated_width(config: Any) -> int:
    """How many dimensions of a head are rotated, the first ones. "proportional" rotation takes its pairs from the whole head."""
    rope = config.rope_parameters
    factor = 1.0 if rope["rope_type"] == "proportional" else rope.get("partial_rotary_factor") or 1.0
    return int(config.head_dim * factor)


@torch.no_grad()
def pair_rotated(layers: nn.ModuleList, config: Any) -> None:
    """Where a part of a head is rotated, order the dimensions of queries and keys so that rotated pairs are half a head apart, as
    transformers' attention expects. The products of queries and keys stay the same."""
    width, part = config.head_dim, rotated_width(config)
    if part == width:
        return
    rest = (width - part) // 2
    first, second, still, standing = torch.arange(width).split([part // 2, part // 2, rest, rest])
    order = torch.cat([first, still, second, standing])
    for layer in layers:
        attention: Any = layer.self_attn
        for weight in [
            weight
            for name in ("q_proj", "k_proj", "k_proj_target", "q_norm", "k_norm")
            for weight in getattr(attention, name, nn.Identity()).parameters()
        ]:
            weight.data = weight.unflatten(0, (-1, width))[:, order.to(weight.device)].flatten(0, 1)


def _gemma4_config(checkpoint: Checkpoint, given: dict[str, Any], num_layers: int) -> PretrainedConfig:
    """Every layer has the widths of the target's layers with full attention, so none has a configuration of its own."""
    for name in ("hidden_act", "rope_theta", "rope_scaling", "partial_rotary_factor"):
        if given.get(name) is not None:
            raise checkpoint.error(f"config.json has {name} = {given[name]!r}, which Gemma 4's layers do not have.")
    if set(given.get("layer_types") or ()) - {"full_attention"}:
        raise checkpoint.error(
            f"its layer_types {given['layer_types']} cannot be run: drafters with Gemma 4's layers have full_attention alone."
        )
    values = {"num_hidden_layers": num_layers} | {key: value for key, value in given.items() if value is not None}
    values["layer_types"] = ["full_attention"] * values["num_hidden_layers"]
    values["head_dim"] = values["global_head_dim"] = values.get("global_head_dim", 512)
    if values.get("attention_k_eq_v") and "num_global_key_value_heads" in values:
        values["num_key_value_heads"] = values["num_global_key_value_heads"]
    same = {
        "model_type": "gemma4_text",
        "per_layer_config": {},
        "num_kv_shared_layers": 0,
        "hidden_size_per_layer_input": 0,
    }
    config: Any = target_parts.layer_config(checkpoint, values | same)
    rope = config.rope_parameters.get("full_attention")
    if rope is None:
        raise checkpoint.error(f"its rope_parameters {config.rope_parameters} have none for full_attention.")
    config.rope_parameters = rope
    return config


def _latent_config(checkpoint: Checkpoint, given: dict[str, Any]) -> PretrainedConfig:
    """DeepSeek's layers with dense MLPs."""
    values = {key: value for key, value in given.items() if value is not None or key == "q_lora_rank"}
    if set(values.pop("layer_types", ())) - {"full_attention"}:
        raise checkpoint.error("has layer_types with windows, which layers with latent attention do not have.")
    for name in ("head_dim", "sliding_window"):  # these layers have neither
        values.pop(name, None)
    values["num_key_value_heads"] = values.get("num_attention_heads")
    config: Any = target_parts.layer_config(checkpoint, values | {"model_type": "deepseek_v3"})
    config.first_k_dense_replace = config.num_hidden_layers
    _check_rotation(checkpoint, config)
    return config


def _one_rope(checkpoint: Checkpoint, values: dict[str, Any], kinds: list[str] | None) -> None:
    """If rotary parameters are given by kind of layer, keep those of the head's kind."""
    for key in ("rope_parameters", "rope_scaling"):
        parts = (values.get(key) or {}).items() if isinstance(values.get(key), dict) else ()
        by_kind = {kind: part for kind, part in parts if isinstance(part, dict)}
        used = [part for kind, part in by_kind.items() if kinds is None or kind in kinds] or list(by_kind.values())
        if any(part != used[0] for part in used):
            raise checkpoint.error(f"its {key} {values[key]} are not one set for all its layers.")
        if used:
            values[key] = used[0]


_LAYERS_OF = {
    Gemma4TextConfig: Gemma4TextDecoderLayer, DeepseekV3Config: DeepseekV3DecoderLayer, Qwen3Config: Qwen3DecoderLayer,
    LlamaConfig: LlamaDecoderLayer,
}  # fmt: skip


def decoder_layer(config: PretrainedConfig, index: int) -> nn.Module:
    """transformers' decoder layer for a configuration of `read_layer_config`."""
    layer: Any = _LAYERS_OF[type(config)](config, index)
    if isinstance(config, Gemma4TextConfig):
        layer.self_attn.store_full_length_kv = False  # no layer reads another's keys
    return layer


def fit_biases(module: nn.Module, plan: Plan, prefix: str = "") -> None:
    """Give the module's linear layers a bias exactly where the file has one; `prefix` is that of the module's names in the plan."""
    for name, linear in module.named_modules():
        if isinstance(linear, nn.Linear):
            has = f"{prefix}{name}.bias" in plan
            linear.register_parameter(
                "bias", nn.Parameter(torch.empty(linear.out_features, device="meta")) if has else None
            )


def add_tables(module: nn.Module, plan: Plan, width: int) -> None:
    """Give a head the embeddings and the language-model head that the file has, and biases where it has them."""
    if "embed_tokens.weight" in plan:
        module.embed_tokens = nn.Embedding(plan.matrix("embed_tokens.weight")[0], width)
    if "lm_head.weight" in plan:
        module.lm_head = nn.Linear(width, plan.matrix("lm_head.weight")[0])
    fit_biases(module, plan)


@dataclass(eq=False)
class LoadedHead:
    """A head over packed rows; its language-model head, or the target's; and the vocabulary of the logits."""

    head: PackedHead
    lm_head: nn.Module
    vocabulary: target_parts.DraftVocabulary


def loaded(
    checkpoint: Checkpoint, plan: Plan, target: PackedModel, config: PretrainedConfig, make: Callable[[int], nn.Module],
    run: Callable[[Any], PackedHead], stated: tuple[int | None, int | None] = (None, None), scale: float | None = None,
) -> LoadedHead:  # fmt: skip
    """Load a head, with rotary positions, and the target's embeddings and language-model head if it has none.

    Args:
        make: builds its module for that many logits.
        run: makes it run over packed rows.
        stated: see `vocabulary_of`.
        scale: of the embeddings' rows; None: as the head's kind has it.
    """
    vocabulary, lm_head = target_parts.vocabulary_of(checkpoint, plan, target, config.hidden_size, *stated)
    shared: Any = lm_head
    size = len(shared.weight) if shared is not None else plan.matrix("lm_head.weight")[0]
    module: Any = target_parts.built(checkpoint, plan, target, lambda: make(size))
    pair_rotated(module.layers, config)
    module.rotary = RotaryPositions(checkpoint, config, target_parts.device_and_dtype(target)[0])
    table = getattr(module, "embed_tokens", None)
    if scale is None and table is not None:
        scale = table_scale(config)
    module.embeddings = embeddings_of(checkpoint, target, table, config.hidden_size, scale)
    return LoadedHead(run(module), lm_head or module.lm_head, vocabulary)


def capped(logits: torch.Tensor, scale: float, softcap: float | None) -> torch.Tensor:
    """c tanh(s logits / c), with the softcap c and the scale s; without a softcap, s logits."""
    logits = logits if scale == 1.0 else logits * scale
    return logits if softcap is None else softcap * torch.tanh(logits / softcap)


class RotaryPositions(nn.Module):
    """cos and sin of rotary position embeddings, computed for any position. The frequencies are in no checkpoint and stay in float32.

    Scalings whose frequencies change with the length of the text ("dynamic", "longrope") keep those of the original length,
    since cached keys cannot change. Dimensions that `pair_rotated` has put aside have the frequency 0.

    Raises:
        CheckpointError: a kind of scaling that transformers does not know, or one that scales dimensions that are not rotated.
    """

    def __init__(self, checkpoint: Checkpoint, config: Any, device: torch.device):
        super().__init__()
        part, whole, config = rotated_width(config), config.head_dim, copy.deepcopy(config)
        if part < whole:
            config.head_dim = part
            config.rope_parameters = {k: v for k, v in config.rope_parameters.items() if k != "partial_rotary_factor"}
        try:
            rope = LlamaRotaryEmbedding(config)  # pyright: ignore[reportArgumentType]
        except BAD_VALUES as error:
            raise checkpoint.error(
                f"its rotary parameters {config.rope_parameters} cannot be used: {error!r}"
            ) from None
        if part < whole and rope.attention_scaling != 1.0:
            raise checkpoint.error(
                f"its rotary parameters {config.rope_parameters} scale a part of each head, which is not supported."
            )
        frequencies = nn.functional.pad(rope.inv_freq, (0, (whole - part) // 2))
        self.inv_freq = torch.cat([frequencies, frequencies]).to(device, torch.float32)
        self.scaling = rope.attention_scaling

    def forward(self, position_ids: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        """cos and sin [1, T, D] at positions [1, T]."""
        angles = position_ids[..., None] * self.inv_freq
        cos, sin = angles.cos(), angles.sin()
        if self.scaling != 1.0:
            cos, sin = cos * self.scaling, sin * self.scaling
        return cos.to(dtype), sin.to(dtype)


class LayeredHead(nn.Module):
    """A head of decoder layers with embeddings, which may be the target's, and rotary positions; `lm_head` if the file has one."""

    embeddings: Embeddings
    rotary: RotaryPositions
    layers: nn.ModuleList
    lm_head: nn.Linear

    def borrowed(self) -> list[nn.Module]:
        """Modules that may be the target's own."""
        return [self.embeddings.table]


class Embeddings:
    """Embeds ids of the target's vocabulary with the head's own table or the target's.

    Not a module, so that the target's table does not become a parameter of the head.

    Args:
        last: the last id in the table, which stands for greater ones; None: all are in it.
        scale: of the table's rows; None: the table's module decides.
    """

    def __init__(self, table: nn.Module, last: int | None = None, scale: float | None = None):
        self.table, self.last, self.scale = table, last, scale

    def __call__(self, input_ids: torch.Tensor, like: torch.Tensor | PackedHead) -> torch.Tensor:
        """[1, T, H] from ids [1, T], on the device and in the dtype of `like`."""
        if self.last is not None:
            input_ids = input_ids.clamp(max=self.last)
        if self.scale is None:
            return self.table(input_ids).to(like.device, like.dtype)
        rows: Any = self.table.weight
        return nn.functional.embedding(input_ids, rows).to(like.device, like.dtype) * self.scale


def table_scale(config: PretrainedConfig) -> float | None:
    """The factor of the rows in a head's own table: Gemma 4's are stored as the target's are, before it scales them."""
    return config.hidden_size**0.5 if isinstance(config, Gemma4TextConfig) else None


def embeddings_of(
    checkpoint: Checkpoint, target: PackedModel, table: nn.Embedding | None, width: int, scale: float | None = None
) -> Embeddings:
    """A head's own embeddings, or the target's if it has no `table`. Ids of padding rows that only the target has use the last row of
    the head's own. Raises CheckpointError: the target's are not as wide as the head."""
    if table is not None:
        last = table.num_embeddings - 1 if table.num_embeddings < target.vocab_size else None
        return Embeddings(table, last, scale)
    shared: Any = target_parts.target_embeddings(target)
    if (held := shared.weight.shape[1]) != width:
        raise checkpoint.error(
            f"has no embed_tokens.weight, and the target's embeddings have width {held}, not {width}."
        )
    return Embeddings(shared, scale=scale)
