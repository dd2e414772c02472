"""Keys of method `dflash`."""

from __future__ import annotations

from dataclasses import dataclass

from ..checkpoints.config import ProposedLengthConfig


@dataclass
class DFlashConfig(ProposedLengthConfig):
    """DFlash, DSpark and Domino: a drafter of a few layers reads the target's hidden states and predicts a block of tokens in
    one forward, by default as many as its block was trained for. With fewer, it runs a shorter block.

    With a DSpark confidence head, `draft_confidence_threshold` ends a draft where the head's estimate of the probability
    that all of it is accepted falls below the threshold.
    """

    name = "dflash"
    requires = ("a DFlash, DSpark or Domino drafter trained for the target: 'model'",)
    default_longest_draft = 15
