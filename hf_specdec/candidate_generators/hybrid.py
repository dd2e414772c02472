"""Two drafters as one: the second continues the first's drafts (FastDeploy), or replaces short ones (Arctic)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ..config import SpeculativeConfig, config_key
from ..core.draft_trees import DraftTrees
from ..core.sequence import Sequence
from ..model.packed_model import PackedModel
from .base import ContinuesDrafts, DrafterContext, ScoresDrafts
from .combined import CombinedGenerator, checked_part, with_common_keys
from .corpora import CorpusConfig
from .lookup_cache import LookupCacheConfig
from .parsing import parse_config
from .registry import register

STRATEGIES = ("fallback", "extend")


@dataclass
class HybridConfig(LookupCacheConfig, CorpusConfig):
    """Two drafters of any methods. Strategy "fallback": the first drafts; the second drafts for rows where the first expects
    fewer than `score_threshold` accepted tokens (Arctic's rule: suffix first, then a model).
    Strategy "extend": the second continues every chain of the first up to `num_speculative_tokens` (a model's few steps
    continued by n-gram lookup). By default `num_speculative_tokens` is the larger one of the two ("extend": their sum)."""

    name = "hybrid"
    has_parts = True
    requires = ("two configurations: 'first' and 'second'",)

    first: Any = config_key(None, "configuration of the drafter that is asked first")
    second: Any = config_key(None, "configuration of the drafter that continues or replaces it")
    strategy: str = config_key(
        "fallback",
        "'fallback' (the second drafts where the first has little) or 'extend' (the second continues the first)",
        choices=STRATEGIES,
    )
    score_threshold: float | None = config_key(
        None,
        "fallback: keep the first's draft if at least this many of its tokens are expected to be accepted (default: the smaller "
        "num_speculative_tokens of the two)",
        minimum=0,
    )

    def __post_init__(self) -> None:
        self.check_keys()
        for key in ("first", "second"):
            part = getattr(self, key)
            if part is None:
                raise self.fail(key, "is missing: give the configuration of a drafter, e.g. {'method': 'ngram'}.")
            setattr(self, key, checked_part(self, key, part))
        if self.num_speculative_tokens is None and self.num_speculative_tokens_per_batch_size is None:
            lengths = [parse_config(part).num_speculative_tokens or 0 for part in (self.first, self.second)]
            self.num_speculative_tokens = sum(lengths) if self.strategy == "extend" else max(lengths)
        super().__post_init__()

    @property
    def implied_length(self) -> int | None:
        return None

    def part(self, key: str) -> SpeculativeConfig:
        """The configuration `first` or `second`, with common keys taken from this one."""
        return with_common_keys(getattr(self, key), self)


@register(HybridConfig)
class HybridGenerator(CombinedGenerator):
    """Runs both drafters. Each observes every step, and which part of its own proposal was accepted."""

    config: HybridConfig

    def __init__(self, config: HybridConfig, target: PackedModel, context: DrafterContext | None = None):
        super().__init__(config, target, context)
        self.first, self.second = [self.made(key, config.part(key), context) for key in ("first", "second")]
        self.combine([self.first, self.second])
        self.extends = config.strategy == "extend"
        if self.extends and not isinstance(self.second, ContinuesDrafts):
            raise config.fail(
                "second",
                f"cannot be {self.second.config.method!r}, which does not continue another's drafts: use 'fallback'.",
            )
        default = min(part.config.num_speculative_tokens or 0 for part in self.parts)
        self.threshold = default if config.score_threshold is None else config.score_threshold

    @property
    def max_draft_nodes(self) -> int:
        nodes = [part.max_draft_nodes for part in self.parts]
        return max(sum(nodes), self.config.longest_draft) if self.extends else max(nodes)

    # ---- drafting ---------------------------------------------------------------------------------------------------

    def propose(self, sequences: list[Sequence], limits: list[int]) -> DraftTrees:
        """The first drafter's proposal, extended or replaced by the second's."""
        first = self._ask(0, sequences, [min(n, self.first.config.num_speculative_tokens or 0) for n in limits])
        if isinstance(self.second, ContinuesDrafts) and self.extends:
            if not first.is_chain:
                raise self.config.fail(
                    "first", "drafts trees, which cannot be extended: give it a chain, or use 'fallback'."
                )
            return self.second.continued(first, sequences, limits)
        scores = self.first.draft_scores(first) if isinstance(self.first, ScoresDrafts) else first.row_depths
        weak = [score < self.threshold for score in scores]
        if not any(weak):
            return first
        ceiling = self.second.config.num_speculative_tokens or 0
        second = self._ask(1, sequences, [min(n, ceiling) if w else 0 for n, w in zip(limits, weak, strict=True)])
        # The second may have no draft yet (its features are missing): then keep the first's.
        chosen = [w and n > 0 for w, n in zip(weak, second.lengths, strict=True)]
        return DraftTrees.choose(first, second, chosen)

    def _ask(self, which: int, sequences: list[Sequence], limits: list[int]) -> DraftTrees:
        if not any(limits):
            return DraftTrees.empty(len(sequences), self.target.device)
        trees = self.parts[which].propose(sequences, limits)
        self.note(which, sequences, trees)
        return trees
