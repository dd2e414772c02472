"""Make a Llama-like model bigger without changing its function: real text at the cost of a real model.

Every dimension can grow: layers (identity ones: their output projections are zero), width (zero-padded residual
stream), MLP, query and key-value heads, head size, vocabulary. New weights are small random numbers wherever
they do not affect the output, so that the work is real. Logits agree up to rounding in the chosen dtype.
"""

from __future__ import annotations

import copy
import math

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

ARCHITECTURES = ("LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM")
ROPE_TYPES_THAT_GROW = ("default", "linear", "llama3")
DIMENSIONS = (
    "hidden_size",
    "num_hidden_layers",
    "intermediate_size",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
)
PRESETS = {"300m": (1024, 20, 4096, 16, 8, 64), "1b": (2048, 16, 8192, 32, 8, 64), "8b": (4096, 32, 14336, 32, 8, 128)}
FILL_STD = 0.02


def inflate(
    model: PreTrainedModel,
    *,
    hidden_size: int | None = None,
    num_hidden_layers: int | None = None,
    intermediate_size: int | None = None,
    num_attention_heads: int | None = None,
    num_key_value_heads: int | None = None,
    head_dim: int | None = None,
    vocab_size: int | None = None,
    dtype: torch.dtype | None = None,
    seed: int = 0,
) -> PreTrainedModel:
    """A bigger model of the same class with the same logits; sizes that are not given stay the same.

    Built tensor by tensor on the source's device in `dtype` (default: the source's), so memory peaks at source + result.
    New tokens (`vocab_size`) are never likely: see `widen_vocabulary`. Raises `ValueError` if a size is smaller than the
    source's or cannot hold it.
    """
    asked = (hidden_size, num_hidden_layers, intermediate_size, num_attention_heads, num_key_value_heads, head_dim)
    old = sizes_of(model)
    new = {name: size if size is not None else old[name] for name, size in zip(DIMENSIONS, asked, strict=True)}
    check_sizes(model, old, new)
    if vocab_size is not None:
        check_vocabulary(model, old, new, vocab_size)
    with model.device:
        big = Inflation(model, old, new, dtype or model.dtype, seed).build()
        if vocab_size is not None and vocab_size > model.config.vocab_size:
            widen_vocabulary(big, old["hidden_size"], vocab_size)
    return big


def check_vocabulary(model: PreTrainedModel, old: dict[str, int], new: dict[str, int], vocab_size: int) -> None:
    """Raise `ValueError` if the vocabulary shrinks, or grows while the hidden size stays."""
    size = model.config.vocab_size
    if vocab_size < size:
        raise ValueError(f"vocab_size={vocab_size} is smaller than the source's {size}: give at least {size}.")
    if vocab_size > size and new["hidden_size"] == old["hidden_size"]:
        raise ValueError(f"vocab_size can only grow with hidden_size: give more than {old['hidden_size']}.")


@torch.no_grad()
def widen_vocabulary(model: PreTrainedModel, width: int, vocab_size: int) -> None:
    """Give an inflated model tokens that it never chooses, in place.

    Embeddings carry a small constant at `width`, the first of the new dimensions, which no layer changes: too small to
    change the norms' mean squares. The last norm scales it up, and the new tokens' output rows have a large negative weight
    there. Old tokens' logits stay the same (tied ones gain a constant).
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
    model.model.norm.weight[width] = 2.0**10
    model.vocab_size = model.model.vocab_size = vocab_size


def sizes_of(model: PreTrainedModel) -> dict[str, int]:
    """The six sizes of a source model; `ValueError` for unknown architectures."""
    if type(model).__name__ not in ARCHITECTURES:
        raise ValueError(f"inflate() knows {', '.join(ARCHITECTURES)}, not {type(model).__name__}: give one of these.")
    sizes = {name: getattr(model.config, name, None) for name in DIMENSIONS}
    sizes["head_dim"] = sizes["head_dim"] or sizes["hidden_size"] // sizes["num_attention_heads"]
    return sizes


def check_sizes(model: PreTrainedModel, old: dict[str, int], new: dict[str, int]) -> None:
    """Raise `ValueError` if a size shrinks, or the new heads cannot hold the old ones."""
    for name in DIMENSIONS:
        if new[name] < old[name]:
            raise ValueError(f"{name}={new[name]} is smaller than the source's {old[name]}: give at least {old[name]}.")
    if new["num_attention_heads"] % new["num_key_value_heads"]:
        raise ValueError(
            f"num_attention_heads={new['num_attention_heads']} must be a multiple of "
            f"num_key_value_heads={new['num_key_value_heads']}: change one of them."
        )
    needed = old["num_key_value_heads"] * copies_of_a_head(old, new)
    if new["num_key_value_heads"] < needed:
        raise ValueError(
            f"{new['num_key_value_heads']} key-value heads cannot hold the source's groups of "
            f"{old['num_attention_heads'] // old['num_key_value_heads']} query heads: "
            f"give num_key_value_heads >= {needed} or more num_attention_heads."
        )
    if new["head_dim"] != old["head_dim"]:
        if new["head_dim"] % old["head_dim"]:
            raise ValueError(
                f"head_dim={new['head_dim']} must be a multiple of the source's {old['head_dim']}, so that its rotary "
                f"frequencies are among the new ones: give {2 * old['head_dim']}, {3 * old['head_dim']}, ..."
            )
        rope = getattr(model.config, "rope_parameters", None) or {}
        kind, share = rope.get("rope_type", "default"), rope.get("partial_rotary_factor", 1.0)
        if kind not in ROPE_TYPES_THAT_GROW or share != 1.0:
            raise ValueError(f"head_dim cannot grow with rope_parameters={rope}: leave head_dim out.")


def copies_of_a_head(old: dict[str, int], new: dict[str, int]) -> int:
    """How many new key-value heads one old head becomes: several if the new groups of query heads are smaller."""
    group = old["num_attention_heads"] // old["num_key_value_heads"]
    return math.ceil(group / (new["num_attention_heads"] // new["num_key_value_heads"]))


def layer_places(old: int, new: int) -> list[int]:
    """The index among `new` layers of each of the `old` ones."""
    return [i * new // old for i in range(old)]


class Inflation:
    """One inflation: the places of the old units, and the tensors of the new model."""

    def __init__(self, model: PreTrainedModel, old: dict[str, int], new: dict[str, int], dtype: torch.dtype, seed: int):
        self.model, self.old, self.new, self.dtype = model, old, new, dtype
        self.generator = torch.Generator(model.device).manual_seed(seed)
        self.place_heads()
        self.layer_places = layer_places(old["num_hidden_layers"], new["num_hidden_layers"])

    def place_heads(self) -> None:
        """Set the new rows of q/k/v for the old ones.

        `q_rows`: new row of each old query row. `kv_rows`, `kv_sources`: new key-value rows and the old rows they copy.
        Rotary pairs (i, i + d/2) of an old head go to (m i, m i + m d/2) with m = d'/d: the same frequency.
        """
        old, new = self.old, self.new
        d, d_new = old["head_dim"], new["head_dim"]
        m = d_new // d
        inside = torch.cat([torch.arange(d // 2) * m, torch.arange(d // 2) * m + d_new // 2])
        group = old["num_attention_heads"] // old["num_key_value_heads"]
        group_new = new["num_attention_heads"] // new["num_key_value_heads"]
        copies = copies_of_a_head(old, new)
        q_heads = [
            (head // group * copies + head % group // group_new) * group_new + head % group % group_new
            for head in range(old["num_attention_heads"])
        ]
        kv_heads = list(range(old["num_key_value_heads"] * copies))
        self.q_heads, self.kv_heads = q_heads, kv_heads
        self.inside = inside
        self.q_rows = torch.cat([head * d_new + inside for head in q_heads])
        self.kv_rows = torch.cat([head * d_new + inside for head in kv_heads])
        self.kv_sources = torch.cat([head // copies * d + torch.arange(d) for head in kv_heads])

    def build(self) -> PreTrainedModel:
        """The bigger model, in the source's mode (training or evaluation)."""
        config = self.make_config()
        with torch.device("meta"):
            big = type(self.model)(config)
        big.model.rotary_emb = type(self.model.model.rotary_emb)(config=config)
        h = self.old["hidden_size"]
        big.model.embed_tokens.weight = self.parameter(self.padded(self.model.model.embed_tokens.weight))
        big.model.norm.weight = self.residual_norm(self.model.model.norm.weight)
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
        """The source's configuration with the new sizes; the norms' epsilon is scaled by the share of nonzero channels."""
        config = copy.deepcopy(self.model.config)
        for name, size in self.new.items():
            setattr(config, name, size)
        config.rms_norm_eps = config.rms_norm_eps * self.old["hidden_size"] / self.new["hidden_size"]
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

    def parameter(self, tensor: Tensor) -> nn.Parameter:
        """The tensor in the new dtype, as a parameter of the same shape."""
        return nn.Parameter(tensor.to(self.dtype))

    def padded(self, weight: Tensor) -> Tensor:
        """[V, H] -> [V, H'], zero where new."""
        out = torch.zeros(weight.shape[0], self.new["hidden_size"], dtype=self.dtype)
        out[:, : weight.shape[1]] = weight.detach()
        return out

    def residual_norm(self, weight: Tensor | None) -> nn.Parameter:
        """RMSNorm weight [H']: the mean square over H' is H/H' of the old one; weight * sqrt(H/H') undoes it."""
        out = torch.ones(self.new["hidden_size"], dtype=torch.float32)
        if weight is not None:
            out[: len(weight)] = weight.detach().float()
        return self.parameter(out * math.sqrt(self.old["hidden_size"] / self.new["hidden_size"]))

    def head_norm(self, weight: Tensor | None, scale: float) -> nn.Parameter:
        """Per-head RMSNorm weight [d'] with the old entries at their rotary places, times `scale`."""
        out = torch.ones(self.new["head_dim"], dtype=torch.float32)
        if weight is not None:
            out[self.inside] = weight.detach().float() * scale
        return self.parameter(out)

    def fill_layer(self, layer: nn.Module, source: nn.Module | None) -> None:
        """Set a layer's tensors: those of `source`, inflated, or an identity layer if `source` is None."""
        attention, mlp = layer.self_attn, layer.mlp
        scale = {"q_proj": math.sqrt(self.new["head_dim"] / self.old["head_dim"]), "k_proj": 1.0, "v_proj": 1.0}
        if hasattr(attention, "q_norm"):
            # Scaled because the shared eps was changed for the wider residual; see `head_norm`.
            grown = self.new["head_dim"] / self.old["head_dim"]
            shrunk_eps = self.old["hidden_size"] / self.new["hidden_size"]
            scale["q_proj"] = scale["k_proj"] = math.sqrt(shrunk_eps * grown)
            norms = source.self_attn if source else None
            attention.q_norm.weight = self.head_norm(norms and norms.q_norm.weight, 1.0)
            attention.k_norm.weight = self.head_norm(norms and norms.k_norm.weight, 1 / math.sqrt(grown))
        for name, heads, rows, sources in (
            ("q_proj", self.q_heads, self.q_rows, slice(None)),
            ("k_proj", self.kv_heads, self.kv_rows, self.kv_sources),
            ("v_proj", self.kv_heads, self.kv_rows, self.kv_sources),
        ):
            old = source and getattr(source.self_attn, name)
            self.fill_rows(getattr(attention, name), old, rows, sources, self.rows_of_heads(heads), scale[name])
        inner = torch.arange(self.old["intermediate_size"])
        for name in ("gate_proj", "up_proj"):
            self.fill_rows(getattr(mlp, name), source and getattr(source.mlp, name), inner, slice(None), inner, 1.0)
        self.fill_output(attention.o_proj, source and source.self_attn.o_proj, self.q_rows)
        self.fill_output(mlp.down_proj, source and source.mlp.down_proj, inner)
        for name in ("input_layernorm", "post_attention_layernorm"):
            getattr(layer, name).weight = self.residual_norm(source and getattr(source, name).weight)

    def rows_of_heads(self, heads: list[int]) -> Tensor:
        """All rows [len(heads) * d'] of these heads."""
        return torch.cat([torch.arange(self.new["head_dim"]) + head * self.new["head_dim"] for head in heads])

    def fill_rows(self, linear, old, rows: Tensor, sources, cleared: Tensor, scale: float) -> None:
        """Fill an input projection: random; `cleared` rows are zero except for the old rows `sources`, placed at `rows`."""
        weight = self.random(*linear.weight.shape)
        bias = None if linear.bias is None else self.random(*linear.bias.shape)
        if old is not None:
            weight[cleared] = 0
            block = weight.new_zeros(len(rows), weight.shape[1])
            block[:, : old.weight.shape[1]] = (old.weight.detach().float() * scale)[sources].to(self.dtype)
            weight[rows] = block
            if bias is not None:
                bias[cleared] = 0
                bias[rows] = (old.bias.detach().float() * scale)[sources].to(self.dtype)
        linear.weight = self.parameter(weight)
        if bias is not None:
            linear.bias = self.parameter(bias)

    def fill_output(self, linear, old, columns: Tensor) -> None:
        """Fill an output projection: zero except for the old weights, which read `columns` and write to the first H rows."""
        weight = torch.zeros(linear.weight.shape, dtype=self.dtype)
        bias = None if linear.bias is None else torch.zeros(linear.bias.shape, dtype=self.dtype)
        if old is not None:
            weight[: old.weight.shape[0], columns] = old.weight.detach().to(self.dtype)
            if bias is not None:
                bias[: len(old.bias)] = old.bias.detach().to(self.dtype)
        linear.weight = self.parameter(weight)
        if bias is not None:
            linear.bias = self.parameter(bias)
