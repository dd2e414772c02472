"""The decoding loop: the only place that produces tokens. It knows no method by name and no HTTP."""

from .decoder import SpeculativeDecoder, StepResult
from .generate import decode

__all__ = ["SpeculativeDecoder", "StepResult", "decode"]
