"""Several drafters side by side: each sequence chooses one of them by name."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

from ..config import config_key
from ..core.draft_trees import DraftTrees
from ..core.outcome import StepOutcome
from ..core.sequence import Sequence
from ..model.packed_model import PackedModel
from .base import CandidateGenerator, DrafterContext, HasDrafters
from .combined import CombinedGenerator, check_drafter, checked_part, with_common_keys
from .corpora import CorpusConfig
from .lookup_cache import LookupCacheConfig
from .registry import register


@dataclass
class PerRequestConfig(LookupCacheConfig, CorpusConfig):
    """Drafters of any methods, by name. Each request to the server chooses one (`speculative_config: {"method": name}`); the
    first is for those that do not choose, and for `generate()`. By default `num_speculative_tokens` is the longest draft of any of them."""

    name = "per_request"
    has_parts = True
    requires = ("'methods': names and their configurations",)

    methods: dict[str, Any] | None = config_key(
        None, "{name: configuration}, or a list of configurations, which are then named after their methods"
    )

    def __post_init__(self) -> None:
        self.method = self.method or self.name
        given = self.methods
        if isinstance(given, (list, tuple)):
            checked = [checked_part(self, "methods", part) for part in given]
            given = {part["method"]: part for part in checked}
            if len(given) < len(checked):
                raise self.fail("methods", "has a method twice: give a dict, with a name for each.")
        if not isinstance(given, dict) or not given or not all(isinstance(name, str) and name for name in given):
            raise self.fail("methods", "must name at least one drafter, e.g. {'fast': {'method': 'ngram'}}.")
        self.methods = {name: checked_part(self, "methods", part) for name, part in given.items()}
        self.length_given = self.num_speculative_tokens is not None or self.draft_length == "auto"
        super().__post_init__()

    @property
    def implied_length(self) -> int | None:
        return super().implied_length if self.length_given else self.num_speculative_tokens


@register(PerRequestConfig)
class PerRequestGenerator(CombinedGenerator, HasDrafters):
    """Asks each sequence's own drafter. A drafter follows only the sequences that it drafts for."""

    config: PerRequestConfig

    def __init__(self, config: PerRequestConfig, target: PackedModel, context: DrafterContext | None = None):
        super().__init__(config, target, context)
        assert config.methods is not None
        self.by_name = {
            name: self.made("methods", with_common_keys(part, config), context) for name, part in config.methods.items()
        }
        self.drafters = list(self.by_name)
        self.combine(list(self.by_name.values()))
        if not config.length_given:  # then the longest that a part can draft
            self.config = dataclasses.replace(config, num_speculative_tokens=max(self.longest))

    def part_of(self, seq: Sequence) -> CandidateGenerator:
        """The drafter of a sequence; raises ValueError if no drafter has its name."""
        check_drafter(seq, self.by_name)
        return self.parts[0] if seq.drafter is None else self.by_name[seq.drafter]

    def parts_of(self, seq: Sequence) -> list[CandidateGenerator]:
        return [self.part_of(seq)]

    def propose(self, sequences: list[Sequence], limits: list[int]) -> DraftTrees:
        trees = DraftTrees.empty(len(sequences), self.target.device)
        for part, longest in zip(self.parts, self.longest, strict=True):
            rows = [i for i, seq in enumerate(sequences) if limits[i] and self.part_of(seq) is part]
            if rows:
                drafted = part.propose([sequences[i] for i in rows], [min(limits[i], longest) for i in rows])
                asked = [i in rows for i in range(len(sequences))]
                trees = drafted if all(asked) else DraftTrees.choose(trees, drafted.spread(rows, len(sequences)), asked)
        return trees

    def observe(self, outcome: StepOutcome) -> None:
        for part in self.parts:
            seen = outcome.of(lambda seq, part=part: self.part_of(seq) is part)
            if seen.chunks or seen.sequences:
                part.observe(seen)
