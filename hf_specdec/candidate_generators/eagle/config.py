"""Keys of method `eagle`."""

from __future__ import annotations

from dataclasses import dataclass

from ..checkpoints.config import ProposedLengthConfig


@dataclass
class EagleConfig(ProposedLengthConfig):
    """EAGLE-1/2: a head of one decoder layer drafts from the target's final hidden states, in chains, static trees
    (EAGLE-1) or dynamic trees (EAGLE-2: `top_k`, `total_tokens`, `depth`)."""

    name = "eagle"
    requires = ("an EAGLE head trained for the target: 'model'",)
