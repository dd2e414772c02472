"""Losses of drafted tokens, against the text's tokens or the target's distributions."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F

from .base import HeadTrainer, StepLoss
from .batch import Batch

Step = Callable[[int, torch.Tensor, torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]


def token_loss(logits: torch.Tensor, labels: torch.Tensor, teacher: torch.Tensor | None) -> torch.Tensor:
    """The loss of each of n tokens, in nats [n]: cross-entropy of the labels [n], or with the target's logits there, KL(target || head).
    All logits are float32 [n, V].
    """
    if teacher is None:
        return F.cross_entropy(logits, labels, reduction="none")
    wanted = teacher.log_softmax(-1)
    return F.kl_div(logits.log_softmax(-1), wanted, reduction="none", log_target=True).sum(-1)


def recurrent_loss(
    trainer: HeadTrainer, batch: Batch, state: Callable[[torch.Tensor], torch.Tensor], step: Step, decay: float = 1.0
) -> StepLoss:
    """The loss of a head that reads the text's own tokens: the sum over steps k of decay^k (teacher_weight CE(target's distribution) +
    label_weight CE(token)).

    Args:
        trainer: with the two weights among its options.
        state: the first state [n, H] at the positions, bool [B, S], that some step counts.
        step: from k, the state [n, H], the tokens x_{t+1+k} [n] and the positions bool [n] that step k counts, the logits at these
            and the next state.
    """
    options = trainer.options
    labels = [batch.labels(k) for k in range(trainer.num_guesses)]
    used = torch.stack([counts for _, counts in labels]).any(0)
    current = state(used)
    # the target's distributions [n, V] of the tokens that count, computed once
    probs, before = None, batch.ahead(batch.loss_mask, 1)
    if options.teacher_weight:
        with torch.no_grad():
            probs = trainer.target.logits(batch.hidden()[before]).softmax(-1)
    rows = before.flatten().cumsum(0).view_as(before) - 1
    total, metrics = current.new_zeros(()), {}
    for k, (ids, counts) in enumerate(labels):
        logits, current = step(k, current, batch.ahead(batch.input_ids, 1 + k)[used], counts[used])
        logits, wanted = logits.float(), ids[counts]
        if probs is not None:
            entropy = F.cross_entropy(logits, probs[batch.ahead(rows, 1 + k)[counts]], reduction="sum")
            total = total + decay**k * options.teacher_weight * entropy
        if options.label_weight:
            total = total + decay**k * options.label_weight * F.cross_entropy(logits, wanted, reduction="sum")
        metrics[f"accuracy_{k + 1}"] = ((logits.argmax(-1) == wanted).sum(), counts.sum())
    return StepLoss(total, labels[0][1].sum(), metrics)
