"""Every message that crosses: between the HTTP side and the engine, and from rank 0 to the other ranks."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

from ...sampling.grammar import Reasoning
from ..engine.encoder import EncoderFacts, EncoderInput
from ..engine.params import SamplingParams
from ..engine.request import Logprob
from ..engine.structured import StructuredOutputsParams

# ---- to the engine: first the pickled arguments of `LLM`, last None -------------------------------------------------------


class Submit(NamedTuple):
    """Add a request. See `Admission.request`."""

    id: str
    prompt: str | None
    prompt_token_ids: list[int]
    params: SamplingParams
    reasoning: Reasoning | None = None
    encoder: EncoderInput | None = None


@dataclass
class Cancel:
    """End a request. `reason`: the answer's finish_reason; None: nobody reads the answer any more."""

    id: str
    reason: str | None = None


@dataclass
class Compile:
    """Compile a grammar; `Compiled` with the same number is the answer."""

    number: int
    grammar: StructuredOutputsParams


# ---- from the engine ---------------------------------------------------------------------------------------------------


@dataclass
class Facts:
    """What the HTTP side must know about a model.

    Attributes:
        defaults: sampling parameters for requests that leave them out.
        response_template: how the model marks reasoning and tool calls, in transformers' format; None: nobody says.
        encoder: of an encoder-decoder model; None: it has no encoder.
    """

    defaults: SamplingParams = field(default_factory=SamplingParams)
    max_model_len: int = 0
    response_template: dict | None = None
    encoder: EncoderFacts | None = None

    @property
    def length(self) -> dict[str, int]:
        """The field `max_model_len` of answers about the model; none before it is loaded."""
        return {"max_model_len": self.max_model_len} if self.max_model_len else {}

    @classmethod
    def of(cls, llm: Any, tokenizer: Any) -> Facts:
        """The facts about a loaded `LLM`. `tokenizer`: the one that the HTTP side uses."""
        template = response_template_of(tokenizer, llm.model)
        return cls(llm.get_default_sampling_params(), llm.max_model_len, template, llm.encoder)


def response_template_of(tokenizer: Any, model: Any) -> dict | None:
    """The tokenizer's response template, or the one that transformers has for this family of models; None if neither exists."""
    template = getattr(tokenizer, "response_template", None)
    if template is not None or not hasattr(tokenizer, "get_response_parser"):
        return template
    try:
        from transformers.cli.serving.utils import get_response_template
    except ImportError:  # this version of transformers has no such function, or has moved it
        return None
    return get_response_template(tokenizer, model)


@dataclass
class Compiled:
    """A grammar is compiled, or an error was found in it."""

    number: int
    error: BaseException | None


@dataclass
class Ended:
    """The engine has ended. It is the last message. `error`: why, or why the model could not be loaded; None: it was told to end."""

    error: BaseException | None = None
    traceback: str = ""


@dataclass
class Update:
    """What a step added to one choice.

    Attributes:
        text, token_ids, logprobs: what is new since the last update. Text that may be the beginning of a stop text is held back. For
            requests without stop texts the engine makes no text; `Answer.make_text` does.
        num_tokens: number of new tokens of the choice so far.
        finish_reason, stop_reason: see `CompletionOutput`; None while the choice is being generated.
        hides_end: True if the last token ended the choice and is not part of its text.
        prompt_logprobs: see `Request`; in the first update and the last one.
        request_finished: True in the last update of a request, which also has `statistics` (`Request.figures`).
        kv_transfer_params: see `Request`; in the last update, and in an earlier one that announces a prompt that is still being read.
        is_refused: True if the engine refused the request, which is the client's mistake; False if the model failed.
    """

    id: str
    index: int = 0
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[dict[int, Logprob]] | None = None
    num_tokens: int = 0
    num_cached_tokens: int = 0
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    request_finished: bool = False
    statistics: dict[str, Any] | None = None
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None
    error: BaseException | None = None
    is_refused: bool = False
    hides_end: bool = False
    kv_transfer_params: dict[str, Any] | None = None


@dataclass
class Load:
    """How busy the engine is: numbers after the last step, for metrics.

    Attributes:
        kv_usage: share of the KV blocks in use, 0 to 1; the larger one if an encoder's keys have blocks, too.
        learning: what a learning drafter reports; None without one.
        free_rows: how many more choices could run, if there are blocks for them.
        num_read: number of choices that the engine has been sent so far, and has read.
    """

    running: int = 0
    waiting: int = 0
    kv_usage: float = 0.0
    preemptions: int = 0
    learning: dict[str, Any] | None = None
    free_rows: int = 0
    num_read: int = 0


# ---- from rank 0 -------------------------------------------------------------------------------------------------------


@dataclass
class Order:
    """What the other ranks do next: "run" these requests to their end, as `LLM.generate` does; "serve", by an `EngineWorker`; or "end"."""

    kind: Literal["run", "serve", "end"]
    requests: list[Submit] = field(default_factory=list)
