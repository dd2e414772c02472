"""Checkpoints of IBM's accelerators and Snowflake's Arctic speculators: how they are recognised and loaded."""

from __future__ import annotations

import itertools
import re
from collections.abc import Collection
from typing import Any

from torch import nn

from ...model.packed_model import PackedModel
from ..checkpoints.files import Checkpoint, Plan, load_module, register_format
from ..checkpoints.target_parts import check_target, device_and_dtype
from ..checkpoints.tied import one_copy
from .head import GATES, LSTMSpeculator, ScaledNorm, Speculator, SumSpeculator


def has_mlp(checkpoint: Checkpoint) -> bool:
    """True for IBM's format; tied checkpoints may hold only one copy of each tensor."""
    names = set(map(unprefixed, checkpoint.names()))
    if has_lstm(names) or has_rnn(names):
        return False
    kinds = {match[1] for match in (re.fullmatch(r"(emb|proj|head|ln)\.\d+\.\w+", name) for name in names) if match}
    return len(kinds) == 4 or checkpoint.config.get("model_type") == "mlp_speculator"


def has_arctic(checkpoint: Checkpoint) -> bool:
    """True for an Arctic LSTM or a "sum_rnn"."""
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
    """Load a speculator in IBM's format (Snowflake's ArcticMLPSpeculator too), on the target's device, in its dtype."""
    n_predict, vocab_size = integer(checkpoint, "n_predict"), integer(checkpoint, "vocab_size")
    tied, scale_input = flag(checkpoint, "tie_weights"), flag(checkpoint, "scale_input")
    (emb_dim, *more), (inner, *others) = widths(checkpoint, "emb_dim"), widths(checkpoint, "inner_dim", 0)
    if more or others:
        raise checkpoint.error(
            "config.json has several widths in emb_dim or inner_dim, but its tensors are those of one layer."
        )
    inner = inner or emb_dim
    check_steps(checkpoint, n_predict, tied)
    check_target(checkpoint, target, emb_dim, vocab_size)
    count, num_projections = (1, min(n_predict, 2)) if tied else (n_predict, n_predict)
    with checkpoint.building():
        speculator = SumSpeculator(
            n_predict, inner, scale_input,
            emb=[nn.Embedding(vocab_size, inner) for _ in range(count)],
            proj=[nn.Linear(inner if i else emb_dim, inner, bias=False) for i in range(num_projections)],
            ln=[ScaledNorm(inner) for _ in range(count)],
            head=[nn.Linear(inner, vocab_size, bias=False) for _ in range(count)],
        )  # fmt: skip
    rename = one_copy(checkpoint, lambda name: tied_name(unprefixed(name), n_predict)) if tied else unprefixed
    load_module(speculator, Plan(checkpoint, rename), *device_and_dtype(target))
    return speculator


def load_speculator(checkpoint: Checkpoint, target: PackedModel) -> Speculator:
    """Load a speculator in any of the formats.

    Raises:
        CheckpointError: it does not fit its configuration or the target.
    """
    names = set(map(unprefixed, checkpoint.names()))
    found, load = "sum_rnn", load_mlp
    if has_lstm(names):
        found, load = "sum_lstm", load_lstm
    elif has_rnn(names):
        load = load_rnn
    method = checkpoint.config.get("method", found)
    if method != found:
        raise checkpoint.error(f"config.json has method = {method!r}, but its tensors are those of {found!r}.")
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
    n_predict, vocab_size = integer(checkpoint, "n_predict"), integer(checkpoint, "vocab_size")
    hidden_size = integer(checkpoint, "input_hidden_dim")
    tie_embeddings = flag(checkpoint, "tie_lstm_embs")
    sizes = [size for key in ("inner_dim", "emb_dim", "proj_dim") for size in widths(checkpoint, key)]
    if len(set(sizes)) != 1:
        raise checkpoint.error(
            f"config.json has inner_dim, emb_dim and proj_dim of {sizes}; for an LSTM they must be equal."
        )
    if not flag(checkpoint, "tie_weights"):
        raise checkpoint.error("config.json has no tie_weights = true, but all steps of an LSTM share their weights.")
    check_target(checkpoint, target, hidden_size, vocab_size)
    scale_input = flag(checkpoint, "scale_input")
    with checkpoint.building():
        speculator = LSTMSpeculator(n_predict, hidden_size, sizes[0], vocab_size, scale_input, tie_embeddings)
    rename = one_copy(checkpoint, lambda name: _lstm_name(unprefixed(name), n_predict, tie_embeddings))
    load_module(speculator, Plan(checkpoint, rename), *device_and_dtype(target))
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


def load_rnn(checkpoint: Checkpoint, target: PackedModel) -> Speculator:
    """Load a "sum_rnn" speculator (IBM's recurrence with a stack of layers for each part), on the target's device, in its dtype."""
    n_predict, vocab_size = integer(checkpoint, "n_predict"), integer(checkpoint, "vocab_size")
    hidden_size = integer(checkpoint, "input_hidden_dim")
    inner, emb, proj = (widths(checkpoint, key) for key in ("inner_dim", "emb_dim", "proj_dim"))
    if len({*emb, *proj, inner[0]}) != 1:
        raise checkpoint.error(
            f"config.json has emb_dim {emb}, proj_dim {proj} and inner_dim {inner}: embeddings, projections and the first inner "
            "width are added, so they must be equal."
        )
    check_target(checkpoint, target, hidden_size, vocab_size)
    tied, width = flag(checkpoint, "tie_weights"), inner[0]
    check_steps(checkpoint, n_predict, tied)
    count, num_projections = (1, min(n_predict, 2)) if tied else (n_predict, n_predict)
    with checkpoint.building():
        starts = [nn.Linear(inner[-1] if i else hidden_size, width, bias=False) for i in range(num_projections)]
        speculator = SumSpeculator(
            n_predict, width, flag(checkpoint, "scale_input"),
            emb=[_layers(nn.Embedding(vocab_size, width), len(emb) - 1, width) for _ in range(count)],
            proj=[_layers(start, len(proj) - 1, width) for start in starts],
            ln=[_norms(inner) for _ in range(count)],
            head=[nn.Linear(inner[-1], vocab_size, bias=False) for _ in range(count)],
        )  # fmt: skip
    rename = one_copy(checkpoint, lambda name: tied_name(unprefixed(name), n_predict)) if tied else unprefixed
    load_module(speculator, Plan(checkpoint, rename), *device_and_dtype(target))
    return speculator


_PREFIX = "speculator."


def unprefixed(name: str) -> str:
    """A tensor's name without `speculator.`."""
    return name.removeprefix(_PREFIX)


def tied_name(name: str, n_predict: int) -> str:
    """The name under which tied weights are loaded: that of step 0, or step 1 for the projections of later steps."""
    match = re.fullmatch(r"(\w+)\.(\d+)\.(.+)", name)
    if match is None or int(match[2]) >= n_predict:
        return name
    first = min(int(match[2]), 1) if match[1].endswith("proj") else 0
    return f"{match[1]}.{first}.{match[3]}"


def check_steps(checkpoint: Checkpoint, n_predict: int, tied: bool) -> None:
    """Raise CheckpointError if config.json gives more steps than the file has weights for."""
    numbers = {
        int(match[1])
        for match in (re.match(r"head\.(\d+)\.", unprefixed(name)) for name in checkpoint.names())
        if match
    }
    if not tied and n_predict > len(numbers):
        raise checkpoint.error(
            f"config.json has n_predict = {n_predict}, but the file has the heads of {len(numbers)} steps."
        )


def integer(checkpoint: Checkpoint, key: str, default: int | None = None, minimum: int = 1) -> int:
    """An integer from config.json.

    Raises:
        CheckpointError: it is missing without a default, or is not an integer of at least `minimum`.
    """
    value = checkpoint.config.get(key, default)
    if type(value) is not int or value < minimum:
        raise checkpoint.error(f"config.json has {key} = {value!r}; it must be an integer of at least {minimum}.")
    return value


def flag(checkpoint: Checkpoint, key: str) -> bool:
    """A boolean from config.json, False by default."""
    value = checkpoint.config.get(key, False)
    if not isinstance(value, bool):
        raise checkpoint.error(f"config.json has {key} = {value!r}; it must be true or false.")
    return value


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
