"""A request's sampling parameters as the logits processors of its rows."""

from __future__ import annotations

from typing import Any

import torch
from transformers.generation.logits_process import (
    LogitsProcessor,
    LogitsProcessorList,
    MinNewTokensLengthLogitsProcessor,
    NoBadWordsLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
)

from ..sampling.grammar import GrammarLogitsProcessor
from ..sampling.penalties import OutputPenaltyLogitsProcessor, TokenBiasLogitsProcessor
from ..sampling.processors import NodeProcessors
from ..sampling.warpers import FusedSamplingLogitsWarper
from .params import SamplingParams


def row_processors(
    params: SamplingParams,
    prompt: list[int],
    ends: set[int],
    tokenizer: Any,
    vocab_size: int,
    grammar: GrammarLogitsProcessor | None = None,
) -> NodeProcessors | None:
    """Make the logits processors of a row, in vLLM's order; None if no parameter changes the logits.

    Args:
        prompt: the row's prompt ids.
        ends: ids that end the row; `min_tokens` forbids them at first.
        tokenizer: spells the bad words.
        vocab_size: number of columns of the logits.
        grammar: what the row's text must match. It comes after the other processors that forbid tokens, so that it can report that none
            is left.

    Raises:
        ValueError: an id is outside the vocabulary, or there are bad words and no tokenizer.
    """
    found: list[LogitsProcessor] = []
    if params.logit_bias or params.allowed_token_ids is not None:
        found.append(TokenBiasLogitsProcessor(vocab_size, params.logit_bias, params.allowed_token_ids))
    if params.bad_words:
        found.append(NoBadWordsLogitsProcessor(_spellings(params.bad_words, tokenizer)))
    if params.min_tokens and ends:
        found.append(MinNewTokensLengthLogitsProcessor(len(prompt), params.min_tokens, sorted(ends)))
    if grammar is not None:
        found.append(grammar)
    if params.repetition_penalty != 1.0:
        found.append(RepetitionPenaltyLogitsProcessor(params.repetition_penalty))
    if params.presence_penalty or params.frequency_penalty:
        found.append(OutputPenaltyLogitsProcessor(len(prompt), params.presence_penalty, params.frequency_penalty))
    if params.do_sample:
        top_k = max(params.top_k, 0)
        if (params.temperature, top_k, params.top_p, params.min_p) != (1.0, 0, 1.0, 0.0):
            found.append(FusedSamplingLogitsWarper(params.temperature, top_k, params.top_p, params.min_p))
    return NodeProcessors(LogitsProcessorList(found), torch.tensor([prompt]), None) if found else None


def _spellings(words: list[str], tokenizer: Any) -> list[list[int]]:
    """Token ids of each word, without and with a space before it, as in vLLM."""
    if tokenizer is None:
        raise ValueError("bad_words need a tokenizer.")
    found = []
    for word in words:
        for text in (word.lstrip(), " " + word.lstrip()):
            ids = tokenizer.encode(text, add_special_tokens=False)
            if ids and ids not in found:
                found.append(ids)
    return found
