"""Drafting with Medusa heads (Cai et al. 2024), and the keys of method `medusa`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn

from ...model.packed_model import PackedModel
from ..base import DrafterContext
from ..checkpoints.config import proposed_length
from ..checkpoints.files import Checkpoint
from ..checkpoints.target_parts import DraftVocabulary, load_once
from ..growing.last_hidden import LastHiddenConfig, LastHiddenGenerator
from ..growing.tree_growth import DraftLevel
from ..registry import register
from .checkpoint import is_converted, is_original, load_medusa


@dataclass
class MedusaConfig(LastHiddenConfig):
    """Medusa: several heads on the target's last hidden state each guess one of the next tokens. A chain by default; heads
    are made for trees: `speculative_token_tree` "medusa_mc_sim_7b_63", or one measured with `hf-specdec calibrate`.

    `max_paths` and `topk` in a converted checkpoint's config.json bound the trees of an engine that built them from it; they
    say nothing about the weights and are not used here.
    """

    name = "medusa"
    requires = ("Medusa heads trained for the target: 'model'",)

    def open(self, wanted: Callable[[str], bool] | None = None) -> Checkpoint:
        """The checkpoint. If it is merged with the target (Medusa-2), shards that hold only the target are left out."""
        return super().open(wanted or (lambda name: not name.startswith(("model.", "transformer."))))


@register(MedusaConfig)
class MedusaGenerator(LastHiddenGenerator):
    """Drafts with Medusa heads: head i predicts the token i + 1 places after the newest, the same for all nodes of a depth."""

    def __init__(self, config: MedusaConfig, target: PackedModel, context: DrafterContext | None = None):
        checkpoint = config.open_head(lambda head: is_original(head) or is_converted(head))
        self.heads = load_once(config, target, lambda: load_medusa(checkpoint, target))
        config = config.with_default_length(proposed_length(checkpoint))
        super().__init__(config, target, self.heads, len(self.heads.blocks))
        self.taps = self.heads.taps
        self.vocabulary = DraftVocabulary(target.vocab_size, self.heads.target_ids)

    def score_only(self, rows: Callable[[nn.Module], nn.Module]) -> None:
        self.heads = self.use_heads("lm_heads", map(rows, self.heads.scoring()))

    def begin(self, *roots: torch.Tensor) -> torch.Tensor:
        hidden, _ = roots
        self.state = hidden[:, None]
        return self.heads(0, hidden)

    def expand(self, level: DraftLevel) -> torch.Tensor:
        """The next head's logits [R, 1, Vd], which depend on the text only."""
        self.state = self.remaining(level)
        return self.heads(level.depth, self.state)
