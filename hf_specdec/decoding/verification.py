"""Which drafted tokens count, and which token follows them: a pure function of drafts, scores and noise."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from ..kernels import random_bits
from ..kernels import reference as ops
from ..runtime import DraftTrees, Sequence
from ..runtime.logits import add_noise


@dataclass
class Verdict:
    """Per row: the accepted path and the token after it.

    Attributes:
        accepted: bool numpy [B, N].
        next_tokens: int64 numpy [B], the bonus token (whole path accepted) or the recovered one.
        tokens: int64 numpy [B, N], the drafted ids.
    """

    accepted: np.ndarray
    next_tokens: np.ndarray
    tokens: np.ndarray


def verify(trees: DraftTrees, scores: torch.Tensor, sequences: list[Sequence], rule: str) -> Verdict:
    """Verify every row's tree.

    Args:
        trees: drafts of B rows.
        scores: float32 [R, V], the target's processed logits after the root and after each node of row 0, then of row 1, ..
        sequences: the B rows, not yet extended.
        rule: "coupled" or "rejection" for rows that sample (`greedy` rows walk along the argmax under every rule).

    The result crosses to the host in one transfer.
    """
    index = _score_rows(trees)
    device = scores.device
    tokens = trees.tokens.to(device)
    walked = [i for i, seq in enumerate(sequences) if rule != "rejection" or not seq.do_sample]
    accepted = torch.zeros(tokens.shape, dtype=torch.bool, device=device)
    next_tokens = torch.zeros(len(sequences), dtype=torch.long, device=device)
    if walked:
        some = trees if len(walked) == len(sequences) else trees.select(walked)
        path, following = _walk(some, tokens[walked], scores, index[walked], [sequences[i] for i in walked])
        accepted[walked], next_tokens[walked] = path, following
    drawn = [i for i, seq in enumerate(sequences) if rule == "rejection" and seq.do_sample]
    if drawn:
        path, following = _reject(trees.select(drawn), scores, index[drawn], [sequences[i] for i in drawn])
        accepted[drawn], next_tokens[drawn] = path, following
    table = torch.cat([accepted.long(), tokens, next_tokens[:, None]], dim=1).cpu().numpy()
    width = tokens.shape[1]
    return Verdict(table[:, :width] > 0, table[:, -1], table[:, width : 2 * width])


def _score_rows(trees: DraftTrees) -> np.ndarray:
    """int64 [B, N + 1]: where the scores of (root, nodes) of each row are; padding points at the root's."""
    counts = np.asarray(trees.lengths, dtype=np.int64) + 1
    first = np.cumsum(counts) - counts
    offsets = np.arange(trees.tokens.shape[1] + 1)[None, :]
    return first[:, None] + np.where(offsets < counts[:, None], offsets, 0)


def _walk(trees: DraftTrees, tokens, scores, index: np.ndarray, sequences: list[Sequence]):
    """Follow the target's own choices: its argmax, or for sampled rows its Gumbel-perturbed argmax (coupled)."""
    valid = np.concatenate([np.ones((len(sequences), 1), bool), trees.valid], axis=1)
    used = index[valid]
    if any(seq.do_sample for seq in sequences):
        depths = np.concatenate([np.zeros((len(sequences), 1), np.int64), trees.depths], axis=1)[valid]
        owners = np.repeat(np.arange(len(sequences)), valid.sum(1))
        positions = [len(sequences[o].tokens) + int(d) for o, d in zip(owners, depths, strict=True)]
        # As float32 and in this order, so that plain decoding with the same noise adds up the same.
        scores = add_noise(scores[used], [sequences[o] for o in owners], positions, random_bits.TOKEN_STREAM)
    elif len(used) != scores.shape[0]:
        scores = scores[used]
    own = np.zeros(index.shape, dtype=np.int64)
    own[valid] = np.arange(len(used))
    choices = scores.argmax(1)[torch.from_numpy(own).to(scores.device)]  # [B, N + 1]
    if tokens.shape[1] == 0:
        return torch.zeros_like(tokens, dtype=torch.bool), choices[:, 0]
    mask = torch.from_numpy(trees.valid).to(tokens.device)
    if trees.is_chain:
        path = ((tokens == choices[:, :-1]) & mask).long().cumprod(1).bool()
    else:
        parents = torch.from_numpy(np.ascontiguousarray(trees.parent_index)).to(tokens.device)
        ancestors = torch.from_numpy(trees.ancestors).to(tokens.device)
        path = ops.accepted_nodes(tokens, mask, parents, ancestors, choices)
    last = (path * torch.arange(1, tokens.shape[1] + 1, device=tokens.device)).amax(1)  # node + 1; 0: the root
    return path, choices.gather(1, last[:, None]).squeeze(1)


def _reject(trees: DraftTrees, scores, index: np.ndarray, sequences: list[Sequence]):
    """Speculative sampling with independent noise, keyed by the row's seed, the position and the round."""
    device = scores.device
    seeds = torch.tensor([seq.seed for seq in sequences], device=device)
    steps = torch.tensor([seq.num_steps for seq in sequences], device=device)
    starts = torch.tensor([len(seq.tokens) for seq in sequences], device=device)
    rows = torch.from_numpy(index).to(device)
    batch = torch.arange(len(sequences), device=device)
    width = trees.tokens.shape[1]

    def target_probs(node):
        return torch.softmax(scores[rows[batch, node]], dim=-1)

    def residual_gumbel(depth):
        return random_bits.gumbel(seeds, starts + depth, steps, random_bits.RESIDUAL_STREAM, scores.shape[1])

    prob_index = trees.prob_index if trees.prob_index is not None else np.tile(np.arange(width), (len(sequences), 1))
    return ops.rejection_walk(
        trees.tokens.to(device),
        torch.from_numpy(trees.valid).to(device),
        torch.from_numpy(np.ascontiguousarray(trees.parent_index)).to(device),
        trees.probs,
        torch.from_numpy(np.ascontiguousarray(prob_index)).to(device),
        target_probs,
        random_bits.uniform(seeds, starts, steps, random_bits.ACCEPT_STREAM, max(width, 1)),
        residual_gumbel,
    )
