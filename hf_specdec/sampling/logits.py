"""From raw logits to scores: apply the logits processors of every row of a batch."""

from __future__ import annotations

from collections.abc import Hashable

import torch

from ..core.sequence import Sequence


def process_logits(
    sequences: list[Sequence],
    paths: list[torch.Tensor] | None,
    logits: torch.Tensor,
    whole: bool = True,
    drafted: bool = True,
    failed: set[int] | None = None,
) -> torch.Tensor:
    """Apply each node's processors (`processors.NodeProcessors`) to its logits.

    Args:
        sequences: R sequences, one per node (a sequence appears once per node of its tree).
        paths: drafted ids between the sequence's tokens and each node, int64 [depth] each; None if all are empty.
        logits: float32 [R, V]; not modified.
        whole, drafted, failed: see `NodeProcessors.apply`.
    """
    groups: dict[Hashable, list[int]] = {}
    for i, seq in enumerate(sequences):
        if seq.processors is not None:
            # Requests of a server have processors of their own, but often the same parameters: they share a call.
            processors = seq.processors
            groups.setdefault(processors.sampling if processors.only_sampling else id(processors), []).append(i)
    if not groups:
        return logits
    if len(groups) == 1 and len(next(iter(groups.values()))) == len(sequences):
        return sequences[0].processors.apply(sequences, paths, logits, whole, drafted, failed)
    scores = logits.clone()
    for members in groups.values():
        index = torch.tensor(members, device=logits.device)
        chosen, without = [sequences[i] for i in members], set[int]()
        scores[index] = chosen[0].processors.apply(
            chosen, None if paths is None else [paths[i] for i in members], logits[index], whole, drafted, without
        )
        if failed is not None:
            failed.update(members[i] for i in without)
    return scores


def needs_prefix(sequences: list[Sequence]) -> bool:
    """True if any sequence's processors look at the prefix."""
    return any(seq.processors is not None and seq.processors.needs_prefix for seq in sequences)


def calls_in_order(seq: Sequence) -> bool:
    """True if the sequence's processors must be called once per token, in order, so nothing may be drafted."""
    return seq.processors is not None and seq.processors.calls_in_order
