"""From raw logits to the scores a token is chosen by: every row's own processors, and its own noise."""

from __future__ import annotations

from typing import Protocol

import torch

from ..kernels import random_bits
from .sampling import SamplingParameters
from .sequence import Sequence


class RowProcessors(Protocol):
    """What `Sequence.processors` must offer; `decoding.warpers.NodeProcessors` is the implementation."""

    needs_prefix: bool
    sampling: SamplingParameters | None  # what the processors end with
    only_sampling: bool  # whether they are no more than that

    def apply(
        self, sequences: list[Sequence], paths: list[torch.Tensor] | None, logits: torch.Tensor, whole: bool = True
    ) -> torch.Tensor:
        """Scores [R, V] for R nodes; `sequences[r]` and the drafted ids `paths[r]` [depth] are node r's prefix.

        Not `whole`: without temperature, top-k, top-p and min-p at the end, which somebody else applies.
        """
        ...


def process_logits(
    sequences: list[Sequence], paths: list[torch.Tensor] | None, logits: torch.Tensor, whole: bool = True
) -> torch.Tensor:
    """Apply each node's processors to its logits.

    Args:
        sequences: R sequences, one per node (a sequence appears once per node of its tree).
        paths: drafted ids between the sequence's tokens and each node, int64 [depth] each; None if all are empty.
        logits: float32 [R, V]; not modified.
        whole: see `RowProcessors.apply`.
    """
    groups: dict[int, list[int]] = {}
    for i, seq in enumerate(sequences):
        if seq.processors is not None:
            groups.setdefault(id(seq.processors), []).append(i)
    if not groups:
        return logits
    if len(groups) == 1 and len(next(iter(groups.values()))) == len(sequences):
        return sequences[0].processors.apply(sequences, paths, logits, whole)
    scores = logits.clone()
    for members in groups.values():
        index = torch.tensor(members, device=logits.device)
        chosen = [sequences[i] for i in members]
        scores[index] = chosen[0].processors.apply(
            chosen, None if paths is None else [paths[i] for i in members], logits[index], whole
        )
    return scores


def needs_prefix(sequences: list[Sequence]) -> bool:
    """Whether any sequence's processors look at the prefix."""
    return any(seq.processors is not None and seq.processors.needs_prefix for seq in sequences)


def add_noise(
    scores: torch.Tensor, sequences: list[Sequence], positions: list[int], stream: int, steps: list[int] | None = None
) -> torch.Tensor:
    """Gumbel-perturb the scores [R, V] of sampled rows (argmax is then a draw); greedy rows stay as they are.

    Args:
        positions: index in the sequence of the token that each row chooses.
        steps: verification rounds, part of the key where noise may not repeat between rounds; None: 0.
    """
    sampled = [i for i, seq in enumerate(sequences) if seq.do_sample]
    if not sampled:
        return scores
    # Nodes of one row at one depth share their noise: make each once.
    keys = {}
    for i in sampled:
        keys.setdefault((sequences[i].seed, positions[i], 0 if steps is None else steps[i]), len(keys))
    table = torch.tensor(list(keys), dtype=torch.long, device=scores.device)
    noise = random_bits.gumbel(table[:, 0], table[:, 1], table[:, 2], stream, scores.shape[1])
    which = [keys[(sequences[i].seed, positions[i], 0 if steps is None else steps[i])] for i in sampled]
    if len(sampled) == len(sequences):
        return scores + (noise if which == list(range(len(keys))) else noise[torch.tensor(which, device=scores.device)])
    noisy = scores.to(torch.float32, copy=True)  # noise is never rounded to the logits' precision
    index = torch.tensor(sampled, device=scores.device)
    noisy[index] += noise[torch.tensor(which, device=scores.device)]
    return noisy
