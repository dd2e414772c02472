"""Targets with MTP modules in their checkpoints, as each family stores them, and the modules' recursion once more, in float64.

The recursion is computed from the whole text every time, without a cache, on dense masks. Each module's decoder layer is the
target's own layer in float64 (`transformers` defines it), except where a test gives a formula of its own.
"""

from __future__ import annotations

import copy
import functools
import inspect
import json
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import torch
from families import FAMILIES, build
from multimodal import build_multimodal
from safetensors.torch import load_file, save_file
from torch import nn

_MOE = {"num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
_MLA = {
    "num_key_value_heads": 4, "q_lora_rank": 24, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8,
    "v_head_dim": 12, "head_dim": 8,
}  # fmt: skip
_INDEXED = {
    "n_routed_experts": 4, "n_group": 1, "topk_group": 1, "index_n_heads": 16, "index_head_dim": 16, "index_topk": 8,
}  # fmt: skip
_KINDS = ["sliding_attention", "full_attention", "sliding_attention"]
_FULL = {"layer_types": ["full_attention"] * 3}
WINDOW = 6


def _deepseek(part: str, i: int, num_layers: int, inner: str = "") -> str:
    names = {"norm": "shared_head.norm", "lm_head": "shared_head.head"}
    first, _, rest = part.partition(".")
    return f"model.layers.{num_layers + i}.{inner}{rest if first == 'layer' else names.get(first, first) + '.' + rest}"


def _hunyuan(part: str, i: int, num_layers: int) -> str:
    for new, old in (("mlp.gate.weight", "mlp.router.gate.weight"), ("mlp.e_score_correction_bias", "mlp.expert_bias"),
                     ("mlp.shared_experts.", "mlp.shared_mlp.")):  # fmt: skip
        part = part.replace(new, old)
    first, _, rest = part.partition(".")
    return f"model.layers.{num_layers + i}." + (
        rest if first == "layer" else part.replace("norm.", "final_layernorm.", 1) if first == "norm" else part
    )


def _qwen(part: str, i: int, num_layers: int) -> str | None:
    first, _, rest = part.partition(".")
    if first == "layer":
        return f"mtp.layers.{i}.{rest}"
    names = {"enorm": "pre_fc_norm_embedding", "hnorm": "pre_fc_norm_hidden", "eh_proj": "fc"}
    return f"mtp.{names.get(first, first)}.{rest}" if i == 0 else None


def _mimo(part: str, i: int, num_layers: int, prefix: str = "model.mtp_layers") -> str:
    first, _, rest = part.partition(".")
    names = {
        "enorm": "token_layernorm.",
        "hnorm": "hidden_layernorm.",
        "eh_proj": "input_proj.",
        "norm": "final_layernorm.",
        "layer": "",
    }
    return f"{prefix}.{i}.{names[first]}{rest}"


def _mimo_v2(part: str, i: int, num_layers: int) -> str:
    part = part.replace("post_attention_layernorm", "pre_mlp_layernorm").replace("sinks", "attention_sink_bias")
    first, _, rest = part.partition(".")
    return f"model.mtp.layers.{i}." + {"norm": f"final_layernorm.{rest}", "layer": rest}.get(first, part)


def _ernie(part: str, i: int, num_layers: int) -> str:
    first, _, rest = part.partition(".")
    names = {"enorm": "mtp_emb_norm", "hnorm": "mtp_hidden_norm", "eh_proj": "mtp_linear_proj", "layer": "mtp_block"}
    return f"model.{names[first]}.{i}.{rest}"


def _longcat(part: str, i: int, num_layers: int) -> str:
    first, _, rest = part.partition(".")
    if first in ("norm", "embed_tokens"):
        return f"model.mtp.{part}"
    names = {"enorm": "enorm.m.", "hnorm": "hnorm.m.", "eh_proj": "eh_proj.", "layer": ""}
    return f"model.mtp.layers.{i}.{names[first]}{rest.replace('mlp.', 'transformer_layer.mlp.', 1)}"


def _nemotron(part: str, i: int, num_layers: int) -> str:
    first, _, rest = part.partition(".")
    if first == "layer":
        return rest.replace("blocks.", "mtp.layers.")
    return f"mtp.layers.1.final_layernorm.{rest}" if first == "norm" else f"mtp.layers.0.{part}"


@dataclass
class Kind:
    """A family: its target, where it stores modules, and what it does around their layer."""

    model_type: str
    options: dict
    rename: Callable[[str, int, int], str | None]
    layer: int = -1  # which of the target's layers a module's is like
    hidden_first: bool = False
    zero_first: bool = False
    normed: bool = True
    has_norm: bool = True
    window: int | None = None
    sinks: int = 0  # of the first keys, which are seen beside the window
    own_tables: tuple[str, ...] = ()
    config: dict = field(default_factory=dict)  # added to the checkpoint's config.json


KINDS = {
    "DeepSeek-V3": Kind("deepseek_v3", FAMILIES["DeepSeek-V3"][1], _deepseek, own_tables=("embed_tokens", "lm_head")),
    "DeepSeek-V3.2": Kind("deepseek_v32", {**_MLA, **_MOE, **_INDEXED}, _deepseek, own_tables=("embed_tokens", "lm_head")),
    "GLM-5": Kind(
        "glm_moe_dsa", {**_MLA, **_MOE, **_INDEXED, "indexer_types": ["full", "full", "shared"]}, _deepseek, layer=1,
    ),
    "GLM-4.5": Kind(
        "glm4_moe", {**_MOE, "n_routed_experts": 4, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1, "use_qk_norm": True},
        _deepseek,
    ),
    "GLM-4.7-Flash": Kind(
        "glm4_moe_lite", {**_MLA, **_MOE, "n_routed_experts": 4, "n_group": 1, "topk_group": 1},
        functools.partial(_deepseek, inner="transformer."),
    ),
    "Hunyuan V3": Kind("hy_v3", _MOE, _hunyuan, zero_first=True),
    "Qwen3-Next": Kind(
        "qwen3_next", {**_MOE, **_FULL, "shared_expert_intermediate_size": 32, "decoder_sparse_step": 1}, _qwen
    ),
    "Qwen3.5": Kind("qwen3_5_text", _FULL, _qwen),
    "Qwen3.5-MoE": Kind("qwen3_5_moe_text", {**_MOE, **_FULL, "shared_expert_intermediate_size": 32}, _qwen),
    "EXAONE-MoE": Kind(
        "exaone_moe", {**_MOE, "num_shared_experts": 1, "sliding_window": WINDOW, "layer_types": _KINDS,
                       "mtp_layer_types": ["sliding_attention"]},
        _qwen, layer=0, window=WINDOW,
    ),
    "MiMo": Kind("qwen2", {}, _mimo, hidden_first=True, zero_first=True),
    "MiMo-V2": Kind(
        "mimo_v2_flash", {**_MOE, "n_routed_experts": 4, "sliding_window": WINDOW, "v_head_dim": 8, "layer_types": _KINDS},
        _mimo_v2, layer=0, window=WINDOW,
    ),
    "Ernie 4.5": Kind("ernie4_5", {}, _ernie, zero_first=True, normed=False, has_norm=False),
    "Ernie 4.5 MoE": Kind(
        "ernie4_5_moe", {"moe_num_experts": 4, "moe_k": 2, "moe_intermediate_size": 32, "moe_layer_start_index": 1,
                         "moe_layer_end_index": 2, "moe_layer_interval": 1, "moe_num_shared_experts": 1},
        _ernie, layer=0, zero_first=True, normed=False, has_norm=False,
    ),
    "LongCat-Flash": Kind(
        "longcat_flash", {**_MLA, "num_layers": 2, "n_routed_experts": 4, "moe_topk": 2, "ffn_hidden_size": 64,
                          "expert_ffn_hidden_size": 32, "zero_expert_num": 0},
        _longcat, own_tables=("embed_tokens",),
    ),
    "Mellum": Kind(
        "mellum", {**_MOE, "layer_types": _KINDS, "sliding_window": WINDOW, "head_dim": 12, "num_mtp_layers": 1}, _qwen, layer=0,
        window=WINDOW,
    ),
    # with a vision tower: the names of GLM-4.5V and GLM-OCR; those of Qwen3.5
    "GLM-4V": Kind("glm4v", {}, lambda *part: _deepseek(*part).replace("model.layers", "model.language_model.layers")),
    "Qwen3.5 with images": Kind("qwen3_5", {}, _qwen, layer=1),
    "Nemotron-H": Kind(
        "nemotron_h", {"layer_types": ["full_attention", "moe", "mlp"], "head_dim": 12, "n_routed_experts": 4, "moe_intermediate_size": 32,
                       "moe_shared_expert_intermediate_size": 24, "moe_latent_size": 16, "routed_scaling_factor": 2.5,
                       "mtp_layers_block_type": ["full_attention", "moe"], "num_nextn_predict_layers": 1},
        _nemotron,
    ),
}  # fmt: skip


class TwoBlocks(nn.Module):
    """Nemotron-H's MTP layer, from two of a target's: attention, then experts."""

    def __init__(self, layers):
        super().__init__()
        self.blocks = nn.ModuleList(layers[:2])

    def forward(self, hidden_states, attention_mask, **_):
        for block in self.blocks:
            hidden_states = block(hidden_states, attention_mask=attention_mask)
        return hidden_states


class TwoPartLayer(nn.Module):
    """LongCat's MTP layer, from one half of a target's."""

    def __init__(self, layer):
        super().__init__()
        self.self_attn, self.mlp = layer.self_attn[0], layer.mlps[0]
        self.input_layernorm, self.post_attention_layernorm = (
            layer.input_layernorm[0],
            layer.post_attention_layernorm[0],
        )

    def forward(self, hidden_states, **kwargs):
        hidden_states = hidden_states + self.self_attn(hidden_states=self.input_layernorm(hidden_states), **kwargs)[0]
        return hidden_states + self.mlp(self.post_attention_layernorm(hidden_states))


def randomized(module: nn.Module, generator: torch.Generator) -> nn.Module:
    """A copy with other weights of the same size."""
    module = copy.deepcopy(module)
    with torch.no_grad():
        for value in module.state_dict().values():
            if value.is_floating_point():
                noise = torch.randn(value.shape, generator=generator)
                value.copy_(value + 0.1 * noise if value.dim() == 1 else 0.25 * noise)
    return module


@dataclass
class Stored:
    """A target as loaded from its checkpoint, the folder, and the modules that are in it."""

    model: nn.Module
    folder: str
    kind: Kind
    parts: list[dict[str, nn.Module]]
    tensors: dict[str, torch.Tensor]


def split_experts(name: str, value: torch.Tensor) -> dict[str, torch.Tensor]:
    """Stacked experts as checkpoints have them: a matrix each."""
    out = {}
    if name.endswith("experts.gate_up_proj"):
        for i, both in enumerate(value):
            for part, half in zip(("gate_proj", "up_proj"), both.chunk(2), strict=True):
                out[name.replace("gate_up_proj", f"{i}.{part}.weight")] = half
    elif name.endswith((".experts.up_proj", ".experts.down_proj")):
        experts, _, part = name.rpartition(".")
        out = {f"{experts}.{i}.{part}.weight": one for i, one in enumerate(value)}
    return out or {name: value}


def store(folder: Path, name: str, num_modules: int = 1, own_tables: bool = False, **options) -> Stored:
    """A target of a family with MTP modules in its checkpoint, as it is when it was loaded from there.

    Args:
        own_tables: stored copies of embeddings and head differ from the target's; otherwise they are copies.
    """
    kind = KINDS[name]
    is_multimodal = kind.model_type in ("glm4v", "qwen3_5")
    model = (
        build_multimodal(kind.model_type) if is_multimodal else build(kind.model_type, 0, **{**kind.options, **options})
    )
    model._is_stateful = False  # Qwen3-Next and Qwen3.5 with attention layers alone have no recurrent state
    generator = torch.Generator().manual_seed(7)
    decoder = model.get_decoder()
    like = decoder.layers[kind.layer]
    if hasattr(like, "mixer"):
        like = TwoBlocks(decoder.layers)
    elif isinstance(like.self_attn, nn.ModuleList):
        like = TwoPartLayer(like)
    hidden, last_norm = (
        model.config.get_text_config().hidden_size,
        getattr(decoder, "norm", getattr(decoder, "norm_f", None)),
    )
    parts, tensors = [], {}
    for i in range(num_modules):
        part: dict[str, nn.Module] = {"layer": randomized(like, generator)}
        first = parts[0] if kind.rename is _qwen and i else None  # what all modules share
        for norm in ("enorm", "hnorm", "norm"):
            part[norm] = first[norm] if first else randomized(last_norm, generator)
        part["eh_proj"] = (
            first["eh_proj"] if first else randomized(nn.Linear(2 * hidden, hidden, bias=False), generator)
        )
        if not kind.has_norm:
            part["norm"] = nn.Identity()
        for table, module in (("embed_tokens", model.get_input_embeddings()), ("lm_head", model.lm_head)):
            part[table] = randomized(module, generator) if own_tables and table in kind.own_tables else module
        stored = {
            key: value
            for key, value in part.items()
            if key not in ("embed_tokens", "lm_head") or key in kind.own_tables
        }
        for key, module in stored.items():
            for tensor, value in module.state_dict().items():
                for split, each in split_experts(f"{key}.{tensor}", value).items():
                    renamed = kind.rename(split, i, model.config.get_text_config().num_hidden_layers)
                    if renamed is not None:
                        tensors[renamed] = each.detach().contiguous().clone()
        parts.append(part)
    model.save_pretrained(folder)
    weights = folder / "model.safetensors"
    save_file({**load_file(weights), **tensors}, weights, metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **kind.config}))
    model.config.name_or_path = model.name_or_path = str(folder)
    return Stored(model, str(folder), kind, parts, tensors)


class PlainMtp:
    """x_j(t) = M_j(token t, x_{j-1}(t - 1)), from the whole text and a path of drafts behind it, in float64."""

    def __init__(self, stored: Stored, normed: bool | None = None, layers: list[Callable] | None = None):
        self.kind = stored.kind
        self.rotary = copy.deepcopy(getattr(stored.model.get_decoder(), "rotary_emb", lambda *_, **__: ()))
        self.normed = stored.kind.normed if normed is None else normed
        self.parts = [{key: copy.deepcopy(module).double() for key, module in part.items()} for part in stored.parts]
        self.layer_types = getattr(stored.model.config.get_text_config(), "layer_types", None)
        self.layers = layers or [self._transformers_layer(part["layer"]) for part in self.parts]

    def _transformers_layer(self, layer):
        for module in layer.modules():
            if hasattr(module, "config"):
                module.config = copy.deepcopy(module.config)
                module.config._attn_implementation = module.config._experts_implementation = "eager"
        kinds = {}
        if "layer_type" in inspect.signature(getattr(self.rotary, "forward", self.rotary)).parameters:
            kinds["layer_type"] = self.layer_types[self.kind.layer]

        def run(x):
            positions = torch.arange(x.shape[0])[None]
            distance = positions[0][:, None] - positions[0][None, :]
            near = (distance < (self.kind.window or 10**6)) | (positions < self.kind.sinks)
            seen = (distance >= 0) & near
            mask = torch.zeros(seen.shape, dtype=torch.float64).masked_fill(~seen, float("-inf"))[None, None]
            sections = positions[None].expand(3, -1, -1) if hasattr(self.rotary, "mrope_section") else positions
            rotary = tuple(each.double() for each in self.rotary(x[None], sections, **kinds))
            out = layer(x[None], attention_mask=mask, position_ids=positions, position_embeddings=rotary)
            return (out[0] if isinstance(out, tuple) else out)[0]

        return run

    def module(self, j: int, tokens: list[int], features: torch.Tensor) -> torch.Tensor:
        """x_j [n, H] of n tokens in a row, the module's first among them, and what is before each."""
        part = self.parts[j]
        embedded = part["embed_tokens"](torch.tensor(tokens))
        if self.kind.zero_first:
            embedded = torch.cat([torch.zeros_like(embedded[:1]), embedded[1:]])
        pair = [part["enorm"](embedded), part["hnorm"](features)]
        hidden = part["eh_proj"](torch.cat(pair[::-1] if self.kind.hidden_first else pair, dim=-1))
        out = self.layers[j](hidden)
        return part["norm"](out) if self.normed else out

    @torch.no_grad()
    def draft_logits(self, text: tuple[int, ...], path: tuple[int, ...], states: torch.Tensor) -> torch.Tensor:
        """Logits [V] of what follows text and path; `states` [>= n, H] are the target's at the text's tokens."""
        count, tokens = len(self.parts), [*text, *path]
        below = states[: len(text) - 1].double()  # what stands at tokens 0, 1, .., n - 1, and grows by a state per step

        def x(j: int, end: int) -> torch.Tensor:  # of tokens j + 1 .. end
            features = below[:end] if j == 0 else x(j - 1, end - 1)
            return self.module(j, tokens[j + 1 : end + 1], features)

        state, j = below[-1], 0
        for step in range(len(path) + 1):
            j = step % count
            state = x(j, len(text) - 1 + step)[-1]
            below = torch.cat([below, state[None]])
        part = self.parts[j]
        return part["lm_head"](state if self.normed else part["norm"](state))


@torch.no_grad()
def target_states(model, texts) -> dict[tuple[int, ...], torch.Tensor]:
    """The target's final hidden states, after the last norm, of each text."""
    found: dict[tuple[int, ...], torch.Tensor] = {}
    for text in sorted(texts, key=len, reverse=True):
        longer = next((known for known in found if known[: len(text)] == text), None)
        found[text] = (
            model.model(torch.tensor([text]), use_cache=False).last_hidden_state[0] if longer is None else found[longer]
        )
    return found


def check_logits(plain: PlainMtp, recording, model, tolerance: float = 1e-4) -> None:
    """Every recorded logit is what the plain recursion says."""
    states = target_states(model, {text for text, _, _ in recording.logits})
    for text, path, logits in recording.logits:
        expected = plain.draft_logits(text, path, states[text])
        error = (logits.double() - expected).abs().max() / expected.abs().max().clamp(min=1)
        assert error < tolerance, (text, path, float(error))


# ---- layers by formula ----------------------------------------------------------------------------------------------


def _attend(q, k, v):
    """Causal attention of [T, heads, D] to keys and values of fewer heads."""
    count, heads, width = q.shape
    group = heads // k.shape[1]
    out = torch.zeros(count, heads, width, dtype=torch.float64)
    for t in range(count):
        for head in range(heads):
            scores = k[: t + 1, head // group] @ q[t, head] / math.sqrt(width)
            out[t, head] = torch.softmax(scores, 0) @ v[: t + 1, head // group]
    return out.flatten(1)


def _rotated(x, theta, width):
    """The first `width` of each head's numbers turned by the position: [T, heads, D]."""
    angles = torch.arange(len(x), dtype=torch.float64)[:, None] * theta ** (
        -torch.arange(0, width, 2, dtype=torch.float64) / width
    )
    cos, sin = angles.cos()[:, None], angles.sin()[:, None]
    first, second, rest = x[..., : width // 2], x[..., width // 2 : width], x[..., width:]
    return torch.cat([first * cos - second * sin, second * cos + first * sin, rest], dim=-1)


def _rms(x, weight, eps):
    return x / torch.sqrt((x * x).mean(-1, keepdim=True) + eps) * weight


def _swiglu(x, w):
    gate = x @ w["mlp.gate_proj.weight"].T
    return (gate * torch.sigmoid(gate) * (x @ w["mlp.up_proj.weight"].T)) @ w["mlp.down_proj.weight"].T


def llama_block(layer, config):
    """Qwen2's: biases on queries, keys and values."""
    w = {name: value.double() for name, value in layer.state_dict().items()}
    theta, width = config.rope_parameters["rope_theta"], config.hidden_size // config.num_attention_heads

    def project(x, part):
        out = x @ w[f"self_attn.{part}_proj.weight"].T + w[f"self_attn.{part}_proj.bias"]
        return out.view(len(x), -1, width)

    def run(x):
        y = _rms(x, w["input_layernorm.weight"], config.rms_norm_eps)
        q, k = (_rotated(project(y, part), theta, width) for part in ("q", "k"))
        x = x + _attend(q, k, project(y, "v")) @ w["self_attn.o_proj.weight"].T
        return x + _swiglu(_rms(x, w["post_attention_layernorm.weight"], config.rms_norm_eps), w)

    return run


def sparse(x, w, config):
    """Qwen's experts: the best of a softmax, weighted to one in sum, and a shared expert behind a gate."""
    scores, chosen = torch.softmax(x @ w["mlp.gate.weight"].T, -1).topk(config.num_experts_per_tok)
    scores = scores / scores.sum(-1, keepdim=True)
    shared = {
        f"mlp.{part}.weight": w[f"mlp.shared_expert.{part}.weight"] for part in ("gate_proj", "up_proj", "down_proj")
    }
    out = torch.sigmoid(x @ w["mlp.shared_expert_gate.weight"].T) * _swiglu(x, shared)
    for t in range(len(x)):
        for score, expert in zip(scores[t], chosen[t], strict=True):
            gate, up = (w["mlp.experts.gate_up_proj"][expert] @ x[t]).chunk(2)
            out[t] += score * (w["mlp.experts.down_proj"][expert] @ (gate * torch.sigmoid(gate) * up))
    return out


def gated_block(layer, config, mlp=None):
    """Qwen3.5's full attention: queries and gates side by side per head, norms of queries and keys, partial rotary
    embeddings, norms that scale by one plus their weight."""
    w = {name: value.double() + (1 if "norm" in name else 0) for name, value in layer.state_dict().items()}
    eps, width, heads = config.rms_norm_eps, config.head_dim, config.num_attention_heads
    rope = config.rope_parameters
    turned = int(width * rope.get("partial_rotary_factor", 1.0))

    def run(x):
        y = _rms(x, w["input_layernorm.weight"], eps)
        q, gate = (y @ w["self_attn.q_proj.weight"].T).view(len(x), heads, 2, width).unbind(2)
        k = (y @ w["self_attn.k_proj.weight"].T).view(len(x), -1, width)
        v = (y @ w["self_attn.v_proj.weight"].T).view(len(x), -1, width)
        q, k = (
            _rotated(_rms(each, w[f"self_attn.{part}_norm.weight"], eps), rope["rope_theta"], turned)
            for each, part in ((q, "q"), (k, "k"))
        )
        x = x + (_attend(q, k, v) * torch.sigmoid(gate.flatten(1))) @ w["self_attn.o_proj.weight"].T
        y = _rms(x, w["post_attention_layernorm.weight"], eps)
        return x + (_swiglu(y, w) if mlp is None else mlp(y, w, config))

    return run


def nemotron_blocks(layer, config):
    """Nemotron-H's attention, which has no rotation, then its experts: sigmoid scores, of which a bias chooses, squared ReLUs in a smaller
    space, and a shared one beside them."""
    w = {name: value.double() for name, value in layer.state_dict().items()}
    eps, width, scale = config.layer_norm_epsilon, config.head_dim, config.routed_scaling_factor

    def run(x):
        y = _rms(x, w["blocks.0.norm.weight"], eps)
        q, k, v = ((y @ w[f"blocks.0.mixer.{part}_proj.weight"].T).view(len(x), -1, width) for part in "qkv")
        x = x + _attend(q, k, v) @ w["blocks.0.mixer.o_proj.weight"].T
        y, p = _rms(x, w["blocks.1.norm.weight"], eps), "blocks.1.mixer."
        small = y @ w[p + "fc1_latent_proj.weight"].T
        scores = torch.sigmoid(y @ w[p + "gate.weight"].T)
        chosen = (scores + w[p + "gate.e_score_correction_bias"]).topk(config.num_experts_per_tok).indices
        out = torch.zeros_like(small)
        for t in range(len(x)):
            for expert in chosen[t]:
                up = (w[p + "experts.up_proj"][expert] @ small[t]).relu() ** 2
                out[t] += (
                    scale * scores[t, expert] / scores[t, chosen[t]].sum() * (w[p + "experts.down_proj"][expert] @ up)
                )
        shared = (y @ w[p + "shared_experts.up_proj.weight"].T).relu() ** 2 @ w[p + "shared_experts.down_proj.weight"].T
        return x + out @ w[p + "fc2_latent_proj.weight"].T + shared

    return run
