"""Snowflake's Arctic speculators (ArcticInference): the LSTM, and the recurrence with several layers per step ("sum_rnn")."""

from __future__ import annotations

import itertools
import re
from collections.abc import Collection

import torch
import torch.nn.functional as F
from torch import nn

from ...model.packed_model import PackedModel
from ..checkpoints.files import Checkpoint, Plan, load_module
from ..checkpoints.target_parts import check_target, place_of
from .parts import (
    ScaledNorm,
    Speculator,
    SumSpeculator,
    check_steps,
    flag,
    integer,
    sharing,
    tied_name,
    unprefixed,
    widths,
)

GATES = ("forget", "input", "output", "cell")


def has_lstm(names: Collection[str]) -> bool:
    """Whether these tensor names (without prefix) are an LSTM's."""
    return any(name.startswith(("forget_emb.", "forget_proj.")) for name in names)


def has_rnn(names: Collection[str]) -> bool:
    """Whether these tensor names (without prefix) are those of a "sum_rnn"."""
    return any(re.match(r"(emb|proj|ln)\.\d+\.\d+\.", name) for name in names)


class LSTMSpeculator(Speculator):
    """An LSTM-like cell ("sum_lstm"); its weights are shared by all steps, but for the first projections.

    With a_g = proj_g(s) + scale * emb_g(token) for the gates g:
    c' = c * sigmoid(a_forget) + GELU(norm(a_cell)) * sigmoid(a_input), s' = GELU(norm(c')) * sigmoid(a_output),
    logits = head(s'). The cell state c is zero when drafting begins; [s', c'] is what one step leaves to the next.

    Args:
        hidden_size: of the target.
        tie_embeddings: one embedding for all gates.
    """

    def __init__(
        self, n_predict: int, hidden_size: int, width: int, vocab_size: int, scale_input: bool, tie_embeddings: bool
    ):
        super().__init__(n_predict, width, scale_input)
        self.width = width
        self.embedded = GATES[:1] if tie_embeddings else GATES
        for gate in self.embedded:
            self.add_module(f"{gate}_emb", nn.ModuleList([nn.Embedding(vocab_size, width)]))
        for gate in GATES:
            sizes = (hidden_size, width)
            self.add_module(f"{gate}_proj", nn.ModuleList(nn.Linear(size, width, bias=False) for size in sizes))
        self.cell_ln, self.state_ln = nn.ModuleList([ScaledNorm(width)]), nn.ModuleList([ScaledNorm(width)])
        self.head = nn.ModuleList([nn.Linear(width, vocab_size, bias=False)])

    def fuse(self) -> None:
        """Once loaded: the four projections of a step become one, in the order of GATES."""
        fused = []
        for step in range(2):
            weight = torch.cat([self.get_parameter(f"{gate}_proj.{step}.weight") for gate in GATES])
            with torch.device("meta"):
                linear = nn.Linear(weight.shape[1], weight.shape[0], bias=False)
            linear.weight = nn.Parameter(weight, requires_grad=False)
            fused.append(linear)
        for gate in GATES:
            delattr(self, f"{gate}_proj")
        self.proj = nn.ModuleList(fused)

    def step(self, index: int, state: torch.Tensor, tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """See Speculator; the state is [s', c'] [N, 2 * width]."""
        hidden, cell = (self.entered(state), None) if index == 0 else state.chunk(2, dim=1)
        embedded = torch.stack([self.get_submodule(f"{gate}_emb.0")(tokens) for gate in self.embedded], dim=1)
        projected = self.proj[min(index, 1)](hidden).view(-1, 4, self.width)
        mixed = torch.add(projected, embedded, alpha=self.embedding_scale)
        forget, enter, leave = mixed[:, :3].sigmoid().unbind(1)
        entering = F.gelu(self.cell_ln[0](mixed[:, 3])) * enter
        cell = entering if cell is None else torch.addcmul(entering, cell, forget)
        out = F.gelu(self.state_ln[0](cell)) * leave
        return self.head[0](out), torch.cat([out, cell], dim=1)


def _lstm_name(name: str, n_predict: int, tie_embeddings: bool) -> str:
    if tie_embeddings and name in {f"{gate}_emb.0.weight" for gate in GATES}:
        return f"{GATES[0]}_emb.0.weight"
    return tied_name(name, n_predict) if name.startswith("head.") else name


def load_lstm(checkpoint: Checkpoint, target: PackedModel) -> Speculator:
    """An LSTM speculator on the target's device, in its dtype."""
    n_predict, vocab_size = integer(checkpoint, "n_predict"), integer(checkpoint, "vocab_size")
    hidden_size = integer(checkpoint, "input_hidden_dim")
    tie_embeddings = flag(checkpoint, "tie_lstm_embs")
    sizes = [size for key in ("inner_dim", "emb_dim", "proj_dim") for size in widths(checkpoint, key)]
    if len(set(sizes)) != 1:
        raise checkpoint.error(f"config.json has inner_dim, emb_dim and proj_dim of {sizes}; an LSTM's are one number.")
    if not flag(checkpoint, "tie_weights"):
        raise checkpoint.error("config.json has no tie_weights = true; an LSTM's weights are those of all steps.")
    check_target(checkpoint, target, hidden_size, vocab_size)
    scale_input = flag(checkpoint, "scale_input")
    with torch.device("meta"):
        speculator = LSTMSpeculator(n_predict, hidden_size, sizes[0], vocab_size, scale_input, tie_embeddings)
    rename = sharing(checkpoint, lambda name: _lstm_name(name, n_predict, tie_embeddings))
    load_module(speculator, Plan(checkpoint, rename), *place_of(target))
    speculator.fuse()
    return speculator


# ---- several layers per step ----------------------------------------------------------------------------------------


def _layers(first: nn.Module, count: int, width: int) -> nn.Sequential:
    """`first`, then norm, GELU and a linear layer, `count` times."""
    more = [m for _ in range(count) for m in (ScaledNorm(width), nn.GELU(), nn.Linear(width, width, bias=False))]
    return nn.Sequential(first, *more)


def _norms(sizes: list[int]) -> nn.Sequential:
    """A norm, then GELU, a linear layer and a norm for each further width."""
    modules: list[nn.Module] = [ScaledNorm(sizes[0])]
    for before, size in itertools.pairwise(sizes):
        modules += [nn.GELU(), nn.Linear(before, size, bias=False), ScaledNorm(size)]
    return nn.Sequential(*modules)


def load_rnn(checkpoint: Checkpoint, target: PackedModel) -> Speculator:
    """A "sum_rnn" speculator on the target's device, in its dtype: IBM's recurrence, each part of it a stack of layers."""
    n_predict, vocab_size = integer(checkpoint, "n_predict"), integer(checkpoint, "vocab_size")
    hidden_size = integer(checkpoint, "input_hidden_dim")
    inner, emb, proj = (widths(checkpoint, key) for key in ("inner_dim", "emb_dim", "proj_dim"))
    if len({*emb, *proj, inner[0]}) != 1:
        raise checkpoint.error(
            f"config.json has emb_dim {emb}, proj_dim {proj} and inner_dim {inner}: embeddings, projections and the first inner "
            "width are added, so they must be one number."
        )
    check_target(checkpoint, target, hidden_size, vocab_size)
    tied, width = flag(checkpoint, "tie_weights"), inner[0]
    check_steps(checkpoint, n_predict, tied)
    count, num_projections = (1, min(n_predict, 2)) if tied else (n_predict, n_predict)
    with torch.device("meta"):
        starts = [nn.Linear(inner[-1] if i else hidden_size, width, bias=False) for i in range(num_projections)]
        speculator = SumSpeculator(
            n_predict, width, flag(checkpoint, "scale_input"),
            emb=[_layers(nn.Embedding(vocab_size, width), len(emb) - 1, width) for _ in range(count)],
            proj=[_layers(start, len(proj) - 1, width) for start in starts],
            ln=[_norms(inner) for _ in range(count)],
            head=[nn.Linear(inner[-1], vocab_size, bias=False) for _ in range(count)],
        )  # fmt: skip
    rename = sharing(checkpoint, lambda name: tied_name(name, n_predict)) if tied else unprefixed
    load_module(speculator, Plan(checkpoint, rename), *place_of(target))
    return speculator
