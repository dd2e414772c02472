"""Eagle3Base: what the generators of EAGLE-3 and P-EAGLE heads share."""

from __future__ import annotations

import torch
from torch import nn

from ...model.native import natively
from ...model.packed_model import PackedModel
from ..base import DrafterContext, HasHead
from ..growing.features import FeatureGenerator
from .checkpoint import LoadedEagle3
from .config import Eagle3Config


class Eagle3Base(FeatureGenerator, HasHead):
    """A generator around a loaded head.

    Args:
        default_length: the checkpoint's own draft length, if it names one.
    """

    config: Eagle3Config

    def __init__(
        self,
        config: Eagle3Config,
        target: PackedModel,
        context: DrafterContext | None,
        loaded: LoadedEagle3,
        default_length: int | None,
    ):
        super().__init__(config.with_default_length(default_length), target, context)
        self.loaded, self.vocabulary, self.taps = loaded, loaded.vocabulary, loaded.options.taps
        self.window_stays = loaded.options.window_stays
        if self.window_stays:  # graphs have one position per token, used for rotation and window
            self.head, self.rounds = natively(loaded.head, config.native), None
        else:
            self.head = self.captured(loaded.head)
        self.cache = self.new_cache(1, config.block_size)

    @property
    def head_module(self) -> nn.Module:
        """The head's own layers."""
        return self.loaded.module

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """The head's logits over its draft vocabulary."""
        return self.loaded.logits(hidden)

    def scoring_modules(self) -> list[nn.Module]:
        """The head's last norm and its language-model head."""
        return [self.loaded.module.norm, self.loaded.lm_head]
