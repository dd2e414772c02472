"""Drafting with EAGLE-3 heads (Li et al. 2025), step by step."""

from __future__ import annotations

import torch

from ...core.output import PackedOutput
from ...model.packed_model import PackedModel
from ..base import DrafterContext
from ..checkpoints.config import proposed_length
from ..checkpoints.target_parts import load_once
from ..registry import register
from .base import Eagle3Base
from .checkpoint import LoadedEagle3, is_eagle3, load_eagle3
from .config import Eagle3Config
from .p_eagle import PEagleGenerator


@register(Eagle3Config)
def make_eagle3(config: Eagle3Config, target: PackedModel, context: DrafterContext | None = None) -> Eagle3Base:
    """The generator for the kind of checkpoint: EAGLE-3 or P-EAGLE."""
    checkpoint = config.open_head(is_eagle3)
    own = config.mask_token_id, config.recycle_normed
    loaded = load_once(config, target, lambda: load_eagle3(checkpoint, target, config.prepack_weights, *own), *own)
    kind = Eagle3Generator if loaded.options.mask_token is None else PEagleGenerator
    return kind(config, target, context, loaded, proposed_length(checkpoint))


class Eagle3Generator(Eagle3Base):
    """Drafts with an EAGLE-3 head."""

    def __init__(
        self,
        config: Eagle3Config,
        target: PackedModel,
        context: DrafterContext | None,
        loaded: LoadedEagle3,
        default_length: int | None,
    ):
        super().__init__(config, target, context, loaded, default_length)
        if config.mask_token_id is not None:
            raise config.fail("mask_token_id", "is for P-EAGLE heads, which this one is not: leave it out.")
        if config.parallel_drafting:
            raise config.fail("parallel_drafting", "is True, but this head drafts step by step: leave it out.")

    def features(self, output: PackedOutput, index: torch.Tensor) -> torch.Tensor:
        """The target's hidden states, concatenated [n, L * Ht]; the head projects them when it reads them."""
        return self.loaded.joined_states(output, index)
