"""A drafter that costs nothing: the last token K times. So a step verifies K + 1 tokens, whatever the text is."""

from __future__ import annotations

from dataclasses import dataclass

from hf_specdec import CandidateGenerator, SpeculativeConfig, register
from hf_specdec.core.draft_trees import DraftTrees
from hf_specdec.core.sequence import Sequence

METHOD = "benchmark_repeating"


@dataclass
class RepeatingConfig(SpeculativeConfig):
    """Drafts the last token K times (benchmarks only)."""

    name = METHOD


@register(RepeatingConfig)
class RepeatingGenerator(CandidateGenerator):
    """Always drafts as much as it may."""

    def propose(self, sequences: list[Sequence], limits: list[int]) -> DraftTrees:
        """A chain per row."""
        drafts = [[seq.tokens[-1]] * limit for seq, limit in zip(sequences, limits, strict=True)]
        return DraftTrees.from_lists(drafts, device=self.target.device)
