"""AgreedChoice: the choice of drafters of a model whose shards are on several ranks. Rank 0 makes it."""

from __future__ import annotations

import numpy as np

from ...core.draft_trees import DraftTrees
from ...core.ranks import Ranks
from ...core.sequence import Sequence
from ...policy import Choice, Fastest


class AgreedChoice:
    """Answers as rank 0's chooser does.

    Args:
        chooser: rank 0's; on the other ranks it is not asked.
    """

    def __init__(self, ranks: Ranks, chooser: Fastest):
        self.ranks, self.chooser = ranks, chooser
        self._following: dict[int | None, bool] = {None: True}

    def agree(self, sequences: list[Sequence]) -> None:
        """A step begins: agree on which texts heads follow, so that they rest on all ranks or on none. None: texts that begin."""
        rows = [*sequences, None]
        flags = self.ranks.same([self.chooser.heads_follow(seq) for seq in rows] if self.ranks.leads else [])
        self._following = dict(zip([None if seq is None else seq.id for seq in rows], map(bool, flags), strict=True))

    def heads_follow(self, seq: Sequence | None) -> bool:
        """What rank 0 said when this step began."""
        return self._following.get(None if seq is None else seq.id, True)

    def followed(self, seconds: float, num_rows: int) -> None:
        """Rank 0's times count."""
        if self.ranks.leads:
            self.chooser.followed(seconds, num_rows)

    def is_awake(self, index: int) -> bool:
        """Rank 0's look-ups rest; the others ask all of theirs, because they learn from being asked."""
        return not self.ranks.leads or self.chooser.is_awake(index)

    def choose(
        self, sequences: list[Sequence], limits: list[int], offers: list[DraftTrees], seconds: list[float],
        scores: list[list[float] | None], able: np.ndarray | None = None,
    ) -> Choice:  # fmt: skip
        """Rank 0's choice. On rank 0 it is the chooser's object, in which the drafters that requests name are noted."""
        if self.ranks.leads:
            choice = self.chooser.choose(sequences, limits, offers, seconds, scores, able)
            self.ranks.same([*choice.drafter.tolist(), *choice.depth.tolist()])
            return choice
        agreed = np.asarray(self.ranks.same(), dtype=np.int64)
        return Choice(agreed[: len(limits)], agreed[len(limits) :])
