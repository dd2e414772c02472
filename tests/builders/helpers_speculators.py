"""Speculator checkpoints with random weights, exactly as they are on the Hub, and their formulas in plain float64."""

from __future__ import annotations

import copy
import json
import math
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import save_file

from hf_specdec import integration

HIDDEN = 32  # of tests/builders/oracle.py's model


@dataclass
class Stored:
    """A checkpoint on disk, and what is in it."""

    folder: Path
    config: dict
    weights: dict[str, torch.Tensor]

    def rewrite(self, **changes) -> Stored:
        """Write it again; `None` for a configuration key removes it."""
        config = {k: v for k, v in (self.config | changes).items() if v is not None}
        self.folder.mkdir(parents=True, exist_ok=True)
        (self.folder / "config.json").write_text(json.dumps(config))
        save_file({k: v.contiguous().clone() for k, v in self.weights.items()}, self.folder / "model.safetensors")
        return Stored(self.folder, config, self.weights)


def random_weights(shapes: dict[str, tuple[int, ...]], seed: int) -> dict[str, torch.Tensor]:
    """Normal numbers; norms near one."""
    generator = torch.Generator().manual_seed(seed)
    out = {}
    for name, shape in shapes.items():
        noise = torch.randn(shape, generator=generator)
        out[name] = 1 + 0.2 * noise if len(shape) == 1 and name.endswith("weight") else 0.5 * noise
    return out


def mlp_checkpoint(
    folder: Path, n_predict=3, inner=24, vocab=61, hidden=HIDDEN, tied=False, scale_input=False, repeat=False, prefix="speculator.",
    seed=0, **config,
) -> Stored:  # fmt: skip
    """IBM's layout. Tied: each shared tensor once, or with `repeat` under the name of every step."""
    width = inner or hidden
    shapes = {}
    for i in range(n_predict):
        shapes |= {f"emb.{i}.weight": (vocab, width), f"proj.{i}.weight": (width, width if i else hidden)}
        shapes |= {f"head.{i}.weight": (vocab, width), f"ln.{i}.weight": (width,), f"ln.{i}.bias": (width,)}
    weights = random_weights(shapes, seed)
    if tied:
        for name in list(weights):
            kind, step, rest = name.split(".")
            first = min(int(step), 1) if kind == "proj" else 0
            weights[name] = weights[f"{kind}.{first}.{rest}"]
            if not repeat and int(step) != first:
                del weights[name]
    values = {
        "architectures": ["MLPSpeculatorPreTrainedModel"], "model_type": "mlp_speculator", "vocab_size": vocab, "emb_dim": hidden,
        "inner_dim": inner, "n_predict": n_predict, "top_k_tokens_per_head": [4, 3, 2, 2, 2, 2, 2][:n_predict], "n_candidates": 3,
        "tie_weights": tied, "scale_input": scale_input, "torch_dtype": "float32", "transformers_version": "4.41.0",
    }  # fmt: skip
    return Stored(folder, values | config, {prefix + k: v for k, v in weights.items()}).rewrite()


def lstm_checkpoint(
    folder: Path, n_predict=3, width=24, vocab=61, hidden=HIDDEN, tie_embs=True, scale_input=True, repeat=False, prefix="", seed=0, **config
) -> Stored:  # fmt: skip
    """Snowflake's sum_lstm. With tied embeddings and `repeat`, each gate's copy is there too, and every head."""
    shapes: dict[str, tuple[int, ...]] = {f"head.{i}.weight": (vocab, width) for i in range(n_predict if repeat else 1)}
    for gate in ("forget", "input", "cell", "output"):
        shapes |= {f"{gate}_proj.0.weight": (width, hidden), f"{gate}_proj.1.weight": (width, width)}
        if gate == "forget" or repeat or not tie_embs:
            shapes[f"{gate}_emb.0.weight"] = (vocab, width)
    shapes |= {f"{norm}_ln.0.{part}": (width,) for norm in ("cell", "state") for part in ("weight", "bias")}
    weights = random_weights(shapes, seed)
    for name in weights:
        if name.startswith("head."):
            weights[name] = weights["head.0.weight"]
        if tie_embs and name.endswith("_emb.0.weight"):
            weights[name] = weights["forget_emb.0.weight"]
    values = {
        "architectures": ["ArcticLSTMSpeculatorPreTrainedModel"], "model_type": "mlp_speculator", "base_model_archs": ["LlamaForCausalLM"],
        "method": "sum_lstm", "vocab_size": vocab, "input_hidden_dim": hidden, "inner_dim": str(width), "emb_dim": str(width),
        "proj_dim": str(width), "n_predict": n_predict, "tie_weights": True, "tie_lstm_embs": tie_embs, "scale_input": scale_input,
    }  # fmt: skip
    return Stored(folder, values | config, {prefix + k: v for k, v in weights.items()}).rewrite()


def rnn_checkpoint(
    folder: Path, n_predict=3, emb=(24,), proj=(24,), inner=(24,), vocab=61, hidden=HIDDEN, tied=True, scale_input=False, seed=0, **config
) -> Stored:  # fmt: skip
    """Snowflake's sum_rnn: every part a stack of layers; tied ones are stored once."""
    shapes: dict[str, tuple[int, ...]] = {}
    for i in range(n_predict):
        if not tied or i == 0:
            shapes[f"emb.{i}.0.weight"] = (vocab, emb[0])
            shapes |= _stack(f"emb.{i}", emb)
            shapes |= {f"ln.{i}.0.{part}": (inner[0],) for part in ("weight", "bias")}
            for k in range(1, len(inner)):
                shapes[f"ln.{i}.{3 * k - 1}.weight"] = (inner[k], inner[k - 1])
                shapes |= {f"ln.{i}.{3 * k}.{part}": (inner[k],) for part in ("weight", "bias")}
            shapes[f"head.{i}.weight"] = (vocab, inner[-1])
        if not tied or i <= 1:
            shapes[f"proj.{i}.0.weight"] = (proj[0], inner[-1] if i else hidden)
            shapes |= _stack(f"proj.{i}", proj)
    values = {
        "architectures": ["ArcticLSTMSpeculatorPreTrainedModel"], "model_type": "mlp_speculator", "method": "sum_rnn",
        "vocab_size": vocab, "input_hidden_dim": hidden, "inner_dim": ".".join(map(str, inner)), "emb_dim": ".".join(map(str, emb)),
        "proj_dim": list(proj), "n_predict": n_predict, "tie_weights": tied, "tie_lstm_embs": False, "scale_input": scale_input,
    }  # fmt: skip
    return Stored(folder, values | config, random_weights(shapes, seed)).rewrite()


def _stack(name: str, sizes: tuple[int, ...]) -> dict[str, tuple[int, ...]]:
    """Norm, activation, linear for each width after the first."""
    shapes: dict[str, tuple[int, ...]] = {}
    for k in range(1, len(sizes)):
        shapes |= {f"{name}.{3 * k - 2}.{part}": (sizes[k],) for part in ("weight", "bias")}
        shapes[f"{name}.{3 * k}.weight"] = (sizes[k], sizes[k - 1])
    return shapes


# ---- the formulas ---------------------------------------------------------------------------------------------------


def gelu(x):
    return x * (1 + torch.erf(x / math.sqrt(2))) / 2


def norm(x, weight=None, bias=None):
    x = x / torch.sqrt((x**2).mean() + 1e-6)
    return x if weight is None else x * weight + bias


def reference(stored: Stored, hidden: torch.Tensor, tokens: list[int]) -> torch.Tensor:
    """Logits [V] after `tokens` (the text's newest, then drafted ones), from the hidden state [H] the first one came from."""
    w = {name.removeprefix("speculator."): tensor.double() for name, tensor in stored.weights.items()}
    config, n = stored.config, stored.config["n_predict"]
    first = {"mlp": mlp_step, "sum_rnn": rnn_step, "sum_lstm": lstm_step}
    step = first["mlp" if "emb.0.weight" in w else config["method"]]
    width = len(next(t for name, t in w.items() if name.startswith(("ln.0.", "state_ln.0."))))
    state_weight = 0.5 ** (0.5 / n)
    scale = math.sqrt((1 - state_weight**2) * (width / 2)) / state_weight
    state, cell = hidden.double(), None
    if config["scale_input"]:
        state = norm(state) / math.sqrt(2)
    for i, token in enumerate(tokens):
        state, cell = step(w, config, i, state, cell, token, scale)
    head = 0 if config["tie_weights"] else len(tokens) - 1
    return w[f"head.{head}.weight"] @ state


def mlp_step(w, config, i, state, cell, token, scale):
    one, two = (0, min(i, 1)) if config["tie_weights"] else (i, i)
    mixed = w[f"proj.{two}.weight"] @ state + scale * w[f"emb.{one}.weight"][token]
    return gelu(norm(mixed, w[f"ln.{one}.weight"], w[f"ln.{one}.bias"])), None


def rnn_step(w, config, i, state, cell, token, scale):
    one, two = (0, min(i, 1)) if config["tie_weights"] else (i, i)

    def stack(name, x):
        k = 1
        while f"{name}.{3 * k}.weight" in w:
            x = w[f"{name}.{3 * k}.weight"] @ gelu(
                norm(x, w[f"{name}.{3 * k - 2}.weight"], w[f"{name}.{3 * k - 2}.bias"])
            )
            k += 1
        return x

    mixed = stack(f"proj.{two}", w[f"proj.{two}.0.weight"] @ state) + scale * stack(
        f"emb.{one}", w[f"emb.{one}.0.weight"][token]
    )
    x, k = norm(mixed, w[f"ln.{one}.0.weight"], w[f"ln.{one}.0.bias"]), 1
    while f"ln.{one}.{3 * k}.weight" in w:
        x = w[f"ln.{one}.{3 * k - 1}.weight"] @ gelu(x)
        x = norm(x, w[f"ln.{one}.{3 * k}.weight"], w[f"ln.{one}.{3 * k}.bias"])
        k += 1
    return gelu(x), None


def lstm_step(w, config, i, state, cell, token, scale):
    def gate(name):
        embedded = w[f"{'forget' if config['tie_lstm_embs'] else name}_emb.0.weight"][token]
        return w[f"{name}_proj.{min(i, 1)}.weight"] @ state + scale * embedded

    candidate = gelu(norm(gate("cell"), w["cell_ln.0.weight"], w["cell_ln.0.bias"]))
    cell = torch.sigmoid(gate("forget")) * (0 if cell is None else cell) + torch.sigmoid(gate("input")) * candidate
    out = torch.sigmoid(gate("output")) * gelu(norm(cell, w["state_ln.0.weight"], w["state_ln.0.bias"]))
    return out, cell


# ---- drafts, as they were made --------------------------------------------------------------------------------------


class DraftRecorder:
    """Wraps the generator of a decoder: which text, which drafted path, which logits."""

    def __init__(self, generator):
        self.seen: list[tuple[list[int], list[int], torch.Tensor]] = []
        root_logits, expand = generator.root_logits, generator.expand

        def recorded_root(sequences, limits):
            logits = root_logits(sequences, limits)
            self.texts, self.paths = [list(seq.tokens) for seq in sequences], [[[]] for _ in sequences]
            self.seen += [(text, [], row.clone()) for text, row in zip(self.texts, logits, strict=True)]
            return logits

        def recorded_expand(level):
            logits = expand(level)
            texts, before = [self.texts[k] for k in level.kept], [self.paths[k] for k in level.kept]
            tokens, parents = level.tokens.tolist(), level.parents.tolist()
            paths = [
                [before[r][parent] + [token] for token, parent in zip(tokens[r], parents[r], strict=True)]
                for r in range(len(texts))
            ]
            for text, row, own in zip(texts, paths, logits, strict=True):
                self.seen += [(text, path, logit.clone()) for path, logit in zip(row, own, strict=True)]
            self.texts, self.paths = texts, paths
            return logits

        generator.root_logits, generator.expand = recorded_root, recorded_expand


def recorded(model, config) -> DraftRecorder:
    """A recorder on the generator that `model.generate(.., speculative_config=config)` will use."""
    from hf_specdec.candidate_generators import parse_config

    return DraftRecorder(integration.get_decoder(model, parse_config(config)).generator)


class TrueHidden:
    """The target's last hidden state behind a text, by a plain float64 forward of its copy."""

    def __init__(self, model):
        self.model, self.known = copy.deepcopy(model).double(), {}

    def __call__(self, text: list[int]) -> torch.Tensor:
        key = tuple(text)
        if key not in self.known:
            with torch.no_grad():
                output = self.model(torch.tensor([text]), output_hidden_states=True, use_cache=False)
            self.known[key] = output.hidden_states[-1][0, -1]
        return self.known[key]


def largest_error(recorder: DraftRecorder, stored: Stored, model) -> float:
    """Largest difference of recorded logits from the formula."""
    true = TrueHidden(model)
    return max(
        float((logits.double() - reference(stored, true(text[:-1]), [text[-1], *path])).abs().max())
        for text, path, logits in recorder.seen
    )
