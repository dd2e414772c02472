"""Speculative sampling over chains and trees in plain torch: the definition, and the CPU path.

All random numbers are keyed by the row's seed, its position and its round: they depend on nothing else in the batch.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
import torch.nn.functional as F

from .. import random_bits
from ..drafts import Drafts, RowStreams, prob_index_on
from ..transfer import upload


def _walk_arguments(
    drafts: Drafts, scores: torch.Tensor, score_rows: np.ndarray, streams: RowStreams
) -> tuple[Callable[[torch.Tensor], torch.Tensor], torch.Tensor, Callable[[torch.Tensor], torch.Tensor]]:
    """`target_probs`, `accept_uniform` and `residual_gumbel` of the walks."""
    seeds, starts, steps = (torch.tensor(stream, device=scores.device) for stream in streams[:3])
    rows, batch = torch.from_numpy(score_rows).to(scores.device), torch.arange(len(score_rows), device=scores.device)
    count = max(drafts.tokens.shape[1], 1)

    def residual_gumbel(depth: torch.Tensor) -> torch.Tensor:
        return random_bits.gumbel(seeds, starts + depth, steps, random_bits.RESIDUAL_STREAM, scores.shape[1])

    uniform = random_bits.uniform(seeds, starts, steps, random_bits.ACCEPT_STREAM, count)
    return lambda node: torch.softmax(scores[rows[batch, node]], dim=-1), uniform, residual_gumbel


def verify_tokens(
    drafts: Drafts,
    scores: torch.Tensor,
    score_rows: np.ndarray,
    streams: RowStreams,
    temperature: torch.Tensor | None = None,
    thresholds: tuple[torch.Tensor, torch.Tensor] | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Speculative sampling over chains and trees, token by token: see `rejection_walk`.

    Args:
        scores: [R, V]; `score_rows` int64 [B, N + 1] says which row of them follows the root and each node.
        temperature, thresholds: sampling parameters that are still to be applied (see `sampling.is_fused`); only with kernels.

    Returns: accepted path bool [B, N], and the token after it int64 [B].
    """
    assert temperature is None and thresholds is None
    device = scores.device
    valid, parents = (
        torch.from_numpy(np.ascontiguousarray(array)).to(device) for array in (drafts.valid, drafts.parent_index)
    )
    nodes = drafts.tokens.to(device), valid, parents, drafts.probs, prob_index_on(drafts, device)
    return rejection_walk(*nodes, *_walk_arguments(drafts, scores, score_rows, streams))


def rejection_walk(tokens, valid, parents, probs, prob_index, target_probs, accept_uniform, residual_gumbel):
    """Speculative sampling over trees.

    For chains, it is the rule of Leviathan et al. 2023 and Chen et al. 2023. Siblings are tried in order, each against the
    residual that the rejected ones left (multi-candidate sampling without replacement, as in EAGLE and SpecInfer).

    Args:
        tokens, valid, parents: [B, N].
        probs, prob_index: draft distributions [B, M, V], and which of them each node was drawn from [B, N] (without the siblings
            drawn before it). None: deterministic drafts, which are accepted with probability p(x).
        target_probs: function of nodes [B] (0: the root) that returns the target's distributions after them, float [B, V].
        accept_uniform: uniform numbers [B, N], one per test.
        residual_gumbel: function of depths [B] that returns Gumbel noise [B, V] for the last draw.

    Returns: accepted path bool [B, N], and the token after it int64 [B].
    """
    batch, num_nodes = tokens.shape
    rows = torch.arange(batch, device=tokens.device)
    current = torch.zeros_like(rows)  # node index + 1; 0 is the root
    depth = torch.zeros_like(rows)
    accepted = torch.zeros_like(valid)
    residual = target_probs(current)
    proposal = None
    proposal_of = torch.full_like(rows, -1)  # the node whose children `proposal` describes
    for node in range(num_nodes):
        tested = valid[:, node] & (parents[:, node] + 1 == current)
        token = tokens[:, node]
        if probs is None:
            proposal = F.one_hot(token, residual.shape[1]).to(residual.dtype)
        else:
            drawn_from = probs[rows, prob_index[:, node]].to(residual.dtype)
            proposal = (
                drawn_from if proposal is None else torch.where((proposal_of == current)[:, None], proposal, drawn_from)
            )
            proposal_of = torch.where(tested, current, proposal_of)
        p, q = residual[rows, token], proposal[rows, token]
        accept = tested & (q > 0) & (accept_uniform[:, node] * q < p)
        reject = tested & ~accept
        accepted[:, node] = accept
        depth = depth + accept
        current = torch.where(accept, node + 1, current)
        left_over = (residual - proposal).clamp_(min=0.0)
        mass = left_over.sum(1, keepdim=True)
        left_over = torch.where(mass > 0, left_over / mass.clamp(min=1e-38), residual)
        residual = torch.where(reject[:, None], left_over, residual)
        residual = torch.where(accept[:, None], target_probs(current), residual)
        if probs is not None:
            without = proposal.scatter(1, token[:, None], 0.0)
            without = without / without.sum(1, keepdim=True).clamp(min=1e-38)
            proposal = torch.where(reject[:, None], without, proposal)
    return accepted, (residual.log() + residual_gumbel(depth)).argmax(1)


# ---- block verification of chains, which has no kernel ----


def verify_block(
    drafts: Drafts, scores: torch.Tensor, score_rows: np.ndarray, streams: RowStreams
) -> tuple[torch.Tensor, torch.Tensor]:
    """Verify chains by `block_walk`. Arguments and results: see `verify_tokens`."""
    device = scores.device
    # The rule weighs nodes before it knows whether they are reached. So a chain ends where nothing can be sampled, and any
    # distribution may stand in there: the weight of a chain's end does not depend on it.
    broken = ~scores.amax(1).isfinite()[upload(score_rows, device)]  # [B, N + 1]
    probs, *noise = _walk_arguments(drafts, scores, score_rows, streams)
    batch, stand_in = torch.arange(len(score_rows), device=device), 1 / scores.shape[1]
    valid = torch.from_numpy(drafts.valid).to(device) & (broken[:, :-1].cumsum(1) == 0)
    nodes = drafts.tokens.to(device), valid, drafts.probs, prob_index_on(drafts, device)
    return block_walk(*nodes, lambda node: probs(node).masked_fill(broken[batch, node][:, None], stand_in), *noise)


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
    """Accepted tokens of each chain, int64 [B], and the unnormalised distribution of the next one, [B, V]; see `block_walk`."""
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
