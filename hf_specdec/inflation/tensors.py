"""Make a model bigger without changing its function: real text at the cost of a real model.

Every dimension can grow: layers (identity ones: their output projections are zero), width (zero-padded residual stream), MLP, query
and key-value heads, head size and vocabulary. New weights are small random numbers wherever they do not affect the output, so that the
work is real. Logits agree up to rounding in the chosen dtype.
"""

from __future__ import annotations

import copy
import json
import math
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedModel

DIMENSIONS = (
    "hidden_size", "num_hidden_layers", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim",
)  # fmt: skip
QUERY_HEADS, KEY_HEADS = "num_attention_heads", "num_key_value_heads"
FILL_STD = 0.02
ROPE_TYPES_THAT_GROW = ("default", "linear", "llama3")
PRESETS = {
    "100m": (768, 14, 2048, 12, 4, 64), "300m": (1024, 20, 4096, 16, 8, 64), "1b": (2048, 16, 8192, 32, 8, 64),
    "8b": (4096, 32, 14336, 32, 8, 128),
}  # fmt: skip


def copies_of_a_head(old: dict[str, int], new: dict[str, int], many: str = QUERY_HEADS, few: str = KEY_HEADS) -> int:
    """How many new heads replace one of the `few` (key-value) heads: several if the new groups of `many` (query) heads are smaller."""
    return math.ceil(old[many] // old[few] / (new[many] // new[few]))


def check_growth(old: dict[str, int], new: dict[str, int], groups: Any, whose: str) -> None:
    """Raise `ValueError` if a size shrinks, or the new heads cannot hold the old ones, `whose` they are. `groups`: see `Inflation`."""
    for name in old:
        if new[name] < old[name]:
            raise ValueError(f"{name}={new[name]} is smaller than {whose} {old[name]}: give at least {old[name]}.")
    for many, few, few_heads, many_heads in groups:
        if new[many] % new[few]:
            raise ValueError(f"{many}={new[many]} must be a multiple of {few}={new[few]}: change one of them.")
        needed = old[few] * copies_of_a_head(old, new, many, few)
        if new[few] < needed:
            raise ValueError(
                f"{new[few]} {few_heads} cannot hold {whose} groups of {old[many] // old[few]} {many_heads}: give {few} >= {needed} or "
                f"more {many}."
            )
    if new["head_dim"] % (size := old["head_dim"]):
        raise ValueError(
            f"head_dim={new['head_dim']} must be a multiple of {whose} {size}, so that its rotary frequencies are among the new ones: "
            f"give {2 * size}, {3 * size}, ..."
        )


def head_places(
    old: dict[str, int], new: dict[str, int], many: str = QUERY_HEADS, few: str = KEY_HEADS
) -> tuple[list[int], list[int]]:
    """The new index of each of the old `many` (query) heads; and, for the first new `few` (key-value) heads, the old one each copies."""
    group, group_new, copies = old[many] // old[few], new[many] // new[few], copies_of_a_head(old, new, many, few)
    places = [
        (head // group * copies + head % group // group_new) * group_new + head % group % group_new
        for head in range(old[many])
    ]
    return places, [head // copies for head in range(old[few] * copies)]


def layer_places(old: int, new: int) -> list[int]:
    """The index among `new` layers of each of the `old` ones."""
    return [i * new // old for i in range(old)]


class Inflation:
    """One inflation: the places of the old units, and the tensors of the new model.

    Attributes:
        architectures: the classes of models that it knows.
        dimensions: the sizes in their configurations that can grow.
        groups: sizes of which the first is a multiple of the second, and what they count in errors.
        norm_offset: what the class's norms of the residual stream and of heads add to their weights.
        eps_scale: the new epsilon of all norms divided by the old one.
        residual_scale: the new residual stream divided by the old one, in the old channels.
    """

    architectures: tuple[str, ...] = ("LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM")
    dimensions: tuple[str, ...] = DIMENSIONS
    groups: tuple[tuple[str, str, str, str], ...] = ((QUERY_HEADS, KEY_HEADS, "key-value heads", "query heads"),)
    norm_offset = 0.0

    def __init__(self, model: Any, old: dict[str, int], new: dict[str, int], dtype: torch.dtype, seed: int):
        self.model, self.old, self.new, self.dtype = model, old, new, dtype
        self.generator = torch.Generator(torch.get_default_device()).manual_seed(seed)
        self.eps_scale, self.residual_scale = old["hidden_size"] / new["hidden_size"], 1.0
        self.place_heads()
        self.layer_places = layer_places(old["num_hidden_layers"], new["num_hidden_layers"])

    @property
    def rotary_share(self) -> float:
        """r/d, the share of a head that is rotated: its first channels."""
        return 1.0

    def place_heads(self) -> None:
        """Choose the new rows of q, k and v in which the old rows are placed.

        `q_rows`: new row of each old query row. `kv_rows`, `kv_sources`: new key-value rows and the old rows they copy.
        Rotary pairs (i, i + r/2) of an old head go to (m i, m i + m r/2) with m = d'/d: the same frequency.
        """
        d, d_new = self.old["head_dim"], self.new["head_dim"]
        m, r = d_new // d, int(d * self.rotary_share)
        self.q_heads, sources = head_places(self.old, self.new)
        self.kv_heads = list(range(len(sources)))
        pairs = torch.arange(r // 2) * m
        self.inside = torch.cat([pairs, pairs + m * r // 2, torch.arange(d - r) + m * r])
        self.q_rows = torch.cat([head * d_new + self.inside for head in self.q_heads])
        self.kv_rows = torch.cat([head * d_new + self.inside for head in self.kv_heads])
        self.kv_sources = torch.cat([head * d + torch.arange(d) for head in sources])

    def build(self) -> PreTrainedModel:
        """The bigger model, in the source's mode (training or evaluation)."""
        config = self.make_config()
        with torch.device("meta"):
            big = type(self.model)(config)
        big.model.rotary_emb = type(self.model.model.rotary_emb)(config=config)
        h = self.old["hidden_size"]
        big.model.embed_tokens.weight = self.parameter(self.padded(self.model.model.embed_tokens.weight))
        tied_scale = self.residual_scale if config.tie_word_embeddings else 1.0
        big.model.norm.weight = self.residual_norm(self.model.model.norm.weight, 1 / tied_scale)
        sources = dict(zip(self.layer_places, self.model.model.layers, strict=True))
        for i, layer in enumerate(big.model.layers):
            self.fill_layer(layer, sources.get(i))
        if config.tie_word_embeddings:
            big.tie_weights()
        else:
            head = self.random(config.vocab_size, config.hidden_size)
            head[:, :h] = self.model.lm_head.weight.detach()
            big.lm_head.weight = self.parameter(head)
        big.generation_config = copy.deepcopy(self.model.generation_config)
        return big.train(self.model.training)

    def make_config(self):
        """The source's configuration with the new sizes; the norms' epsilon is scaled as their mean squares are."""
        config = copy.deepcopy(self.model.config)
        for name, size in self.new.items():
            setattr(config, name, size)
        config.rms_norm_eps = config.rms_norm_eps * self.eps_scale
        config.dtype = self.dtype
        if getattr(config, "layer_types", None):
            kinds = dict(zip(self.layer_places, self.model.config.layer_types, strict=True))
            config.layer_types = [
                kinds.get(i) or kinds[max(p for p in kinds if p < i)] for i in range(self.new["num_hidden_layers"])
            ]
        return config

    def random(self, *shape: int) -> Tensor:
        """Small normal numbers of `shape`, for weights that do not affect the logits."""
        return torch.empty(shape, dtype=self.dtype).normal_(std=FILL_STD, generator=self.generator)

    def zeros(self, *shape: int) -> Tensor:
        """Zeros of `shape` in the new dtype."""
        return torch.zeros(shape, dtype=self.dtype)

    def parameter(self, tensor: Tensor) -> nn.Parameter:
        """The tensor in the new dtype, as a parameter of the same shape."""
        return nn.Parameter(tensor.to(self.dtype))

    def placed(self, out: Tensor, old: Tensor, rows: Tensor, columns: Tensor, cleared: Any = ()) -> Tensor:
        """`out` with the old weights at these rows and columns; the `cleared` rows are zero elsewhere."""
        out[torch.as_tensor(cleared, dtype=torch.long)] = 0
        out[rows[:, None], columns] = old.to(self.dtype)
        return out

    def padded(self, weight: Tensor) -> Tensor:
        """[V, H] -> [V, H'], zero where new."""
        out = self.zeros(len(weight), self.new["hidden_size"])
        out[:, : weight.shape[1]] = weight.detach().float() * self.residual_scale
        return out

    def residual_norm(self, weight: Tensor | None, scale: float = 1.0) -> nn.Parameter:
        """RMSNorm weight [H'], times `scale`: the mean square over H' is H/H' of the old one; weight * sqrt(H/H') undoes it."""
        out = torch.ones(self.new["hidden_size"], dtype=torch.float32)
        if weight is not None:
            out[: len(weight)] = weight.detach().float() + self.norm_offset
        grown = math.sqrt(self.old["hidden_size"] / self.new["hidden_size"])
        return self.parameter(out * grown * scale - self.norm_offset)

    def head_norm(self, weight: Tensor | None, scale: float) -> nn.Parameter:
        """Per-head RMSNorm weight [d'] with the old entries at their rotary places, times `scale`."""
        out = torch.ones(self.new["head_dim"], dtype=torch.float32)
        if weight is not None:
            out[self.inside] = (weight.detach().float() + self.norm_offset) * scale
        return self.parameter(out - self.norm_offset)

    def fill_layer(self, layer: Any, source: Any) -> None:
        """Set a layer's tensors: those of `source`, inflated, or an identity layer if `source` is None."""
        self.fill_mixer(layer, source)
        inner, mlp = torch.arange(self.old["intermediate_size"]), source and source.mlp
        for name in ("gate_proj", "up_proj"):
            self.fill_rows(getattr(layer.mlp, name), mlp and getattr(mlp, name), inner, slice(None), inner, 1.0)
        self.fill_output(layer.mlp.down_proj, mlp and mlp.down_proj, inner)
        for name in ("input_layernorm", "post_attention_layernorm"):
            getattr(layer, name).weight = self.residual_norm(source and getattr(source, name).weight)

    def fill_mixer(self, layer: Any, source: Any) -> None:
        """Set the part of a layer that mixes tokens, inflated from `source`'s; None: an idle one."""
        self.fill_attention(layer.self_attn, source and source.self_attn)

    def fill_attention(self, attention: Any, source: Any) -> None:
        """Set the projections and norms of an attention layer, inflated from `source`; None: an idle layer."""
        scale = {"q_proj": math.sqrt(self.new["head_dim"] / self.old["head_dim"]), "k_proj": 1.0, "v_proj": 1.0}
        if hasattr(attention, "q_norm"):
            # Scaled because the shared eps was changed for the wider residual; see `head_norm`.
            grown = self.new["head_dim"] / self.old["head_dim"]
            scale["q_proj"] = scale["k_proj"] = math.sqrt(self.eps_scale * grown)
            attention.q_norm.weight = self.head_norm(source and source.q_norm.weight, 1.0)
            attention.k_norm.weight = self.head_norm(source and source.k_norm.weight, 1 / math.sqrt(grown))
        self.fill_query(attention.q_proj, source and source.q_proj, scale["q_proj"])
        cleared = self.rows_of_heads(self.kv_heads)
        for name in ("k_proj", "v_proj"):
            old = source and getattr(source, name)
            self.fill_rows(getattr(attention, name), old, self.kv_rows, self.kv_sources, cleared, scale[name])
        self.fill_output(attention.o_proj, source and source.o_proj, self.q_rows)

    def fill_query(self, linear: Any, source: Any, scale: float) -> None:
        """Set the projection of queries, inflated from `source` and times `scale`."""
        self.fill_rows(linear, source, self.q_rows, slice(None), self.rows_of_heads(self.q_heads), scale)

    def rows_of_heads(self, heads: list[int]) -> Tensor:
        """All rows [len(heads) * d'] of these heads."""
        return torch.cat([torch.arange(self.new["head_dim"]) + head * self.new["head_dim"] for head in heads])

    def fill_rows(self, linear, old, rows: Tensor, sources, cleared: Tensor, scale: float | Tensor) -> None:
        """Fill an input projection: random; `cleared` rows are zero except for the old rows `sources`, times `scale`, placed at `rows`."""
        self.fill(linear, old, self.random, scale, sources, rows, None, cleared)

    def fill_output(self, linear, old, columns: Tensor) -> None:
        """Fill an output projection: zero except for the old weights, which read `columns` and write to the first H rows."""
        rows = torch.arange(self.old["hidden_size"])
        self.fill(linear, old, self.zeros, self.residual_scale, slice(None), rows, columns, ())

    def fill(self, linear, old, make: Any, scale: float | Tensor, sources, rows: Tensor, columns, cleared) -> None:
        """Fill weight and bias with what `make` makes, and in it the old rows `sources`. `columns`: of the weight; None: the first."""
        for name in ("weight", "bias"):
            if getattr(linear, name) is None:
                continue
            out = make(*getattr(linear, name).shape)
            if old is not None:
                block = getattr(old, name).detach().float().view(len(getattr(old, name)), -1)
                places = torch.arange(block.shape[1]) if columns is None or name == "bias" else columns
                self.placed(out.view(len(out), -1), (block * scale)[sources], rows, places, cleared)
            setattr(linear, name, self.parameter(out))


def inflate(
    model: PreTrainedModel,
    *,
    vocab_size: int | None = None,
    dtype: torch.dtype | None = None,
    seed: int = 0,
    kind: type[Inflation] = Inflation,
    **sizes: int | None,
) -> PreTrainedModel:
    """A bigger model of the same class with the same logits; sizes that are not given stay the same.

    Built tensor by tensor on the source's device in `dtype` (default: the source's), so memory peaks at source + result.
    New tokens (`vocab_size`) are never likely: see `widen_vocabulary`.

    Args:
        kind: knows the model's class (recipes/tiny/inflate_states.py: Qwen3.5's with recurrent layers).
        sizes: any of `kind.dimensions`.

    Raises:
        ValueError: a size is smaller than the source's or cannot hold it, or the source has no such size.
    """
    if type(model).__name__ not in kind.architectures:
        known = ", ".join(kind.architectures)
        raise ValueError(f"inflate() knows {known}, not {type(model).__name__}: give one of these.")
    old: dict[str, Any] = {name: getattr(model.config, name, None) for name in kind.dimensions}
    old["head_dim"] = old["head_dim"] or old["hidden_size"] // old["num_attention_heads"]
    given = {name: size for name, size in sizes.items() if size is not None}
    for name in given.keys() - old.keys():
        raise ValueError(f"{type(model).__name__} has no {name}: leave it out. Its sizes are {', '.join(old)}.")
    new = old | given
    check_growth(old, new, kind.groups, "the source's")
    rope: dict[str, Any] = getattr(model.config, "rope_parameters", None) or {}
    grows = rope.get("rope_type", "default") in ROPE_TYPES_THAT_GROW
    if new["head_dim"] != old["head_dim"] and not (
        grows and (kind is not Inflation or rope.get("partial_rotary_factor", 1.0) == 1.0)
    ):
        raise ValueError(f"head_dim cannot grow with rope_parameters={rope}: leave head_dim out.")
    size = model.config.vocab_size
    if vocab_size is not None and vocab_size < size:
        raise ValueError(f"vocab_size={vocab_size} is smaller than the source's {size}: give at least {size}.")
    if (vocab_size or 0) > size and new["hidden_size"] == old["hidden_size"]:
        raise ValueError(f"vocab_size can only grow with hidden_size: give more than {old['hidden_size']}.")
    with model.device:
        big = kind(model, old, new, dtype or model.dtype, seed).build()
        if vocab_size is not None and vocab_size > size:
            widen_vocabulary(big, old["hidden_size"], vocab_size, kind.norm_offset)
    return big


@torch.no_grad()
def widen_vocabulary(model: Any, width: int, vocab_size: int, norm_offset: float = 0.0) -> None:
    """Give an inflated model tokens that it never chooses, in place.

    Embeddings carry a small constant at `width`, the first of the new dimensions, which no layer changes: too small to
    change the norms' mean squares. The last norm scales it up, and the new tokens' output rows have a large negative weight
    there. Old tokens' logits stay the same (tied ones gain a constant). `norm_offset`: see `Inflation`.
    """
    size = model.config.vocab_size
    embeddings, head = model.get_input_embeddings(), model.get_output_embeddings()
    tied = model.config.tie_word_embeddings
    constant = 2.0**-10 * embeddings.weight.float().square().sum(1).div(width).median().sqrt()
    wide = torch.zeros(vocab_size, embeddings.weight.shape[1], dtype=embeddings.weight.dtype)
    wide[:size] = embeddings.weight
    wide[:size, width] = constant.to(wide.dtype)
    output = wide
    if not tied:
        output = torch.zeros_like(wide)
        output[:size] = head.weight
        output[:size, width] = 0
    output[size:, width] = -(2.0**15)
    embeddings.weight = nn.Parameter(wide)
    embeddings.num_embeddings, head.out_features, model.config.vocab_size = vocab_size, vocab_size, vocab_size
    head.weight = embeddings.weight if tied else nn.Parameter(output)
    model.model.norm.weight[width] = 2.0**10 - norm_offset
    model.vocab_size = model.model.vocab_size = vocab_size


LAYER_IDS = "eagle_aux_hidden_state_layer_ids"


def inflate_eagle3(
    folder: str | Path,
    source: PretrainedConfig,
    target: PretrainedConfig,
    destination: str | Path,
    dtype: torch.dtype = torch.bfloat16,
    device: torch.device | str = "cpu",
    seed: int = 0,
) -> None:
    """Write the head of `folder`, which drafts for `source`, to `destination`, with the sizes of `target`. Raises ValueError: `folder`
    has no EAGLE-3 head in the original layout, or the target is too small to hold the head."""
    folder, destination = Path(folder), Path(destination)
    config: dict[str, Any] = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    tensors = load_file(folder / "model.safetensors", device=str(device))
    if "midlayer.hidden_norm.weight" not in tensors or not config.get(LAYER_IDS):
        raise ValueError(f"{folder} is not an EAGLE-3 head with midlayer.* and {LAYER_IDS}: give such a head.")
    old, new = {name: config[name] for name in DIMENSIONS}, {name: getattr(target, name) for name in DIMENSIONS}
    new["num_hidden_layers"] = old["num_hidden_layers"]
    if old["hidden_size"] != source.hidden_size:
        raise ValueError(
            f"{folder} has width {old['hidden_size']}, but `source` has {source.hidden_size}: give the head's own target."
        )
    check_growth(old, new, HeadInflation.groups, "the head's")
    with torch.device(device):
        grown = HeadInflation(None, old, new, dtype, seed).tensors(tensors)
        offsets(grown, config, target.vocab_size)
    destination.mkdir(parents=True, exist_ok=True)
    save_file({name: tensor.contiguous().cpu() for name, tensor in grown.items()}, destination / "model.safetensors")
    config = {**config, **new, **tapped(config[LAYER_IDS], source.num_hidden_layers, target.num_hidden_layers)}
    config |= {
        "rms_norm_eps": config["rms_norm_eps"] * old["hidden_size"] / new["hidden_size"],
        "target_hidden_size": target.hidden_size,
        "vocab_size": target.vocab_size,
        "torch_dtype": str(dtype).removeprefix("torch."),
    }
    (destination / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def tapped(layers: list[int], old: int, new: int) -> dict[str, Any]:
    """Config keys for the hidden states to read. The output of old layer i - 1 comes from its new place among the `new` layers."""
    places = layer_places(old, new)
    moved = [places[i - 1] + 1 if i else 0 for i in layers]
    outputs = {LAYER_IDS: [i - 1 for i in moved], "use_aux_hidden_state": True}
    return {LAYER_IDS: moved, "eagle_config": outputs}


def offsets(tensors: dict[str, Tensor], config: dict[str, Any], vocab_size: int) -> None:
    """Add `d2t` and `t2d` if the target has more tokens than the head. A new `d2t` maps the head's tokens to the target's first."""
    size = tensors["lm_head.weight"].shape[0]
    if size < vocab_size:
        tensors.setdefault("d2t", torch.zeros(size, dtype=torch.long))
        chosen = torch.zeros(vocab_size, dtype=torch.bool)
        chosen[torch.arange(size) + tensors["d2t"]] = True
        tensors["t2d"] = chosen
    config["draft_vocab_size"] = size


class HeadInflation(Inflation):
    """The inflated tensors of one head. Old units get the same places as in a model."""

    def tensors(self, old: dict[str, Tensor]) -> dict[str, Tensor]:
        """All tensors by name. New inner units are random and do not affect the output."""
        old_sizes, new = self.old, self.new
        h, width, inner_new = old_sizes["hidden_size"], new["hidden_size"], new["intermediate_size"]
        channels, inner = torch.arange(h), torch.arange(old_sizes["intermediate_size"])
        projections = {  # new rows of the old ones, old rows, new heads that have them, number of new heads
            "q_proj": (self.q_rows, slice(None), self.q_heads, new["num_attention_heads"]),
            "k_proj": (self.kv_rows, self.kv_sources, self.kv_heads, new["num_key_value_heads"]),
        }
        projections["v_proj"] = projections["k_proj"]
        grown = {}
        for name, weight in old.items():
            kind, states = name.split(".")[-2] if "." in name else name, weight.shape[-1] // h
            columns = torch.cat([channels + i * width for i in range(max(states, 1))])  # of concatenated states
            if kind in projections:
                rows, sources, heads, count = projections[kind]
                scale = (new["head_dim"] / old_sizes["head_dim"]) ** 0.5 if kind == "q_proj" else 1.0
                out, block = self.random(count * new["head_dim"], states * width), (weight.float() * scale)[sources]
                grown[name] = self.placed(out, block, rows, columns, self.rows_of_heads(heads))
            elif kind in ("gate_proj", "up_proj"):
                grown[name] = self.placed(self.random(inner_new, states * width), weight, inner, columns, inner)
            elif kind == "o_proj":
                grown[name] = self.zeros(width, new["num_attention_heads"] * new["head_dim"])
                self.placed(grown[name], weight, channels, self.q_rows)
            elif kind == "down_proj":
                grown[name] = self.placed(self.zeros(width, inner_new), weight, channels, inner)
            elif kind == "fc":
                grown[name] = self.placed(self.zeros(width, states * width), weight, channels, columns)
            elif kind == "lm_head":
                tokens = torch.arange(len(weight))
                grown[name] = self.placed(self.random(len(weight), width), weight, tokens, channels)
            elif weight.shape == (h,):  # norms, including those of the states
                grown[name] = self.residual_norm(weight).data
            elif kind in ("d2t", "t2d"):
                grown[name] = weight
            else:
                raise ValueError(f"{name} {tuple(weight.shape)}: this tensor is not part of a known EAGLE-3 head.")
        return grown
