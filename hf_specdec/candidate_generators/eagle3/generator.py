"""Drafting with EAGLE-3 heads (Li et al. 2025), step by step."""

from __future__ import annotations

import torch

from ...core.output import PackedOutput
from ...model.packed_model import PackedModel
from ..base import CandidateGenerator, DrafterContext
from ..checkpoints.config import proposed_length
from ..checkpoints.target_parts import load_once
from ..growing.features import FeatureGenerator
from ..registry import register
from .checkpoint import LoadedEagle3, is_eagle3, load_eagle3
from .config import Eagle3Config
from .p_eagle import PEagleGenerator


@register(Eagle3Config)
class Eagle3Generator(FeatureGenerator):
    """Drafts with an EAGLE-3 head."""

    config: Eagle3Config

    @classmethod
    def create(
        cls, config: Eagle3Config, target: PackedModel, context: DrafterContext | None = None
    ) -> CandidateGenerator:
        """The generator for the kind of checkpoint: EAGLE-3 or P-EAGLE."""
        checkpoint = config.open_head(is_eagle3)
        own = config.mask_token_id, config.recycle_normed
        loaded = load_once(config, target, lambda: load_eagle3(checkpoint, target, config.prepack_weights, *own), *own)
        kind = cls if loaded.options.mask_token is None else PEagleGenerator
        return kind(config, target, context, loaded, proposed_length(checkpoint))

    def __init__(
        self,
        config: Eagle3Config,
        target: PackedModel,
        context: DrafterContext | None,
        loaded: LoadedEagle3,
        default_length: int | None,
    ):
        self.default_length = default_length
        super().__init__(self.with_checkpoint_defaults(config), target, context)
        if config.mask_token_id is not None:
            raise config.fail("mask_token_id", "is for P-EAGLE heads, which this one is not: leave it out.")
        if config.parallel_drafting:
            raise config.fail("parallel_drafting", "is True, but this head drafts step by step: leave it out.")
        self.loaded, self.vocabulary, self.taps = loaded, loaded.vocabulary, loaded.options.taps
        self.window_stays = loaded.options.window_stays
        if self.window_stays:  # graphs have one position per token, used for rotation and window
            self.head, self.rounds = loaded.head, None
        else:
            self.head = self.captured(loaded.head)
        self.cache = self.new_cache(1, config.block_size)

    def with_checkpoint_defaults(self, config: Eagle3Config) -> Eagle3Config:
        """The configuration with the checkpoint's draft length, where the user gave none."""
        return config.with_default_length(self.default_length)

    def features(self, output: PackedOutput, index: torch.Tensor) -> torch.Tensor:
        """The target's hidden states, concatenated [n, L * Ht]; the head projects them when it reads them."""
        return self.loaded.joined_states(output, index)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """The head's logits over its draft vocabulary."""
        return self.loaded.logits(hidden)
