"""Typical acceptance (Cai et al. 2024, "Medusa", section 2.3): accept drafts that the target finds likely enough."""

from __future__ import annotations

import functools
import logging

import numpy as np
import torch

from ..config import SpeculativeConfig
from ..core.draft_trees import DraftTrees
from ..core.sequence import Sequence
from ..kernels import random_bits
from ..kernels.drafts import last_node
from ..kernels.verification.reference import likeliest_longest_path, own_scores, typical_thresholds

logger = logging.getLogger(__name__)


@functools.cache
def _warn() -> None:
    """Once per process."""
    logger.warning(
        "rejection_sample_method='typical' is lossy: it accepts any draft the target finds likely enough, so sampled text does "
        "not follow the target's distribution. 'coupled', 'rejection' and 'block' are exact."
    )


def accept_typical(
    trees: DraftTrees,
    scores: torch.Tensor,
    score_rows: np.ndarray,
    sequences: list[Sequence],
    config: SpeculativeConfig,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Accept the longest path of typical tokens (the likeliest of equally long ones), and draw the next token from the target.

    The draw is the one that coupled verification would make there: its noise is keyed by seed and position. The rule is lossy:
    any typical draft is accepted, however improbable.
    """
    _warn()
    device = scores.device
    scores, own = own_scores(trees, scores, score_rows)
    tokens, rows = trees.tokens.to(device), torch.from_numpy(own).to(device)
    valid = torch.from_numpy(trees.valid).to(device)
    parents = torch.from_numpy(np.ascontiguousarray(trees.parent_index)).to(device)
    after_parent = rows.gather(1, parents + 1)  # [B, N]
    thresholds, log_probs = typical_thresholds(scores, config.posterior_threshold, config.posterior_alpha)
    log_likelihood = log_probs[after_parent, tokens]
    typical = valid & (log_likelihood.exp() > thresholds[after_parent])
    if trees.is_chain:
        path = typical.long().cumprod(1).bool()
    else:
        path = likeliest_longest_path(typical, torch.from_numpy(trees.ancestors).to(device), log_likelihood)
    seeds = torch.tensor([seq.seed for seq in sequences], device=device)
    positions = torch.tensor([len(seq.tokens) for seq in sequences], device=device) + path.sum(1)
    steps = torch.zeros_like(seeds)  # as in coupled verification, the round is not part of the key
    noise = random_bits.gumbel(seeds, positions, steps, random_bits.TOKEN_STREAM, scores.shape[1])
    after_path = rows.gather(1, last_node(path)[:, None]).squeeze(1)
    return path, (scores[after_path] + noise).argmax(1)
