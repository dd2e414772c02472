"""The target's distributions, for heads that learn them."""

from __future__ import annotations

import torch

from .batch import Batch
from .target import TargetModel


class Teacher:
    """The target's distributions of the tokens that count, computed once for all steps of a head."""

    @torch.no_grad()
    def __init__(self, target: TargetModel, batch: Batch):
        before = batch.ahead(batch.loss_mask, 1)  # positions whose next token counts
        self.probs = target.logits(batch.hidden()[before]).softmax(-1)  # [n, V]
        self.rows = before.flatten().cumsum(0).view_as(before) - 1

    def of(self, guess: int, counts: torch.Tensor) -> torch.Tensor:
        """The distribution [n, V] of x_{t+2+guess} at each t where `counts` bool [B, S], as of `Batch.labels`."""
        return self.probs[Batch.ahead(self.rows, 1 + guess)[counts]]
