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
LAYOUTS = {
    "yuhuili": Layout(BASE, CONFIG),
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


class PlainEagle3(PlainDrafter):
    def __init__(self, tensors, model, layout: Layout):
        super().__init__()
        self.states = layout.states
        self.norm_before_residual = layout.flags.get("norm_before_residual", False)
        self.norm_output = layout.flags.get("norm_output", False)
        self.norm_before_head = layout.flags.get("norm_before_head", True)
        self.window_stays = layout.flags.get("window_stays", False)
        self.scale, self.mask_token = layout.flags.get("logit_scale", 1.0), layout.flags.get("mask_token")
        self.layers = PlainLayers(tensors, **layout.plain)
        w = self.w = self.layers.w
        self.table = w.get("embed_tokens.weight", model.get_input_embeddings().weight.detach().double())
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

    def row(self, state, token, hidden, position):
        normed = rms(hidden, self.w["layers.0.hidden_norm.weight"])
        both = torch.cat([rms(self.table[token], self.w["layers.0.input_layernorm.weight"]), normed])
        x = (normed if self.norm_before_residual else hidden) + self.layers.attention(0, both, position, state)
        x = x + self.layers.mlp(0, x)
        for i in range(1, self.layers.num_layers):
            x = self.layers.ordinary_layer(i, x, position, state)
        return x

    def fed_back(self, out):
        return rms(out, self.w["norm.weight"]) if self.norm_output else out

    def logits(self, out):
        return self.head @ (rms(out, self.w["norm.weight"]) if self.norm_before_head else out) * self.scale

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
