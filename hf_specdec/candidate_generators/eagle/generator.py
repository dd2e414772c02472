"""Drafting with EAGLE-1 and EAGLE-2 heads (Li et al. 2024)."""

from __future__ import annotations

from ...model.packed_model import PackedModel
from ..base import DrafterContext
from ..checkpoints.config import proposed_length
from ..checkpoints.target_parts import load_once
from ..growing.features import FeatureGenerator
from ..registry import register
from .checkpoint import is_eagle, load_eagle
from .config import EagleConfig


@register(EagleConfig)
class EagleGenerator(FeatureGenerator):
    """Drafts with an EAGLE-1/2 head. Logits come from the target's language-model head, or the checkpoint's own."""

    config: EagleConfig

    def __init__(self, config: EagleConfig, target: PackedModel, context: DrafterContext | None = None):
        checkpoint = config.open_head(is_eagle)
        super().__init__(config.with_default_length(proposed_length(checkpoint)), target, context)
        self.loaded = load_once(config, target, lambda: load_eagle(checkpoint, target, config.prepack_weights))
        self.head = self.captured(self.loaded.head)
        self.lm_head, self.vocabulary = self.loaded.lm_head, self.loaded.vocabulary
        self.cache = self.new_cache(1, config.block_size)
