"""Rejection and block: the target's distribution by tests against the drafter's, with noise independent of the drafts.

All numbers are keyed by the row's seed, its position and its round: they depend on nothing else in the batch.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch

from ..config import SpeculativeConfig
from ..core.draft_trees import DraftTrees
from ..core.sequence import Sequence
from ..kernels import random_bits
from ..kernels import reference as ops
from ..kernels.dispatch import uses_triton
from ..kernels.transfer import upload
from ..sampling.fused import RowSampling
from .target_choice import drafts_on, streams_on


class _Noise:
    """A round's numbers for every row."""

    def __init__(self, sequences: list[Sequence], device: torch.device, vocab_size: int):
        self.seeds = torch.tensor([seq.seed for seq in sequences], device=device)
        self.steps = torch.tensor([seq.num_steps for seq in sequences], device=device)
        self.starts = torch.tensor([len(seq.tokens) for seq in sequences], device=device)
        self.vocab_size = vocab_size

    def accept_uniform(self, count: int) -> torch.Tensor:
        """Uniform numbers [B, count] to test drafts with."""
        return random_bits.uniform(self.seeds, self.starts, self.steps, random_bits.ACCEPT_STREAM, max(count, 1))

    def residual_gumbel(self, depth: torch.Tensor) -> torch.Tensor:
        """Gumbel noise [B, V] for the token at `depth` [B] behind each row's last."""
        return random_bits.gumbel(
            self.seeds, self.starts + depth, self.steps, random_bits.RESIDUAL_STREAM, self.vocab_size
        )


def _target_probs(scores: torch.Tensor, index: np.ndarray) -> Callable[[torch.Tensor], torch.Tensor]:
    """(node [B], 0 = root) -> the target's distribution after it, [B, V]; made when asked for, one node a row at a time."""
    rows = torch.from_numpy(index).to(scores.device)
    batch = torch.arange(len(rows), device=scores.device)
    return lambda node: torch.softmax(scores[rows[batch, node]], dim=-1)


def _prob_index(trees: DraftTrees, device: torch.device) -> torch.Tensor:
    """Which of `trees.probs` each node was drawn from, int64 [B, N]."""
    batch, width = trees.tokens.shape
    if trees.prob_index is None:
        return torch.arange(width, device=device).expand(batch, -1)
    return upload(trees.prob_index, device)


def reject_tokens(
    trees: DraftTrees,
    scores: torch.Tensor,
    index: np.ndarray,
    sequences: list[Sequence],
    config: SpeculativeConfig,
    sampling: RowSampling | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Speculative sampling, token by token: see `reference.rejection_walk`."""
    device = scores.device
    if uses_triton(device):
        from ..kernels.rejection import verify_rejection

        at, tokens, valid, parents = drafts_on(device, trees, index)
        seeds, positions, steps, _ = streams_on(device, sequences)
        prob_index = None if trees.probs is None else _prob_index(trees, device).contiguous()
        temperature, limits = (None, None) if sampling is None else (sampling.temperature, sampling.limits)
        path, _, next_tokens = verify_rejection(
            scores,
            at,
            tokens,
            valid,
            seeds,
            positions,
            steps,
            parents,
            trees.probs,
            prob_index,
            temperature=temperature,
            limits=limits,
        )
        return path, next_tokens
    noise = _Noise(sequences, device, scores.shape[1])
    return ops.rejection_walk(
        trees.tokens.to(device),
        torch.from_numpy(trees.valid).to(device),
        torch.from_numpy(np.ascontiguousarray(trees.parent_index)).to(device),
        trees.probs,
        _prob_index(trees, device),
        _target_probs(scores, index),
        noise.accept_uniform(trees.tokens.shape[1]),
        noise.residual_gumbel,
    )


def accept_block(
    trees: DraftTrees, scores: torch.Tensor, index: np.ndarray, sequences: list[Sequence], config: SpeculativeConfig
) -> tuple[torch.Tensor, torch.Tensor]:
    """Block verification of chains: see `reference.block_walk`.

    Raises:
        SpeculativeConfigError: the drafts are trees, for which the rule is not defined.
    """
    if not trees.is_chain:
        raise config.fail(
            "rejection_sample_method",
            "is 'block', which verifies chains, and this configuration drafts trees: draft chains, or verify by 'rejection' "
            "or 'coupled'.",
        )
    device = scores.device
    noise = _Noise(sequences, device, scores.shape[1])
    # The rule weighs nodes before it is known whether they are reached. So where there is nothing to sample from a chain ends,
    # and any distribution stands in: the weight of a chain's end does not depend on it.
    broken = ~scores.amax(1).isfinite()[upload(index, device)]  # [B, N + 1]
    probs, batch = _target_probs(scores, index), torch.arange(len(sequences), device=device)
    stand_in = 1 / scores.shape[1]
    return ops.block_walk(
        trees.tokens.to(device),
        torch.from_numpy(trees.valid).to(device) & (broken[:, :-1].cumsum(1) == 0),
        trees.probs,
        _prob_index(trees, device),
        lambda node: probs(node).masked_fill(broken[batch, node][:, None], stand_in),
        noise.accept_uniform(trees.tokens.shape[1]),
        noise.residual_gumbel,
    )
