"""Drafting with Medusa heads (Cai et al. 2024)."""

from __future__ import annotations

import torch

from ...model.packed_model import PackedModel
from ..base import DrafterContext
from ..checkpoints.target_parts import DraftVocabulary, load_once
from ..growing.last_hidden import LastHiddenGenerator
from ..growing.levels import Level
from ..registry import register
from .checkpoint import is_converted, is_original, load_medusa
from .config import MedusaConfig


@register(MedusaConfig)
class MedusaGenerator(LastHiddenGenerator):
    """Drafts with Medusa heads: head i predicts the token i + 1 places after the newest, the same for all nodes of a depth."""

    config: MedusaConfig

    def __init__(self, config: MedusaConfig, target: PackedModel, context: DrafterContext | None = None):
        super().__init__(config, target, context)
        checkpoint = config.open_head(lambda each: is_original(each) or is_converted(each))
        self.heads = load_once(config, target, lambda: load_medusa(checkpoint, target))
        self.vocabulary = DraftVocabulary(target.vocab_size, self.heads.target_ids)
        self.set_heads(self.heads, len(self.heads.blocks))

    def begin(self, *roots: torch.Tensor) -> torch.Tensor:
        """The first head's logits [R, Vd]."""
        hidden, _ = roots
        self.state = hidden[:, None]
        return self.heads(0, hidden)

    def expand(self, level: Level) -> torch.Tensor:
        """The next head's logits [R, 1, Vd], which depend on the text only."""
        self.state = self.remaining(level)
        return self.heads(level.depth, self.state)
