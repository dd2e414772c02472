"""Draft heads with int8 or int4 weights. What a head shares with the target stays the target's."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ...model.options.quantized import quantize_for_good
from .target_parts import HeadConfig

if TYPE_CHECKING:
    from ..base import CandidateGenerator


def quantize_head(generator: CandidateGenerator) -> None:
    """Give a head the weights its configuration wants. Heads are ours, so it is for good: the weights loaded are dropped.

    Every linear layer of the head is quantized, a language-model head of its own too: a draft logit need not be exact.
    Other drafters are left alone.
    """
    from ..growing.grower import GrowingGenerator

    config = generator.config
    if not isinstance(config, HeadConfig) or config.quantization is None or not isinstance(generator, GrowingGenerator):
        return
    shared = set(generator.target.model.modules())
    for module in generator.modules():
        if module not in shared:
            quantize_for_good(module, config.quantization, shared)
