"""Verification by the target's own choices in plain torch: the definition, and the CPU path."""

from __future__ import annotations

import numpy as np
import torch

from ..drafts import Drafts, RowStreams, last_node
from ..random_bits import TOKEN_STREAM
from ..sampling.reference import choose_tokens


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
    assert temperature is None and thresholds is None
    choices = target_choices(drafts, scores, score_rows, streams)
    tokens = drafts.tokens.to(scores.device)
    valid = torch.from_numpy(drafts.valid).to(scores.device)
    if drafts.is_chain:
        path = ((tokens == choices[:, :-1]) & valid).long().cumprod(1).bool()
    else:
        parents = torch.from_numpy(np.ascontiguousarray(drafts.parent_index)).to(scores.device)
        ancestors = torch.from_numpy(drafts.ancestors).to(scores.device)
        path = accepted_nodes(tokens, valid, parents, ancestors, choices)
    return path, choices.gather(1, last_node(path)[:, None]).squeeze(1)


def greedy_tokens(scores: torch.Tensor) -> torch.Tensor:
    """The argmax of each row of scores [R, V], the lowest id among equals: int64 [R]."""
    return scores.argmax(1)


def target_choices(drafts: Drafts, scores: torch.Tensor, score_rows: np.ndarray, streams: RowStreams) -> torch.Tensor:
    """The target's token after the root and after each node, int64 [B, N + 1].

    It is the argmax of the scores, to which rows that sample add Gumbel noise.
    """
    scores, index = own_scores(drafts, scores, score_rows)
    if any(streams.do_sample):
        exists = _exists(drafts)
        depths = np.concatenate([np.zeros((len(exists), 1), np.int64), drafts.depths], axis=1)[exists]
        owners = np.repeat(np.arange(len(exists)), exists.sum(1)).tolist()
        positions = [streams.positions[o] + int(depth) for o, depth in zip(owners, depths, strict=True)]
        seeds, do_sample = [streams.seeds[o] for o in owners], [streams.do_sample[o] for o in owners]
        chosen = choose_tokens(scores, seeds, positions, do_sample, TOKEN_STREAM)
    else:
        chosen = scores.argmax(1)
    return chosen[torch.from_numpy(index).to(scores.device)]


def own_scores(drafts: Drafts, scores: torch.Tensor, score_rows: np.ndarray) -> tuple[torch.Tensor, np.ndarray]:
    """The scores of these rows' roots and nodes alone, [R', V], and the index of each one's row among them: [B, N + 1], 0 for padding."""
    exists = _exists(drafts)
    used = score_rows[exists]
    chosen = np.zeros(score_rows.shape, dtype=np.int64)
    chosen[exists] = np.arange(len(used))
    return (scores if len(used) == scores.shape[0] else scores[used]), chosen


def _exists(drafts: Drafts) -> np.ndarray:
    """Which of (root, nodes) are not padding: bool [B, N + 1]."""
    return np.concatenate([np.ones((len(drafts.lengths), 1), bool), drafts.valid], axis=1)


def accepted_nodes(tokens, valid, parents, ancestors, choices) -> torch.Tensor:
    """Walk each tree along the target's own choices.

    Args:
        tokens, valid, parents: [B, N], the drafted tokens, which entries are nodes, and their parents.
        ancestors: [B, N + 1, N + 1], see `Drafts.ancestors`.
        choices: [B, N + 1], the token the target chooses after the root and after each node.

    Returns: bool [B, N], the nodes on the accepted path: at most one per depth, even if siblings repeat a token.
    """
    match = valid & (tokens == choices.gather(1, parents + 1))
    return likeliest_longest_path(match, ancestors, torch.zeros(tokens.shape, device=tokens.device))


def likeliest_longest_path(candidates, ancestors, log_likelihood) -> torch.Tensor:
    """The longest path from the root over candidate nodes; among equally long paths, the likeliest; among these, the first.

    Args:
        candidates: bool [B, N].
        ancestors: [B, N + 1, N + 1], see `Drafts.ancestors`.
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


# ---- typical acceptance (Cai et al. 2024, "Medusa", section 2.3), which has no kernel ----


def typical_thresholds(scores: torch.Tensor, threshold: float, alpha: float) -> tuple[torch.Tensor, torch.Tensor]:
    """The probability that a typical token must exceed, [R], and log-probabilities [R, V] (Cai et al. 2024, "Medusa").

    It is min(threshold, alpha * exp(-H)) with the entropy H = -sum p log(p + 1e-5) of scores [R, V]: lower for flatter
    distributions.
    """
    log_probs = torch.log_softmax(scores, dim=-1, dtype=torch.float32)
    probs = log_probs.exp()
    entropy = -torch.linalg.vecdot(probs, (probs + 1e-5).log())
    return (alpha * torch.exp(-entropy)).clamp(max=threshold), log_probs
