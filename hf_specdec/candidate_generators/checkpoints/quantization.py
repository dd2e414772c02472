"""Draft heads with int8 or int4 weights. Modules shared with the target are not changed."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ...model.options.quantized import quantize_for_good, quantizes_natively
from .target_parts import HeadConfig

if TYPE_CHECKING:
    from ..base import CandidateGenerator


def quantize_head(generator: CandidateGenerator) -> None:
    """Quantize a head's weights if its configuration says so. The loaded weights are dropped.

    Every linear layer of the head is quantized, its own language-model head included: draft logits need not be exact.
    Drafters that are not heads are left alone.
    """
    from ..growing.grower import GrowingGenerator

    config = generator.config
    if not isinstance(config, HeadConfig) or config.quantization is None or not isinstance(generator, GrowingGenerator):
        return
    shared = set(generator.target.model.modules())
    for module in generator.modules():
        if module not in shared:
            quantize_for_good(module, config.quantization, shared, quantizes_natively(config))
