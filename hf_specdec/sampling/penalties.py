"""Logits processors that serving APIs offer and transformers lacks: presence and frequency penalties, a bias per token."""

from __future__ import annotations

import torch
from transformers.generation.logits_process import LogitsProcessor


class OutputPenaltyLogitsProcessor(LogitsProcessor):
    """Presence and frequency penalties, on what was written after the prompt (OpenAI's definition).

    Args:
        prompt_length: tokens that are not counted.
        presence: subtracted from the logit of every token that was written.
        frequency: subtracted once for each time it was written.
    """

    def __init__(self, prompt_length: int, presence: float = 0.0, frequency: float = 0.0):
        self.prompt_length, self.presence, self.frequency = prompt_length, presence, frequency

    def __call__(self, input_ids: torch.LongTensor, scores: torch.FloatTensor) -> torch.FloatTensor:
        """input_ids int64 [B, L], scores [B, V] → [B, V]."""
        written = input_ids[:, self.prompt_length :]
        counts = torch.zeros_like(scores).scatter_add_(1, written, torch.ones_like(written, dtype=scores.dtype))
        return scores - self.presence * (counts > 0) - self.frequency * counts


class TokenBiasLogitsProcessor(LogitsProcessor):
    """A number added to some tokens' logits, or -inf to all but some.

    Args:
        bias: token id → number.
        allowed: the only ids that may be chosen; None: all.

    Raises:
        ValueError: an id outside the vocabulary.
    """

    def __init__(self, vocab_size: int, bias: dict[int, float] | None = None, allowed: list[int] | None = None):
        wrong = [token for token in [*(bias or ()), *(allowed or ())] if not 0 <= token < vocab_size]
        if wrong:
            raise ValueError(
                f"logit_bias and allowed_token_ids must name ids from 0 to {vocab_size - 1}, not {wrong[0]}."
            )
        self.added = torch.zeros(vocab_size)
        if allowed is not None:
            self.added.fill_(float("-inf"))
            self.added[torch.tensor(allowed)] = 0.0
        for token, value in (bias or {}).items():
            self.added[token] += value

    def __call__(self, input_ids: torch.LongTensor, scores: torch.FloatTensor) -> torch.FloatTensor:
        """scores [B, V] → [B, V]."""
        self.added = self.added.to(scores.device)
        return scores + self.added
