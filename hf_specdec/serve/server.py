"""Server: requests of all endpoints, on their way to the engine and back."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import logging
import time
import uuid
from collections import deque
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

from ..integration import model_lock
from ..sampling.grammar import Reasoning
from .errors import ApiError, bad_request, failed, overloaded
from .followers import RankedWorker, Serve
from .llm import LLM
from .messages import response_template_of
from .metrics import Metrics
from .params import SamplingParams
from .protocol import ChatRequest, TokenizeRequest
from .structured import StructuredOutputsParams
from .text import Detokenizer
from .worker import Cancel, EngineWorker, Load, Submit, Update

logger = logging.getLogger(__name__)

CHATML = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
_LOOK_AFTER_SECONDS = 15.0  # of silence, whether the engine is still there


@dataclass
class Limits:
    """What the server refuses.

    Attributes:
        max_body_bytes: of a request.
        read_seconds: for the headers of a request, and for its body (more for large ones).
        max_queued_requests: that wait for the engine; beyond them the answer is 429. None: no limit.
        keep_alive_seconds: of silence, after which a stream sends a comment; 0: never.
        answer_seconds: for an answer; it ends with what is written then. None: no limit.
    """

    max_body_bytes: int = 16 << 20
    max_queued_requests: int | None = None
    keep_alive_seconds: float = 15.0
    read_seconds: float = 30.0
    answer_seconds: float | None = None


class Inbox:
    """Updates of one client's request, in the event loop; None after every `seconds` in which none came.

    Frames are many: this is cheaper than asyncio.Queue, and one timer does whatever comes.
    """

    def __init__(self, seconds: float):
        self.seconds, self.loop = seconds, asyncio.get_running_loop()
        self._found: deque[tuple[Answer, Update] | None] = deque()
        self._awaited: asyncio.Future[None] | None = None
        self._last = self.loop.time()
        self._timer = self.loop.call_later(seconds, self._look)

    def put(self, found: tuple[Answer, Update] | None) -> None:
        """Something has come."""
        self._last = self.loop.time()
        self._found.append(found)
        if self._awaited is not None and not self._awaited.done():
            self._awaited.set_result(None)

    async def get(self) -> tuple[Answer, Update] | None:
        """What comes next, for one reader."""
        while not self._found:
            self._awaited = self.loop.create_future()
            await self._awaited
        return self._found.popleft()

    def close(self) -> None:
        """Nobody reads it any more."""
        self._timer.cancel()

    def _look(self) -> None:
        if self.loop.time() >= self._last + self.seconds:
            self.put(None)
        self._timer = self.loop.call_at(self._last + self.seconds, self._look)


@dataclass
class Answer:
    """One request's updates, as they come.

    Attributes:
        number: of the prompt within the client's request.
        inbox: where updates go, with those of the other prompts.
        ended: by its last update, or because the client has left.
        deadline: ends it when its time is over; None: it has no limit.
        prompt_end: the prompt's last ids.
        texts: by choice, what makes text of tokens here; none if the engine does, to find stop texts.
    """

    id: str
    number: int
    inbox: Inbox
    num_prompt: int
    params: SamplingParams
    began: float = field(default_factory=time.monotonic)
    first: float | None = None
    ended: bool = False
    num_new: int = 0
    num_cached: int = 0
    deadline: asyncio.TimerHandle | None = None
    prompt_end: list[int] = field(default_factory=list)
    texts: dict[int, Detokenizer] = field(default_factory=dict)

    def make_text(self, update: Update, tokenizer: Any) -> None:
        """Set an update's text, if the engine has left that to us."""
        if self.params.detokenize:
            return
        text = self.texts.get(update.index)
        if text is None:
            text = Detokenizer(tokenizer, self.prompt_end, self.params.skip_special_tokens)
            self.texts[update.index] = text
        tokens = update.token_ids[:-1] if update.hides_end else update.token_ids
        update.text = "".join([text.add(token) for token in tokens])
        if update.finish_reason is not None:
            update.text += text.finish()


class Server:
    """Requests of all endpoints, on their way to the engine and back.

    Args:
        tokenizer: of the model.
        response_template: how the model marks reasoning and tool calls; None: the tokenizer's, or transformers' for the model.
        names: the model's; the first is what answers say.

    Attributes:
        worker: None until the model is loaded (`start`).
        defaults: sampling parameters of requests that leave them out.
    """

    def __init__(self, tokenizer: Any, names: list[str], limits: Limits, response_template: dict | None = None):
        self.response_template = response_template
        self.tokenizer, self.names, self.limits = tokenizer, names, limits
        self.defaults, self.max_model_len = SamplingParams(), 0
        self.worker: EngineWorker | None = None
        self.loop: asyncio.AbstractEventLoop | None = None
        self.answers: dict[str, Answer] = {}
        self.created = int(time.time())
        self.metrics = Metrics(names[0], lambda: Load() if self.worker is None else self.worker.load)
        if tokenizer.chat_template is None:
            logger.warning("The tokenizer has no chat template: /v1/chat/completions uses ChatML.")

    def start(self, llm: LLM, loop: asyncio.AbstractEventLoop) -> None:
        """Serve a model that has been loaded; updates go to `loop`."""
        self.defaults, self.max_model_len, self.loop = llm.get_default_sampling_params(), llm.max_model_len, loop
        if self.response_template is None:
            self.response_template = response_template_of(self.tokenizer, llm.model)
        if self.response_template is not None:
            self.tokenizer.get_response_parser(self.response_template, prefix="")  # raises if it is malformed
        if llm.ranks is None:
            self.worker = EngineWorker(llm.engine, self.deliver, model_lock(llm.model))
        else:
            llm.ranks.same_object(Serve())
            self.worker = RankedWorker(llm.engine, self.deliver, model_lock(llm.model), llm.ranks)
        self.worker.start()

    def stop(self) -> None:
        """End the engine's thread; what runs is aborted."""
        if self.worker is not None:
            self.worker.stop()
            self.worker.join()

    @property
    def engine(self) -> EngineWorker:
        """The worker.

        Raises:
            ApiError: 503, while the model is being loaded or after the engine has stopped.
        """
        worker = self.worker
        if worker is None:
            raise ApiError(503, "The model is loading.", "service_unavailable", headers={"Retry-After": "5"})
        if worker.failure is not None or not worker.is_alive():
            raise ApiError(503, "The engine has stopped; the log says why.", "service_unavailable")
        return worker

    def deliver(self, updates: list[Update]) -> None:
        """Hand a step's updates over to the event loop; called in the engine's thread."""
        if self.loop is not None and not self.loop.is_closed():
            with contextlib.suppress(RuntimeError):  # the loop closed just now: nobody is left to read
                self.loop.call_soon_threadsafe(self._route, updates)

    def _route(self, updates: list[Update]) -> None:
        for update in updates:
            # The last update ends the entry here: a stream that nobody began to read would keep it.
            answer = self.answers.pop(update.id, None) if update.request_finished else self.answers.get(update.id)
            if answer is not None and answer.deadline is not None and update.request_finished:
                answer.deadline.cancel()
            if answer is not None:
                answer.inbox.put((answer, update))
        written = [len(update.token_ids) for update in updates if update.token_ids]
        self.metrics.tokens_written(sum(written), len(written))

    def check_model(self, name: str | None) -> None:
        """Raise ApiError if a request names another model."""
        if name is not None and name not in self.names:
            raise ApiError(
                404, f"The model {name!r} does not exist here. Served: {', '.join(self.names)}.", param="model",
                code="model_not_found",
            )  # fmt: skip

    def encode(self, prompt: str | list[int], add_special_tokens: bool = True) -> list[int]:
        """Ids of a prompt."""
        return (
            list(prompt)
            if isinstance(prompt, list)
            else self.tokenizer(prompt, add_special_tokens=add_special_tokens)["input_ids"]
        )

    def chat_prompt(self, body: ChatRequest | TokenizeRequest) -> list[int]:
        """Ids of a conversation.

        Raises:
            ApiError: the template refuses it.
        """
        messages = [message.for_template() for message in body.messages or []]
        more = getattr(body, "chat_template_kwargs", None) or {}
        reserved = sorted(more.keys() & inspect.signature(self.tokenizer.apply_chat_template).parameters.keys())
        if reserved and reserved != ["documents"]:
            raise bad_request(f"chat_template_kwargs may not set {', '.join(reserved)}.", "chat_template_kwargs")
        template = None if self.tokenizer.chat_template is not None else CHATML
        final = getattr(body, "continue_final_message", False)
        tools = getattr(body, "offered_tools", None)
        try:
            return self.tokenizer.apply_chat_template(
                messages, tools=tools, chat_template=template, add_generation_prompt=body.add_generation_prompt and not final,
                continue_final_message=final, tokenize=True, return_dict=False, **more,
            )  # fmt: skip
        except Exception as error:  # templates are programs of the checkpoint's: they raise what they like
            raise bad_request(f"The chat template refused the messages: {error}", "messages") from None

    async def compile(self, grammar: StructuredOutputsParams | None) -> None:
        """Compile a grammar while the request waits, so that the engine finds it compiled.

        Raises:
            ApiError: it is malformed or too complex.
        """
        if grammar is None:
            return
        try:
            await asyncio.to_thread(self.engine.engine.grammars.matcher, grammar)
        except ValueError as error:
            raise bad_request(str(error), "structured_outputs") from None

    def submit(
        self,
        prompt: str | list[int],
        ids: list[int],
        params: SamplingParams,
        reasoning: Reasoning | None = None,
        among: list[Answer] | None = None,
        max_time: float | None = None,
    ) -> Answer:
        """Send a request to the engine.

        Args:
            among: answers to the same client's request, which this one joins.
            max_time: seconds after which it ends with what is written, at most the server's limit; None: that.

        Raises:
            ApiError: it is too long, or too many wait.
        """
        engine = self.engine
        if not ids:
            raise bad_request("The prompt is empty: it needs at least one token.", "prompt")
        if len(ids) >= self.max_model_len:
            raise ApiError(
                400, f"The prompt has {len(ids)} tokens; with max_model_len {self.max_model_len} it may have {self.max_model_len - 1}.",
                param="messages" if isinstance(prompt, list) else "prompt", code="context_length_exceeded",
            )  # fmt: skip
        most = self.limits.max_queued_requests
        if most is not None and engine.load.waiting >= most:
            raise overloaded(f"{most} requests are waiting already (--max-num-queued-reqs). Try again later.")
        silence = self.limits.keep_alive_seconds or _LOOK_AFTER_SECONDS
        number, inbox = (len(among), among[0].inbox) if among else (0, Inbox(silence))
        params = params.copy(
            detokenize=bool(params.stop)
        )  # without stop texts, text is made here, beside the engine's steps
        answer = Answer(uuid.uuid4().hex, number, inbox, len(ids), params, prompt_end=ids[-Detokenizer.CONTEXT :])
        self.answers[answer.id] = answer
        engine.send(Submit(answer.id, prompt if isinstance(prompt, str) else None, ids, params, reasoning))
        seconds = min((each for each in (max_time, self.limits.answer_seconds) if each is not None), default=None)
        if seconds is not None:
            answer.deadline = asyncio.get_running_loop().call_later(seconds, engine.send, Cancel(answer.id, "length"))
        return answer

    async def updates(self, answers: list[Answer]) -> AsyncIterator[tuple[Answer, Update] | None]:
        """Updates of a client's answers, until all have ended; None after every `keep_alive_seconds` without one. Call `leave` at the end.

        Raises:
            ApiError: what ended one of them.
        """
        left, inbox = len(answers), answers[0].inbox
        while left:
            found = await inbox.get()
            if found is None:
                _ = self.engine  # raises if it has stopped
                if self.limits.keep_alive_seconds:
                    yield None
                continue
            answer, update = found
            left -= update.request_finished
            answer.ended = update.request_finished
            self._note(answer, update)
            if isinstance(update.error, ValueError):
                raise bad_request(str(update.error))
            if update.error is not None:
                raise failed(f"The model raised {type(update.error).__name__} for this request.")
            answer.make_text(update, self.tokenizer)  # the engine has accepted the prompt's ids
            yield found

    def leave(self, answers: list[Answer]) -> None:
        """Nobody reads these answers any more: those that have not ended are cancelled."""
        for answer in answers:
            answer.inbox.close()
            self.answers.pop(answer.id, None)
            if answer.deadline is not None:
                answer.deadline.cancel()
            if not answer.ended:
                answer.ended = True
                self.metrics.request_ended("abort", answer.num_prompt, answer.num_cached, None)
                if self.worker is not None:
                    self.worker.send(Cancel(answer.id))

    def _note(self, answer: Answer, update: Update) -> None:
        now = time.monotonic()
        answer.num_new += len(update.token_ids)
        answer.num_cached = max(answer.num_cached, update.num_cached_tokens)
        if answer.first is None and update.token_ids:
            answer.first = now
            self.metrics.first_token.observe(now - answer.began)
        if update.request_finished:
            self.metrics.whole.observe(now - answer.began)
            if answer.first is not None and answer.num_new > 1:
                self.metrics.per_token.observe((now - answer.first) / (answer.num_new - 1))
            reason = "error" if update.error is not None else update.finish_reason or "stop"
            self.metrics.request_ended(reason, answer.num_prompt, answer.num_cached, update.statistics)

    def timings(self, answer: Answer, update: Update) -> dict[str, Any]:
        """The answer's `metrics`, with vLLM's statistics of speculation."""
        found: dict[str, Any] = {}
        if answer.first is not None:
            found["time_to_first_token_ms"] = round(1e3 * (answer.first - answer.began), 3)
            found["generation_time_ms"] = round(1e3 * (time.monotonic() - answer.first), 3)
        if update.statistics is not None:
            found["speculative_decoding"] = update.statistics["speculative_decoding"]
        return found
