"""Typical acceptance (Cai et al. 2024, "Medusa", section 2.3) in plain torch. It has no kernel."""

from __future__ import annotations

import torch


def typical_thresholds(scores: torch.Tensor, threshold: float, alpha: float) -> tuple[torch.Tensor, torch.Tensor]:
    """The probability that a typical token must exceed, [R], and log-probabilities [R, V] (Cai et al. 2024, "Medusa").

    It is min(threshold, alpha * exp(-H)) with the entropy H = -sum p log(p + 1e-5) of scores [R, V]: lower for flatter
    distributions.
    """
    log_probs = torch.log_softmax(scores, dim=-1, dtype=torch.float32)
    probs = log_probs.exp()
    entropy = -torch.linalg.vecdot(probs, (probs + 1e-5).log())
    return (alpha * torch.exp(-entropy)).clamp(max=threshold), log_probs


def likeliest_longest_path(candidates, ancestors, log_likelihood) -> torch.Tensor:
    """The longest path from the root over candidate nodes; among equally long paths, the likeliest.

    Args:
        candidates: bool [B, N].
        ancestors: [B, N + 1, N + 1] from `ancestor_matrix`.
        log_likelihood: [B, N], the log-probability of each node given its parent.

    Returns: bool [B, N].
    """
    if candidates.shape[1] == 0:
        return candidates
    lines = ancestors[:, 1:, 1:]
    reached = ~(lines & ~candidates[:, None, :]).any(2)  # the node and all its ancestors are candidates
    depth = lines.sum(2) * reached
    # Other nodes may have a likelihood of -inf, and -inf * 0 is NaN.
    summed = (lines * log_likelihood.masked_fill(~candidates, 0.0)[:, None, :]).sum(2)
    deepest = reached & (depth == depth.amax(1, keepdim=True))
    best = summed.masked_fill(~deepest, float("-inf")).argmax(1)
    path = lines.gather(1, best[:, None, None].expand(-1, 1, lines.shape[2])).squeeze(1)
    return path & reached.any(1, keepdim=True)
