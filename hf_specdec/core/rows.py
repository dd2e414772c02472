"""RowInput: one sequence's part of a forward."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch


@dataclass
class RowInput:
    """New tokens of one sequence.

    Attributes:
        seq_id: which sequence of the cache.
        tokens: int64 numpy [t] ids, or a tensor [t] where they are already on the device.
        start: logical index of the first new token; what is before is visible to all of them.
        positions: numpy [t]; None: `start`, `start + 1`, ..
        visibility: bool numpy [t, m] over the last m of the row's slots, the t new ones last; None: causal. Trees need it.
        region_positions: numpy [m], positions of those m slots; needed with `visibility` for sliding windows.
        window_positions: numpy [t], where sliding windows take the new tokens to stand; None: at `positions`.
        logits: how many of the last tokens need logits.
        behind: ids [n] behind `tokens` that are on the device.
    """

    seq_id: int
    tokens: np.ndarray | torch.Tensor
    start: int
    positions: np.ndarray | None = None
    visibility: np.ndarray | None = None
    region_positions: np.ndarray | None = None
    window_positions: np.ndarray | None = None
    logits: int = 1
    behind: torch.Tensor | None = None

    @property
    def num_tokens(self) -> int:
        """t."""
        return self.tokens.shape[0] + (0 if self.behind is None else self.behind.shape[0])
