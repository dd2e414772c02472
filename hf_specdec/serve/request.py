"""Request and Choice: the engine's state of a prompt and of each of its answers."""

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
    """One of a request's n answers, while it is generated.

    Attributes:
        output: what has been generated so far.
        sequence: its row in the decoder.
        text: makes text of the tokens; None if no text is wanted.
        grammar: what the text must match; None: any text.
        is_added: True once the sequence has been added to the decoder.
        hides_end: True if its last token ended it and is not part of its text.
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
        """Sort key of the scheduler, smallest first: priority, then arrival."""
        return self.request.params.priority, self.request.number, self.output.index


@dataclass(eq=False)
class Request:
    """A prompt, its parameters, and its answers.

    Attributes:
        number: order of arrival.
        on_update: called in the engine's thread, with the request, after each step that gave it tokens or ended it.
        error: the error that ended it, if any.
        is_refused: True if that error is the client's mistake.
        prompt_logprobs: for each prompt token read so far; None for the first, which no logits predict.
        kv_transfer_params: parameters for the decode server that continues the request; None if no prompt is kept.
        announcement: parameters for the decode server that pulls the prompt while it is read; taken by whoever delivers them.
        statistics: `RowStatistics` of the choices that have ended.
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
    is_refused: bool = False
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None
    kv_transfer_params: dict | None = None
    announcement: dict | None = None
    statistics: list = field(default_factory=list)

    @property
    def finished(self) -> bool:
        """True once every choice has ended."""
        return all(choice.output.finished() for choice in self.choices)

    def result(self) -> RequestOutput:
        """The results so far, as `LLM.generate` returns them."""
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
            error=self.error,
        )
