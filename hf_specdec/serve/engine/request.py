"""The engine's state of a prompt and of each of its answers, and the results that users get, under vLLM's names."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from ...core.sequence import Sequence
from ...decoding.outputs import RowStatistics, summarize
from ...sampling.grammar import GrammarLogitsProcessor
from .params import SamplingParams
from .text import Detokenizer, safe_length


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


@dataclass(eq=False)
class RequestChoice:
    """One of a request's n answers, while it is generated.

    Attributes:
        text: makes text of the tokens; None if no text is wanted.
        is_added: True once the sequence has been added to the decoder.
        hides_end: True if its last token ended it and is not part of its text.
        taken: numbers of characters and of tokens that `take` has returned; None before its first call.
    """

    request: Request
    output: CompletionOutput
    sequence: Sequence
    text: Detokenizer | None
    grammar: GrammarLogitsProcessor | None = None
    is_added: bool = False
    hides_end: bool = False
    taken: tuple[int, int] | None = None

    @property
    def order(self) -> tuple[int, int, int]:
        """Sort key of the scheduler, smallest first: priority, then arrival."""
        return self.request.params.priority, self.request.number, self.output.index

    def take(self) -> tuple[str, list[int], list[dict[int, Logprob]] | None] | None:
        """The text, ids and log-probabilities since the last call; None if there are none. Text that may begin a stop text is held back."""
        output, (characters, tokens) = self.output, self.taken or (0, 0)
        if characters < 0 or (tokens == len(output.token_ids) and not output.finished()):
            return None
        end = len(output.text) if output.finished() else safe_length(output.text, self.request.params.stop)
        end = max(end, characters)
        self.taken = -1 if output.finished() else end, len(output.token_ids)  # -1: its end has been returned
        logprobs = None if output.logprobs is None else output.logprobs[tokens:]
        return output.text[characters:end], output.token_ids[tokens:], logprobs


@dataclass(eq=False)
class Request:
    """A prompt, its parameters, and its answers.

    Attributes:
        number: order of arrival.
        is_refused: True if its `error` is the client's mistake.
        prompt_logprobs: for each prompt token read so far; None for the first, which no logits predict.
        kv_transfer_params: parameters for the decode server that continues the request; None if no prompt is kept.
        announcement: parameters for the decode server that pulls the prompt while it is read; taken by whoever delivers them.
        statistics: those of the choices that have ended.
    """

    id: str
    number: int
    prompt: str | None
    prompt_token_ids: list[int]
    params: SamplingParams
    choices: list[RequestChoice] = field(default_factory=list)
    num_cached_tokens: int = 0
    error: BaseException | None = None
    is_refused: bool = False
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None
    kv_transfer_params: dict | None = None
    announcement: dict | None = None
    statistics: list[RowStatistics] = field(default_factory=list)

    @property
    def finished(self) -> bool:
        return all(choice.output.finished() for choice in self.choices)

    def result(self) -> RequestOutput:
        """The results so far, as `LLM.generate` returns them."""
        return RequestOutput(
            self.id, self.prompt, self.prompt_token_ids, [choice.output for choice in self.choices], self.finished, self.prompt_logprobs,
            self.num_cached_tokens, summarize(self.statistics, 0) if self.finished and self.error is None else None,
            self.kv_transfer_params or self.choices[0].sequence.files or None, self.error,
        )  # fmt: skip

    def figures(self, longest_draft: int) -> dict[str, Any]:
        """Statistics of speculation, also in vLLM's form, whose histogram ends at `longest_draft`; and counts for metrics."""
        steps = [step for row in self.statistics for step in row.steps]
        accepted = [count for _, _, _, count in steps]
        drafting = [depth for _, depth, _, _ in steps if depth]
        summary = summarize(self.statistics, 0)
        histogram = [0] * (longest_draft + 1)
        for count in accepted:
            histogram[min(count, longest_draft)] += 1
        return {
            **summary,
            "num_drafts": len(drafting),
            "num_accepted_per_position": [
                sum(count > i for count in accepted) for i in range(max(drafting, default=0))
            ],
            "speculative_decoding": {
                "mean_acceptance_length": summary["mean_accepted_length"], "draft_acceptance_rate": summary["acceptance_rate"],
                "acceptance_histogram": histogram, "num_spec_steps": len(steps), "num_spec_tokens": longest_draft,
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
