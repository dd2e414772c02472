"""Greedy and coupled verification: the target chooses a token after every node, and drafts are accepted as far as they match."""

from __future__ import annotations

import numpy as np
import torch

from ..dispatch import uses_triton
from ..drafts import Drafts, RowStreams
from . import reference
from .reference import target_choices

__all__ = ["follow_choices", "greedy_tokens", "target_choices"]


def follow_choices(
    drafts: Drafts,
    scores: torch.Tensor,
    score_rows: np.ndarray,
    streams: RowStreams,
    temperature: torch.Tensor | None = None,
    thresholds: tuple[torch.Tensor, torch.Tensor] | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Walk each tree along the target's own choices.

    Args:
        scores: [R, V]; `score_rows` int64 [B, N + 1] says which row of them follows the root and each node.
        temperature, thresholds: sampling parameters that are still to be applied (see `sampling.is_fused`); only with kernels.

    Returns: accepted path bool [B, N], and the token after it int64 [B].
    """
    if uses_triton(scores.device):
        from .triton import follow_choices as by_kernel

        return by_kernel(drafts, scores, score_rows, streams, temperature, thresholds)
    assert temperature is None and thresholds is None
    return reference.follow_choices(drafts, scores, score_rows, streams)


def greedy_tokens(scores: torch.Tensor) -> torch.Tensor:
    """The argmax of each row of scores [R, V], the lowest id among equals: int64 [R]."""
    if uses_triton(scores.device):
        from .triton import target_choices as by_kernel

        index = torch.arange(len(scores), device=scores.device)[:, None]
        return by_kernel(scores, index, index.new_zeros(len(scores), 0, dtype=torch.bool)).squeeze(1)
    return scores.argmax(1)
