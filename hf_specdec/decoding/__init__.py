"""The loop: one place where tokens are produced. Knows no method by name, no HTTP."""

from .decoder import SpeculativeDecoder, StepResult
from .generate import decode

__all__ = ["SpeculativeDecoder", "StepResult", "decode"]
