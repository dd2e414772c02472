"""Checkpoints of IBM's accelerators and Snowflake's Arctic speculators: how they are recognised and loaded."""

from __future__ import annotations

import itertools
import re
from collections.abc import Collection
from typing import Any

from torch import nn

from ...model.packed_model import PackedModel
from ..checkpoints.files import Checkpoint, Plan, one_copy, register_format
from ..checkpoints.target_parts import built, check_target
from .head import GATES, LSTMSpeculator, ScaledNorm, Speculator, SumSpeculator


def has_mlp(checkpoint: Checkpoint) -> bool:
    """True for IBM's format; tied checkpoints may hold only one copy of each tensor."""
    names = set(map(unprefixed, checkpoint.names()))
    if has_lstm(names) or has_rnn(names):
        return False
    kinds = {match[1] for match in (re.fullmatch(r"(emb|proj|head|ln)\.\d+\.\w+", name) for name in names) if match}
    return len(kinds) == 4 or checkpoint.config.get("model_type") == "mlp_speculator"


def has_arctic(checkpoint: Checkpoint) -> bool:
    names = set(map(unprefixed, checkpoint.names()))
    return has_lstm(names) or has_rnn(names)


register_format(
    "MLP speculator (ibm-fms/*-accelerator, ibm-ai-platform, ibm-granite, ArcticMLPSpeculator: speculator.{emb,proj,ln,head}.{i})",
    "mlp_speculator",
    has_mlp,
)
register_format(
    "Arctic speculator (Snowflake/Arctic-LSTM-Speculator-*: forget_emb.0, {forget,input,output,cell}_proj.{0,1}; sum_rnn: emb.0.0)",
    "arctic",
    has_arctic,
)


def load_mlp(checkpoint: Checkpoint, target: PackedModel) -> Speculator:
    """Load a speculator in IBM's format (Snowflake's ArcticMLPSpeculator too)."""
    (emb_dim, *more), (inner, *others) = widths(checkpoint, "emb_dim"), widths(checkpoint, "inner_dim", 0)
    if more or others:
        raise checkpoint.error(
            "config.json has several widths in emb_dim or inner_dim, but its tensors are those of one layer."
        )
    return _load_sum(checkpoint, target, emb_dim, [inner or emb_dim], None)


def load_rnn(checkpoint: Checkpoint, target: PackedModel) -> Speculator:
    """Load a "sum_rnn" speculator: IBM's recurrence with a stack of layers for each part."""
    inner, emb, proj = (widths(checkpoint, key) for key in ("inner_dim", "emb_dim", "proj_dim"))
    if len({*emb, *proj, inner[0]}) != 1:
        raise checkpoint.error(
            f"config.json has emb_dim {emb}, proj_dim {proj} and inner_dim {inner}: embeddings, projections and the first inner "
            "width are added, so they must be equal."
        )
    return _load_sum(checkpoint, target, checkpoint.integer("input_hidden_dim"), inner, (len(emb) - 1, len(proj) - 1))


def _load_sum(
    checkpoint: Checkpoint, target: PackedModel, hidden_size: int, inner: list[int], stacks: tuple[int, int] | None
) -> Speculator:
    """Load a SumSpeculator on the target's device, in its dtype.

    Args:
        stacks: number of further layers after each embedding and after each projection; None: no stacks, and other names of tensors.
    """
    n_predict, vocab_size = checkpoint.integer("n_predict"), checkpoint.integer("vocab_size")
    tied, scale_input, width = checkpoint.flag("tie_weights"), checkpoint.flag("scale_input"), inner[0]
    check_steps(checkpoint, n_predict, tied)
    check_target(checkpoint, target, hidden_size, vocab_size)
    count, num_projections = (1, min(n_predict, 2)) if tied else (n_predict, n_predict)

    def make() -> Speculator:
        emb: list[nn.Module] = [nn.Embedding(vocab_size, width) for _ in range(count)]
        proj: list[nn.Module] = [
            nn.Linear(inner[-1] if i else hidden_size, width, bias=False) for i in range(num_projections)
        ]
        if stacks is not None:
            emb = [_layers(table, stacks[0], width) for table in emb]
            proj = [_layers(first, stacks[1], width) for first in proj]
        ln = [ScaledNorm(width) if stacks is None else _norms(inner) for _ in range(count)]
        head = [nn.Linear(inner[-1], vocab_size, bias=False) for _ in range(count)]
        return SumSpeculator(n_predict, width, scale_input, emb, proj, ln, head)

    rename = one_copy(checkpoint, lambda name: tied_name(unprefixed(name), n_predict)) if tied else unprefixed
    return built(checkpoint, Plan(checkpoint, rename), target, make)


def load_speculator(checkpoint: Checkpoint, target: PackedModel) -> Speculator:
    """Load a speculator in any of the formats.

    Raises:
        CheckpointError: it does not fit its configuration or the target.
    """
    names = set(map(unprefixed, checkpoint.names()))
    kind, load = "sum_rnn", load_mlp
    if has_lstm(names):
        kind, load = "sum_lstm", load_lstm
    elif has_rnn(names):
        load = load_rnn
    method = checkpoint.config.get("method", kind)
    if method != kind:
        raise checkpoint.error(f"config.json has method = {method!r}, but its tensors are those of {kind!r}.")
    return load(checkpoint, target)


def has_lstm(names: Collection[str]) -> bool:
    """True for the tensor names (without prefix) of an LSTM."""
    return any(name.startswith(("forget_emb.", "forget_proj.")) for name in names)


def has_rnn(names: Collection[str]) -> bool:
    """True for the tensor names (without prefix) of a "sum_rnn"."""
    return any(re.match(r"(emb|proj|ln)\.\d+\.\d+\.", name) for name in names)


def _lstm_name(name: str, n_predict: int, tie_embeddings: bool) -> str:
    if tie_embeddings and name in {f"{gate}_emb.0.weight" for gate in GATES}:
        return f"{GATES[0]}_emb.0.weight"
    return tied_name(name, n_predict) if name.startswith("head.") else name


def load_lstm(checkpoint: Checkpoint, target: PackedModel) -> Speculator:
    """Load an LSTM speculator on the target's device, in its dtype."""
    n_predict, vocab_size = checkpoint.integer("n_predict"), checkpoint.integer("vocab_size")
    hidden_size = checkpoint.integer("input_hidden_dim")
    tie_embeddings = checkpoint.flag("tie_lstm_embs")
    sizes = [size for key in ("inner_dim", "emb_dim", "proj_dim") for size in widths(checkpoint, key)]
    if len(set(sizes)) != 1:
        raise checkpoint.error(
            f"config.json has inner_dim, emb_dim and proj_dim of {sizes}; for an LSTM they must be equal."
        )
    if not checkpoint.flag("tie_weights"):
        raise checkpoint.error("config.json has no tie_weights = true, but all steps of an LSTM share their weights.")
    check_target(checkpoint, target, hidden_size, vocab_size)
    sizes = n_predict, hidden_size, sizes[0], vocab_size, checkpoint.flag("scale_input"), tie_embeddings
    rename = one_copy(checkpoint, lambda name: _lstm_name(unprefixed(name), n_predict, tie_embeddings))
    speculator = built(checkpoint, Plan(checkpoint, rename), target, lambda: LSTMSpeculator(*sizes))
    speculator.fuse()
    return speculator


def _layers(first: nn.Module, count: int, width: int) -> nn.Sequential:
    """`first`, then norm, GELU and a linear layer, `count` times."""
    more = [m for _ in range(count) for m in (ScaledNorm(width), nn.GELU(), nn.Linear(width, width, bias=False))]
    return nn.Sequential(first, *more)


def _norms(sizes: list[int]) -> nn.Sequential:
    """A norm; then GELU, a linear layer and a norm for each further width."""
    modules: list[nn.Module] = [ScaledNorm(sizes[0])]
    for before, size in itertools.pairwise(sizes):
        modules += [nn.GELU(), nn.Linear(before, size, bias=False), ScaledNorm(size)]
    return nn.Sequential(*modules)


def unprefixed(name: str) -> str:
    return name.removeprefix("speculator.")


def tied_name(name: str, n_predict: int) -> str:
    """The name under which tied weights are loaded: that of step 0, or step 1 for the projections of later steps."""
    match = re.fullmatch(r"(\w+)\.(\d+)\.(.+)", name)
    if match is None or int(match[2]) >= n_predict:
        return name
    first = min(int(match[2]), 1) if match[1].endswith("proj") else 0
    return f"{match[1]}.{first}.{match[3]}"


def check_steps(checkpoint: Checkpoint, n_predict: int, tied: bool) -> None:
    """Raise CheckpointError if config.json gives more steps than the file has weights for."""
    matches = [re.match(r"head\.(\d+)\.", unprefixed(name)) for name in checkpoint.names()]
    numbers = {int(match[1]) for match in matches if match}
    if not tied and n_predict > len(numbers):
        raise checkpoint.error(
            f"config.json has n_predict = {n_predict}, but the file has the heads of {len(numbers)} steps."
        )


def widths(checkpoint: Checkpoint, key: str, default: int | None = None) -> list[int]:
    """Widths from config.json, given as 4096, [4096, 4096] or "4096.4096"."""
    value: Any = checkpoint.config.get(key, default)
    parts = value.split(".") if isinstance(value, str) else value if isinstance(value, list) else [value]
    numbers = [int(part) for part in parts if type(part) is int or (isinstance(part, str) and part.isdecimal())]
    if not parts or len(numbers) < len(parts) or min(numbers) < 0:
        raise checkpoint.error(
            f"config.json has {key} = {value!r}; it must be a width, a list of widths or text like '4096.4096'."
        )
    return numbers
