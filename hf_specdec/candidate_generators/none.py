"""Plain decoding: the same loop with an empty draft."""

from __future__ import annotations

from dataclasses import dataclass

from ..config import SpeculativeConfig
from ..core.draft_trees import DraftTrees
from ..core.sequence import Sequence
from .base import CandidateGenerator
from .registry import register


@dataclass
class NoSpeculationConfig(SpeculativeConfig):
    """No drafter: one token per step, through the same loop. The baseline that every method's output is compared with."""

    name = "none"


@register(NoSpeculationConfig)
class NoSpeculation(CandidateGenerator):
    """Proposes nothing."""

    @property
    def max_draft_nodes(self) -> int:
        return 0

    def propose(self, sequences: list[Sequence], limits: list[int]) -> DraftTrees:
        return DraftTrees.empty(len(sequences), self.target.device)
