"""PARD (An et al. 2025): a draft model trained to predict several tokens in one forward, from mask tokens after the text."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ..config import config_key
from ..core.sequence import Sequence
from ..model.packed_model import PackedModel
from .base import DrafterContext
from .checkpoints.files import Checkpoint, register_format
from .draft_model import DraftModelConfig, DraftModelGenerator
from .growing.tree_growth import AllDepths, Draft, DraftLevel
from .registry import register

# Keys of the mask token in a drafter's config.json: AMD's, vLLM's, and the plain name.
_MASK_KEYS = ("pard_token", "ptd_token_id", "mask_token_id")


def _is_pard(checkpoint: Checkpoint) -> bool:
    names_mask = any(isinstance(checkpoint.config.get(key), int) for key in _MASK_KEYS[:2])
    # P-EAGLE heads name a mask token too, but are not language models
    return names_mask and checkpoint.any(r"model\.layers\.0\.")


register_format("PARD (amd/PARD-*: a causal language model with pard_token)", "pard", _is_pard)


@dataclass
class PardConfig(DraftModelConfig):
    """PARD: a smaller causal language model, fine-tuned for it, drafts all tokens in one forward. With
    `branching_factors` or another tree, the nodes of a depth share their candidates."""

    name = "pard"
    requires = ("a draft model trained for parallel drafting: 'model' or generate(assistant_model=...)",)
    default_num_speculative_tokens = 8
    default_longest_draft = 12

    mask_token_id: int | None = config_key(
        None, "the drafter's mask token; by default what its config.json names (pard_token)", minimum=0
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.early_exit is not None:
            raise self.fail("early_exit", "cannot be used: the target was not trained to draft in parallel.")


@register(PardConfig)
class PardGenerator(DraftModelGenerator):
    """Drafts K tokens in one causal forward of the new tokens and K - 1 mask tokens.

    Drafted tokens do not depend on each other, so all nodes of one depth share their logits. Only the text's keys and
    values stay in the cache: those of the masks are overwritten in the next round.
    """

    has_loop = False  # one forward has drafted all depths before any token is chosen

    def __init__(self, config: PardConfig, target: PackedModel, context: DrafterContext | None = None):
        super().__init__(config, target, context)
        self.mask_token_id = self._find_mask_token(config)
        # of the current round:
        self.limits: dict[int, int] = {}  # each sequence's draft length
        self.made: AllDepths | None = None

    def _find_mask_token(self, config: PardConfig) -> int:
        token = config.mask_token_id
        for key in _MASK_KEYS:
            token = getattr(self.drafter.config, key, None) if token is None else token
        if type(token) is not int or token < 0:
            raise config.fail(
                "model",
                f"is not a known parallel drafter: its configuration names no mask token ({', '.join(_MASK_KEYS)}). Set "
                "'mask_token_id' if you know it, or use method 'draft_model'.",
            )
        if token >= self.drafter.vocab_size:
            raise config.fail("mask_token_id", f"is {token}, but the drafter has {self.drafter.vocab_size} tokens.")
        return token

    def roots(self, sequences: list[Sequence], limits: list[int]) -> tuple[torch.Tensor, ...]:
        """Read the new tokens of each text followed by masks; logits [R, Vd] of the first depth."""
        self.limits = {seq.id: limit for seq, limit in zip(sequences, limits, strict=True)}
        (logits,) = super().roots(sequences, limits)
        self.made = AllDepths(logits, limits)
        return (self.made.at()[:, 0],)

    def after_text(self, seq: Sequence) -> list[int]:
        """A mask for each depth but the first, whose logits are those of the text's last token."""
        return [self.mask_token_id] * (self.limits[seq.id] - 1)

    def round_programs(self) -> None:
        """Nothing is left to compute after the first depth."""

    def expand(self, level: DraftLevel) -> torch.Tensor:
        """The forward's logits at the next depth [R, 1, Vd], which all nodes of a row share."""
        assert self.made is not None
        return self.made.at(level)

    def drafted(self, sequences: list[Sequence], draft: Draft) -> None:
        """Drop the round's logits. No keys and values of nodes are kept: they belong to masks."""
        self.made = None
