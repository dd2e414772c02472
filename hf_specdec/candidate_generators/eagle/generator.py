"""Drafting with EAGLE-1 and EAGLE-2 heads (Li et al. 2024), and the keys of method `eagle`."""

from __future__ import annotations

from dataclasses import dataclass

from ...model.packed_model import PackedModel
from ..base import DrafterContext
from ..checkpoints.config import HeadConfig, proposed_length
from ..checkpoints.target_parts import load_once
from ..growing.features import FeatureGenerator
from ..registry import register
from .checkpoint import is_eagle, load_eagle


@dataclass
class EagleConfig(HeadConfig):
    """EAGLE-1/2: a head of one decoder layer drafts from the target's final hidden states, in chains, static trees
    (EAGLE-1) or dynamic trees (EAGLE-2: `top_k`, `total_tokens`, `depth`)."""

    name = "eagle"
    requires = ("an EAGLE head trained for the target: 'model'",)


@register(EagleConfig)
class EagleGenerator(FeatureGenerator):
    """Drafts with an EAGLE-1/2 head. Logits come from the target's language-model head, or the checkpoint's own."""

    def __init__(self, config: EagleConfig, target: PackedModel, context: DrafterContext | None = None):
        checkpoint = config.open_head(is_eagle)
        super().__init__(config.with_default_length(proposed_length(checkpoint)), target, context)
        self.use(load_once(config, target, lambda: load_eagle(checkpoint, target, config.prepack_weights)))
