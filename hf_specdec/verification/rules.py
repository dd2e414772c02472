"""The rules: which drafted tokens are accepted, and which token follows them. `RULES` has those for rows that sample.

All have the arguments and results of `follow_target`.
"""

from __future__ import annotations

import functools
import logging

import numpy as np
import torch

from ..config import SpeculativeConfig
from ..core.draft_trees import DraftTrees
from ..core.sequence import Sequence
from ..kernels import random_bits, rejection, verification
from ..kernels.drafts import RowStreams, last_node
from ..kernels.verification.reference import likeliest_longest_path, own_scores, typical_thresholds
from ..sampling.parameters import FusedSampling

logger = logging.getLogger(__name__)


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
    """Greedy and coupled: the target chooses a token after every node, and drafts are accepted as far as they match.

    Args:
        trees: drafts of B rows with up to N nodes.
        scores: float32 [R, V], the target's.
        score_rows: int64 numpy [B, N + 1], the row of `scores` that follows the root and each node.
        sampling: parameters that the rule's kernel must still apply; only for the rules of `sampling.parameters.RULES_WITH_KERNELS`.

    Returns: the accepted nodes bool [B, N] and the token after them int64 [B], on the scores' device, without waiting for it.
    """
    return verification.follow_choices(trees, scores, score_rows, streams_of(sequences), *_parameters(sampling))


def reject_tokens(trees, scores, score_rows, sequences, config, sampling=None) -> tuple[torch.Tensor, torch.Tensor]:
    """Speculative sampling, token by token (Leviathan et al. 2023; Chen et al. 2023): drafts are tested against the drafter's
    distribution, so that the output follows the target's."""
    return rejection.verify_tokens(trees, scores, score_rows, streams_of(sequences), *_parameters(sampling))


def _parameters(sampling: FusedSampling | None):
    return (None, None) if sampling is None else (sampling.temperature, sampling.thresholds)


def accept_block(trees, scores, score_rows, sequences, config, sampling=None) -> tuple[torch.Tensor, torch.Tensor]:
    """Block verification of chains (Sun et al. 2024); raises SpeculativeConfigError for trees, for which it is not defined."""
    if not trees.is_chain:
        raise config.fail(
            "rejection_sample_method",
            "is 'block', which verifies chains, and this configuration drafts trees: draft chains, or verify by 'rejection' "
            "or 'coupled'.",
        )
    return rejection.verify_block(trees, scores, score_rows, streams_of(sequences))


def accept_typical(trees, scores, score_rows, sequences, config, sampling=None) -> tuple[torch.Tensor, torch.Tensor]:
    """Accept the longest path of typical tokens, which the target finds likely enough (the likeliest of equally long ones), and draw
    the next token from the target (Cai et al. 2024, "Medusa", section 2.3).

    The draw is the one that coupled verification would make there: its noise is keyed by seed and position. The rule is lossy:
    any typical draft is accepted, however improbable.
    """
    _warn(
        "rejection_sample_method='typical' is lossy: it accepts any draft the target finds likely enough, so sampled text does "
        "not follow the target's distribution. 'coupled', 'rejection' and 'block' are exact."
    )
    device = scores.device
    scores, chosen = own_scores(trees, scores, score_rows)
    tokens, rows = trees.tokens.to(device), torch.from_numpy(chosen).to(device)
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


def accept_at_rates(trees, scores, score_rows, sequences, config, sampling=None) -> tuple[torch.Tensor, torch.Tensor]:
    """For benchmarks only: accept the first L nodes on the way to each tree's deepest node, P(L >= i) = `config.acceptance_rates[i - 1]`.

    Applies to greedy rows, too. The next token is the target's own choice after the path, so the cost is that of greedy or
    coupled verification. One uniform number per round decides L; rates never increase with depth.
    """
    _warn(
        "rejection_sample_method='synthetic': DRAFTS ARE ACCEPTED AT FIXED RATES, WHATEVER THE MODEL SAYS. THE TEXT IS "
        "MEANINGLESS; use this to measure speed only."
    )
    device, streams = scores.device, streams_of(sequences)
    choices = verification.target_choices(trees, scores, score_rows, streams)
    seeds, starts, steps = (torch.tensor(stream, device=device) for stream in streams[:3])
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


@functools.cache
def _warn(message: str) -> None:
    """Once per process."""
    logger.warning(message)


RULES = {
    "greedy": follow_target,
    "coupled": follow_target,
    "rejection": reject_tokens,
    "block": accept_block,
    "typical": accept_typical,
    "synthetic": accept_at_rates,
}
