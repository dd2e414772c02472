"""What a request returns. Names are vLLM's."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass
class Logprob:
    """Log-probability of one token under the model's own distribution (before penalties and temperature).

    Attributes:
        rank: 1 for the most probable token.
        decoded_token: its text; None without a tokenizer.
    """

    logprob: float
    rank: int
    decoded_token: str | None = None


@dataclass
class CompletionOutput:
    """One choice.

    Attributes:
        index: of the choice, 0..n-1.
        token_ids: new ids; the end-of-sequence or stop token is the last one.
        logprobs: per new token {id: Logprob}; None unless asked for.
        finish_reason: "stop", "length", "abort", or None while it runs.
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
        """True if the choice has ended."""
        return self.finish_reason is not None


@dataclass
class RequestOutput:
    """A request's choices, and what they cost.

    Attributes:
        prompt_logprobs: per prompt token {id: Logprob}, None for the first; None unless asked for.
        num_cached_tokens: prompt tokens whose KV came from earlier requests.
        speculation: statistics of speculation over all choices (see `Speculation`).
        kv_transfer_params: {"hidden_states_path": the first choice's file} with the method `extract_hidden_states`; of a prompt whose
            keys are held, what a decode server needs; else None.
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
