"""EAGLE-3 and P-EAGLE checkpoints in every layout, and what each means to a plain float64 head."""

import math
from dataclasses import dataclass, field

import torch
from helpers_eagle import (
    EPS,
    HEADS,
    HIDDEN,
    INNER,
    KV_HEADS,
    PlainDrafter,
    PlainLayers,
    layer_shapes,
    rms,
    save_checkpoint,
    weights,
)
from oracle import VOCAB

DRAFT_VOCAB = 40
DRAFT_IDS = [i * 3 // 2 for i in range(DRAFT_VOCAB)]  # target ids of the draft vocabulary
SCRIPT = DRAFT_IDS[3:30:2]  # drafts can only be accepted if the drafter knows them
NORM = (HIDDEN,)
CONFIG = {
    "architectures": ["LlamaForCausalLMEagle3"], "model_type": "llama", "hidden_size": HIDDEN, "intermediate_size": INNER,
    "num_attention_heads": HEADS, "num_key_value_heads": KV_HEADS, "num_hidden_layers": 1, "hidden_act": "silu",
    "rms_norm_eps": EPS, "max_position_embeddings": 12, "vocab_size": VOCAB, "draft_vocab_size": DRAFT_VOCAB,
}  # fmt: skip
BASE = {
    "fc.weight": (HIDDEN, 3 * HIDDEN), **layer_shapes("layers.0.", 2 * HIDDEN), "layers.0.input_layernorm.weight": NORM,
    "layers.0.hidden_norm.weight": NORM, "norm.weight": NORM, "lm_head.weight": (DRAFT_VOCAB, HIDDEN),
}  # fmt: skip
SECOND = {
    **layer_shapes("layers.1."),
    "layers.1.input_layernorm.weight": NORM,
    "layers.1.post_attention_layernorm.weight": NORM,
}
EMBEDDINGS = {"embed_tokens.weight": (VOCAB, HIDDEN)}


def speculators_config(kind="eagle3", **changes):
    layers = {k: v for k, v in CONFIG.items() if k not in ("architectures", "draft_vocab_size")}
    layers |= changes.pop("layers", {})
    return {
        "architectures": [f"{kind.title()}Speculator"], "speculators_model_type": kind, "speculators_version": "0.9.0",
        "transformer_layer_config": layers, "draft_vocab_size": DRAFT_VOCAB, "target_hidden_size": None,
        "eagle_aux_hidden_state_layer_ids": None, "tie_word_embeddings": False,
        "speculators_config": {
            "algorithm": kind, "default_proposal_method": "greedy",
            "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": 3, "verifier_accept_k": 1}],
            "verifier": {"name_or_path": "some/Target-8B", "architectures": ["LlamaForCausalLM"]},
        },
        **changes,
    }  # fmt: skip


@dataclass
class Layout:
    """A checkpoint, and what it means to the plain head.

    states: which of the target's hidden states are joined (i: behind i layers; -2: the last, normed; -1: not normed).
    plain: options of PlainLayers; flags: of PlainEagle3.
    """

    shapes: dict
    config: dict = field(default_factory=dict)
    states: tuple = (0, 1, 2)  # 2, n // 2, n - 3 of 3 layers, in the target's order
    prefix: str = "midlayer."
    plain: dict = field(default_factory=dict)
    flags: dict = field(default_factory=dict)
    reduced: bool = True  # has d2t and t2d


def without(shapes, *names):
    return {name: shape for name, shape in shapes.items() if name not in names}


def llama3_frequencies():
    """Llama 3.1's scaling of the frequencies of width 8 and theta 5e5: factor 8, low 1, high 4, 16 original positions."""
    out = []
    for i in range(4):
        frequency = 5e5 ** (-2 * i / 8)
        wavelength = 2 * math.pi / frequency
        smooth = min(max((16 / wavelength - 1) / (4 - 1), 0.0), 1.0)
        out.append((1 - smooth) * frequency / 8 + smooth * frequency)
    return torch.tensor(out, dtype=torch.float64)


LINEAR_2 = 10000.0 ** (-torch.arange(4, dtype=torch.float64) / 4) / 2
QWEN3 = {"layers.0.self_attn.q_norm.weight": (8,), "layers.0.self_attn.k_norm.weight": (8,)}
AUX = "eagle_aux_hidden_state_layer_ids"
DEEPSPEC = {  # the embeddings are read by all layers
    **BASE, **EMBEDDINGS, "fc.weight": (HIDDEN, 2 * HIDDEN), "lm_head.weight": (VOCAB, HIDDEN), **layer_shapes("layers.1.", 2 * HIDDEN),
    "layers.1.input_layernorm.weight": NORM, "layers.1.hidden_norm.weight": NORM,
}  # fmt: skip
DEEPSPEC_KEYS = {
    "num_hidden_layers": 2, "draft_num_hidden_layers": 2, "layer_types": ["full_attention"] * 2, "target_layer_ids": [0, 1],
    "ttt_length": 7, "step_loss_decay": 0.8, "num_target_layers": 3, "target_model_name_or_path": "some/Target", "draft_vocab_size": None,
}  # fmt: skip
PROPORTIONAL = torch.tensor([1.0, 1e6 ** (-2 / 16), *[0.0] * 6], dtype=torch.float64)


def gemma_layer(i):
    """Shapes of a layer of Gemma 4's, whose values are its keys; None: what other layers have."""
    prefix = f"layers.{i}."
    norms = {f"{prefix}{name}_feedforward_layernorm.weight": NORM for name in ("pre", "post")}
    norms |= {f"{prefix}self_attn.{name}_norm.weight": (16,) for name in "qk"}
    layer = layer_shapes(prefix, 2 * HIDDEN, width=16) | {f"{prefix}self_attn.v_proj.weight": None}
    return layer | norms | {f"{prefix}layer_scalar": (1,)}


NOPE, ROPE, RANK, VALUE, YARN = 6, 8, 12, 10, 4.0  # widths of latent attention, and a factor
LATENT_CONFIG = {key: value for key, value in CONFIG.items() if key != "num_key_value_heads"} | {
    "architectures": ["DeepseekV3ForCausalLMEagle3"], "model_type": "kimi_k2", "q_lora_rank": 16, "kv_lora_rank": RANK, "rope_theta": 5e4,
    "qk_nope_head_dim": NOPE, "qk_rope_head_dim": ROPE, "v_head_dim": VALUE, "n_routed_experts": 8, "first_k_dense_replace": 1,
    "moe_layer_freq": 1, "topk_method": "noaux_tc", "rope_interleave": True,
}  # fmt: skip


def latent_shapes(query_rank=True):
    """Of a head with latent attention."""
    p = "layers.0.self_attn."
    query = {
        "q_a_proj.weight": (16, 2 * HIDDEN),
        "q_a_layernorm.weight": (16,),
        "q_b_proj.weight": (HEADS * (NOPE + ROPE), 16),
    }
    shapes = {
        "kv_a_proj_with_mqa.weight": (RANK + ROPE, 2 * HIDDEN), "kv_a_layernorm.weight": (RANK,),
        "kv_b_proj.weight": (HEADS * (NOPE + VALUE), RANK), "o_proj.weight": (HIDDEN, HEADS * VALUE),
        **(query if query_rank else {"q_proj.weight": (HEADS * (NOPE + ROPE), 2 * HIDDEN)}),
    }  # fmt: skip
    rest = {name: shape for name, shape in BASE.items() if not name.startswith(p)}
    return rest | {p + name: shape for name, shape in shapes.items()}


def yarn_frequencies(theta):
    """YaRN's of width 8: factor 4, 16 original positions, at most 32 and at least 1 turns over them."""
    low, high = (8 * math.log(16 / (turns * 2 * math.pi)) / (2 * math.log(theta)) for turns in (32, 1))
    low, high = max(math.floor(low), 0), min(math.ceil(high), 7)
    out = []
    for i in range(4):
        plain, kept = theta ** (-2 * i / 8), 1 - min(max((i - low) / (high - low), 0.0), 1.0)
        out.append(plain / YARN * (1 - kept) + plain * kept)
    return torch.tensor(out, dtype=torch.float64)


LAYOUTS = {
    "yuhuili": Layout(BASE, CONFIG),
    "latent": Layout(latent_shapes(), LATENT_CONFIG, plain={"inv_freq": 5e4 ** (-torch.arange(4, dtype=torch.float64) / 4)}),
    "latent, YaRN": Layout(
        {**latent_shapes(query_rank=False), **EMBEDDINGS},
        {
            **LATENT_CONFIG, "q_lora_rank": None,
            "rope_scaling": {"type": "yarn", "factor": YARN, "original_max_position_embeddings": 16, "beta_fast": 32, "beta_slow": 1,
                             "mscale": 1.0, "mscale_all_dim": 1.0},
        },
        plain={"inv_freq": yarn_frequencies(5e4), "window": YARN},
    ),
    "DeepSpec": Layout(
        {**DEEPSPEC, **QWEN3, "layers.1.self_attn.q_norm.weight": (8,), "layers.1.self_attn.k_norm.weight": (8,)},
        {**CONFIG, **DEEPSPEC_KEYS, "architectures": ["Qwen3Eagle3Model"], "model_type": "qwen3", "rope_theta": 1e6},
        states=(1, 2), prefix="layers.0.", plain={"num_layers": 2, "theta": 1e6}, reduced=False,
    ),
    "DeepSpec, Gemma 4": Layout(
        {**DEEPSPEC, **gemma_layer(0), **gemma_layer(1)},
        {key: value for key, value in CONFIG.items() if key not in ("hidden_act", "draft_vocab_size")} | DEEPSPEC_KEYS | {
            "architectures": ["Gemma4Eagle3Model"], "model_type": "gemma4_text", "hidden_activation": "gelu_pytorch_tanh", "head_dim": 4,
            "global_head_dim": 16, "num_global_key_value_heads": KV_HEADS, "num_key_value_heads": 1, "attention_k_eq_v": True,
            "final_logit_softcapping": 3.0, "enable_moe_block": False, "rope_parameters": {
                "sliding_attention": {"rope_type": "default", "rope_theta": 10.0},
                "full_attention": {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1e6},
            },
        },
        states=(1, 2), prefix="layers.0.", plain={"num_layers": 2, "inv_freq": PROPORTIONAL}, flags={"softcap": 3.0}, reduced=False,
    ),
    "own embeddings": Layout({**BASE, **EMBEDDINGS}, CONFIG),
    "specforge ids": Layout(BASE, {**CONFIG, "eagle_config": {AUX: [0, 1, 2], "use_aux_hidden_state": True}}, states=(1, 2, -1)),
    "vllm ids": Layout(BASE, {**CONFIG, AUX: [2, 1, 3]}, states=(1, 2, -1)),
    "two states": Layout({**BASE, "fc.weight": (HIDDEN, 2 * HIDDEN)}, {**CONFIG, AUX: [0, 2]}, states=(0, 2)),
    "last hidden state": Layout(
        without(BASE, "fc.weight"), {**CONFIG, "eagle_config": {AUX: [], "use_aux_hidden_state": False}}, states=(-2,),
    ),
    "full vocabulary": Layout({**BASE, "lm_head.weight": (VOCAB, HIDDEN)}, {**CONFIG, "draft_vocab_size": VOCAB}, reduced=False),
    "target's head": Layout(without(BASE, "lm_head.weight"), {**CONFIG, "draft_vocab_size": VOCAB}, reduced=False),
    "two layers": Layout(
        {**BASE, **SECOND, "layers.1.hidden_norm.weight": NORM}, {**CONFIG, "num_hidden_layers": 2}, prefix="layers.0.",
        plain={"num_layers": 2},
    ),
    "qkv bias": Layout({**BASE, **layer_shapes("layers.0.", 2 * HIDDEN, qkv_bias=True)}, {**CONFIG, "attention_bias": True}),
    "qwen3": Layout({**BASE, **QWEN3}, {**CONFIG, "model_type": "qwen3", "rope_theta": 1e6}, plain={"theta": 1e6}),
    "SpecForge, norm_output": Layout(
        {**BASE, **{f"fc_norm.{i}.weight": NORM for i in range(3)}}, {**CONFIG, "fc_norm": True, "norm_output": True},
    ),
    "another's norm_output": Layout(
        BASE, {**CONFIG, "architectures": ["LlamaForCausalLM"], "norm_output": True}, flags={"norm_output": True},
    ),
    "recycle_normed": Layout(BASE, {**CONFIG, "norm_output": True, "recycle_normed": True}, flags={"norm_output": True}),
    "mrope": Layout(
        BASE, {**CONFIG, "rope_theta": 1e6, "rope_scaling": {"type": "mrope", "mrope_section": [1, 1, 2]}}, plain={"theta": 1e6},
    ),
    "mrope, new": Layout(
        BASE,
        {**CONFIG, "rope_parameters": {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [1, 1, 2], "mrope_interleaved": True}},
        plain={"theta": 1e6},
    ),
    "norm_before_fc": Layout(
        {**BASE, "input_norm.weight": (3 * HIDDEN,)},
        {**CONFIG, "eagle_config": {"norm_before_fc": True}, "norm_before_residual": True}, flags={"norm_before_residual": True},
    ),
    "logit_scale": Layout(BASE, {**CONFIG, "logit_scale": 0.25}, flags={"logit_scale": 0.25}),
    "a part rotated": Layout(
        {**BASE, **QWEN3}, {**CONFIG, "partial_rotary_factor": 0.5}, plain={"inv_freq": 1e4 ** (-torch.arange(2, dtype=torch.float64) / 2)},
    ),
    "rope_scaling, old": Layout(BASE, {**CONFIG, "rope_scaling": {"type": "linear", "factor": 2.0}}, plain={"inv_freq": LINEAR_2}),
    "rope_scaling, new": Layout(
        BASE,
        {**CONFIG, "rope_parameters": {"rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "low_freq_factor": 1.0,
                                       "high_freq_factor": 4.0, "original_max_position_embeddings": 16}},
        plain={"inv_freq": llama3_frequencies()},
    ),
    "rope by kind of layer": Layout(
        BASE,
        {
            **CONFIG,
            "layer_types": ["full_attention"],
            "rope_parameters": {
                "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
                "full_attention": {"rope_type": "default", "rope_theta": 1e6},
            },
        },
        plain={"theta": 1e6},
    ),
    "sliding window": Layout(
        BASE, {**CONFIG, "layer_types": ["sliding_attention"] * 3, "sliding_window": 5}, plain={"window": 5},
    ),
    "speculators": Layout({**BASE, **EMBEDDINGS}, speculators_config(), prefix="layers.0.", flags={"norm_before_residual": True}),
    "speculators, sliding window": Layout(
        {**BASE, **EMBEDDINGS}, speculators_config(layers={"layer_types": ["sliding_attention"], "sliding_window": 3}),
        prefix="layers.0.", plain={"window": 3}, flags={"norm_before_residual": True, "window_stays": True},
    ),
    "speculators, flags": Layout(
        {**BASE, **QWEN3, "input_norm.weight": (3 * HIDDEN,)},
        speculators_config(
            norm_before_residual=False, norm_before_fc=True, norm_output=True, **{AUX: [1, 2, 3]},
            layers={"model_type": "qwen3", "head_dim": 8, "rope_parameters": {"rope_type": "default", "rope_theta": 1e6}},
        ),
        states=(1, 2, -1), prefix="layers.0.", plain={"theta": 1e6}, flags={"norm_output": True},
    ),
    "p-eagle": Layout(
        {**BASE, "mask_hidden": (1, 3 * HIDDEN)}, {**CONFIG, "parallel_drafting": True, "pard_token": 7}, flags={"mask_token": 7},
    ),
    "speculators, p-eagle": Layout(
        {**BASE, **SECOND, **EMBEDDINGS, "mask_hidden": (1, 1, 3 * HIDDEN), **{f"fc_norm.{i}.weight": NORM for i in range(3)}},
        speculators_config("peagle", mask_token_id=5, fc_norm=True, layers={"num_hidden_layers": 2}), prefix="layers.0.",
        plain={"num_layers": 2}, flags={"mask_token": 5},
    ),
}  # fmt: skip


class LatentLayers(PlainLayers):
    """Attention of DeepSeek's: keys and values are made of a latent vector and of one rotated key for all heads, which are cached."""

    def rotate(self, x, position):
        """x [heads, 8]: pairs (2 j, 2 j + 1) are turned; the first parts of all come before the second ones."""
        angles = position * self.inv_freq
        a, b = x[:, 0::2], x[:, 1::2]
        return torch.cat([a * angles.cos() - b * angles.sin(), b * angles.cos() + a * angles.sin()], dim=1)

    def attention(self, i, x, position, state):
        p, scale = f"layers.{i}.self_attn.", 1 / math.sqrt(NOPE + ROPE)
        if self.window is not None:  # the factor of YaRN
            scale *= (0.1 * math.log(self.window) + 1) ** 2
        if p + "q_proj.weight" in self.w:
            q = self.linear(x, p + "q_proj")
        else:
            q = self.linear(
                rms(self.linear(x, p + "q_a_proj"), self.w[p + "q_a_layernorm.weight"], 1e-6), p + "q_b_proj"
            )
        q_plain, q_turned = q.view(self.heads, -1).split([NOPE, ROPE], dim=1)
        latent, key = self.linear(x, p + "kv_a_proj_with_mqa").split([RANK, ROPE])
        keys, values = state[i]
        keys.append(rms(latent, self.w[p + "kv_a_layernorm.weight"], 1e-6)[None])
        values.append(self.rotate(key[None], position))
        made = torch.stack([self.linear(each[0], p + "kv_b_proj").view(self.heads, -1) for each in keys])
        scores = torch.einsum("hd,thd->ht", q_plain, made[..., :NOPE])
        scores = scores + self.rotate(q_turned, position) @ torch.cat(values).T
        out = torch.einsum("ht,thd->hd", torch.softmax(scores * scale, 1), made[..., NOPE:])
        return self.linear(out.flatten(), p + "o_proj")


class PlainEagle3(PlainDrafter):
    def __init__(self, tensors, model, layout: Layout):
        super().__init__()
        self.states = layout.states
        self.norm_before_residual = layout.flags.get("norm_before_residual", False)
        self.norm_output = layout.flags.get("norm_output", False)
        self.norm_before_head = layout.flags.get("norm_before_head", True)
        self.window_stays = layout.flags.get("window_stays", False)
        self.scale, self.mask_token = layout.flags.get("logit_scale", 1.0), layout.flags.get("mask_token")
        self.softcap = layout.flags.get("softcap")
        latent = "layers.0.self_attn.kv_a_proj_with_mqa.weight" in tensors
        self.layers = (LatentLayers if latent else PlainLayers)(tensors, **layout.plain)
        w = self.w = self.layers.w
        self.table = w.get("embed_tokens.weight", model.get_input_embeddings().weight.detach().double())
        if self.layers.is_gemma:
            self.table = self.table * HIDDEN**0.5
        self.head = w.get("lm_head.weight", model.get_output_embeddings().weight.detach().double())

    def feature(self, states, p):
        return self.fuse([states[i][p] for i in self.states])

    def fuse(self, chunks):
        if "fc_norm.0.weight" in self.w:
            chunks = [rms(chunk, self.w[f"fc_norm.{i}.weight"]) for i, chunk in enumerate(chunks)]
        x = torch.cat(list(chunks))
        if "input_norm.weight" in self.w:
            x = rms(x, self.w["input_norm.weight"])
        return self.w["fc.weight"] @ x if "fc.weight" in self.w else x

    def row(self, state, token, x, position):
        for i in range(self.layers.num_layers):
            if i and self.w[f"layers.{i}.self_attn.q_proj.weight"].shape[1] == len(x):
                x = self.layers.ordinary_layer(i, x, position, state)
                continue
            normed = rms(x, self.w[f"layers.{i}.hidden_norm.weight"])
            both = torch.cat([rms(self.table[token], self.w[f"layers.{i}.input_layernorm.weight"]), normed])
            x = (normed if self.norm_before_residual else x) + self.layers.attention(i, both, position, state)
            x = (x + self.layers.mlp(i, x)) * self.w.get(f"layers.{i}.layer_scalar", 1)
        return x

    def fed_back(self, out):
        return rms(out, self.w["norm.weight"]) if self.norm_output else out

    def logits(self, out):
        logits = self.head @ (rms(out, self.w["norm.weight"]) if self.norm_before_head else out) * self.scale
        return logits if self.softcap is None else self.softcap * torch.tanh(logits / self.softcap)

    def follow(self, text, path, states):
        if self.mask_token is None or not path:
            return super().follow(text, path, states)
        path = (self.mask_token,) * len(path)
        if (text, path) not in self.known:
            state = self.layers.copy(self.follow(text, path[:-1], states)[0])
            mask = self.fuse(self.w["mask_hidden"].flatten().chunk(3))
            self.known[text, path] = state, self.row(state, self.mask_token, mask, len(text) - 2 + len(path))
        return self.known[text, path]


def table_tensors():
    ids = torch.tensor(DRAFT_IDS)
    return {
        "d2t": ids - torch.arange(DRAFT_VOCAB),
        "t2d": torch.zeros(VOCAB, dtype=torch.bool).index_fill(0, ids, True),
    }


def write(folder, name: str, **config):
    layout = LAYOUTS[name]
    tensors = weights(layout.shapes)
    named = {key.replace("layers.0.", layout.prefix): tensor for key, tensor in tensors.items()}
    if layout.reduced:
        named |= table_tensors()
    return tensors, save_checkpoint(folder, named, {**layout.config, **config})
