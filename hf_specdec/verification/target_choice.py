"""Greedy and coupled: the target chooses a token after every node, and drafts are accepted as far as they match."""

from __future__ import annotations

import numpy as np
import torch

from ..config import SpeculativeConfig
from ..core.draft_trees import DraftTrees
from ..core.sequence import Sequence
from ..kernels import verification
from ..kernels.drafts import RowStreams
from ..sampling.fused import FusedSampling


def streams_of(sequences: list[Sequence]) -> RowStreams:
    """The random streams of these rows in this round."""
    return RowStreams(
        [seq.seed for seq in sequences],
        [len(seq.tokens) for seq in sequences],
        [seq.num_steps for seq in sequences],
        [seq.do_sample for seq in sequences],
    )


def follow_target(
    trees: DraftTrees,
    scores: torch.Tensor,
    score_rows: np.ndarray,
    sequences: list[Sequence],
    config: SpeculativeConfig,
    sampling: FusedSampling | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Walk each tree along the target's own choices."""
    temperature, thresholds = (None, None) if sampling is None else (sampling.temperature, sampling.thresholds)
    return verification.follow_choices(trees, scores, score_rows, streams_of(sequences), temperature, thresholds)
