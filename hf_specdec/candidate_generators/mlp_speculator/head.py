"""The networks of IBM's and Snowflake's speculators: an MLP or an LSTM with one step per drafted token."""

from __future__ import annotations

import itertools
import math
from abc import ABC, abstractmethod

import torch
import torch.nn.functional as F
from torch import nn

EPSILON = 1e-6
GATES = ("forget", "input", "output", "cell")


class ScaledNorm(nn.Module):
    """Root-mean-square norm with a weight and a bias (mean over the width, in float32, epsilon 1e-6)."""

    def __init__(self, width: int):
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.empty(width)), nn.Parameter(torch.empty(width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[.., width] to the same."""
        return F.rms_norm(x, self.weight.shape, self.weight, EPSILON) + self.bias


class Speculator(nn.Module, ABC):
    """A recurrence with one step per drafted token, started from the target's last hidden state.

    Token embeddings are added to the projected state with a weight that leaves half of the state's variance to the target's
    hidden state after all `n_predict` steps, however many are used (Wertheimer et al. 2024, "Accelerating
    Production LLMs with Combined Token/Embedding Speculators").

    Args:
        n_predict: tokens it was trained to predict.
        width: of the sum of state and embedding.
        scale_input: normalise the target's hidden state.
    """

    head: nn.ModuleList  # a language-model head per step, or one for all

    def __init__(self, n_predict: int, width: int, scale_input: bool):
        super().__init__()
        self.n_predict, self.scale_input = n_predict, scale_input
        state_weight = 0.5 ** (0.5 / n_predict)
        self.embedding_scale = math.sqrt((1 - state_weight**2) * width / 2) / state_weight

    def entered(self, hidden: torch.Tensor) -> torch.Tensor:
        """The target's hidden states [N, H], normalised if `scale_input`."""
        return F.rms_norm(hidden, hidden.shape[-1:], eps=EPSILON) * 0.5**0.5 if self.scale_input else hidden

    @abstractmethod
    def step(self, index: int, state: torch.Tensor, tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Logits [N, V] of the token after `tokens` [N], and the state [N, S] for the next step.

        Args:
            index: of the step. In step 0 `state` is the target's last hidden state [N, H].
        """


class SumSpeculator(Speculator):
    """s' = GELU(norm_i(proj_i(s) + scale * emb_i(token))), logits = head_i(s').

    Args:
        inner: widths of the sum and of the layers after it; the last is that of the state.
        tied: one module each for all steps, but the first step's projection. Otherwise one for each step.
        stacks: number of further layers after each embedding and after each projection; None: no stacks, and other names of tensors.
    """

    def __init__(
        self, n_predict: int, hidden_size: int, inner: list[int], vocab_size: int, scale_input: bool, tied: bool,
        stacks: tuple[int, int] | None = None,
    ):  # fmt: skip
        width, size = inner[0], inner[-1]
        super().__init__(n_predict, width, scale_input)
        count, num_projections = (1, min(n_predict, 2)) if tied else (n_predict, n_predict)
        emb: list[nn.Module] = [nn.Embedding(vocab_size, width) for _ in range(count)]
        proj: list[nn.Module] = [
            nn.Linear(size if i else hidden_size, width, bias=False) for i in range(num_projections)
        ]
        if stacks is not None:
            emb = [_layers(table, stacks[0], width) for table in emb]
            proj = [_layers(first, stacks[1], width) for first in proj]
        self.emb, self.proj = nn.ModuleList(emb), nn.ModuleList(proj)
        self.ln = nn.ModuleList(ScaledNorm(width) if stacks is None else _norms(inner) for _ in range(count))
        self.head = nn.ModuleList(nn.Linear(size, vocab_size, bias=False) for _ in range(count))

    def step(self, index: int, state: torch.Tensor, tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        emb, proj, ln, head = (
            modules[min(index, len(modules) - 1)] for modules in (self.emb, self.proj, self.ln, self.head)
        )
        projected = proj(self.entered(state) if index == 0 else state)
        state = F.gelu(ln(torch.add(projected, emb(tokens), alpha=self.embedding_scale)))
        return head(state), state


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


class LSTMSpeculator(Speculator):
    """An LSTM-like cell ("sum_lstm"). All steps share its weights, except the first step's projections.

    With a_g = proj_g(s) + scale * emb_g(token) for the gates g:
    c' = c * sigmoid(a_forget) + GELU(norm(a_cell)) * sigmoid(a_input), s' = GELU(norm(c')) * sigmoid(a_output),
    logits = head(s'). The cell state c starts at zero; [s', c'] is the state for the next step.

    Args:
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
        """Join the four projections of a step into one, in the order of GATES; called after loading."""
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
        hidden, cell = (self.entered(state), None) if index == 0 else state.chunk(2, dim=1)
        embedded = torch.stack([self.get_submodule(f"{gate}_emb.0")(tokens) for gate in self.embedded], dim=1)
        projected = self.proj[min(index, 1)](hidden).view(-1, 4, self.width)
        mixed = torch.add(projected, embedded, alpha=self.embedding_scale)
        forget, enter, leave = mixed[:, :3].sigmoid().unbind(1)
        entering = F.gelu(self.cell_ln[0](mixed[:, 3])) * enter
        cell = entering if cell is None else torch.addcmul(entering, cell, forget)
        out = F.gelu(self.state_ln[0](cell)) * leave
        return self.head[0](out), torch.cat([out, cell], dim=1)
