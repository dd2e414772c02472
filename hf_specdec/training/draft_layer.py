"""The decoder layer of a new EAGLE head: shaped like the target's, as a plain Llama layer that all tools load."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig

from ..candidate_generators.checkpoints.files import Checkpoint, Plan
from ..candidate_generators.checkpoints.layers import Embeddings, RotaryPositions
from ..core.output import Taps
from ..model.architectures import decoder_of
from .batch import Batch
from .options import TrainingError
from .target import TargetModel
from .unrolled import ATTENTION_NAME

logger = logging.getLogger(__name__)


class Shapes(Plan):
    """In place of a checkpoint's plan: the optional tensors that a new head has, and their shapes."""

    def __init__(self, shapes: dict[str, tuple[int, ...]]):
        self.shapes, self.sources = shapes, {name: name for name in shapes}

    def shape(self, canonical: str) -> tuple[int, ...]:
        return self.shapes[canonical]


def layer_shape(target: TargetModel, positions: int) -> dict[str, Any]:
    """Keys of a configuration: the target's vocabulary, width, heads and rotary base. `positions`: if the target has no limit.

    Rotary frequencies have the target's base (that of its first kind of layers), without any scaling: texts in training are short.
    """
    config, heads = target.config, target.config.num_attention_heads
    rope = getattr(config, "rope_parameters", None) or {}
    bases = (kind["rope_theta"] for kind in (rope, *rope.values()) if isinstance(kind, dict) and "rope_theta" in kind)
    return {
        "vocab_size": target.vocab_size,
        "hidden_size": target.hidden_size,
        "num_attention_heads": heads,
        "num_key_value_heads": getattr(config, "num_key_value_heads", None) or heads,
        "head_dim": getattr(config, "head_dim", None) or target.hidden_size // heads,
        "max_position_embeddings": getattr(config, "max_position_embeddings", None) or positions,
        "rope_parameters": {"rope_type": "default", "rope_theta": float(next(bases, 10000.0))},
    }


def layer_numbers(option: str, given: str | None, last: int, usual: Sequence[int]) -> Sequence[int]:
    """The target's layers that an option names; the usual ones without it. Raises TrainingError: they are not different numbers from 0 to
    `last`.
    """
    if given is None:
        return usual
    numbers = [int(part) if part.strip().isdecimal() else -1 for part in given.split(",")]
    if len(set(numbers)) < len(numbers) or min(numbers) < 0 or max(numbers) > last:
        raise TrainingError(
            f"{option} must be different numbers from 0 to {last} with commas between, such as {','.join(map(str, usual))}, "
            f"not {given!r}."
        )
    return numbers


def layer_config_for(
    target: TargetModel, intermediate_size: int | None, num_layers: int, num_key_value_heads: int | None = None
) -> LlamaConfig:
    """Configuration of Llama layers with the shape of the target's, and the attention of unrolled.py. Raises TrainingError: the numbers of
    query heads and key-value heads do not fit.
    """
    shape = layer_shape(target, 2048)
    heads, shared = shape["num_attention_heads"], num_key_value_heads or shape["num_key_value_heads"]
    if heads % shared:
        raise TrainingError(f"--num-key-value-heads must divide the target's {heads} attention heads, not be {shared}.")
    theirs = getattr(target.config, "intermediate_size", None)
    layers = LlamaConfig(
        **{**shape, "num_key_value_heads": shared},
        intermediate_size=intermediate_size or theirs or 4 * target.hidden_size,
        num_hidden_layers=num_layers,
        hidden_act="silu",
        rms_norm_eps=getattr(target.config, "rms_norm_eps", None) or 1e-6,
    )
    layers._attn_implementation = ATTENTION_NAME
    return layers


def prepare(head: Any, config: LlamaConfig, target: TargetModel) -> None:
    """Give a new head the target's embeddings (not trained) and rotary positions; float32, on the target's device."""
    head.to(target.device, torch.float32)
    head.embeddings = Embeddings(target.embed_tokens)
    head.rotary = rotary_for(config, target)


def rotary_for(config: LlamaConfig, target: TargetModel) -> RotaryPositions:
    """The rotary positions of a new head's layers."""
    return RotaryPositions(Checkpoint(Path("."), "the head being trained"), config, target.device)


def embedding_table(target: TargetModel) -> torch.Tensor:
    """The target's embeddings [V, H] as its first layer reads them (some families scale them)."""
    return target.embed_tokens(torch.arange(target.vocab_size, device=target.device))


def layer_json(config: LlamaConfig) -> dict[str, Any]:
    """The layers' keys for config.json, under names that both old and new readers know."""
    keys = (
        "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim",
        "hidden_act", "max_position_embeddings", "rms_norm_eps", "vocab_size",
    )  # fmt: skip
    values = {"model_type": "llama", **{key: getattr(config, key) for key in keys}}
    return values | {"rope_theta": (config.rope_parameters or {}).get("rope_theta"), "attention_bias": False}


@torch.no_grad()
def last_norm_scale(target: TargetModel) -> torch.Tensor:
    """The weights [H] of the target's last norm, so that logits have the right size from the start; ones, if it is not an RMS
    norm."""
    norm: Any = getattr(decoder_of(target.model), "norm", None)
    ones = torch.ones(target.hidden_size, device=target.device)
    if norm is None or "RMSNorm" not in type(norm).__name__:
        return ones
    return norm(ones.to(norm.weight.dtype)).float()  # the input has a mean square of 1


@torch.no_grad()
def state_sizes(target: TargetModel, layers: tuple[int, ...], token_counts: torch.Tensor) -> torch.Tensor:
    """The root mean square [n H] of every dimension of n hidden states, concatenated.

    A few dimensions of raw states are many times larger than the others and would dominate a new layer's input, so states are
    divided by these numbers, which are measured on random tokens with the frequencies of the data, `token_counts` [V].
    """
    ids = torch.multinomial(token_counts.float() + 1e-6, 1024, replacement=True).view(8, 128)
    batch = Batch(ids, torch.full((8,), 128), torch.ones_like(ids, dtype=torch.bool))
    states = target.capture(batch, Taps(layers=layers)).layers
    return torch.cat([states[i].square().mean((0, 1)).sqrt() for i in layers]).clamp(min=1e-6)


@torch.no_grad()
def main_directions(table: torch.Tensor, count: int) -> torch.Tensor:
    """The `count` orthonormal directions [count, H] that keep most of a table [V, H], strongest first."""
    return torch.linalg.eigh(table.float().T @ table.float()).eigenvectors.flip(1)[:, :count].T.contiguous()


def mask_token(given: int | None, target: TargetModel, token_counts: torch.Tensor) -> int:
    """The id in mask slots. The first available of: the given one; the tokenizer's mask token; an embedding row after the tokenizer's
    last token; the padding token; another special token that the target does not write. Raises TrainingError: there is none.
    """
    table: torch.Tensor = target.embed_tokens.weight  # pyright: ignore[reportAssignmentType]
    rows, tokenizer = len(table), target.tokenizer
    if given is not None:
        if given >= rows:
            raise TrainingError(f"--mask-token-id {given}: the target has embeddings for {rows} tokens.")
        return given
    special: Sequence[int] = getattr(tokenizer, "all_special_ids", ())
    candidates = [("mask token", tokenizer.mask_token_id), ("first id without a token", len(tokenizer))]
    candidates += [("padding token", tokenizer.pad_token_id)] + [("special token", i) for i in special]
    for what, token in candidates:
        if token is not None and token < rows and token not in target.end_tokens and not token_counts[token]:
            logger.info("Slots to be drafted hold the tokenizer's %s, id %d.", what, token)
            return token
    raise TrainingError(
        "Every token of the target's tokenizer may occur in texts, so none can be the mask: name one with --mask-token-id."
    )
