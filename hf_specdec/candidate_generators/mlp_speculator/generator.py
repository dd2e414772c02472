"""Drafting with MLP speculators (Wertheimer et al. 2024), in chains and trees."""

from __future__ import annotations

import torch
from torch import nn

from ...model.packed_model import PackedModel
from ..base import DrafterContext, HasHead
from ..checkpoints.files import Checkpoint
from ..checkpoints.target_parts import draft_vocabulary, load_once
from ..growing.last_hidden import LastHiddenGenerator
from ..growing.levels import Level
from ..growing.tree_shapes import TreeTemplate
from ..registry import register
from .checkpoint import has_arctic, has_mlp, integer, load_speculator
from .config import ArcticConfig, MLPSpeculatorConfig


@register(MLPSpeculatorConfig)
class MLPSpeculatorGenerator(LastHiddenGenerator, HasHead):
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

    @property
    def head_module(self) -> nn.Module:
        """The speculator."""
        return self.speculator

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
        """The tokens, with padding ids that only the target has replaced by the last id."""
        return tokens if self.last_token is None else tokens.clamp(max=self.last_token)

    def begin(self, *roots: torch.Tensor) -> torch.Tensor:
        """The first step's logits, from the target's hidden states."""
        hidden, tokens = roots
        logits, state = self.speculator.step(0, hidden, self._embedded(tokens))
        self.state = state[:, None]
        return logits

    def expand(self, level: Level) -> torch.Tensor:
        """This depth's logits [R, F, V], for all nodes."""
        rows, count = level.tokens.shape
        tokens = self._embedded(level.tokens.flatten())
        logits, state = self.speculator.step(level.depth, self.carried(level).flatten(0, 1), tokens)
        self.state = state.view(rows, count, -1)
        return logits.view(rows, count, -1)


@register(ArcticConfig)
class ArcticGenerator(MLPSpeculatorGenerator):
    """The same generator under Snowflake's name."""

    config: ArcticConfig
