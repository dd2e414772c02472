"""Request and Choice: what moves through the engine."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from ..core.sequence import Sequence
from ..sampling.grammar import GrammarLogitsProcessor
from .outputs import CompletionOutput, Logprob, RequestOutput
from .params import SamplingParams
from .text import Detokenizer


@dataclass(eq=False)
class Choice:
    """One of a request's n answers, while it is written.

    Attributes:
        sequence: its row in the decoder.
        text: None if no text is wanted.
        grammar: what the text has to be; None: anything.
        is_added: the decoder knows the sequence.
        hides_end: its last token has ended it and is no part of its text.
    """

    request: Request
    output: CompletionOutput
    sequence: Sequence
    text: Detokenizer | None
    grammar: GrammarLogitsProcessor | None = None
    is_added: bool = False
    hides_end: bool = False

    @property
    def order(self) -> tuple[int, int, int]:
        """Smallest first: by priority, then by arrival."""
        return self.request.params.priority, self.request.number, self.output.index


@dataclass(eq=False)
class Request:
    """A prompt and how to go on with it.

    Attributes:
        number: of its arrival.
        on_update: called in the engine's thread with the request after every step that gave it tokens, and at its end.
        error: what ended it, if an error did.
        prompt_logprobs: per prompt token that was read; None for the first, which nothing comes before.
    """

    id: str
    number: int
    prompt: str | None
    prompt_token_ids: list[int]
    params: SamplingParams
    on_update: Callable[[Request], None] | None = None
    choices: list[Choice] = field(default_factory=list)
    num_cached_tokens: int = 0
    error: BaseException | None = None
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None
    kv_transfer_params: dict | None = None  # for the server that goes on
    statistics: list = field(default_factory=list)  # RowStatistics of the choices that have ended

    @property
    def finished(self) -> bool:
        """True once every choice has ended."""
        return all(choice.output.finished() for choice in self.choices)

    def result(self) -> RequestOutput:
        """What it has so far."""
        from ..decoding.outputs import summarize

        return RequestOutput(
            request_id=self.id,
            prompt=self.prompt,
            prompt_token_ids=self.prompt_token_ids,
            outputs=[choice.output for choice in self.choices],
            finished=self.finished,
            prompt_logprobs=self.prompt_logprobs,
            num_cached_tokens=self.num_cached_tokens,
            speculation=summarize(self.statistics, 0) if self.finished and self.error is None else None,
            kv_transfer_params=self.kv_transfer_params or self.choices[0].sequence.files or None,
        )
