"""The decoding loop: the only place that produces tokens. It knows nothing of HTTP, and of the methods only "auto" by name."""

from .decoder import SpeculativeDecoder, StepResult
from .generate import decode

__all__ = ["SpeculativeDecoder", "StepResult", "decode"]
