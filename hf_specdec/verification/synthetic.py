"""Synthetic acceptance at the rates of the configuration. For benchmarks only: the text is meaningless."""

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
from ..kernels.verification import target_choices
from .target_choice import streams_of

logger = logging.getLogger(__name__)


@functools.cache
def _warn() -> None:
    """Once per process."""
    logger.warning(
        "rejection_sample_method='synthetic': DRAFTS ARE ACCEPTED AT FIXED RATES, WHATEVER THE MODEL SAYS. THE TEXT IS "
        "MEANINGLESS; use this to measure speed only."
    )


def accept_at_rates(
    trees: DraftTrees,
    scores: torch.Tensor,
    score_rows: np.ndarray,
    sequences: list[Sequence],
    config: SpeculativeConfig,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Accept the first L nodes on the way to each tree's deepest node, P(L >= i) = `config.acceptance_rates[i - 1]`.

    Applies to greedy rows, too. The next token is the target's own choice after the path, so the cost is that of greedy or
    coupled verification. One uniform number per round decides L; rates never increase with depth.
    """
    _warn()
    device = scores.device
    streams = streams_of(sequences)
    choices = target_choices(trees, scores, score_rows, streams)
    seeds, starts, steps = (
        torch.tensor(each, device=device) for each in (streams.seeds, streams.positions, streams.steps)
    )
    luck = random_bits.uniform(seeds, starts, steps, random_bits.ACCEPT_STREAM)  # [B, 1]
    length = (luck < torch.tensor(config.acceptance_rates, device=device)).sum(1, keepdim=True)
    path = torch.from_numpy(_longest_line(trees)).to(device)
    path &= torch.from_numpy(trees.depths).to(device) <= length
    return path, choices.gather(1, last_node(path)[:, None]).squeeze(1)


def _longest_line(trees: DraftTrees) -> np.ndarray:
    """The path from the root to each tree's deepest node (the first if several are equally deep): bool [B, N]."""
    if trees.is_chain or trees.tokens.shape[1] == 0:
        return trees.valid.copy()
    deepest = np.where(trees.valid, trees.depths, 0).argmax(1)
    return trees.ancestors[np.arange(len(deepest)), deepest + 1, 1:] & trees.valid
