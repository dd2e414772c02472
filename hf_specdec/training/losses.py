"""Losses of drafted tokens, against the text's tokens or the target's distributions."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from .batch import Batch
from .target import TargetModel


def token_loss(logits: torch.Tensor, labels: torch.Tensor, teacher: torch.Tensor | None) -> torch.Tensor:
    """The loss of each of n tokens, in nats [n].

    Args:
        logits: float32 [n, V], the head's.
        labels: int64 [n], the text's tokens.
        teacher: float32 [n, V], the target's logits there, for KL(target || head); None: cross-entropy of the labels.
    """
    if teacher is None:
        return F.cross_entropy(logits, labels, reduction="none")
    wanted = teacher.log_softmax(-1)
    return F.kl_div(logits.log_softmax(-1), wanted, reduction="none", log_target=True).sum(-1)


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
