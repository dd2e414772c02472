"""Logits warpers for any `LogitsProcessorList` of transformers. Speculative decoding uses the same operations.

from hf_specdec.sampling import CoupledNoiseLogitsWarper
model.generate(ids, do_sample=False, logits_processor=LogitsProcessorList([CoupledNoiseLogitsWarper([seed])]))
"""

from __future__ import annotations

from typing import Any

import torch
from transformers.generation.logits_process import LogitsProcessor

from ..kernels import random_bits
from ..kernels.drafting.reference import to_target_vocabulary
from ..kernels.sampling.reference import sampling_scores


class CoupledNoiseLogitsWarper(LogitsProcessor):
    """Add the noise of coupled sampling to the scores.

    `generate(do_sample=False)` with this warper last draws from the model's distribution. It draws the same tokens as
    `speculative_config={"rejection_sample_method": "coupled", "seed": ...}`.

    Args:
        seeds: the random stream of each row, int64 [B] (see `core.sequence.stream_seeds`).
        padding: number of left-padding tokens per row; positions count from the first real token.
    """

    def __init__(self, seeds: list[int], padding: list[int] | None = None):
        self.seeds = torch.tensor(seeds, dtype=torch.long)
        self.padding = torch.tensor(padding if padding is not None else [0] * len(seeds), dtype=torch.long)

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """scores [B, V] + Gumbel noise of each row's next position."""
        seeds = self.seeds.to(scores.device)
        positions = input_ids.shape[1] - self.padding.to(scores.device)
        noise = random_bits.gumbel(seeds, positions, torch.zeros_like(seeds), random_bits.TOKEN_STREAM, scores.shape[1])
        return scores + noise


class DraftVocabularyLogitsWarper(LogitsProcessor):
    """Map logits over a draft vocabulary to the target's vocabulary; tokens outside the draft vocabulary get -inf.

    Args:
        target_ids: int64 [Vd], the target's id of each draft id (EAGLE-3: `arange(Vd) + d2t`).
        vocab_size: V.
    """

    def __init__(self, target_ids: torch.LongTensor, vocab_size: int):
        if target_ids.dim() != 1 or int(target_ids.max()) >= vocab_size or int(target_ids.min()) < 0:
            raise ValueError(f"target_ids must be a vector of ids below vocab_size = {vocab_size}.")
        self.target_ids, self.vocab_size = target_ids, vocab_size

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """[..., Vd] → [..., V]."""
        return to_target_vocabulary(scores, self.target_ids.to(scores.device), self.vocab_size)


class FusedSamplingLogitsWarper(LogitsProcessor):
    """Apply temperature, top-k, top-p and min-p with one sort.

    It keeps the tokens that TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper and MinPLogitsWarper keep one after
    another.

    Raises:
        ValueError: a parameter is out of range.
    """

    def __init__(self, temperature: float = 1.0, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0):
        if temperature <= 0 or top_k < 0 or not 0 < top_p <= 1 or not 0 <= min_p <= 1:
            raise ValueError(
                "temperature must be above 0, top_k at least 0 (0: off), top_p in (0, 1], min_p in [0, 1]; got "
                f"{temperature}, {top_k}, {top_p}, {min_p}."
            )
        self.temperature, self.top_k, self.top_p, self.min_p = temperature, top_k, top_p, min_p

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """[R, V] → [R, V], removed tokens at -inf."""
        top_p = self.top_p if self.top_p < 1 else None
        return sampling_scores(scores, self.temperature, self.top_k or None, top_p, self.min_p or None)


# ---- what serving APIs offer and transformers lacks ----


class OutputPenaltyLogitsProcessor(LogitsProcessor):
    """Presence and frequency penalties, on what was written after the prompt (OpenAI's definition).

    Args:
        prompt_length: tokens that are not counted.
        presence: subtracted from the logit of every token that was written.
        frequency: subtracted once for each time it was written.
    """

    def __init__(self, prompt_length: int, presence: float = 0.0, frequency: float = 0.0):
        self.prompt_length, self.presence, self.frequency = prompt_length, presence, frequency

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """input_ids int64 [B, L], scores [B, V] → [B, V]."""
        written = input_ids[:, self.prompt_length :]
        counts = torch.zeros_like(scores).scatter_add_(1, written, torch.ones_like(written, dtype=scores.dtype))
        return scores - self.presence * (counts > 0) - self.frequency * counts


class TokenBiasLogitsProcessor(LogitsProcessor):
    """A number added to some tokens' logits, or -inf to all but some.

    Args:
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

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """scores [B, V] → [B, V]."""
        self.added = self.added.to(scores.device)
        return scores + self.added


class BeginningLogitsProcessor(LogitsProcessor):
    """Let a text begin with chosen tokens; after them, apply other processors, which look at a row's own prefix only.

    Args:
        prompt_length: number of tokens before the text.
        allowed: per place of the text, from its first, the ids of which the most probable one must stand there.
        then: the processors for later places.
    """

    def __init__(self, prompt_length: int, allowed: list[list[int]], then: list[Any]):
        self.prompt_length, self.allowed, self.then = prompt_length, allowed, then

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """scores [B, V] of the token after input_ids [B, S]."""
        place = input_ids.shape[1] - self.prompt_length
        if place >= len(self.allowed):
            for processor in self.then:
                scores = processor(input_ids, scores)
            return scores
        ids = torch.tensor(self.allowed[place], device=scores.device)
        best = ids[scores[:, ids].argmax(1)]
        return torch.full_like(scores, float("-inf")).scatter(1, best[:, None], 0.0)
