"""The results that users get: requests, their choices, and log-probabilities."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass
class Logprob:
    """Log-probability of one token under the model's own distribution (before penalties and temperature).

    Attributes:
        rank: 1 for the most probable token.
        decoded_token: the token's text; None without a tokenizer.
    """

    logprob: float
    rank: int
    decoded_token: str | None = None


@dataclass
class CompletionOutput:
    """One choice.

    Attributes:
        index: number of the choice, from 0 to n - 1.
        text: the new text. A stop text that ended it is cut off unless `include_stop_str_in_output`.
        token_ids: new ids; if an end-of-sequence or stop token ended the choice, it is the last one.
        cumulative_logprob: sum of the new tokens' log-probabilities; None unless `logprobs` was requested.
        logprobs: {id: Logprob} for each new token; None unless requested.
        finish_reason: "stop", "length", "abort", "error", or None while it runs.
        stop_reason: the stop text or id that ended it; None for the end-of-sequence token.
    """

    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    cumulative_logprob: float | None = None
    logprobs: list[dict[int, Logprob]] | None = None
    finish_reason: str | None = None
    stop_reason: str | int | None = None

    def finished(self) -> bool:
        """True if it has ended, so that no token follows."""
        return self.finish_reason is not None


@dataclass
class RequestOutput:
    """A request's choices and statistics.

    Attributes:
        prompt: the prompt's text; None if it was given as token ids.
        prompt_logprobs: {id: Logprob} for each prompt token, None for the first; None unless requested.
        num_cached_tokens: prompt tokens whose KV came from earlier requests.
        speculation: statistics of speculation over all choices (see `Speculation`).
        kv_transfer_params: with the method `extract_hidden_states`, {"hidden_states_path": the first choice's file}; on a prefill server
            that keeps the prompt's KV, the parameters for the decode server; else None.
        error: why the request failed while it ran; its choices then have what was generated before. None: it did not fail.
        encoder_prompt: the text that the encoder of an encoder-decoder model has read; None: it was given ids or audio.
        encoder_prompt_token_ids: the ids that it has read. `prompt_token_ids` are then the decoder's.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool = False
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None
    num_cached_tokens: int = 0
    speculation: dict[str, Any] | None = None
    kv_transfer_params: dict[str, Any] | None = None
    error: BaseException | None = None
    encoder_prompt: str | None = None
    encoder_prompt_token_ids: list[int] | None = None
