"""The estimated τ: how many drafted tokens the target would accept, judged on held-out text without decoding."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from .base import Guesses
from .batch import Batch


@dataclass
class Estimate:
    """Acceptance on held-out text.

    Attributes:
        acceptance: per position, the share of guesses that are the target's greedy choice where all before them were.
        tau: 1 + sum over positions of the products of these up to there: tokens per target forward.
        anchors: how many drafts were judged.
    """

    acceptance: list[float]
    tau: float
    anchors: int

    @classmethod
    def of(cls, accepted: torch.Tensor, offered: torch.Tensor) -> Estimate:
        """From counts [K] of accepted guesses and of guesses whose predecessors were all accepted."""
        rates = (accepted.double() / offered.double().clamp(min=1)).cpu()
        return cls(rates.tolist(), 1.0 + float(rates.cumprod(0).sum()), int(offered[0]))


def judge(guesses: Guesses, choices: torch.Tensor, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
    """(accepted, offered) int64 [K]: how many guesses were right, of those that came after right ones only.

    Args:
        choices: int64 [B, S], the target's greedy choice after each token.

    A guess is judged only for tokens that count (`batch.loss_mask`).
    """
    num_guesses = guesses.tokens.shape[1]
    steps = torch.arange(num_guesses, device=choices.device)
    places = guesses.anchors[:, None] + steps  # the token each guess follows
    inside = places + 1 < batch.lengths[guesses.rows, None]
    at, rows = places.clamp(max=choices.shape[1] - 2), guesses.rows[:, None]
    counts = inside & batch.loss_mask[rows, at + 1]
    right = counts & (guesses.tokens == choices[rows, at])
    alive = torch.cat([torch.ones_like(right[:, :1]), right[:, :-1]], dim=1).long().cumprod(1).bool()
    return (right & alive).sum(0), (counts & alive).sum(0)
