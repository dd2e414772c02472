"""make_policy: the policy of draft lengths that a configuration asks for."""

from __future__ import annotations

from collections.abc import Callable

from ..candidate_generators import CandidateGenerator
from ..candidate_generators.auto import AutoGenerator
from ..config import SpeculativeConfig
from ..core.clock import clock_for
from .auto_length import AutoLength
from .auto_memory import AutoMemory
from .auto_method import AutoMethod
from .draft_length import DraftLengthPolicy, LengthPerBatchSize, UpToBatchSize


def make_policy(config: SpeculativeConfig, generator: CandidateGenerator | None = None) -> DraftLengthPolicy:
    """The policy that the configuration asks for.

    Args:
        generator: the drafter. If it combines several drafters, the policy also chooses among them. None: the time of choosing is
            not counted.
    """
    clock = None if generator is None else clock_for(generator.target.device)
    if isinstance(generator, AutoGenerator):
        policy = AutoMethod(generator, clock, AutoMemory.of(generator))
    else:
        policy = _make_lengths(config, clock)
    most_rows = config.disable_by_batch_size
    return policy if most_rows is None else UpToBatchSize(policy, most_rows)


def _make_lengths(config: SpeculativeConfig, clock: Callable[[], float] | None) -> DraftLengthPolicy:
    if config.num_speculative_tokens_per_batch_size is not None:
        return LengthPerBatchSize(config.num_speculative_tokens_per_batch_size)
    if config.draft_length == "auto":
        return AutoLength(config.longest_draft or 1, clock)
    return DraftLengthPolicy()
