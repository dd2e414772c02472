"""Drafting with MLP speculators (Wertheimer et al. 2024), in chains and trees; keys of methods `mlp_speculator` and `arctic`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn

from ...config import config_key
from ...model.packed_model import PackedModel
from ..base import DrafterContext, HasHead
from ..checkpoints.target_parts import load_once
from ..growing.last_hidden import LastHiddenConfig, LastHiddenGenerator
from ..growing.tree_growth import DraftLevel
from ..growing.tree_shapes import TreeShape, TreeTemplate
from ..registry import register
from .checkpoint import TABLE, load_speculator


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
