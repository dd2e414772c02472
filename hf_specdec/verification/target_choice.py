"""Greedy and coupled: the target chooses a token after every node, and drafts count as far as they are what it chose."""

from __future__ import annotations

import numpy as np
import torch

from ..config import SpeculativeConfig
from ..core.draft_trees import DraftTrees
from ..core.sequence import Sequence
from ..kernels import random_bits
from ..kernels import reference as ops
from ..kernels.dispatch import uses_triton
from ..kernels.transfer import upload, upload_together
from ..sampling.fused import RowSampling
from ..sampling.logits import choose_tokens


def own_scores(trees: DraftTrees, scores: torch.Tensor, index: np.ndarray) -> tuple[torch.Tensor, np.ndarray]:
    """The scores of these rows' roots and nodes alone, [R', V], and the `index` into them (0 for padding)."""
    exists = _exists(trees)
    used = index[exists]
    own = np.zeros(index.shape, dtype=np.int64)
    own[exists] = np.arange(len(used))
    return (scores if len(used) == scores.shape[0] else scores[used]), own


def target_choices(
    trees: DraftTrees, scores: torch.Tensor, index: np.ndarray, sequences: list[Sequence]
) -> torch.Tensor:
    """The target's argmax, or for sampled rows its Gumbel-perturbed argmax, after root and nodes: int64 [B, N + 1]."""
    scores, own = own_scores(trees, scores, index)
    if any(seq.do_sample for seq in sequences):
        exists = _exists(trees)
        depths = np.concatenate([np.zeros((len(sequences), 1), np.int64), trees.depths], axis=1)[exists]
        owners = np.repeat(np.arange(len(sequences)), exists.sum(1))
        positions = [len(sequences[o].tokens) + int(d) for o, d in zip(owners, depths, strict=True)]
        chosen = choose_tokens(scores, [sequences[o] for o in owners], positions, random_bits.TOKEN_STREAM)
    else:
        chosen = scores.argmax(1)
    return chosen[torch.from_numpy(own).to(scores.device)]


def _exists(trees: DraftTrees) -> np.ndarray:
    """Which of (root, nodes) are no padding: bool [B, N + 1]."""
    return np.concatenate([np.ones((len(trees.lengths), 1), bool), trees.valid], axis=1)


def last_node(path: torch.Tensor) -> torch.Tensor:
    """Where each path [B, N] ends: index of its last node + 1, 0 for the root; int64 [B]."""
    if path.shape[1] == 0:
        return torch.zeros(path.shape[0], dtype=torch.long, device=path.device)
    return (path * torch.arange(1, path.shape[1] + 1, device=path.device)).amax(1)


def drafts_on(device: torch.device, trees: DraftTrees, index: np.ndarray) -> tuple:
    """What the verification kernels read of drafts: score rows int64 [B, N + 1]; tokens int64, valid bool, and parents int64
    [B, N] (None: chains)."""
    arrays = [index, trees.valid] if trees.is_chain else [index, trees.valid, trees.parent_index]
    at, valid, *parents = upload_together(arrays, device)
    return at, trees.tokens.to(device).contiguous(), valid, parents[0] if parents else None


def streams_on(device: torch.device, sequences: list[Sequence]) -> tuple[torch.Tensor, ...]:
    """What the verification kernels read of rows: seeds, positions of the token after the root, rounds int64 [B]; do_sample
    bool [B]."""
    rows = [(seq.seed, len(seq.tokens), seq.num_steps, seq.do_sample) for seq in sequences]
    seeds, positions, steps, do_sample = upload(torch.tensor(rows, dtype=torch.long).T.contiguous(), device)
    return seeds, positions, steps, do_sample > 0


def follow_target(
    trees: DraftTrees,
    scores: torch.Tensor,
    index: np.ndarray,
    sequences: list[Sequence],
    config: SpeculativeConfig,
    sampling: RowSampling | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Walk each tree along the target's own choices."""
    if uses_triton(scores.device):
        from ..kernels.verification import verify_choices

        at, tokens, valid, parents = drafts_on(scores.device, trees, index)
        streams = streams_on(scores.device, sequences) if any(seq.do_sample for seq in sequences) else None
        seeds, positions, _, do_sample = (None, None, None, None) if streams is None else streams
        temperature, limits = (None, None) if sampling is None else (sampling.temperature, sampling.limits)
        path, _, next_tokens = verify_choices(
            scores, at, tokens, valid, parents, seeds, positions, do_sample, temperature, limits
        )
        return path, next_tokens
    choices = target_choices(trees, scores, index, sequences)
    tokens = trees.tokens.to(scores.device)
    mask = torch.from_numpy(trees.valid).to(scores.device)
    if trees.is_chain:
        path = ((tokens == choices[:, :-1]) & mask).long().cumprod(1).bool()
    else:
        parents = torch.from_numpy(np.ascontiguousarray(trees.parent_index)).to(scores.device)
        ancestors = torch.from_numpy(trees.ancestors).to(scores.device)
        path = ops.accepted_nodes(tokens, mask, parents, ancestors, choices)
    return path, choices.gather(1, last_node(path)[:, None]).squeeze(1)
