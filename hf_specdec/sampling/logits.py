"""From raw logits to the scores a token is chosen by: every row's own processors, and its own noise."""

from __future__ import annotations

from typing import Protocol

import torch

from ..core.sequence import Sequence
from ..kernels import random_bits
from .rows import SamplingParameters


class RowProcessors(Protocol):
    """What `Sequence.processors` must offer; `decoding.warpers.NodeProcessors` is the implementation."""

    needs_prefix: bool
    sampling: SamplingParameters | None  # what the processors end with
    only_sampling: bool  # whether they are no more than that
    in_step: bool  # whether all rows of a batch are to begin together
    calls_in_order: (
        bool  # whether nothing may be drafted, as they are to be called once per token; may change with every call
    )

    def apply(
        self,
        sequences: list[Sequence],
        paths: list[torch.Tensor] | None,
        logits: torch.Tensor,
        whole: bool = True,
        drafted: bool = True,
    ) -> torch.Tensor:
        """Scores [R, V] for R nodes; `sequences[r]` and the drafted ids `paths[r]` [depth] are node r's prefix.

        Not `whole`: without temperature, top-k, top-p and min-p at the end, which somebody else applies. Not `drafted`: every
        node is a row's last token and its scores choose the next, so the call counts for processors that keep state.
        """
        ...


def process_logits(
    sequences: list[Sequence],
    paths: list[torch.Tensor] | None,
    logits: torch.Tensor,
    whole: bool = True,
    drafted: bool = True,
) -> torch.Tensor:
    """Apply each node's processors to its logits.

    Args:
        sequences: R sequences, one per node (a sequence appears once per node of its tree).
        paths: drafted ids between the sequence's tokens and each node, int64 [depth] each; None if all are empty.
        logits: float32 [R, V]; not modified.
        whole, drafted: see `RowProcessors.apply`.
    """
    groups: dict[int, list[int]] = {}
    for i, seq in enumerate(sequences):
        if seq.processors is not None:
            groups.setdefault(id(seq.processors), []).append(i)
    if not groups:
        return logits
    if len(groups) == 1 and len(next(iter(groups.values()))) == len(sequences):
        return sequences[0].processors.apply(sequences, paths, logits, whole, drafted)
    scores = logits.clone()
    for members in groups.values():
        index = torch.tensor(members, device=logits.device)
        chosen = [sequences[i] for i in members]
        scores[index] = chosen[0].processors.apply(
            chosen, None if paths is None else [paths[i] for i in members], logits[index], whole, drafted
        )
    return scores


def needs_prefix(sequences: list[Sequence]) -> bool:
    """Whether any sequence's processors look at the prefix."""
    return any(seq.processors is not None and seq.processors.needs_prefix for seq in sequences)


def calls_in_order(seq: Sequence) -> bool:
    """Whether nothing may be drafted for a sequence because of its processors."""
    return seq.processors is not None and seq.processors.calls_in_order


def choose_tokens(scores: torch.Tensor, sequences: list[Sequence], positions: list[int], stream: int) -> torch.Tensor:
    """Each row's token, int64 [R]: the argmax of its scores [R, V], for rows that sample with Gumbel noise (a draw).

    Args:
        positions: index in the sequence of the token that each row chooses.
    """
    sampled = [i for i, seq in enumerate(sequences) if seq.do_sample]
    if not sampled:
        return scores.argmax(1)
    # Nodes of one row at one depth share their noise: make each once.
    keys: dict[tuple[int, int], int] = {}
    which = [keys.setdefault((sequences[i].seed, positions[i]), len(keys)) for i in sampled]
    seeds, of_keys, rows = (
        torch.tensor(each, device=scores.device)
        for each in ([seed for seed, _ in keys], [position for _, position in keys], which)
    )
    noise = (seeds, of_keys, torch.zeros_like(seeds), stream, rows)
    if len(sampled) == len(sequences):
        return random_bits.noisy_argmax(scores.float(), *noise)  # noise is never rounded to the logits' precision
    chosen = scores.argmax(1)
    index = torch.tensor(sampled, device=scores.device)
    chosen[index] = random_bits.noisy_argmax(scores[index].float(), *noise)
    return chosen
