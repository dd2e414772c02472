"""The estimated τ: how many drafted tokens the target would accept, computed on held-out text without decoding."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from .base import Guesses
from .batch import Batch


@dataclass
class Estimate:
    """Acceptance on held-out text.

    Attributes:
        acceptance: per position, the share of guesses equal to the target's greedy choice, given that all earlier ones were.
        tau: tokens per target forward: 1 + the sum over positions of the product of acceptances up to there.
        anchors: number of drafts compared.
    """

    acceptance: list[float]
    tau: float
    anchors: int

    @classmethod
    def of(cls, accepted: torch.Tensor, offered: torch.Tensor) -> Estimate:
        """From counts [K] of accepted guesses, and of guesses whose predecessors were all accepted."""
        rates = (accepted.double() / offered.double().clamp(min=1)).cpu()
        return cls(rates.tolist(), 1.0 + float(rates.cumprod(0).sum()), int(offered[0]))


def judge(guesses: Guesses, choices: torch.Tensor, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
    """(accepted, offered) int64 [K]: the numbers of right guesses, and of guesses whose predecessors were all right, among tokens that
    count. `choices`: int64 [B, S], the target's greedy choice after each token.
    """
    num_guesses = guesses.tokens.shape[1]
    steps = torch.arange(num_guesses, device=choices.device)
    places = guesses.anchors[:, None] + steps  # position of the token before each guess
    inside = places + 1 < batch.lengths[guesses.rows, None]
    at, rows = places.clamp(max=choices.shape[1] - 2), guesses.rows[:, None]
    counts = inside & batch.loss_mask[rows, at + 1]
    right = counts & (guesses.tokens == choices[rows, at])
    alive = torch.cat([torch.ones_like(right[:, :1]), right[:, :-1]], dim=1).long().cumprod(1).bool()
    return (right & alive).sum(0), (counts & alive).sum(0)
