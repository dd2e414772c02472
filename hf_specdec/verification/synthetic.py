"""Synthetic acceptance: as many drafts count as the configuration asks for. For benchmarks; the text is meaningless."""

from __future__ import annotations

import functools
import logging

import numpy as np
import torch

from ..config import SpeculativeConfig
from ..core.draft_trees import DraftTrees
from ..core.sequence import Sequence
from ..kernels import random_bits
from .target_choice import last_node, target_choices

logger = logging.getLogger(__name__)


@functools.cache
def _warn() -> None:
    """Once per process."""
    logger.warning(
        "rejection_sample_method='synthetic': DRAFTS ARE ACCEPTED AT FIXED RATES, WHATEVER THE MODEL SAYS. THE TEXT IS "
        "MEANINGLESS; use this to measure speed only."
    )


def accept_at_rates(
    trees: DraftTrees, scores: torch.Tensor, index: np.ndarray, sequences: list[Sequence], config: SpeculativeConfig
) -> tuple[torch.Tensor, torch.Tensor]:
    """Accept the first L nodes on the way to each tree's deepest node, P(L >= i) = `config.acceptance_rates[i - 1]`.

    Greedy rows too. The next token is the target's own choice after the path, so the cost is that of greedy or coupled
    verification. One uniform number a round, keyed by seed, position and round, decides L (rates never increase).
    """
    _warn()
    device = scores.device
    choices = target_choices(trees, scores, index, sequences)
    seeds, starts, steps = (
        torch.tensor(numbers, device=device)
        for numbers in zip(*((seq.seed, len(seq.tokens), seq.num_steps) for seq in sequences), strict=True)
    )
    luck = random_bits.uniform(seeds, starts, steps, random_bits.ACCEPT_STREAM)  # [B, 1]
    length = (luck < torch.tensor(config.acceptance_rates, device=device)).sum(1, keepdim=True)
    path = torch.from_numpy(_longest_line(trees)).to(device)
    path &= torch.from_numpy(trees.depths).to(device) <= length
    return path, choices.gather(1, last_node(path)[:, None]).squeeze(1)


def _longest_line(trees: DraftTrees) -> np.ndarray:
    """The nodes from the root to each tree's deepest node (the first of them): bool [B, N]."""
    if trees.is_chain or trees.tokens.shape[1] == 0:
        return trees.valid.copy()
    deepest = np.where(trees.valid, trees.depths, 0).argmax(1)
    return trees.ancestors[np.arange(len(deepest)), deepest + 1, 1:] & trees.valid
