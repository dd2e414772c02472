"""Requests: how they are checked and made, and the engine's state of a prompt and of each of its answers."""

from __future__ import annotations

import functools
import itertools
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from transformers import BatchFeature, PreTrainedModel
from transformers.generation.logits_process import (
    LogitsProcessorList,
    MinNewTokensLengthLogitsProcessor,
    NoBadWordsLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
)

from ...candidate_generators.prediction import Prediction
from ...core.sequence import Sequence, stream_seeds
from ...decoding.decoder import SpeculativeDecoder
from ...decoding.generate import check_methods
from ...decoding.outputs import RowStatistics, Speculation, summarize
from ...model.image_layers import num_image_keys
from ...model.packed_model import PackedModel
from ...model.prompt import ReadPrompt, read_prompt
from ...refusals import check_inputs
from ...sampling.grammar import GrammarLogitsProcessor, Reasoning
from ...sampling.processors import NodeProcessors
from ...sampling.warpers import FusedSamplingLogitsWarper, OutputPenaltyLogitsProcessor, TokenBiasLogitsProcessor
from .adapters import Adapters
from .encoder import EncoderInput, EncoderSide, check_ids
from .outputs import CompletionOutput, Logprob, RequestOutput
from .params import SamplingParams
from .structured import GrammarCompiler
from .text import Detokenizer, safe_length, token_text


class ImagePrompt:
    """A prompt with images, of one row, which the model itself reads.

    Args:
        seen: the ids as drafters see them.
        inputs: see `EncoderInput.images`.
        num_blocks: as of a `Source`, whose `length` this also has: 0 unless the images' keys stand beside those of text.
    """

    def __init__(
        self, model: PreTrainedModel, ids: list[int], seen: list[int], inputs: dict[str, Any], num_blocks: int
    ):
        self.model, self.ids, self.seen, self.inputs = model, ids, seen, inputs
        self.length, self.num_blocks = num_image_keys(model, inputs), num_blocks

    def read(self, target: PackedModel) -> ReadPrompt:
        """Let the model read it, prepared as by its `generate()`. Call outside `active()`. Raises ValueError: it does not take these
        inputs; UnsupportedModel: it cannot go on from them as here."""

        def read(model, input_ids, logits_processor, stopping_criteria, generation_config, **prepared):
            check_inputs(model, input_ids, generation_config, prepared)
            columns, seen = [np.arange(input_ids.shape[1])], input_ids.new_tensor([self.seen])
            return read_prompt(target, input_ids, prepared, generation_config, seen, columns)

        model: Any = self.model
        # Without a mask generate() would hide tokens with the id that pads.
        given = {"input_ids": [self.ids], "attention_mask": [[1] * len(self.ids)], **self.inputs}
        inputs = BatchFeature(given, tensor_type="pt").to(model.device, model.dtype)
        return model.generate(
            **inputs, custom_generate=read, max_length=len(self.ids) + 1, do_sample=False, num_beams=1
        )


@dataclass(eq=False)
class RequestChoice:
    """One of a request's n answers, while it is generated."""

    request: Request
    output: CompletionOutput
    sequence: Sequence
    text: Detokenizer | None  # None if no text is wanted
    grammar: GrammarLogitsProcessor | None = None
    is_added: bool = False  # the sequence has been added to the decoder
    hides_end: bool = False  # its last token ended it and is not part of its text
    num_told: int = 0  # tokens that `text` has been told
    taken: tuple[int, int] | None = None  # characters and tokens that `take` has returned; None before its first call

    @property
    def order(self) -> tuple[int, int, int]:
        """Sort key of the scheduler, smallest first: priority, then arrival."""
        return self.request.params.priority, self.request.number, self.output.index

    @functools.cached_property
    def is_watched(self) -> bool:
        """Whether more is to be done with a token than to append it, even if it does not end the sequence."""
        params = self.request.params
        return self.grammar is not None or params.logprobs is not None or bool(params.stop)

    def make_text(self, is_last: bool = False) -> str:
        """Bring the output's text up to its tokens. Returns what this adds. `is_last`: no token follows."""
        if self.text is None:
            return ""
        told = len(self.output.token_ids) - self.hides_end
        add = self.text.finish if is_last else self.text.add
        piece = add(self.output.token_ids[self.num_told : told])
        self.num_told, self.output.text = told, self.text.text
        return piece

    def finish_text(self) -> None:
        """The same once no token will come, with its last bytes."""
        try:
            self.make_text(is_last=True)
        finally:
            self.text = None  # what raises may raise again

    def take(self) -> tuple[str, list[int], list[dict[int, Logprob]] | None] | None:
        """The text, ids and log-probabilities since the last call; None if there are none. Text that may begin a stop text is held back."""
        output, (characters, tokens) = self.output, self.taken or (0, 0)
        if characters < 0 or (tokens == len(output.token_ids) and not output.finished()):
            return None
        if not output.finished():
            self.make_text()
        end = len(output.text) if output.finished() else safe_length(output.text, self.request.params.stop)
        end = max(end, characters)
        self.taken = -1 if output.finished() else end, len(output.token_ids)  # -1: its end has been returned
        logprobs = None if output.logprobs is None else output.logprobs[tokens:]
        return output.text[characters:end], output.token_ids[tokens:], logprobs


@dataclass(eq=False)
class Request:
    """A prompt, its parameters, and its answers."""

    id: str
    number: int
    prompt: str | None  # the text that the user gave; of an encoder-decoder model, the encoder's
    prompt_token_ids: list[int]
    params: SamplingParams
    seen_ids: list[int]  # the prompt's as drafters and processors see them: padding stands for ids without logits
    encoder: EncoderInput | None = None  # None: the model has none, or the prompt has no images
    choices: list[RequestChoice] = field(default_factory=list)
    num_cached_tokens: int = 0
    error: BaseException | None = None
    is_refused: bool = False  # the `error` is the client's mistake
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None  # so far; None for the first, which nothing predicts
    kv_transfer_params: dict | None = None  # for the decode server that continues the request, if its prompt is kept
    token_times: list[float] | None = None  # see `EncoderSide.times`
    announcement: dict | None = None  # for the one that pulls it while it is read; taken by whoever delivers it
    statistics: list[RowStatistics] = field(default_factory=list)  # of the choices that have ended
    _summary: Speculation | None = None
    started: float | None = None  # when its first row began to run, by the clock of all processes of this machine

    @property
    def num_prompt(self) -> int:
        """Number of tokens of the user's prompt; of audio, of the decoder's."""
        return len((self.encoder.ids if self.encoder is not None else []) or self.prompt_token_ids)

    @property
    def finished(self) -> bool:
        """True once all choices have ended."""
        return None not in [choice.output.finish_reason for choice in self.choices]

    def result(self) -> RequestOutput:
        """The results so far, as `LLM.generate` returns them."""
        read = None if self.encoder is None or self.encoder.images is not None else self.encoder.ids
        texts = (self.prompt, None, None) if read is None else (None, self.prompt, read)
        return RequestOutput(
            self.id, texts[0], self.prompt_token_ids, [choice.output for choice in self.choices], self.finished, self.prompt_logprobs,
            self.num_cached_tokens, self.summary if self.finished and self.error is None else None,
            self.kv_transfer_params or self.choices[0].sequence.files or None, self.error, *texts[1:],
        )  # fmt: skip

    @property
    def summary(self) -> Speculation:
        """Statistics of speculation of the choices that have ended."""
        if self._summary is None or len(self._summary.rows) < len(self.statistics):
            self._summary = summarize(self.statistics, 0)
        return self._summary

    def figures(self, longest_draft: int) -> dict[str, Any]:
        """Statistics of speculation, also in vLLM's form, whose histogram ends at `longest_draft`; and counts for metrics."""
        drafted = [(depth, accepted) for row in self.statistics for _, depth, _, accepted in row.steps if depth]
        summary = self.summary
        histogram = [summary["num_steps"] - len(drafted)] + [0] * longest_draft
        for _, accepted in drafted:
            histogram[min(accepted, longest_draft)] += 1
        return {
            **summary,
            "started": self.started,
            "num_drafts": len(drafted),
            "num_accepted_per_position": [
                sum(accepted > i for _, accepted in drafted) for i in range(max(drafted, default=(0, 0))[0])
            ],
            "speculative_decoding": {
                "mean_acceptance_length": summary["mean_accepted_length"], "draft_acceptance_rate": summary["acceptance_rate"],
                "acceptance_histogram": histogram, "num_spec_steps": summary["num_steps"], "num_spec_tokens": longest_draft,
                "num_accepted_draft_tokens": summary["num_accepted_tokens"], "num_draft_tokens": summary["num_draft_tokens"],
            },
        }  # fmt: skip


def logprobs_of(
    logits: torch.Tensor, tokens: list[int], count: int, text_of: Callable[[int], str | None]
) -> list[dict[int, Logprob]]:
    """For each row of logits [R, V], the log-probabilities of its `count` most probable tokens and of one given token."""
    scores = logits.float().log_softmax(-1)
    chosen = scores.gather(1, torch.tensor(tokens, device=scores.device)[:, None])
    ranks = (scores > chosen).sum(1).add(1).tolist()
    best = scores.topk(count, dim=1)
    entries = []
    rows = zip(tokens, chosen[:, 0].tolist(), ranks, best.indices.tolist(), best.values.tolist(), strict=True)
    for token, value, rank, ids, values in rows:
        ranked = enumerate(zip(ids, values, strict=True), 1)
        entry = {other: Logprob(v, r, text_of(other)) for r, (other, v) in ranked}
        entry.setdefault(token, Logprob(value, rank, text_of(token)))
        entries.append(entry)
    return entries


class Admission:
    """Makes requests that an engine can serve. Arguments: see `Engine`."""

    def __init__(
        self, decoder: SpeculativeDecoder, tokenizer: Any, max_model_len: int, grammars: GrammarCompiler, adapters: Adapters,
        seed: int | None = None, encoder: EncoderSide | None = None, num_image_blocks: int = 0
    ):  # fmt: skip
        self.encoder, self.adapters, self.num_image_blocks = encoder, adapters, num_image_blocks
        self.decoder, self.tokenizer, self.max_model_len = decoder, tokenizer, max_model_len
        self.grammars, self.eos_token_ids = grammars, grammars.ends
        self._numbers = itertools.count()
        self._seeds = random.Random(seed)

    def request(
        self, request_id: str, prompt: str | None, prompt_token_ids: list[int], params: SamplingParams,
        reasoning: Reasoning | None = None, encoder: EncoderInput | None = None
    ) -> Request:  # fmt: skip
        """Check the arguments of a request and make it. Raises ValueError: it cannot be served.

        Args:
            prompt: the prompt's text, if there is one; only shown in the result.
            reasoning: what the model writes before the text that `structured_outputs` describes; None: nothing.
            encoder: for an encoder-decoder model: `prompt_token_ids` are then the decoder's, and `prompt` is the encoder's. Of a prompt
                with images: these.
        """
        images = None if encoder is None else encoder.images
        ids, seen, image_prompt = list(prompt_token_ids), list(prompt_token_ids), None
        if images is not None:
            check_methods(self.decoder, 0, {})
            seen = self._seen(ids)
            image_prompt = self._image_prompt(ids, seen, images)
        self._check_prompt(seen)
        self._check_params(params)
        if images is not None and (params.prompt_logprobs is not None or params.kv_transfer_params):
            raise ValueError("prompt_logprobs and kv_transfer_params are for prompts without images: leave them out.")
        adapter = self.adapters.id_of(params.lora)
        if adapter is not None and params.kv_transfer_params:
            raise ValueError("lora and kv_transfer_params cannot be combined: leave one of them out.")
        source = None if self.encoder is None else self.encoder.source(encoder)
        predicted = self._predicted(params.prediction)
        wanted = params.structured_outputs  # in a server the HTTP side has had it compiled already
        matcher = None if wanted is None else self.grammars.matcher(wanted)
        request = Request(request_id, next(self._numbers), prompt, ids, params, seen, encoder)
        request.prompt_logprobs = None if params.prompt_logprobs is None else [None]
        seed = self._seeds.getrandbits(62) if params.seed is None else params.seed % 2**63
        read = [] if source is None else source.ids
        streams = stream_seeds(seed, [read + request.prompt_token_ids] * params.n)
        for index, stream in enumerate(streams):
            choice = self._make_choice(request, index, stream, matcher, reasoning)
            choice.sequence.source, choice.sequence.adapter = source, adapter
            choice.sequence.image_prompt, choice.sequence.is_text = image_prompt, image_prompt is None
            choice.sequence.prediction = None if predicted is None else Prediction(predicted)
            request.choices.append(choice)
        return request

    def _seen(self, ids: list[int]) -> list[int]:
        """The ids of a prompt with images as drafters see them: a placeholder of the model's that has no logits is padding."""
        model: Any = self.decoder.target.model
        placeholder, pad = getattr(model.config, "image_token_id", None), model.generation_config.pad_token_id or 0
        has_logits = placeholder is None or placeholder < self.decoder.target.vocab_size
        return ids if has_logits else [pad if token == placeholder else token for token in ids]

    def _image_prompt(self, ids: list[int], seen: list[int], images: dict[str, Any]) -> ImagePrompt:
        """Raises ValueError: the keys of its images do not fit."""
        made = ImagePrompt(self.decoder.target.model, ids, seen, images, self.num_image_blocks)
        most = self.num_image_blocks * self.decoder.cache.block_size
        if made.length > most:
            raise ValueError(
                f"The images have {made.length} keys; there is memory for {most}. Give it more memory, or fewer images."
            )
        return made

    def _predicted(self, given: str | list[int] | None) -> list[int] | None:
        """The ids of a prediction. Raises ValueError: they are not the model's, or too many, or there is no tokenizer."""
        if given is None:
            return None
        if isinstance(given, str) and self.tokenizer is None:
            raise ValueError("prediction: a text needs a tokenizer; give token ids.")
        ids = self.tokenizer(given, add_special_tokens=False)["input_ids"] if isinstance(given, str) else list(given)
        check_ids(ids, self.decoder.target.vocab_size, "prediction holds the id")
        if len(ids) > self.max_model_len:
            raise ValueError(f"prediction has {len(ids)} tokens; max_model_len is {self.max_model_len}.")
        return ids

    def _check_prompt(self, ids: list[int]) -> None:
        length, cache = len(ids), self.decoder.cache
        if not length:
            raise ValueError("The prompt is empty: it needs at least one token.")
        if length >= self.max_model_len:
            most = f"with max_model_len {self.max_model_len} it may have {self.max_model_len - 1}"
            raise ValueError(f"The prompt has {length} tokens; {most}.")
        check_ids(ids, self.decoder.target.vocab_size, "The prompt holds the id")
        if -(-(length + 1) // cache.block_size) > cache.most_blocks:
            most = cache.most_blocks * cache.block_size
            raise ValueError(f"The prompt has {length} tokens; the KV cache holds {most}. Give it more memory.")

    def _check_params(self, params: SamplingParams) -> None:
        check_ids(params.stop_token_ids, self.decoder.target.vocab_size, "stop_token_ids holds")
        if params.stop and self.tokenizer is None:
            raise ValueError("stop needs a tokenizer: pass one to LLM(tokenizer=...), or stop_token_ids.")
        drafters = self.decoder.drafters
        if params.drafter is not None and params.drafter not in drafters:
            known = f"it has {', '.join(drafters)}" if drafters else "it has one method, for every request"
            raise ValueError(
                f"drafter {params.drafter!r} (speculative_config's 'method') is not one of this engine's: {known}."
            )
        # Under every rule but "coupled" the tokens depend on where drafts end, and so on what else is running.
        rule, drafts = self.decoder.config.verification_rule, self.decoder.generator.max_draft_nodes
        bring = params.prediction, params.structured_outputs, params.thinking_token_budget
        drafts = drafts or any(value is not None for value in bring)
        drafts = drafts if params.num_speculative_tokens is None else params.num_speculative_tokens
        if params.seed is not None and params.do_sample and drafts and rule != "coupled":
            raise ValueError(
                f"seed: with rejection_sample_method {rule!r} a seed does not give the same tokens every time, because they depend on "
                "the drafts. Leave seed out, switch this request's drafts off (num_speculative_tokens 0), or use 'coupled'."
            )
        if params.structured_outputs is not None and rule == "synthetic":
            raise ValueError(
                "structured_outputs: the rule 'synthetic' accepts drafts whatever they are. Use another rule."
            )

    def _make_choice(
        self, request: Request, index: int, stream: int, matcher: Any, reasoning: Reasoning | None
    ) -> RequestChoice:
        """Make the choice `index` of a request, whose random numbers come from the seed `stream`."""
        params, prompt = request.params, request.seen_ids
        length, room = len(prompt), self.max_model_len - len(prompt)
        new_tokens = room if params.max_tokens is None else min(params.max_tokens, room)
        ends = set(params.stop_token_ids) | (set() if params.ignore_eos else set(self.eos_token_ids))
        grammar, budget = None, None if reasoning is None else params.thinking_token_budget
        if matcher is not None or budget is not None:
            matcher, text_of = matcher and matcher.deep_copy(), lambda token: token_text(self.tokenizer, token) or ""
            size = self.grammars.vocab_size
            grammar = GrammarLogitsProcessor(matcher, size, length, frozenset(ends), reasoning, text_of, budget)
        sequence = Sequence(
            list(prompt), length + new_tokens, frozenset(ends), params.do_sample, stream, self._processors(request, ends, grammar),
            num_speculative_tokens=params.num_speculative_tokens, drafter=params.drafter,
            wants_prompt_logits=params.prompt_logprobs is not None and index == 0, is_shared=not params.private,
            space=params.space if params.lora is None else f"{params.space} {params.lora}",
        )  # fmt: skip
        wants_text = params.detokenize and self.tokenizer is not None
        text = Detokenizer(self.tokenizer, request.prompt_token_ids, params.skip_special_tokens) if wants_text else None
        output = CompletionOutput(index)
        if params.logprobs is not None:
            output.logprobs, output.cumulative_logprob = [], 0.0
        return RequestChoice(request, output, sequence, text, grammar)

    def _processors(
        self, request: Request, ends: set[int], grammar: GrammarLogitsProcessor | None
    ) -> NodeProcessors | None:
        """The logits processors of a row, in vLLM's order; None if no parameter changes the logits. The model's own rules come first.
        Raises ValueError: an id is outside the vocabulary, or there are bad words and no tokenizer.
        """
        params, prompt, given = request.params, request.seen_ids, request.encoder
        rules = [] if self.encoder is None or given is None else self.encoder.rules(given, prompt)
        processors, vocab_size = LogitsProcessorList(rules), self.decoder.target.vocab_size
        if params.logit_bias or params.allowed_token_ids is not None:
            processors.append(TokenBiasLogitsProcessor(vocab_size, params.logit_bias, params.allowed_token_ids))
        if params.bad_words:
            processors.append(NoBadWordsLogitsProcessor(self._spellings(params.bad_words)))
        if params.min_tokens and ends:
            processors.append(MinNewTokensLengthLogitsProcessor(len(prompt), params.min_tokens, sorted(ends)))
        if grammar is not None:  # after other processors that forbid tokens, to report that none is left
            processors.append(grammar)
        if params.repetition_penalty != 1.0:
            processors.append(RepetitionPenaltyLogitsProcessor(params.repetition_penalty))
        if params.presence_penalty or params.frequency_penalty:
            processors.append(
                OutputPenaltyLogitsProcessor(len(prompt), params.presence_penalty, params.frequency_penalty)
            )
        if params.do_sample:
            top_k = max(params.top_k, 0)
            if (params.temperature, top_k, params.top_p, params.min_p) != (1.0, 0, 1.0, 0.0):
                processors.append(FusedSamplingLogitsWarper(params.temperature, top_k, params.top_p, params.min_p))
        return NodeProcessors(processors, torch.LongTensor([prompt]), None) if processors else None

    def _spellings(self, words: list[str]) -> list[list[int]]:
        if self.tokenizer is None:
            raise ValueError("bad_words need a tokenizer.")
        texts = [text for word in words for text in (word.lstrip(), " " + word.lstrip())]
        spellings = [self.tokenizer.encode(text, add_special_tokens=False) for text in texts]
        return [ids for i, ids in enumerate(spellings) if ids and ids not in spellings[:i]]
