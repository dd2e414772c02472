"""ReadsTargetKeys: drafters that attend to the target's own keys and values, in its pages."""

from __future__ import annotations

from typing import Any

from ...cache import PagedStaticCache
from ...core.errors import UnsupportedModel
from ...core.outcome import StepOutcome
from ...core.sequence import Sequence
from ..base import CandidateGenerator
from .grower import GrowsDrafts


class ReadsTargetKeys(GrowsDrafts, CandidateGenerator):
    """Keeps no keys of the text, and reads no prompt."""

    _keys: PagedStaticCache | None = None

    @property
    def cache(self) -> Any:
        """The target's PagedStaticCache; None before the first step."""
        return self._keys

    def has_keys(self, seq: Sequence) -> bool:
        """True if the target's cache has the keys of all tokens but the last."""
        table = None if self.cache is None else self.cache.tables.get(seq.id)
        return table is not None and table.length == len(seq.tokens) - 1

    def observe(self, outcome: StepOutcome) -> None:
        """Note where the step has written keys. Raises UnsupportedModel: not in our pages."""
        super().observe(outcome)
        if outcome.cache is None:
            raise UnsupportedModel(
                f"Method {self.config.method!r} reads the target's keys in our pages, which transformers' own loop does not have: pass "
                "speculative_config to generate() in place of assisted_loop()."
            )
        if self.rounds is not None and outcome.cache is not self.cache:
            self.rounds.clear()  # they refer to it
        self._keys = outcome.cache

    def release(self) -> None:
        super().release()
        if self.rounds is None:
            self._keys = None
