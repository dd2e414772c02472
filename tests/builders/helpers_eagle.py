"""EAGLE heads once more, in plain float64, a token at a time; checkpoints to load; and what a generator did, recorded."""

from __future__ import annotations

import contextlib
import itertools
import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from transformers import LogitsProcessor, LogitsProcessorList

from hf_specdec.candidate_generators.growing.grower import GrowsDrafts
from hf_specdec.candidate_generators.growing.own_cache import OwnsCache

HIDDEN, INNER, HEADS, KV_HEADS, WIDTH = 32, 48, 4, 2, 8
EPS = 1e-5


# ---- checkpoints ----------------------------------------------------------------------------------------------------


def weights(shapes: Mapping[str, tuple[int, ...] | None], seed: int = 0) -> dict[str, torch.Tensor]:
    """Random tensors; norms are near one, matrices keep the size of what they are applied to."""
    generator = torch.Generator().manual_seed(seed)
    out = {}
    for name, shape in shapes.items():
        if shape is None:
            continue
        noise = torch.randn(shape, generator=generator)
        scale = 0.8 / math.sqrt(shape[-1])
        out[name] = (
            1 + 0.3 * noise if "norm" in name or "scalar" in name else noise if "embed" in name else scale * noise
        )
    return out


def layer_shapes(
    prefix: str, input_width: int = HIDDEN, qkv_bias: bool = False, hidden: int = HIDDEN, width: int = WIDTH
):
    """Names and shapes of a decoder layer without its norms before attention."""
    q, kv = HEADS * width, KV_HEADS * width
    shapes = {
        "self_attn.q_proj.weight": (q, input_width), "self_attn.k_proj.weight": (kv, input_width),
        "self_attn.v_proj.weight": (kv, input_width), "self_attn.o_proj.weight": (hidden, q),
        "mlp.gate_proj.weight": (INNER, hidden), "mlp.up_proj.weight": (INNER, hidden),
        "mlp.down_proj.weight": (hidden, INNER), "post_attention_layernorm.weight": (hidden,),
    }  # fmt: skip
    if qkv_bias:
        shapes |= {"self_attn.q_proj.bias": (q,), "self_attn.k_proj.bias": (kv,), "self_attn.v_proj.bias": (kv,)}
    return {prefix + name: shape for name, shape in shapes.items()}


def save_checkpoint(
    folder: Path, tensors: dict[str, torch.Tensor], config: dict, file: str = "model.safetensors"
) -> str:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    if file.endswith(".bin"):
        torch.save(tensors, folder / file)
    else:
        save_file(tensors, folder / file)
    return str(folder)


# ---- plain heads ----------------------------------------------------------------------------------------------------


def rms(x, weight, eps=EPS):
    return x / torch.sqrt((x * x).mean(-1, keepdim=True) + eps) * weight


class PlainLayers:
    """Decoder layers fed one token at a time. `state` is a list of (keys, values) per layer, each a list of [kv heads, D]."""

    def __init__(
        self, tensors, num_layers=1, theta=10000.0, inv_freq=None, window=None, heads=HEADS, kv_heads=KV_HEADS
    ):
        self.w = {name: tensor.to(torch.float64) for name, tensor in tensors.items()}
        self.is_gemma = "layers.0.layer_scalar" in self.w  # Gemma 4's layers
        self.num_layers, self.heads, self.kv_heads, self.window = num_layers, heads, kv_heads, window
        self.sinks = 0  # how many of the first keys are seen besides those in the window
        self.besides = 0  # how many of the newest keys are seen besides those in the window
        self.width = self.w["layers.0.self_attn.o_proj.weight"].shape[1] // heads
        steps = torch.arange(self.width // 2, dtype=torch.float64)
        self.inv_freq = theta ** (-2 * steps / self.width) if inv_freq is None else inv_freq

    def new_state(self):
        return [([], []) for _ in range(self.num_layers)]

    def copy(self, state):
        return [(list(keys), list(values)) for keys, values in state]

    def linear(self, x, name):
        out = self.w[name + ".weight"] @ x
        return out + self.w[name + ".bias"] if name + ".bias" in self.w else out

    def rotate(self, x, position):
        angles = position * self.inv_freq
        half = len(self.inv_freq)  # of what is rotated
        first, second, still = x[:, :half], x[:, half : 2 * half], x[:, 2 * half :]
        return torch.cat(
            [first * angles.cos() - second * angles.sin(), second * angles.cos() + first * angles.sin(), still], dim=1
        )

    def attention(self, i, x, position, state):
        prefix = f"layers.{i}.self_attn."
        q = self.linear(x, prefix + "q_proj").view(self.heads, self.width)
        k = self.linear(x, prefix + "k_proj").view(self.kv_heads, self.width)
        v = (
            self.linear(x, prefix + "v_proj").view(self.kv_heads, self.width)
            if prefix + "v_proj.weight" in self.w
            else k
        )
        v = rms(v, 1) if self.is_gemma else v
        if prefix + "q_norm.weight" in self.w:
            q, k = rms(q, self.w[prefix + "q_norm.weight"]), rms(k, self.w[prefix + "k_norm.weight"])
        keys, values = state[i]
        keys.append(self.rotate(k, position))
        values.append(v)
        oldest = len(keys) - self.window - self.besides if self.window else 0
        seen = [i for i in range(len(keys)) if i >= oldest or i < self.sinks]
        grouped = self.rotate(q, position).view(self.kv_heads, -1, self.width)  # the queries of each key head
        seen_keys, seen_values = (torch.stack([states[i] for i in seen], dim=1) for states in (keys, values))
        scores = grouped @ seen_keys.mT / (1 if self.is_gemma else math.sqrt(self.width))
        out = torch.softmax(scores, -1) @ seen_values
        out = self.linear(out.flatten(), prefix + "o_proj")
        return rms(out, self.w[f"layers.{i}.post_attention_layernorm.weight"]) if self.is_gemma else out

    def mlp(self, i, x):
        before = "pre_feedforward" if self.is_gemma else "post_attention"
        x = rms(x, self.w[f"layers.{i}.{before}_layernorm.weight"])
        prefix = f"layers.{i}.mlp."
        gate = self.linear(x, prefix + "gate_proj")
        if self.is_gemma:
            act = gate / 2 * (1 + torch.tanh((2 / math.pi) ** 0.5 * (gate + 0.044715 * gate**3)))
        else:
            act = gate * torch.sigmoid(gate)
        out = self.linear(act * self.linear(x, prefix + "up_proj"), prefix + "down_proj")
        return rms(out, self.w[f"layers.{i}.post_feedforward_layernorm.weight"]) if self.is_gemma else out

    def ordinary_layer(self, i, x, position, state):
        norm = f"layers.{i}.input_layernorm.weight"
        x = x + self.attention(i, rms(x, self.w[norm]) if norm in self.w else x, position, state)
        return x + self.mlp(i, x)


class PlainDrafter:
    """What a head says after a text and a path of drafts. Rows do not see later ones, so each is computed once per text.

    Subclasses have `feature(states, p)`, `row(state, token, feature, position)` and `logits(output)`.
    """

    layers: PlainLayers
    window_stays = False  # while drafting, at the text's end

    def __init__(self):
        self.known = {}  # (text, path) → keys and values, and the output, behind it

    def read(self, text: tuple[int, ...], states):
        """Keys and values, and the last output, behind the whole text; `states` are the target's at its tokens."""
        if (text, ()) not in self.known:
            if len(text) == 1:
                return self.layers.new_state(), None
            state, _ = self.read(text[:-1], states)
            state, p = self.layers.copy(state), len(text) - 2
            self.known[text, ()] = state, self.row(state, text[-1], self.feature(states, p), p)
        return self.known[text, ()]

    def follow(self, text, path, states):
        """Keys and values, and the last output, behind the text and the path: guesses take the place of features."""
        if not path:
            return self.read(text, states)
        if (text, path) not in self.known:
            state, out = self.follow(text, path[:-1], states)
            state = self.layers.copy(state)
            self.layers.besides = len(path) if self.window_stays else 0
            out = self.row(state, path[-1], self.fed_back(out), len(text) - 2 + len(path))
            self.layers.besides = 0
            self.known[text, path] = state, out
        return self.known[text, path]

    def draft_logits(self, text, path, states):
        return self.logits(self.follow(text, tuple(path), states)[1])

    def fed_back(self, out):
        return out


# ---- recording ------------------------------------------------------------------------------------------------------


@dataclass
class Recording:
    """Everything a generator computed: (text, path, logits) per node, and its cache when a text had just been read."""

    logits: list[tuple[tuple[int, ...], tuple[int, ...], torch.Tensor]] = field(default_factory=list)
    caches: list[tuple[tuple[int, ...], list[tuple[torch.Tensor, torch.Tensor]]]] = field(default_factory=list)
    trees: list = field(default_factory=list)

    def emitted(self) -> list[int]:
        """Tokens per round, of all texts."""
        growing: list[list[tuple[int, ...]]] = []
        for text, _ in self.caches:
            for texts in growing:
                if len(text) > len(texts[-1]) and text[: len(texts[-1])] == texts[-1]:
                    texts.append(text)
                    break
            else:
                growing.append([text])
        return [len(b) - len(a) for texts in growing for a, b in itertools.pairwise(texts)]


@contextlib.contextmanager
def recorded(generator_class):
    """Inside, generators of this class write down what they do, depth by depth."""
    recording, frontier = Recording(), []
    root_logits, expand, propose = GrowsDrafts.root_logits, generator_class.expand, generator_class.propose

    def recording_root(self, sequences, limits):
        logits = root_logits(self, sequences, limits)
        frontier[:] = [[()] for _ in sequences]
        for seq, row in zip(sequences, logits, strict=True):
            text = tuple(seq.tokens)
            recording.logits.append((text, (), row.clone()))
            recording.caches.append((text, self.cache.read(seq.id)))
        return logits

    def recording_expand(self, level):
        logits = expand(self, level)
        before = [frontier[i] for i in level.kept]
        frontier[:] = [
            [paths[parent] + (token,) for parent, token in zip(parents, tokens, strict=True)]
            for paths, parents, tokens in zip(before, level.parents.tolist(), level.tokens.tolist(), strict=True)
        ]
        for i, paths, rows in zip(level.rows, frontier, logits, strict=True):
            text = tuple(self.sequences[i].tokens)
            for path, row in zip(paths, rows.expand(len(paths), -1), strict=True):
                recording.logits.append((text, path, row.clone()))
        return logits

    def recording_propose(self, sequences, limits):
        trees = propose(self, sequences, limits)
        recording.trees.append(([tuple(seq.tokens) for seq in sequences], trees))
        return trees

    GrowsDrafts.root_logits, generator_class.expand = recording_root, recording_expand
    generator_class.propose = recording_propose
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(OwnsCache, "at_once", GrowsDrafts.at_once)
            yield recording
    finally:
        GrowsDrafts.root_logits, generator_class.expand = root_logits, expand
        generator_class.propose = propose


class Script(LogitsProcessor):
    """Says at most places which token comes next, to target and drafter alike; at the others they are on their own.

    So drafts are accepted up to the next such place, where a random head is almost always wrong.
    """

    def __init__(self, tokens: list[int]):
        self.tokens = tokens

    def __call__(self, input_ids, scores):
        place = input_ids.shape[1]
        if place % 20 in (1, 8, 14, 15, 17):  # between them: runs of 0, 1, 3 and 6
            return scores
        scores = scores.clone()
        scores[:, self.tokens[place % len(self.tokens)]] += 1000.0
        return scores


def scripted(tokens: Iterable[int] = range(4, 40, 3)) -> LogitsProcessorList:
    """A script of these tokens, over and over, as an argument of generate()."""
    return LogitsProcessorList([Script(list(tokens))])


def hidden_states(model, texts) -> dict[tuple[int, ...], list[torch.Tensor]]:
    """The target's hidden states (embeddings, behind 1 layer, ..; the last one normed) of each text, [n, H] float64 each,
    and, under index -1, the last layer's output before the norm."""
    found = {}
    for text in sorted(texts, key=len, reverse=True):
        longer = next((known for known in found if known[: len(text)] == text), None)
        if longer is not None:
            found[text] = found[longer]
            continue
        raw = []
        handle = model.model.layers[-1].register_forward_hook(lambda module, args, output, raw=raw: raw.append(output))
        with torch.no_grad():
            out = model.model(torch.tensor([text]), output_hidden_states=True, use_cache=False)
        handle.remove()
        last = raw[0][0] if isinstance(raw[0], tuple) else raw[0]
        found[text] = [h[0].to(torch.float64) for h in (*out.hidden_states, last)]
    return found


def check_against(plain: PlainDrafter, recording: Recording, model, tolerance: float = 1e-4) -> None:
    """Every recorded logit and cached key and value is what the plain head says."""
    states = hidden_states(model, {text for text, _, _ in recording.logits})
    for text, path, logits in recording.logits:
        expected = plain.draft_logits(text, path, states[text])
        torch.testing.assert_close(logits.to(torch.float64), expected, atol=tolerance, rtol=tolerance)
    for text, layers in recording.caches:
        state, _ = plain.read(text, states[text])
        for (keys, values), (plain_keys, plain_values) in zip(layers, state, strict=True):
            for found, expected in ((keys, plain_keys), (values, plain_values)):
                assert len(found) == len(text) - 1
                expected = torch.stack(expected)
                if 2 * len(plain.layers.inv_freq) < plain.layers.width:  # keys are kept in another order of dimensions
                    found, expected = found.sort().values, expected.sort().values
                torch.testing.assert_close(found.to(torch.float64), expected, atol=tolerance, rtol=tolerance)
