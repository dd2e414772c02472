"""MLP speculators (Wertheimer et al. 2024): IBM's accelerators and Snowflake's Arctic speculators, chains and trees."""

from __future__ import annotations

import re
from dataclasses import dataclass, field

import torch
from torch import nn

from ...model.packed_model import PackedModel
from ..base import DrafterContext
from ..checkpoints.files import Checkpoint, Plan, load_module, register_format
from ..checkpoints.target_parts import check_target, draft_vocabulary, load_once, place_of
from ..growing.last_hidden import LastHiddenConfig, LastHiddenGenerator
from ..growing.levels import Level
from ..growing.tree_shapes import TreeShape, TreeTemplate
from ..registry import register
from .arctic import has_lstm, has_rnn, load_lstm, load_rnn
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

_SHAPE_KEYS = ("branching_factors", "speculative_token_tree", "top_k", "total_tokens")


@dataclass
class MLPSpeculatorConfig(LastHiddenConfig):
    """An MLP speculator drafts from the target's last hidden state and its own tokens: a chain, unless a tree is asked for.

    `top_k_tokens_per_head` and `n_candidates` are the keys checkpoints of this format carry; those in the checkpoint are
    used only with `use_checkpoint_tree`.
    """

    name = "mlp_speculator"
    requires = ("an MLP speculator (IBM accelerator, Arctic speculator) trained for the target: 'model'",)

    top_k_tokens_per_head: list[int] | None = field(
        default=None,
        metadata={"help": "children per node at each depth, e.g. [4, 3, 2, 2]: draft a tree instead of a chain"},
    )
    n_candidates: int | None = field(
        default=None, metadata={"help": "of the tree, keep only the paths to this many best leaves (default: all)"}
    )
    use_checkpoint_tree: bool = field(
        default=False,
        metadata={"help": "draft the tree the checkpoint's top_k_tokens_per_head and n_candidates describe"},
    )

    def __post_init__(self) -> None:
        self.check_bool("use_checkpoint_tree")
        own = "top_k_tokens_per_head" if self.top_k_tokens_per_head is not None else None
        if self.use_checkpoint_tree:
            if own:
                raise self.fail(own, "cannot be combined with 'use_checkpoint_tree': both give the tree's shape.")
            own = "use_checkpoint_tree"
        for key in _SHAPE_KEYS:
            if own and getattr(self, key) is not None:
                raise self.fail(own, f"cannot be combined with {key!r}: both give the tree's shape.")
        if self.n_candidates is not None and not own:
            raise self.fail("n_candidates", "is for trees: give 'top_k_tokens_per_head', or set 'use_checkpoint_tree'.")
        self.check_int("n_candidates", minimum=1, optional=True)
        factors = self.top_k_tokens_per_head
        if factors is not None:
            if not isinstance(factors, list) or not factors or not all(type(f) is int and f >= 1 for f in factors):
                raise self.fail("top_k_tokens_per_head", f"must be a list of integers of at least 1, not {factors!r}.")
            self._check_widths("top_k_tokens_per_head", factors)
            self._fix_depth("top_k_tokens_per_head", len(factors))
        super().__post_init__()

    def shape(self) -> TreeShape:
        """The shape these keys describe (a chain, until the checkpoint's tree is known)."""
        if self.top_k_tokens_per_head is not None:
            return TreeTemplate.from_widths(self.top_k_tokens_per_head, self.n_candidates)
        return super().shape()


@dataclass
class ArcticConfig(MLPSpeculatorConfig):
    """`mlp_speculator` under the name Snowflake's vLLM plugin gives it; both read every checkpoint of the family."""

    name = "arctic"


# ---- formats --------------------------------------------------------------------------------------------------------


def has_mlp(checkpoint: Checkpoint) -> bool:
    """Whether these are IBM's tensors, or must be what is left of them (tied checkpoints may keep any one copy)."""
    names = set(map(unprefixed, checkpoint.names()))
    if has_lstm(names) or has_rnn(names):
        return False
    kinds = {match[1] for match in (re.fullmatch(r"(emb|proj|head|ln)\.\d+\.\w+", name) for name in names) if match}
    return len(kinds) == 4 or checkpoint.config.get("model_type") == "mlp_speculator"


def has_arctic(checkpoint: Checkpoint) -> bool:
    """Whether these are the tensors of an Arctic LSTM, or of a "sum_rnn"."""
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
    """A speculator in IBM's format (also Snowflake's ArcticMLPSpeculator), on the target's device, in its dtype."""
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
    with torch.device("meta"):
        speculator = SumSpeculator(
            n_predict, inner, scale_input,
            emb=[nn.Embedding(vocab_size, inner) for _ in range(count)],
            proj=[nn.Linear(inner if i else emb_dim, inner, bias=False) for i in range(num_projections)],
            ln=[ScaledNorm(inner) for _ in range(count)],
            head=[nn.Linear(inner, vocab_size, bias=False) for _ in range(count)],
        )  # fmt: skip
    rename = sharing(checkpoint, lambda name: tied_name(name, n_predict)) if tied else unprefixed
    load_module(speculator, Plan(checkpoint, rename), *place_of(target))
    return speculator


def load_speculator(checkpoint: Checkpoint, target: PackedModel) -> Speculator:
    """A speculator in any of the family's formats.

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


# ---- drafting -------------------------------------------------------------------------------------------------------


@register(MLPSpeculatorConfig)
class MLPSpeculatorGenerator(LastHiddenGenerator):
    """Drafts with an MLP or LSTM speculator."""

    config: MLPSpeculatorConfig

    def __init__(self, config: MLPSpeculatorConfig, target: PackedModel, context: DrafterContext | None = None):
        super().__init__(config, target, context)
        checkpoint = config.open_head(lambda checkpoint: has_mlp(checkpoint) or has_arctic(checkpoint))
        self.speculator = load_once(config, target, lambda: load_speculator(checkpoint, target))
        vocab_size = integer(checkpoint, "vocab_size")
        self.vocabulary = draft_vocabulary(checkpoint, target, None, vocab_size)
        self.last_token = vocab_size - 1 if vocab_size < target.vocab_size else None
        self.set_heads(self.speculator, self.speculator.n_predict)
        if config.use_checkpoint_tree:
            self.shape = self._checkpoint_tree(checkpoint, self.shape.depth)

    def _checkpoint_tree(self, checkpoint: Checkpoint, depth: int) -> TreeTemplate:
        """The first levels of the tree in the checkpoint's configuration."""
        factors, n_predict = checkpoint.config.get("top_k_tokens_per_head"), self.speculator.n_predict
        if (
            not isinstance(factors, list)
            or len(factors) != n_predict
            or not all(type(f) is int and f >= 1 for f in factors)
        ):
            raise checkpoint.error(
                f"config.json has top_k_tokens_per_head = {factors!r} for n_predict = {n_predict}: 'use_checkpoint_tree' needs "
                "as many integers; give 'top_k_tokens_per_head' instead."
            )
        kept = self.config.n_candidates or integer(checkpoint, "n_candidates")
        return TreeTemplate.from_widths(factors[:depth], kept)

    def _embedded(self, tokens: torch.Tensor) -> torch.Tensor:
        """The tokens; in place of padding that only the target has an embedding for, the last one."""
        return tokens if self.last_token is None else tokens.clamp(max=self.last_token)

    def begin(self, *roots: torch.Tensor) -> torch.Tensor:
        """The first step, from the target's hidden states."""
        hidden, tokens = roots
        logits, state = self.speculator.step(0, hidden, self._embedded(tokens))
        self.state = state[:, None]
        return logits

    def expand(self, level: Level) -> torch.Tensor:
        """The step of this depth, for all nodes."""
        rows, count = level.tokens.shape
        tokens = self._embedded(level.tokens.flatten())
        logits, state = self.speculator.step(level.depth, self.carried(level).flatten(0, 1), tokens)
        self.state = state.view(rows, count, -1)
        return logits.view(rows, count, -1)


@register(ArcticConfig)
class ArcticGenerator(MLPSpeculatorGenerator):
    """The same, by Snowflake's name."""

    config: ArcticConfig
