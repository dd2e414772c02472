"""The loss of drafted tokens, against the text's tokens or the target's distributions."""

from __future__ import annotations

import torch
import torch.nn.functional as F


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
