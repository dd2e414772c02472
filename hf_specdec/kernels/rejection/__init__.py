"""Rejection verification: speculative sampling, token by token over trees or by blocks over chains."""

from __future__ import annotations

import numpy as np
import torch

from ..dispatch import uses_triton
from ..drafts import Drafts, RowStreams
from . import reference
from .block import verify_block

__all__ = ["verify_block", "verify_tokens"]


def verify_tokens(
    drafts: Drafts,
    scores: torch.Tensor,
    score_rows: np.ndarray,
    streams: RowStreams,
    temperature: torch.Tensor | None = None,
    thresholds: tuple[torch.Tensor, torch.Tensor] | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Speculative sampling over chains and trees, token by token: see `reference.rejection_walk`.

    Args:
        scores: [R, V]; `score_rows` int64 [B, N + 1] says which row of them follows the root and each node.
        temperature, thresholds: sampling parameters that are still to be applied (see `sampling.is_fused`); only with kernels.

    Returns: accepted path bool [B, N], and the token after it int64 [B].
    """
    if uses_triton(scores.device):
        from .triton import verify_tokens as by_kernel

        return by_kernel(drafts, scores, score_rows, streams, temperature, thresholds)
    assert temperature is None and thresholds is None
    return reference.verify_tokens(drafts, scores, score_rows, streams)
