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

from .tensors import Inflation, copies_of_a_head

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
    check_sizes(model, kind, old, new)
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


def check_sizes(model: PreTrainedModel, kind: type[Inflation], old: dict[str, int], new: dict[str, int]) -> None:
    """Raise `ValueError` if a size shrinks, or the new heads cannot hold the old ones."""
    for name in old:
        if new[name] < old[name]:
            raise ValueError(f"{name}={new[name]} is smaller than the source's {old[name]}: give at least {old[name]}.")
    for group in kind.groups:
        check_heads(old, new, *group)
    if new["head_dim"] != old["head_dim"]:
        if new["head_dim"] % old["head_dim"]:
            raise ValueError(
                f"head_dim={new['head_dim']} must be a multiple of the source's {old['head_dim']}, so that its rotary "
                f"frequencies are among the new ones: give {2 * old['head_dim']}, {3 * old['head_dim']}, ..."
            )
        rope = getattr(model.config, "rope_parameters", None) or {}
        form, share = rope.get("rope_type", "default"), rope.get("partial_rotary_factor", 1.0)
        if form not in ROPE_TYPES_THAT_GROW or (share != 1.0 and kind is Inflation):
            raise ValueError(f"head_dim cannot grow with rope_parameters={rope}: leave head_dim out.")


def check_heads(old: dict[str, int], new: dict[str, int], many: str, few: str, few_heads: str, many_heads: str) -> None:
    """Raise `ValueError` unless the new heads, groups of `many` that share one of `few`, can hold the old ones."""
    if new[many] % new[few]:
        raise ValueError(f"{many}={new[many]} must be a multiple of {few}={new[few]}: change one of them.")
    needed = old[few] * copies_of_a_head(old, new, many, few)
    if new[few] < needed:
        raise ValueError(
            f"{new[few]} {few_heads} cannot hold the source's groups of {old[many] // old[few]} {many_heads}: "
            f"give {few} >= {needed} or more {many}."
        )
