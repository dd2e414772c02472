"""From the target's logits to scores that tokens are chosen by: logits processors, sampling parameters and random streams.

The warpers exported here also work in transformers' own `generate()`; see docs/verification.md for an example.
"""

from .warpers import CoupledNoiseLogitsWarper, DraftVocabularyLogitsWarper, FusedSamplingLogitsWarper

__all__ = ["CoupledNoiseLogitsWarper", "DraftVocabularyLogitsWarper", "FusedSamplingLogitsWarper"]
