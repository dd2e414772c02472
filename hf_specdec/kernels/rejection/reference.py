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


class WalkNoise:
    """The random numbers of one round for every row."""

    def __init__(self, streams: RowStreams, device: torch.device, vocab_size: int):
        self.seeds, self.starts, self.steps = (
            torch.tensor(each, device=device) for each in (streams.seeds, streams.positions, streams.steps)
        )
        self.vocab_size = vocab_size

    def accept_uniform(self, count: int) -> torch.Tensor:
        """Uniform numbers [B, count] to test drafts with."""
        return random_bits.uniform(self.seeds, self.starts, self.steps, random_bits.ACCEPT_STREAM, max(count, 1))

    def residual_gumbel(self, depth: torch.Tensor) -> torch.Tensor:
        """Gumbel noise [B, V] for the token at `depth` [B] after each row's last."""
        return random_bits.gumbel(
            self.seeds, self.starts + depth, self.steps, random_bits.RESIDUAL_STREAM, self.vocab_size
        )


def target_probs(scores: torch.Tensor, score_rows: np.ndarray) -> Callable[[torch.Tensor], torch.Tensor]:
    """A function of nodes [B] (0: the root) that returns the target's distributions after them, [B, V]."""
    rows = torch.from_numpy(score_rows).to(scores.device)
    batch = torch.arange(len(rows), device=scores.device)
    return lambda node: torch.softmax(scores[rows[batch, node]], dim=-1)


def verify_tokens(
    drafts: Drafts, scores: torch.Tensor, score_rows: np.ndarray, streams: RowStreams
) -> tuple[torch.Tensor, torch.Tensor]:
    """See `rejection.verify_tokens`."""
    device, noise = scores.device, WalkNoise(streams, scores.device, scores.shape[1])
    return rejection_walk(
        drafts.tokens.to(device),
        torch.from_numpy(drafts.valid).to(device),
        torch.from_numpy(np.ascontiguousarray(drafts.parent_index)).to(device),
        drafts.probs,
        prob_index_on(drafts, device),
        target_probs(scores, score_rows),
        noise.accept_uniform(drafts.tokens.shape[1]),
        noise.residual_gumbel,
    )


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
