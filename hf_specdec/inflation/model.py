"""Make a model bigger without changing its function: real text at the cost of a real model.

Every dimension can grow: layers (identity ones: their output projections are zero), width (zero-padded residual stream), MLP, query
and key-value heads, head size and vocabulary. New weights are small random numbers wherever they do not affect the output, so that the
work is real. Logits agree up to rounding in the chosen dtype.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from .tensors import Inflation, check_growth

ROPE_TYPES_THAT_GROW = ("default", "linear", "llama3")
PRESETS = {
    "100m": (768, 14, 2048, 12, 4, 64), "300m": (1024, 20, 4096, 16, 8, 64), "1b": (2048, 16, 8192, 32, 8, 64),
    "8b": (4096, 32, 14336, 32, 8, 128),
}  # fmt: skip


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
    old = sizes_of(model, kind)
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
    if vocab_size is not None:
        check_vocabulary(model, old, new, vocab_size)
    with model.device:
        big = kind(model, old, new, dtype or model.dtype, seed).build()
        if vocab_size is not None and vocab_size > model.config.vocab_size:
            widen_vocabulary(big, old["hidden_size"], vocab_size, kind.norm_offset)
    return big


def check_vocabulary(model: PreTrainedModel, old: dict[str, int], new: dict[str, int], vocab_size: int) -> None:
    """Raise `ValueError` if the vocabulary shrinks, or grows while the hidden size stays."""
    size = model.config.vocab_size
    if vocab_size < size:
        raise ValueError(f"vocab_size={vocab_size} is smaller than the source's {size}: give at least {size}.")
    if vocab_size > size and new["hidden_size"] == old["hidden_size"]:
        raise ValueError(f"vocab_size can only grow with hidden_size: give more than {old['hidden_size']}.")


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


def sizes_of(model: PreTrainedModel, kind: type[Inflation]) -> dict[str, int]:
    """The sizes of a source model; `ValueError` for unknown architectures."""
    known = kind.architectures
    if type(model).__name__ not in known:
        raise ValueError(f"inflate() knows {', '.join(known)}, not {type(model).__name__}: give one of these.")
    sizes: dict[str, Any] = {name: getattr(model.config, name, None) for name in kind.dimensions}
    sizes["head_dim"] = sizes["head_dim"] or sizes["hidden_size"] // sizes["num_attention_heads"]
    return sizes
