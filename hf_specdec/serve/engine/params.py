"""SamplingParams: how one request is decoded. Names and meanings are vLLM's."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Any

from ...candidate_generators.prediction import are_ids
from ...config import number_error, with_hints
from .structured import StructuredOutputsParams

MOST_LOGPROBS = 20
MOST_CHOICES = 128
GROUP_NAME = "weight_update_group"  # of a trainer and the engine, where none is given
# Logits divided by a smaller number could become infinite.
_LEAST_TEMPERATURE = 1e-20
_LEAST_PENALTY = 1e-3
_INTEGERS: dict[str, tuple[int, int | None]] = {  # the least and the largest value of each field
    "n": (1, MOST_CHOICES), "top_k": (-1, 2**31 - 1), "max_tokens": (1, None), "min_tokens": (0, 2**31 - 1),
    "logprobs": (0, MOST_LOGPROBS), "prompt_logprobs": (0, MOST_LOGPROBS), "num_speculative_tokens": (0, None),
    "priority": (-(2**31), 2**31), "thinking_token_budget": (-1, None), "seed": (-(2**63), 2**64 - 1),
}  # fmt: skip
_OPTIONAL = {"max_tokens", "logprobs", "prompt_logprobs", "num_speculative_tokens", "seed", "thinking_token_budget"}
_NUMBERS = {
    "temperature": (0, 100), "top_p": (0, 1), "min_p": (0, 1), "presence_penalty": (-2, 2), "frequency_penalty": (-2, 2),
    "repetition_penalty": (0, 100),
}  # fmt: skip
# whose defaults a model's generation config may set
OF_MODELS = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")


@with_hints
@dataclass
class SamplingParams:
    """How one request is decoded.

    Attributes:
        n: number of choices to generate for the prompt.
        temperature: 0 is greedy decoding.
        top_p: 1 switches it off.
        min_p: 0 switches it off.
        top_k: 0 or -1 switches it off.
        presence_penalty: subtracted once from the logit of a token that the answer already holds.
        frequency_penalty: subtracted from it once per occurrence.
        repetition_penalty: divides positive and multiplies negative logits of tokens that the prompt or the answer holds.
        seed: seed of the request's random numbers. With the same seed a request gets the same tokens, whatever else is running.
            None: the engine draws a seed.
        stop: texts that end a choice. They are cut off unless `include_stop_str_in_output`.
        stop_token_ids: ids that end a choice, in addition to the model's end-of-sequence tokens.
        ignore_eos: continue after an end-of-sequence token.
        max_tokens: maximum number of new tokens; None: until `max_model_len` is reached.
        min_tokens: new tokens that a choice must have before it may end.
        logprobs: also return the log-probabilities of this many best tokens (and of the chosen one) at every position.
        prompt_logprobs: the same for the prompt's tokens. The prompt is then read as a whole, without cached prefixes.
        logit_bias: token id → number added to its logit.
        allowed_token_ids: only these ids may be chosen.
        bad_words: words that may not be written by their usual tokens, without or with a space before them (vLLM's meaning). Other tokens
            can still spell the same letters.
        detokenize: make text of the new tokens; False: only ids are returned.
        num_speculative_tokens: draft length for this request, at most the engine's own; 0 switches speculation off.
        prediction: what will be written, mostly, as a text or token ids (OpenAI's `prediction`). Where the text follows it, drafts come
            from it, whatever the method. The text is the same.
        drafter: name of the drafter for this request, one of those that the engine has; None: the first (method "per_request")
            or the fastest ("auto").
        private: what is learnt from this request does not draft for other requests, and what was learnt from others does not draft for
            this one; a head that learns does not learn from it. The text is the same.
        space: name of the look-up tables that this request shares with others of the same space, unless it is private. The server
            derives it from the API key.
        lora: name of the LoRA adapter that computes the request, one of those that are loaded; None: the model as it is.
        priority: requests with a lower number run first.
        kv_transfer_params: {"do_remote_decode": true} tells a prefill server to keep the prompt's KV; the parameters that it returns tell
            a decode server where to read it. With "in_chunks": true, a stream sends these parameters as soon as the prompt's first chunk
            has been read (`serve.transfer`).
        thinking_token_budget: after so many tokens of reasoning its end is forced; None or -1: no limit. The tokenizer's response template
            says where reasoning begins and ends.
        structured_outputs: what the text must match (a JSON schema, a regular expression, ...); a dictionary works too.

    Raises:
        ValueError: a value is out of range; the message names the field.
    """

    n: int = 1
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    seed: int | None = None
    stop: list[str] = field(default_factory=list)
    stop_token_ids: list[int] = field(default_factory=list)
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    max_tokens: int | None = 16
    min_tokens: int = 0
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    logit_bias: dict[int, float] | None = None
    allowed_token_ids: list[int] | None = None
    bad_words: list[str] = field(default_factory=list)
    skip_special_tokens: bool = True
    detokenize: bool = True
    num_speculative_tokens: int | None = None
    prediction: str | list[int] | None = None
    drafter: str | None = None
    private: bool = False
    space: str = ""
    lora: str | None = None
    priority: int = 0
    thinking_token_budget: int | None = None
    structured_outputs: StructuredOutputsParams | None = None
    kv_transfer_params: dict[str, Any] | None = None

    def __post_init__(self) -> None:
        self.stop = [self.stop] if isinstance(self.stop, str) else list(self.stop or [])
        self.stop_token_ids = list(self.stop_token_ids or [])
        self.bad_words = list(self.bad_words or [])
        if isinstance(self.structured_outputs, dict):
            self.structured_outputs = StructuredOutputsParams.of(self.structured_outputs)
        for name, bounds in {**_INTEGERS, **_NUMBERS}.items():
            value = getattr(self, name)
            wrong = number_error(value, name in _INTEGERS, *bounds)
            if wrong and not (value is None and name in _OPTIONAL):
                raise ValueError(f"{name} {wrong}")
        if self.thinking_token_budget == -1:
            self.thinking_token_budget = None
        if self.top_p == 0:
            raise ValueError("top_p must be above 0.")
        if self.repetition_penalty < _LEAST_PENALTY:
            raise ValueError(f"repetition_penalty must be at least {_LEAST_PENALTY}.")
        if 0 < self.temperature < _LEAST_TEMPERATURE:
            raise ValueError(f"temperature must be 0 (greedy) or at least {_LEAST_TEMPERATURE}.")
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise ValueError(f"min_tokens ({self.min_tokens}) must be at most max_tokens ({self.max_tokens}).")
        for name in ("stop", "bad_words"):
            if any(not isinstance(text, str) or not text for text in getattr(self, name)):
                raise ValueError(f"{name} must hold non-empty texts, not {getattr(self, name)!r}.")
        if not isinstance(self.private, bool) or not isinstance(self.space, str):
            given = f"{self.private!r} and {self.space!r}"
            raise ValueError(f"private must be True or False and space a text, not {given}.")
        if not isinstance(self.lora, (str, type(None))):
            raise ValueError(f"lora must be the name of an adapter, not {self.lora!r}.")
        if self.prediction is not None and not (isinstance(self.prediction, str) or are_ids(self.prediction)):
            raise ValueError(f"prediction must be a text or token ids, not {type(self.prediction).__name__}.")
        if self.prediction is not None and self.num_speculative_tokens == 0:
            raise ValueError(
                "prediction asks for drafts, and num_speculative_tokens 0 switches them off: leave one of them out."
            )
        if self.stop and not self.detokenize:
            raise ValueError("stop needs text: leave out detokenize=False, or use stop_token_ids.")
        if self.allowed_token_ids is not None and not self.allowed_token_ids:
            raise ValueError("allowed_token_ids must name at least one id.")
        if self.logit_bias is not None:
            self.logit_bias = {int(token): float(bias) for token, bias in self.logit_bias.items()}
            if any(not -100 <= bias <= 100 for bias in self.logit_bias.values()):
                raise ValueError("logit_bias must hold numbers from -100 to 100.")

    @property
    def do_sample(self) -> bool:
        """True if tokens are drawn; False for greedy decoding."""
        return self.temperature > 0

    def copy(self, **changes: Any) -> SamplingParams:
        """A copy with other values for some parameters. Raises ValueError: a value is wrong."""
        return dataclasses.replace(self, **changes)
