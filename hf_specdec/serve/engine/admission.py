"""Admission: checks requests and makes their choices, each with its row, logits processors and random stream."""

from __future__ import annotations

import itertools
import random
from typing import Any

import torch
from transformers.generation.logits_process import (
    LogitsProcessorList,
    MinNewTokensLengthLogitsProcessor,
    NoBadWordsLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
)

from ...core.sequence import Sequence, stream_seeds
from ...decoding.decoder import SpeculativeDecoder
from ...sampling.grammar import GrammarLogitsProcessor, Reasoning
from ...sampling.penalties import OutputPenaltyLogitsProcessor, TokenBiasLogitsProcessor
from ...sampling.processors import NodeProcessors
from ...sampling.warpers import FusedSamplingLogitsWarper
from .params import SamplingParams
from .request import CompletionOutput, Request, RequestChoice
from .structured import GrammarCompiler
from .text import Detokenizer, token_text


class Admission:
    """Makes requests that an engine can serve. Arguments: see `Engine`."""

    def __init__(
        self, decoder: SpeculativeDecoder, tokenizer: Any, max_model_len: int, grammars: GrammarCompiler,
        seed: int | None = None
    ):  # fmt: skip
        self.decoder, self.tokenizer, self.max_model_len = decoder, tokenizer, max_model_len
        self.grammars, self.eos_token_ids = grammars, grammars.ends
        self._numbers = itertools.count()
        self._seeds = random.Random(seed)

    def request(
        self, request_id: str, prompt: str | None, prompt_token_ids: list[int], params: SamplingParams,
        reasoning: Reasoning | None = None
    ) -> Request:  # fmt: skip
        """Check the arguments of a request and make it. Raises ValueError: it cannot be served.

        Args:
            prompt: the prompt's text, if there is one; only shown in the result.
            reasoning: what the model writes before the text that `structured_outputs` describes; None: nothing.
        """
        self._check_prompt(prompt_token_ids)
        self._check_params(params)
        wanted = params.structured_outputs  # in a server the HTTP side has had it compiled already
        matcher = None if wanted is None else self.grammars.matcher(wanted)
        request = Request(request_id, next(self._numbers), prompt, list(prompt_token_ids), params)
        request.prompt_logprobs = None if params.prompt_logprobs is None else [None]
        seed = self._seeds.getrandbits(62) if params.seed is None else params.seed % 2**63
        streams = stream_seeds(seed, [request.prompt_token_ids] * params.n)
        for index, stream in enumerate(streams):
            request.choices.append(self._make_choice(request, index, stream, matcher, reasoning))
        return request

    def _check_prompt(self, ids: list[int]) -> None:
        length, vocab_size, cache = len(ids), self.decoder.target.vocab_size, self.decoder.cache
        if not length:
            raise ValueError("The prompt is empty: it needs at least one token.")
        if length >= self.max_model_len:
            most = f"with max_model_len {self.max_model_len} it may have {self.max_model_len - 1}"
            raise ValueError(f"The prompt has {length} tokens; {most}.")
        wrong = next((token for token in ids if not 0 <= token < vocab_size), None)
        if wrong is not None:
            raise ValueError(f"The prompt holds the id {wrong}; the model has ids 0 to {vocab_size - 1}.")
        if -(-(length + 1) // cache.block_size) > cache.most_blocks:
            most = cache.most_blocks * cache.block_size
            raise ValueError(f"The prompt has {length} tokens; the KV cache holds {most}. Give it more memory.")

    def _check_params(self, params: SamplingParams) -> None:
        vocab_size, drafters = self.decoder.target.vocab_size, self.decoder.drafters
        wrong = next((token for token in params.stop_token_ids if not 0 <= token < vocab_size), None)
        if wrong is not None:
            raise ValueError(f"stop_token_ids holds {wrong}; the model has ids 0 to {vocab_size - 1}.")
        if params.drafter is not None and params.drafter not in drafters:
            known = f"it has {', '.join(drafters)}" if drafters else "it has one method, for every request"
            raise ValueError(
                f"drafter {params.drafter!r} (speculative_config's 'method') is not one of this engine's: {known}."
            )
        # Under every rule but "coupled" the tokens depend on where drafts end, and so on what else is running.
        rule, drafts = self.decoder.config.verification_rule, self.decoder.generator.max_draft_nodes
        drafts = drafts if params.num_speculative_tokens is None else params.num_speculative_tokens
        if params.seed is not None and params.do_sample and drafts and rule != "coupled":
            raise ValueError(
                f"seed: with rejection_sample_method {rule!r} a seed does not give the same tokens every time, because they depend on "
                "the drafts. Leave seed out, switch this request's drafts off (num_speculative_tokens 0), or use 'coupled'."
            )
        if params.structured_outputs is not None and rule == "synthetic":
            message = "the rule 'synthetic' accepts drafts whatever they are. Use another rule."
            raise ValueError(f"structured_outputs: {message}")

    def _make_choice(
        self, request: Request, index: int, stream: int, matcher: Any, reasoning: Reasoning | None
    ) -> RequestChoice:
        """Make the choice `index` of a request, whose random numbers come from the seed `stream`."""
        params, prompt = request.params, request.prompt_token_ids
        length, room = len(prompt), self.max_model_len - len(prompt)
        new_tokens = room if params.max_tokens is None else min(params.max_tokens, room)
        ends = set(params.stop_token_ids) | (set() if params.ignore_eos else set(self.eos_token_ids))
        grammar = None if matcher is None else GrammarLogitsProcessor(
            matcher.deep_copy(), self.grammars.vocab_size, length, frozenset(ends), reasoning,
            lambda token: token_text(self.tokenizer, token) or "",
        )  # fmt: skip
        sequence = Sequence(
            list(prompt), length + new_tokens, frozenset(ends), params.do_sample, stream,
            row_processors(params, prompt, ends, self.tokenizer, self.decoder.target.vocab_size, grammar),
            num_speculative_tokens=params.num_speculative_tokens, drafter=params.drafter,
            wants_prompt_logits=params.prompt_logprobs is not None and index == 0, is_shared=not params.private, space=params.space,
        )  # fmt: skip
        wants_text = params.detokenize and self.tokenizer is not None
        text = Detokenizer(self.tokenizer, prompt, params.skip_special_tokens) if wants_text else None
        output = CompletionOutput(index, logprobs=None if params.logprobs is None else [])
        output.cumulative_logprob = None if params.logprobs is None else 0.0
        return RequestChoice(request, output, sequence, text, grammar)


def row_processors(
    params: SamplingParams, prompt: list[int], ends: set[int], tokenizer: Any, vocab_size: int,
    grammar: GrammarLogitsProcessor | None = None
) -> NodeProcessors | None:  # fmt: skip
    """Make the logits processors of a row, in vLLM's order; None if no parameter changes the logits.

    Args:
        ends: ids that end the row; `min_tokens` forbids them at first.
        grammar: what the row's text must match. It comes after other processors that forbid tokens, to report that none is left.

    Raises:
        ValueError: an id is outside the vocabulary, or there are bad words and no tokenizer.
    """
    processors = LogitsProcessorList()
    if params.logit_bias or params.allowed_token_ids is not None:
        processors.append(TokenBiasLogitsProcessor(vocab_size, params.logit_bias, params.allowed_token_ids))
    if params.bad_words:
        processors.append(NoBadWordsLogitsProcessor(_spellings(params.bad_words, tokenizer)))
    if params.min_tokens and ends:
        processors.append(MinNewTokensLengthLogitsProcessor(len(prompt), params.min_tokens, sorted(ends)))
    if grammar is not None:
        processors.append(grammar)
    if params.repetition_penalty != 1.0:
        processors.append(RepetitionPenaltyLogitsProcessor(params.repetition_penalty))
    if params.presence_penalty or params.frequency_penalty:
        processors.append(OutputPenaltyLogitsProcessor(len(prompt), params.presence_penalty, params.frequency_penalty))
    if params.do_sample:
        top_k = max(params.top_k, 0)
        if (params.temperature, top_k, params.top_p, params.min_p) != (1.0, 0, 1.0, 0.0):
            processors.append(FusedSamplingLogitsWarper(params.temperature, top_k, params.top_p, params.min_p))
    return NodeProcessors(processors, torch.LongTensor([prompt]), None) if processors else None


def _spellings(words: list[str], tokenizer: Any) -> list[list[int]]:
    if tokenizer is None:
        raise ValueError("bad_words need a tokenizer.")
    spellings: list[list[int]] = []
    for text in (text for word in words for text in (word.lstrip(), " " + word.lstrip())):
        ids = tokenizer.encode(text, add_special_tokens=False)
        if ids and ids not in spellings:
            spellings.append(ids)
    return spellings
