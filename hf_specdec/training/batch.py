"""A batch: texts padded on the right, the tokens that count, and the target's hidden states."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import torch
import torch.nn.functional as F


@dataclass
class Batch:
    """B texts (see the package's docstring for the alignment).

    Attributes:
        input_ids: int64 [B, S].
        lengths: int64 [B], tokens of each row; the rest is padding.
        loss_mask: bool [B, S], tokens of answers; False on padding.
        last_hidden: [B, S, H] or None, the target's final hidden states after the last norm.
        layers: {i: [B, S, H]}, of the tapped layers.
    """

    input_ids: torch.Tensor
    lengths: torch.Tensor
    loss_mask: torch.Tensor
    last_hidden: torch.Tensor | None = None
    layers: dict[int, torch.Tensor] = field(default_factory=dict)

    @property
    def present(self) -> torch.Tensor:
        """bool [B, S]: not padding."""
        positions = torch.arange(self.input_ids.shape[1], device=self.input_ids.device)
        return positions < self.lengths[:, None]

    @property
    def position_ids(self) -> torch.Tensor:
        """int64 [1, S], the same for every row."""
        return torch.arange(self.input_ids.shape[1], device=self.input_ids.device)[None]

    def hidden(self) -> torch.Tensor:
        """`last_hidden`, for trainers whose taps include it."""
        assert self.last_hidden is not None
        return self.last_hidden

    def labels(self, guess: int) -> tuple[torch.Tensor, torch.Tensor]:
        """For every t: x_{t+2+guess} [B, S], and whether it exists and counts, bool [B, S]."""
        return self.ahead(self.input_ids, 2 + guess), self.ahead(self.loss_mask, 2 + guess)

    @staticmethod
    def ahead(tensor: torch.Tensor, steps: int) -> torch.Tensor:
        """`tensor` shifted: position t of the result [B, S, ..] is `tensor` at t + steps; zero (False) beyond the end."""
        moved = tensor[:, steps:]
        missing = tensor.shape[1] - moved.shape[1]
        return F.pad(moved, (0, 0) * (tensor.dim() - 2) + (0, missing))

    def to(self, device: torch.device) -> Batch:
        moved = {name: value.to(device) for name, value in vars(self).items() if isinstance(value, torch.Tensor)}
        return replace(self, **moved, layers={index: states.to(device) for index, states in self.layers.items()})
