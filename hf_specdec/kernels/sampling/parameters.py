"""The sampling parameters of B rows as tensors on a device."""

from __future__ import annotations

from dataclasses import dataclass

import torch

DRAWS_PER_ROUND = 4096  # the most draws of a row at one position


@dataclass
class RowParameters:
    """Parameters and random streams of B rows. A parameter that is None is off in all rows.

    Attributes:
        seeds, positions, steps: int64 [B], each row's stream, the index of its next token, and its round.
        do_sample: bool [B].
        temperature, top_p, min_p: float32 [B], off at 1, 1 and 0.
        top_k: int32 [B], off at 0.
    """

    seeds: torch.Tensor
    positions: torch.Tensor
    steps: torch.Tensor
    do_sample: torch.Tensor
    temperature: torch.Tensor | None = None
    top_k: torch.Tensor | None = None
    top_p: torch.Tensor | None = None
    min_p: torch.Tensor | None = None

    @property
    def removes(self) -> bool:
        """True if top-k, top-p or min-p may remove tokens."""
        return any(each is not None for each in (self.top_k, self.top_p, self.min_p))

    @property
    def are_off(self) -> bool:
        """True if scores equal the logits."""
        return self.temperature is None and not self.removes

    def noise_keys(
        self, logits: torch.Tensor, rows: torch.Tensor | None, ahead: int, shared: bool
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Seeds, positions and steps of the noise of logits [R, F, V]: int64 [R F] each."""
        owners = owners_of(logits, rows)
        seeds, positions = self.seeds[owners], self.positions[owners] + ahead
        if shared:
            return seeds, positions, torch.zeros_like(seeds)
        ranks = torch.arange(logits.shape[1], device=logits.device).repeat(len(logits))
        return seeds, positions, self.steps[owners] * DRAWS_PER_ROUND + ranks


def owners_of(logits: torch.Tensor, rows: torch.Tensor | None) -> torch.Tensor:
    """Which of the B rows each of the R F rows of logits [R, F, V] belongs to, int64 [R F]."""
    rows = torch.arange(len(logits), device=logits.device) if rows is None else rows
    return rows.repeat_interleave(logits.shape[1])
