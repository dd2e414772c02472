"""Operations of drafters: grow and prune dynamic trees, map draft vocabularies, and gather the target's hidden states."""

from __future__ import annotations

import torch

from ..dispatch import uses_triton
from . import reference
from .reference import keep_nodes

__all__ = ["DraftVocabularyTable", "gather_features", "keep_nodes", "next_frontier", "prune_tree"]


def next_frontier(
    frontier_values: torch.Tensor,
    tokens: torch.Tensor,
    log_probs: torch.Tensor,
    keep: int,
    limits: torch.Tensor | None = None,
    depth: int = 0,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Grow a dynamic tree by one level. Arguments and results: see `reference.next_frontier`."""
    if uses_triton(log_probs.device):
        from .triton import next_frontier as by_kernel

        return by_kernel(frontier_values, tokens, log_probs, keep, limits, depth)
    return reference.next_frontier(frontier_values, tokens, log_probs, keep, limits, depth)


def prune_tree(
    tokens: torch.Tensor, values: torch.Tensor, parents: torch.Tensor, expanded: torch.Tensor, count: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Keep the `count` likeliest nodes of each tree. Arguments and results: see `reference.prune_tree`."""
    if uses_triton(values.device):
        from .triton import prune_tree as by_kernel

        return by_kernel(tokens, values, parents, expanded, count)
    return reference.prune_tree(tokens, values, parents, expanded, count)


def gather_features(layers: list[torch.Tensor], index: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Concatenate the hidden states of some tokens over layers: [n, L * H] in `dtype`, from L layers [T, H] and `index` [n]."""
    if uses_triton(index.device):
        from .triton import gather_features as by_kernel

        # Layers are contiguous, except in models that pass views on.
        return by_kernel([each.contiguous() for each in layers], index, dtype)
    return reference.gather_features(layers, index, dtype)


class DraftVocabularyTable:
    """Maps logits over a draft vocabulary to the target's.

    Args:
        target_ids: int64 [Vd], the target's id of each draft id.
        vocab_size: V, the size of the target's vocabulary.
    """

    def __init__(self, target_ids: torch.Tensor, vocab_size: int):
        self.target_ids, self.vocab_size = target_ids, vocab_size
        self._places: torch.Tensor | None = None  # the inverse table, which the kernel reads

    def scores(self, logits: torch.Tensor) -> torch.Tensor:
        """Float32 [R, V] from logits [R, Vd]; tokens outside the draft vocabulary get minus infinity."""
        if uses_triton(logits.device):
            from .triton import draft_places, to_target_vocabulary

            if self._places is None:
                self._places = draft_places(self.target_ids, self.vocab_size)
            return to_target_vocabulary(logits.contiguous(), self._places)
        return reference.to_target_vocabulary(logits.to(torch.float32), self.target_ids, self.vocab_size)
