"""Every message that crosses between the HTTP side and the engine. To the engine go first the pickled arguments of `LLM`, then `Submit`,
`Cancel` and `Ask`, last None; the others come from it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

from ...sampling.grammar import Reasoning
from ..engine.encoder import EncoderFacts, EncoderInput
from ..engine.outputs import Logprob
from ..engine.params import SamplingParams
from ..engine.structured import response_template_of


class Submit(NamedTuple):
    """Add a request. See `Admission.request`."""

    id: str
    prompt: str | None
    prompt_token_ids: list[int]
    params: SamplingParams
    reasoning: Reasoning | None = None
    encoder: EncoderInput | None = None


class Cancel(NamedTuple):
    """End a request. `reason`: the answer's finish_reason; None: nobody reads the answer any more."""

    id: str
    reason: str | None = None


class Call(NamedTuple):
    """Call a method of a part of the engine. "join" is a method of the control's `weights`."""

    part: Literal["grammars", "corpora", "adapters", "control"]
    method: str
    arguments: dict[str, Any]


class Ask(NamedTuple):
    """A call, to which `Done` with the same number is the answer."""

    number: int
    call: Call


@dataclass
class Facts:
    """What the HTTP side must know about a model."""

    defaults: SamplingParams = field(default_factory=SamplingParams)  # for fields that requests leave out
    max_model_len: int = 0
    response_template: dict | None = None  # how the model marks reasoning and tool calls, in transformers' format
    encoder: EncoderFacts | None = None  # of an encoder-decoder model
    adapters: tuple[str, ...] = ()  # names of the LoRA adapters
    corpora: dict[str, int] = field(default_factory=dict)  # the server's own: numbers of tokens by name

    @property
    def length(self) -> dict[str, int]:
        """The field `max_model_len` of answers about the model; none before it is loaded."""
        return {"max_model_len": self.max_model_len} if self.max_model_len else {}

    @classmethod
    def of(cls, llm: Any, tokenizer: Any) -> Facts:
        """The facts about a loaded `LLM`. `tokenizer`: the one that the HTTP side uses."""
        template = response_template_of(tokenizer, llm.model)
        return cls(
            llm.get_default_sampling_params(),
            llm.max_model_len,
            template,
            llm.encoder,
            tuple(llm.engine.adapters.paths),
            llm.engine.corpora.sizes,
        )


class Done(NamedTuple):
    """What was asked is done, or raised an error."""

    number: int
    error: BaseException | None


class Ended(NamedTuple):
    """The engine has ended. It is the last message. `error`: why, or why the model could not be loaded; None: it was told to end."""

    error: BaseException | None = None
    traceback: str = ""


@dataclass
class Update:
    """What a step added to one choice: `text`, `token_ids` and `logprobs` are what is new since the last update. Text that may begin a
    stop text is held back. For requests without stop texts the engine makes no text; `Answer.make_text` does.
    """

    id: str
    index: int = 0
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[dict[int, Logprob]] | None = None
    num_tokens: int = 0  # of the choice so far
    num_cached_tokens: int = 0
    finish_reason: str | None = None  # None while the choice is being generated
    stop_reason: str | int | None = None
    request_finished: bool = False  # the last update of a request, which also has `statistics`
    statistics: dict[str, Any] | None = None  # `Request.figures`
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None  # see `Request`; in the first update and the last
    error: BaseException | None = None
    is_refused: bool = False  # the engine refused the request, which is the client's mistake
    hides_end: bool = False  # the last token ended the choice and is not part of its text
    kv_transfer_params: dict[str, Any] | None = None  # see `Request`; in the last update, and in an announcement
    token_times: list[float] | None = None  # the same; in the last update


@dataclass
class Load:
    """How busy the engine is: numbers after the last step, for metrics."""

    running: int = 0
    waiting: int = 0
    kv_usage: float = 0.0  # share of the KV blocks in use, 0 to 1; the larger one if an encoder's keys have blocks, too
    preemptions: int = 0
    learning: dict[str, Any] | None = None  # what a learning drafter reports
    free_rows: int = 0  # how many more choices could run, if there are blocks for them
    num_read: int = 0  # choices that the engine has been sent so far, and has read
    weights: dict[str, Any] | None = None  # `Acceptance.report`
    is_paused: bool = False
    is_asleep: bool = False
