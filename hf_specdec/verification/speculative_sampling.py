"""Rejection and block: test drafts against the drafter's distribution, so that the output follows the target's."""

from __future__ import annotations

import numpy as np
import torch

from ..config import SpeculativeConfig
from ..core.draft_trees import DraftTrees
from ..core.sequence import Sequence
from ..kernels import rejection
from ..sampling.fused import FusedSampling
from .target_choice import streams_of


def reject_tokens(
    trees: DraftTrees,
    scores: torch.Tensor,
    score_rows: np.ndarray,
    sequences: list[Sequence],
    config: SpeculativeConfig,
    sampling: FusedSampling | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Speculative sampling, token by token (Leviathan et al. 2023; Chen et al. 2023)."""
    temperature, thresholds = (None, None) if sampling is None else (sampling.temperature, sampling.thresholds)
    return rejection.verify_tokens(trees, scores, score_rows, streams_of(sequences), temperature, thresholds)


def accept_block(
    trees: DraftTrees,
    scores: torch.Tensor,
    score_rows: np.ndarray,
    sequences: list[Sequence],
    config: SpeculativeConfig,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Block verification of chains (Sun et al. 2024).

    Raises:
        SpeculativeConfigError: the drafts are trees, for which the rule is not defined.
    """
    if not trees.is_chain:
        raise config.fail(
            "rejection_sample_method",
            "is 'block', which verifies chains, and this configuration drafts trees: draft chains, or verify by 'rejection' "
            "or 'coupled'.",
        )
    return rejection.verify_block(trees, scores, score_rows, streams_of(sequences))
