"""From raw logits to scores: apply the logits processors of every row of a batch."""

from __future__ import annotations

from collections.abc import Hashable

import torch

from ..core.sequence import Sequence


def process_logits(
    sequences: list[Sequence], paths: list[torch.Tensor] | None, logits: torch.Tensor, failed: set[int] | None = None, **how: bool
) -> torch.Tensor:  # fmt: skip
    """Apply each node's processors to its logits, float32 [R, V], which are not modified. A sequence appears once for each node of its
    tree. The other arguments, also `how`: see `NodeProcessors.apply`."""
    groups: dict[Hashable, list[int]] = {}
    for i, seq in enumerate(sequences):
        if seq.processors is not None:
            # Requests of a server have processors of their own, but often the same parameters: they share a call.
            processors = seq.processors
            groups.setdefault(processors.sampling if processors.only_sampling else id(processors), []).append(i)
    if not groups:
        return logits
    if len(groups) == 1 and len(next(iter(groups.values()))) == len(sequences):
        return sequences[0].processors.apply(sequences, paths, logits, failed=failed, **how)
    scores = logits.clone()
    for members in groups.values():
        index = torch.tensor(members, device=logits.device)
        chosen, without = [sequences[i] for i in members], set[int]()
        of_chosen = None if paths is None else [paths[i] for i in members]
        scores[index] = chosen[0].processors.apply(chosen, of_chosen, logits[index], failed=without, **how)
        if failed is not None:
            failed.update(members[i] for i in without)
    return scores


def needs_prefix(sequences: list[Sequence]) -> bool:
    """True if any sequence's processors look at the prefix."""
    return any(seq.processors is not None and seq.processors.needs_prefix for seq in sequences)


def calls_in_order(seq: Sequence) -> bool:
    """True if the sequence's processors must be called once per token, in order, so nothing may be drafted."""
    return seq.processors is not None and seq.processors.calls_in_order
