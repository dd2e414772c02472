"""Checkpoints of IBM's accelerators and Snowflake's Arctic speculators: how they are recognised and loaded."""

from __future__ import annotations

import re
from typing import Any

from ...model.packed_model import PackedModel
from ..checkpoints.files import Checkpoint, Plan, one_copy, register_format
from ..checkpoints.keys import FLAG, Key, Kind, Table, integer, list_of, one_of
from ..checkpoints.target_parts import built, check_target
from .head import GATES, LSTMSpeculator, Speculator, SumSpeculator


def _widths(value: Any) -> list[int] | None:
    """Widths that are given as 4096, [4096, 4096] or "4096.4096"; None if they are not."""
    parts = value.split(".") if isinstance(value, str) else value if isinstance(value, list) else [value]
    numbers = [int(part) for part in parts if type(part) is int or (isinstance(part, str) and part.isdecimal())]
    return None if not parts or len(numbers) < len(parts) or min(numbers) < 0 else numbers


_WIDTHS = Kind("a width, a list of widths or text like '4096.4096'", lambda value: _widths(value) is not None)
TABLE = Table(
    {
        "n_predict": Key(integer(), default=...),
        "vocab_size": Key(integer(), default=...),
        "method": Key(one_of("sum_rnn", "sum_lstm")),
        "input_hidden_dim": Key(integer()),
        "emb_dim": Key(_WIDTHS, default=...),
        "inner_dim": Key(_WIDTHS, default=0),
        "proj_dim": Key(_WIDTHS),
        "tie_weights": Key(FLAG, default=False),
        "tie_lstm_embs": Key(FLAG, default=False),  # read for an LSTM only, as in the reference
        "scale_input": Key(FLAG, default=False),
        "top_k_tokens_per_head": Key(list_of("integers", int)),
        "n_candidates": Key(integer()),
    },
    nothing=frozenset({"base_model_arch", "base_model_archs", "model_type"}),
    has_layers=False,
)


def kind_of(checkpoint: Checkpoint) -> str | None:
    """ "mlp" (IBM's format), "sum_lstm" or "sum_rnn" by the tensors' names; None: another format."""
    names = set(map(unprefixed, checkpoint.names()))
    if any(name.startswith(("forget_emb.", "forget_proj.")) for name in names):
        return "sum_lstm"
    if any(re.match(r"(emb|proj|ln)\.\d+\.\d+\.", name) for name in names):
        return "sum_rnn"
    parts = {match[1] for match in (re.fullmatch(r"(emb|proj|head|ln)\.\d+\.\w+", name) for name in names) if match}
    return "mlp" if len(parts) == 4 or checkpoint.config.get("model_type") == "mlp_speculator" else None


register_format(
    "MLP speculator (ibm-fms/*-accelerator, ibm-ai-platform, ibm-granite, ArcticMLPSpeculator: speculator.{emb,proj,ln,head}.{i})",
    "mlp_speculator",
    lambda checkpoint: kind_of(checkpoint) == "mlp",
)
register_format(
    "Arctic speculator (Snowflake/Arctic-LSTM-Speculator-*: forget_emb.0, {forget,input,output,cell}_proj.{0,1}; sum_rnn: emb.0.0)",
    "arctic",
    lambda checkpoint: kind_of(checkpoint) in ("sum_lstm", "sum_rnn"),
)


def load_speculator(checkpoint: Checkpoint, target: PackedModel) -> Speculator:
    """Load a speculator in any of the formats, on the target's device, in its dtype. Raises CheckpointError: it does not fit its
    configuration or the target."""
    given, kind = TABLE.read(checkpoint), kind_of(checkpoint)
    emb, inner, proj = (_widths(width) or [] for width in (given.emb_dim, given.inner_dim, given.proj_dim or []))
    recurrence = "sum_lstm" if kind == "sum_lstm" else "sum_rnn"
    if given.method not in (None, recurrence):
        raise checkpoint.error(
            f"config.json has method = {given.method!r}, but its tensors are those of {recurrence!r}."
        )
    if kind != "mlp":
        if given.input_hidden_dim is None or given.proj_dim is None:
            raise checkpoint.error("config.json has no input_hidden_dim and proj_dim, which its tensors need.")
        hidden_size, others = given.input_hidden_dim, inner if kind == "sum_lstm" else inner[:1]
        if len({*emb, *proj, *others}) != 1:
            raise checkpoint.error(
                f"config.json has emb_dim {emb}, proj_dim {proj} and inner_dim {inner}: what is added must be equally wide."
            )
        stacks = len(emb) - 1, len(proj) - 1
    else:  # IBM's format, and Snowflake's ArcticMLPSpeculator
        hidden_size, stacks = given.input_hidden_dim or emb[0], None
        inner = inner if inner[0] else emb
        if len(emb) > 1 or len(inner) > 1:
            raise checkpoint.error(
                "config.json has several widths in emb_dim or inner_dim, but its tensors are those of one layer."
            )
    check_target(checkpoint, target, hidden_size, given.vocab_size)
    if kind == "sum_lstm":
        return _load_lstm(checkpoint, target, given, inner[0])
    return _load_sum(checkpoint, target, given, inner, stacks)


def _load_sum(
    checkpoint: Checkpoint, target: PackedModel, given: Any, inner: list[int], stacks: tuple[int, int] | None
) -> Speculator:
    n_predict, tied = given.n_predict, given.tie_weights
    heads = {match[1] for name in checkpoint.names() if (match := re.match(r"head\.(\d+)\.", unprefixed(name)))}
    if not tied and n_predict > len(heads):
        raise checkpoint.error(
            f"config.json has n_predict = {n_predict}, but the file has the heads of {len(heads)} steps."
        )
    sizes = n_predict, target.config.hidden_size, inner, given.vocab_size
    rename = one_copy(checkpoint, lambda name: tied_name(unprefixed(name), n_predict)) if tied else unprefixed
    plan = Plan(checkpoint, rename)
    return built(checkpoint, plan, target, lambda: SumSpeculator(*sizes, given.scale_input, tied, stacks))


def _lstm_name(name: str, n_predict: int, tie_embeddings: bool) -> str:
    if tie_embeddings and name in {f"{gate}_emb.0.weight" for gate in GATES}:
        return f"{GATES[0]}_emb.0.weight"
    return tied_name(name, n_predict) if name.startswith("head.") else name


def _load_lstm(checkpoint: Checkpoint, target: PackedModel, given: Any, width: int) -> Speculator:
    if not given.tie_weights:
        raise checkpoint.error("config.json has no tie_weights = true, but all steps of an LSTM share their weights.")
    tied_embeddings, sizes = given.tie_lstm_embs, (given.n_predict, target.config.hidden_size, width, given.vocab_size)
    rename = one_copy(checkpoint, lambda name: _lstm_name(unprefixed(name), given.n_predict, tied_embeddings))
    plan = Plan(checkpoint, rename)
    speculator = built(checkpoint, plan, target, lambda: LSTMSpeculator(*sizes, given.scale_input, tied_embeddings))
    speculator.fuse()
    return speculator


def unprefixed(name: str) -> str:
    """A tensor's name without the prefix that some files have."""
    return name.removeprefix("speculator.")


def tied_name(name: str, n_predict: int) -> str:
    """The name under which tied weights are loaded: that of step 0, or step 1 for the projections of later steps."""
    match = re.fullmatch(r"(\w+)\.(\d+)\.(.+)", name)
    if match is None or int(match[2]) >= n_predict:
        return name
    first = min(int(match[2]), 1) if match[1].endswith("proj") else 0
    return f"{match[1]}.{first}.{match[3]}"
