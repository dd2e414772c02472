"""Operations of drafters: grow and prune dynamic trees, map draft vocabularies, and gather the target's hidden states."""

from __future__ import annotations

import torch

from ..dispatch import operation, uses_triton
from . import reference
from .reference import keep_nodes

__all__ = ["DraftVocabularyTable", "gather_features", "keep_nodes", "next_frontier", "prune_tree"]

next_frontier = operation(reference.next_frontier)
prune_tree = operation(reference.prune_tree)
gather_features = operation(reference.gather_features)


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
