"""Block verification of chains in plain torch. It has no kernel."""

from __future__ import annotations

import numpy as np
import torch

from ..drafts import Drafts, RowStreams, prob_index_on
from ..transfer import upload
from .reference import WalkNoise, target_probs


def verify_block(
    drafts: Drafts, scores: torch.Tensor, score_rows: np.ndarray, streams: RowStreams
) -> tuple[torch.Tensor, torch.Tensor]:
    """Verify chains by `block_walk`. Arguments and results: see `rejection.verify_tokens`."""
    device, noise = scores.device, WalkNoise(streams, scores.device, scores.shape[1])
    # The rule weighs nodes before it knows whether they are reached. So a chain ends where nothing can be sampled, and any
    # distribution may stand in there: the weight of a chain's end does not depend on it.
    broken = ~scores.amax(1).isfinite()[upload(score_rows, device)]  # [B, N + 1]
    probs, batch = target_probs(scores, score_rows), torch.arange(len(score_rows), device=device)
    stand_in = 1 / scores.shape[1]
    return block_walk(
        drafts.tokens.to(device),
        torch.from_numpy(drafts.valid).to(device) & (broken[:, :-1].cumsum(1) == 0),
        drafts.probs,
        prob_index_on(drafts, device),
        lambda node: probs(node).masked_fill(broken[batch, node][:, None], stand_in),
        noise.accept_uniform(drafts.tokens.shape[1]),
        noise.residual_gumbel,
    )


def block_walk(tokens, valid, probs, prob_index, target_probs, accept_uniform, residual_gumbel):
    """Block verification of chains (Sun et al. 2024, arXiv 2403.10444, algorithm 2).

    It is exact, and no exact rule that tests one drafted path accepts more tokens in expectation. Let p be the target's and q the
    drafter's distribution after i drafted tokens x_1 .. x_i:

        w_0 = 1,  w_i = min(1, w_(i-1) p(x_i) / q(x_i))             P(at least i tokens are accepted | x_1 .. x_i)
        R_i = sum over x of max(w_i p(x) - q(x), 0),                with q = 0 after the last drafted token: R_n = w_n
        h_i = R_i / (R_i + 1 - w_i)

    For the largest i with u_i < h_i (h_0 = 1), all of x_1 .. x_i are accepted, and the next token is drawn from
    max(w_i p - q, 0) / R_i. All prefixes are tested: one that fails does not stop longer ones.

    Args:
        tokens, valid: [B, N], one chain per row.
        probs, prob_index: as in `rejection_walk`; None: deterministic drafts (q is 1 at the drafted token).
        target_probs: function of nodes [B] (0: the root) that returns the target's distributions after them, float [B, V].
        accept_uniform: uniform numbers u_1 .. u_N, [B, N].
        residual_gumbel: function of depths [B] that returns Gumbel noise [B, V] for the last draw.

    Returns: accepted path bool [B, N], and the token after it int64 [B].
    """
    length, left_over = block_acceptance(tokens, valid, probs, prob_index, target_probs, accept_uniform)
    accepted = torch.arange(tokens.shape[1], device=tokens.device) < length[:, None]
    return accepted, (left_over.log() + residual_gumbel(length)).argmax(1)


def block_acceptance(tokens, valid, probs, prob_index, target_probs, accept_uniform):
    """The number of accepted tokens of each chain, int64 [B], and the unnormalised distribution of the next one, [B, V].

    Arguments and rule: see `block_walk`.
    """
    num_nodes = tokens.shape[1]
    rows = torch.arange(tokens.shape[0], device=tokens.device)
    length, left_over = torch.zeros_like(rows), accept_uniform.new_zeros(())
    drafted = torch.ones_like(rows, dtype=torch.bool)  # True if the row has an i-th drafted token
    weight = torch.ones_like(rows, dtype=accept_uniform.dtype)
    for i in range(num_nodes + 1):
        target = target_probs(torch.full_like(rows, i))
        over, next_weight, goes_on = target * weight[:, None], weight, drafted
        if i < num_nodes:
            token, goes_on = tokens[:, i], valid[:, i]
            if probs is None:
                q = torch.ones_like(weight)
                over[rows, token] -= goes_on.to(over.dtype)
            else:
                drawn_from = probs[rows, prob_index[:, i]].to(over.dtype)
                q = drawn_from[rows, token]
                # distributions that no draft was drawn from may hold anything
                over -= drawn_from.masked_fill(~goes_on[:, None], 0.0)
            over.clamp_(min=0.0)
            ratio = torch.where(q > 0, target[rows, token] / q.clamp(min=1e-38), 0.0)
            next_weight = (weight * ratio).clamp(max=1.0)
        mass = over.sum(1)
        # The mass is 0 only if w = 1 and p = q, in paths that cannot be accepted, or by rounding.
        over = torch.where((mass > 0)[:, None], over, target)
        # The empty block is always accepted; u < h is tested without a division.
        accept = drafted & (accept_uniform[:, i - 1] * (mass + (1.0 - weight)) < mass) if i else drafted
        length = torch.where(accept, i, length)
        left_over = torch.where(accept[:, None], over, left_over)
        weight, drafted = next_weight, goes_on
    return length, left_over
