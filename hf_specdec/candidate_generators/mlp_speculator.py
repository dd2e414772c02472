"""MLP speculators (Wertheimer et al. 2024) of IBM and Snowflake (Arctic): a small recurrence drafts; `mlp_speculator` and `arctic`."""

from __future__ import annotations

import itertools
import math
import re
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from ..config import config_key
from ..model.packed_model import PackedModel
from .base import DrafterContext, HasHead
from .checkpoints.files import Checkpoint, Plan, one_copy, register_format, renaming
from .checkpoints.keys import FLAG, Key, Kind, Table, integer, list_of, one_of
from .checkpoints.target_parts import built, check_target, load_once
from .growing.last_hidden import LastHiddenConfig, LastHiddenGenerator
from .growing.tree_growth import DraftLevel
from .growing.tree_shapes import TreeShape, TreeTemplate
from .registry import register

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
            linear = nn.Linear(weight.shape[1], weight.shape[0], bias=False, device="meta")
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


_PREFIX = (r"speculator\.", "")  # which some files have
_unprefixed = renaming(_PREFIX)


def kind_of(checkpoint: Checkpoint) -> str | None:
    """ "mlp" (IBM's format), "sum_lstm" or "sum_rnn" by the tensors' names; None: another format."""
    names = set(map(_unprefixed, checkpoint.names()))
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
    heads = {match[1] for name in checkpoint.names() if (match := re.match(r"head\.(\d+)\.", _unprefixed(name)))}
    if not tied and n_predict > len(heads):
        raise checkpoint.error(
            f"config.json has n_predict = {n_predict}, but the file has the heads of {len(heads)} steps."
        )
    sizes = n_predict, target.config.hidden_size, inner, given.vocab_size
    rename = _unprefixed
    if tied:  # later steps have the tensors of step 0, or their projections those of step 1
        steps = "|".join(map(str, range(n_predict)))
        rules = (rf"(\w*proj)\.(?!0\.)({steps})\.", r"\1.1."), (rf"(?!\w*proj\.)(\w+)\.({steps})\.", r"\1.0.")
        rename = one_copy(checkpoint, renaming(_PREFIX, *rules))
    plan = Plan(checkpoint, rename)
    return built(checkpoint, plan, target, lambda: SumSpeculator(*sizes, given.scale_input, tied, stacks))


def _load_lstm(checkpoint: Checkpoint, target: PackedModel, given: Any, width: int) -> Speculator:
    if not given.tie_weights:
        raise checkpoint.error("config.json has no tie_weights = true, but all steps of an LSTM share their weights.")
    tied_embeddings, sizes = given.tie_lstm_embs, (given.n_predict, target.config.hidden_size, width, given.vocab_size)
    rules = [_PREFIX, (rf"head\.({'|'.join(map(str, range(given.n_predict)))})\.", "head.0.")]
    if tied_embeddings:
        rules.append((rf"({'|'.join(GATES)})_emb\.0\.weight$", f"{GATES[0]}_emb.0.weight"))
    plan = Plan(checkpoint, one_copy(checkpoint, renaming(*rules)))
    speculator = built(checkpoint, plan, target, lambda: LSTMSpeculator(*sizes, given.scale_input, tied_embeddings))
    speculator.fuse()
    return speculator


@dataclass
class MLPSpeculatorConfig(LastHiddenConfig):
    """An MLP speculator drafts from the target's last hidden state and its own tokens: a chain, unless a tree is asked for.

    `top_k_tokens_per_head` and `n_candidates` are the keys checkpoints of this format carry; those in the checkpoint are
    used only with `use_checkpoint_tree`.
    """

    name = "mlp_speculator"
    requires = ("an MLP speculator (IBM accelerator, Arctic speculator) trained for the target: 'model'",)
    reads_too = ("mlp_speculator", "arctic")
    tree_keys = (*LastHiddenConfig.tree_keys, "use_checkpoint_tree", "top_k_tokens_per_head")

    top_k_tokens_per_head: list[int] | None = config_key(
        None, "children per node at each depth, e.g. [4, 3, 2, 2]: draft a tree instead of a chain"
    )
    n_candidates: int | None = config_key(
        None, "of the tree, keep only the paths to this many best leaves (default: all)", minimum=1
    )
    use_checkpoint_tree: bool = config_key(
        False, "draft the tree the checkpoint's top_k_tokens_per_head and n_candidates describe"
    )

    def __post_init__(self) -> None:
        self.check_keys()
        if self.n_candidates is not None and self.top_k_tokens_per_head is None and not self.use_checkpoint_tree:
            raise self.fail("n_candidates", "is for trees: give 'top_k_tokens_per_head', or set 'use_checkpoint_tree'.")
        self._check_factors("top_k_tokens_per_head")
        super().__post_init__()

    def shape(self) -> TreeShape:
        """The shape these keys describe; the checkpoint's own tree is read by the generator."""
        if self.top_k_tokens_per_head is not None:
            return TreeTemplate.from_widths(self.top_k_tokens_per_head, self.n_candidates)
        return super().shape()


@dataclass
class ArcticConfig(MLPSpeculatorConfig):
    """`mlp_speculator` under the name Snowflake's vLLM plugin gives it; both read every checkpoint of the family."""

    name = "arctic"


@register(MLPSpeculatorConfig)
class MLPSpeculatorGenerator(LastHiddenGenerator, HasHead):
    """Drafts with an MLP or LSTM speculator."""

    config: MLPSpeculatorConfig

    def __init__(self, config: MLPSpeculatorConfig, target: PackedModel, context: DrafterContext | None = None):
        checkpoint = config.open_head()
        self.head_module = self.speculator = load_once(config, target, lambda: load_speculator(checkpoint, target))
        super().__init__(config, target, self.speculator, self.speculator.n_predict)
        given = TABLE.read(checkpoint)
        self.last_token = given.vocab_size - 1 if given.vocab_size < target.vocab_size else None
        if config.use_checkpoint_tree:
            kept = config.n_candidates or given.n_candidates
            factors, n_predict = given.top_k_tokens_per_head, self.speculator.n_predict
            if factors is None or len(factors) != n_predict or min(factors) < 1:
                raise checkpoint.error(
                    f"config.json has top_k_tokens_per_head = {factors!r} for n_predict = {n_predict}: 'use_checkpoint_tree' needs "
                    "as many integers; give 'top_k_tokens_per_head' instead."
                )
            self.shape = TreeTemplate.from_widths(factors[: self.shape.depth], kept)

    def score_only(self, rows: Callable[[nn.Module], nn.Module]) -> None:
        self.head_module = self.speculator = self.use_heads("head", map(rows, self.speculator.head))

    def _embedded(self, tokens: torch.Tensor) -> torch.Tensor:
        """The tokens, with padding ids that only the target has replaced by the last id."""
        return tokens if self.last_token is None else tokens.clamp(max=self.last_token)

    def begin(self, *roots: torch.Tensor) -> torch.Tensor:
        hidden, tokens = roots
        logits, state = self.speculator.step(0, hidden, self._embedded(tokens))
        self.state = state[:, None]
        return logits

    def expand(self, level: DraftLevel) -> torch.Tensor:
        rows, count = level.tokens.shape
        tokens = self._embedded(level.tokens.flatten())
        logits, state = self.speculator.step(level.depth, self.carried(level).flatten(0, 1), tokens)
        self.state = state.view(rows, count, -1)
        return logits.view(rows, count, -1)


@register(ArcticConfig)
class ArcticGenerator(MLPSpeculatorGenerator):
    """The same under Snowflake's name."""
