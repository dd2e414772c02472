"""Server: sends the requests of all endpoints to the engine, and the updates of each request to its client."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
import uuid
from collections.abc import AsyncIterator, Callable
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from ...core.errors import is_failure
from ...sampling.grammar import Reasoning
from ..engine.encoder import EncoderInput
from ..engine.outputs import Logprob
from ..engine.params import SamplingParams
from ..engine.structured import StructuredOutputsParams
from ..engine.text import Detokenizer
from ..ipc.engine_process import EngineProcess
from ..ipc.messages import Call, Cancel, Facts, Load, Submit, Update
from ..metrics import Metrics
from .errors import ApiError, bad_request, failed, overloaded, shutting_down, stopped, unavailable
from .lanes import Lanes
from .media import Media
from .reader import RequestReader
from .spans import PARENT, Spans
from .store import ResponseStore

if TYPE_CHECKING:
    from ..ipc.worker import EngineWorker
    from ..llm import LLM

logger = logging.getLogger(__name__)

_MOST_BYTES_OF_IMAGES = 8 << 30  # of all requests at once, as models read them: small files may become many megabytes
_ENGINE_CHECK_SECONDS = 15.0  # without updates: a stream that sends no comments then checks that the engine still runs


@dataclass
class Limits:
    """Limits of the server; times are in seconds.

    Attributes:
        max_body_bytes: largest body of a request.
        max_queued_requests: requests that may wait for the engine; a further one is answered with 429. None: no limit.
        keep_alive_seconds: time without an update after which a stream sends a comment; 0: it never does.
        read_seconds: time for the headers of a request to arrive, and for its body (large bodies get more).
        answer_seconds: time for an answer, which then ends with what has been generated. None: no limit.
    """

    max_body_bytes: int = 16 << 20
    max_queued_requests: int | None = None
    keep_alive_seconds: float = 15.0
    read_seconds: float = 30.0
    answer_seconds: float | None = None


@dataclass
class Privacy:
    """Whose texts may shape whose drafts. Drafts never change a text, but the speed of an answer can reveal what was drafted.

    Attributes:
        private: every request is private (`SamplingParams.private`).
        shares_across_keys: requests with different API keys share what look-ups learn, and may teach one head.
    """

    private: bool = False
    shares_across_keys: bool = False

    def check(self, speculative_config: Any, api_keys: list[str] | None) -> None:
        """Check the API keys. Raises ValueError: one is empty; or a head would learn from the requests of several, so that those of one key
        shape another's drafts, which is not allowed."""
        if "" in (api_keys or []):
            raise ValueError(
                "An API key is empty, so that every request has it: give a key, or no --api-key and no HF_SPECDEC_API_KEY."
            )
        keeps_apart = len(set(api_keys or [])) > 1 and not (self.private or self.shares_across_keys)
        if not keeps_apart or speculative_config is None:
            return
        from ...candidate_generators import parse_config  # loads every drafter

        if getattr(parse_config(speculative_config), "learn", False):
            raise ValueError(
                "'learn' teaches one head from the requests of all API keys: allow that with --share-across-api-keys, or leave 'learn' out."
            )


@dataclass
class Answer:
    """The state of the answer to one prompt, while it is generated."""

    id: str
    number: int  # index of the prompt in the client's request, from 0
    inbox: asyncio.Queue[tuple[Answer, Update] | None]  # receives its updates, and those of the request's other prompts
    num_prompt: int
    params: SamplingParams
    began: float = field(default_factory=time.monotonic)
    parent: bytes = field(default_factory=PARENT.get)  # see `Spans`
    first: float | None = None  # when its first token came
    text_seconds: float = 0.0  # spent on making its text here
    ended: bool = False  # its last update has been read, or the client has disconnected
    num_new: int = 0  # tokens of all choices so far
    num_cached: int = 0  # prompt tokens whose KV was cached
    num_image_bytes: int = 0
    statistics: dict[str, Any] | None = None  # `Request.figures`, once it has ended
    deadline: asyncio.TimerHandle | None = None  # ends it when its time limit is reached
    prompt: list[int] = field(default_factory=list)
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None
    texts: dict[int, Detokenizer] = field(default_factory=dict)  # by choice; none if the engine makes the text

    def make_text(self, update: Update, tokenizer: Any) -> None:
        """Set an update's text, unless the engine has made it."""
        if self.params.detokenize:
            return
        began = time.monotonic()
        if update.index not in self.texts:
            self.texts[update.index] = Detokenizer(tokenizer, self.prompt, self.params.skip_special_tokens)
        text = self.texts[update.index]
        tokens = update.token_ids[:-1] if update.hides_end else update.token_ids
        update.text = text.add(tokens) if update.finish_reason is None else text.finish(tokens)
        self.text_seconds += time.monotonic() - began

    def timings(self) -> dict[str, Any]:
        """The field `metrics`: times in milliseconds, and statistics of speculation in vLLM's form."""
        timings: dict[str, Any] = {}
        if self.first is not None:
            timings["time_to_first_token_ms"] = round(1e3 * (self.first - self.began), 3)
            timings["generation_time_ms"] = round(1e3 * (time.monotonic() - self.first), 3)
        if self.statistics is not None:
            timings["speculative_decoding"] = self.statistics["speculative_decoding"]
        return timings


class Server(RequestReader):
    """Sends the requests of all endpoints to the engine, and the updates of each request to its client.

    The engine runs in a process of its own (`connect`), or in a thread of this one (`start`). Methods are called in the event loop's
    thread, except `deliver` (the engine's), `connect` and `start` (the one that loads the model), `stop` (any other), and those that
    make token ids (those of `lanes`).

    Args:
        response_template: how the model marks reasoning and tool calls, in transformers' format; None: the tokenizer's own, or the
            one that transformers has for this family of models.
        privacy: whose texts may shape whose drafts; None: only texts of the same API key do.
        processor: transformers' processor of images and text; None: images are refused.
        media_hosts: see `Media`; none: images are sent, not fetched.
        loads_adapters: requests may load and unload LoRA adapters.
        updates_weights: requests may pause the engine, let it sleep and update its weights.
        store: where responses are kept; None: none is.
        spans: is told of every answer that has ended.

    Attributes:
        is_alone: no other server answers at the same address, so what a client changes here is there when it comes again.
    """

    is_alone = True

    def __init__(
        self, tokenizer: Any, names: list[str], limits: Limits, response_template: dict | None = None,
        privacy: Privacy | None = None, processor: Any = None, media_hosts: list[str] | None = None, loads_adapters: bool = False,
        updates_weights: bool = False, store: ResponseStore | None = None, spans: Spans | None = None
    ):  # fmt: skip
        super().__init__(tokenizer, names, response_template, processor)
        self.loads_adapters, self.updates_weights, self.store = loads_adapters, updates_weights, store
        self.limits, self.privacy, self.spans = limits, privacy or Privacy(), spans
        self.media = Media(media_hosts or [], limits.max_body_bytes)
        self.worker: EngineWorker | EngineProcess | None = None  # until the model is loaded
        self.loop: asyncio.AbstractEventLoop  # that of the requests, once the model is loaded
        self.answers: dict[str, Answer] = {}  # those that have not ended, by id
        self.lanes = Lanes(self)
        self.corpora: dict[str, dict[str, int]] = {}  # that clients have added: space → name → number of tokens
        self._asked: set[asyncio.Task] = set()  # what the engine has been asked to do and has not done yet
        self._num_submitted = 0  # choices
        self.is_closed = False  # the time for draining is over: every request is refused
        self.metrics = Metrics(names[0], lambda: Load() if self.worker is None else self.worker.load)

    def start(self, llm: LLM, loop: asyncio.AbstractEventLoop) -> None:
        """Start the engine of a loaded model in a thread of this process; for `loop` and errors see `connect`."""
        worker = llm.make_worker(self.deliver)
        self.connect(worker, Facts.of(llm, self.tokenizer), loop)
        worker.start()

    def connect(self, worker: EngineWorker | EngineProcess, facts: Facts, loop: asyncio.AbstractEventLoop) -> None:
        """Send requests to this engine, whose `deliver` is ours. Raises Exception: transformers', for a malformed response template."""
        self.know(facts)
        self.worker, self.loop = worker, loop

    def end_answers(self) -> None:
        """End all remaining answers with an error, because the time for draining is over. Clients then see why the connection closes."""
        self.is_closed = True
        if self.worker is not None:
            for name in self.answers:
                self.worker.send(Cancel(name))
        self.end_with(shutting_down())
        self.lanes.end()
        for task in self._asked:
            task.cancel()

    def end_with(self, error: ApiError) -> None:
        """End all answers with an error."""
        self._route([Update(answer, request_finished=True, error=error) for answer in list(self.answers)])

    def stop(self) -> None:
        """End the engine and wait for it; running requests are aborted."""
        if self.worker is not None:
            self.worker.stop()
            self.worker.join()

    @property
    def running_worker(self) -> EngineWorker | EngineProcess:
        """The worker that runs the engine. Raises ApiError: 503, the model is being loaded, or the engine has stopped or says nothing."""
        if self.worker is None:
            raise unavailable("The model is loading.")
        self._check_alive(self.worker)
        if isinstance(self.worker, EngineProcess) and self.worker.is_silent:
            seconds = round(time.monotonic() - self.worker.heard)
            raise unavailable(f"The engine's process has said nothing for {seconds} s. It may have been stopped.")
        return self.worker

    def _check_alive(self, worker: EngineWorker | EngineProcess | None) -> None:
        """Raise ApiError: 503, the engine has ended, or will. Answers that have begun wait for one that says nothing."""
        if self.is_closed:
            raise shutting_down()
        if worker is None or worker.failure is not None or not worker.is_alive():
            raise stopped()

    def deliver(self, updates: list[Update]) -> None:
        """Pass updates on to the loop's thread."""
        with contextlib.suppress(RuntimeError):  # the loop is closed: there are no readers any more
            self.loop.call_soon_threadsafe(self._route, updates)

    def _route(self, updates: list[Update]) -> None:
        """Put each update into the inbox of its answer, and count the new tokens."""
        for update in updates:
            # Remove the answer here and not in its reader: a stream that was never read would keep it for ever.
            answer = self.answers.pop(update.id, None) if update.request_finished else self.answers.get(update.id)
            if answer is not None:
                if answer.deadline is not None and update.request_finished:
                    answer.deadline.cancel()
                answer.inbox.put_nowait((answer, update))
        written = [len(update.token_ids) for update in updates if update.token_ids]
        self.metrics.tokens_written(sum(written), len(written))

    async def compile(self, grammar: StructuredOutputsParams | None) -> None:
        """Compile a grammar, if there is one, before the request is submitted, so that the engine's thread need not wait for it. Raises
        ApiError: 400, it is malformed or too complex; 503, see `running_worker`.
        """
        if grammar is not None:
            call = Call("grammars", "start", {"params": grammar})
            await self._done(self.running_worker.ask(call), "structured_outputs")

    async def _done(self, asked: Future, param: str | None, then: Callable[[], object] = lambda: None) -> None:
        """Wait for what the engine was asked to do, and do what follows `then`, even if the client leaves. Raises ApiError: 400, the
        engine refuses it, because of the field `param`; 503, the engine has stopped, or the server is shutting down."""

        async def done() -> None:
            await asyncio.wrap_future(asked)
            then()

        task = asyncio.ensure_future(done())
        self._asked.add(task)
        task.add_done_callback(self._asked.discard)
        try:
            await asyncio.shield(task)
        except (ValueError, ImportError) as error:
            raise bad_request(str(error), param) from None
        except ChildProcessError:
            raise stopped() from None
        except asyncio.CancelledError:
            if self.is_closed:
                raise shutting_down() from None
            raise

    async def change_adapters(self, name: str, path: str | None, replaces: bool = False) -> None:
        """Load a LoRA adapter (see `Adapters.load`), or unload it (`path` None). Answers that use it end as they began. Raises ApiError:
        403, this server does not do it; 400, the adapter cannot be loaded; 404, there is none; 503, see `running_worker`."""
        worker, names = self.running_worker, self.facts.adapters
        if not self.loads_adapters:
            raise ApiError(
                403, "Adapters are loaded on request if the server was started with --allow-runtime-lora-updating."
            )
        if path is None:
            if name not in names:
                raise ApiError(
                    404, f"The lora adapter {name!r} cannot be found.", param="lora_name", code="model_not_found"
                )
            self._note_adapters(name)  # before it has gone
            await self._done(worker.ask(Call("adapters", "unload", {"name": name})), "lora_path")
            return
        if not name or name in self.names:
            raise bad_request(f"lora_name {name!r} is empty or the name of the model.", "lora_name")
        asked = worker.ask(Call("adapters", "load", {"name": name, "path": path, "replaces": replaces}))
        await self._done(asked, "lora_path", partial(self._note_adapters, name, name))

    def check_control(self) -> EngineWorker | EngineProcess:
        """The worker. Raises ApiError: 403, this server's clients may not control the engine; 503, see `running_worker`."""
        if not self.updates_weights:
            raise ApiError(403, "This needs a server that was started with --enable-weight-updates.")
        return self.running_worker

    async def control(self, method: str, arguments: dict[str, Any]) -> None:
        """Call a method of the engine's `Control`. Raises ApiError: see `check_control`; 400, it cannot be done."""
        await self._done(self.check_control().ask(Call("control", method, arguments)), None)

    def _note_adapters(self, gone: str, *new: str) -> None:
        self.facts = replace(self.facts, adapters=(*(name for name in self.facts.adapters if name != gone), *new))

    async def change_corpus(self, space: str, name: str, ids: np.ndarray | None) -> None:
        """Add a corpus of a space, int32 [n], or remove it (None). Raises ApiError: 400, it cannot be added; 503, see `running_worker`."""

        def note() -> None:
            of_space = self.corpora.setdefault(space, {})
            of_space.pop(name, None)
            if ids is not None:
                of_space[name] = len(ids)

        call = Call("corpora", "start", {"space": space, "name": name, "ids": ids})
        await self._done(self.running_worker.ask(call), "text", note)

    def submit(
        self, ids: list[int], params: SamplingParams, reasoning: Reasoning | None = None, among: list[Answer] | None = None,
        max_time: float | None = None, space: str = "", encoder: EncoderInput | None = None, waits: bool = True
    ) -> Answer:  # fmt: skip
        """Send one prompt to the engine.

        Args:
            ids: of the prompt, see `prompt_ids`; with `encoder`, of the decoder.
            among: answers to the earlier prompts of the same client's request, with which this one shares an inbox.
            max_time: seconds after which the answer ends with what has been generated. The server's own limit also applies.
            space: see `Sequence.space`; not used if API keys share what is learnt.
            encoder: what the encoder reads, if there is one.
            waits: False: the client has waited for an earlier part of the same request.

        Raises:
            ApiError: 429, too many requests are waiting; 503, see `running_worker`.
        """
        worker, most = self.running_worker, self.limits.max_queued_requests
        load = worker.load
        free = 0 if load.waiting else load.free_rows  # if choices wait although rows are free, blocks are missing
        # Those that the engine has reported, and those sent to it since then for which it has no free row.
        waiting = load.waiting + max(0, self._num_submitted - load.num_read - free)
        if waits and most is not None and waiting >= most:
            raise overloaded(f"{most} requests are waiting already (--max-num-queued-reqs). Try again later.")
        num_image_bytes = 0 if encoder is None else encoder.num_bytes_of_images
        held = sum(answer.num_image_bytes for answer in self.answers.values())
        if num_image_bytes and held and held + num_image_bytes > _MOST_BYTES_OF_IMAGES:
            raise overloaded(f"The images of running requests take {held} bytes. Try again later.")
        number, inbox = (len(among), among[0].inbox) if among else (0, asyncio.Queue())
        # Only stop texts need text in the engine. Otherwise it is made in this thread, while the engine computes its next step.
        private = params.private or self.privacy.private
        space = "" if self.privacy.shares_across_keys else space
        params = params.copy(detokenize=bool(params.stop), private=private, space=space)
        num_prompt = len((encoder.ids if encoder is not None else []) or ids)
        answer = Answer(uuid.uuid4().hex, number, inbox, num_prompt, params, prompt=ids)
        answer.num_image_bytes = num_image_bytes
        self.answers[answer.id] = answer
        self._num_submitted += params.n
        worker.send(Submit(answer.id, None, ids, params, reasoning, encoder))
        limits = [limit for limit in (max_time, self.limits.answer_seconds) if limit is not None]
        if limits:
            end = Cancel(answer.id, "length")
            answer.deadline = asyncio.get_running_loop().call_later(min(limits), worker.send, end)
        return answer

    async def updates(self, answers: list[Answer]) -> AsyncIterator[tuple[Answer, Update] | None]:
        """Yield the updates of a client's answers until all have ended; with `keep_alive_seconds`, also None after every such time without
        one. Call `release` afterwards, also after an error. Raises ApiError: 400 or 500, one of the answers ended with an error; 503,
        the engine has stopped, or the server is shutting down.
        """
        left, inbox, loop = len(answers), answers[0].inbox, asyncio.get_running_loop()
        heard, seconds = loop.time(), self.limits.keep_alive_seconds or _ENGINE_CHECK_SECONDS

        def notice_silence() -> None:  # one timer serves all updates, because each step brings one for each stream
            nonlocal heard, timer
            if loop.time() >= heard + seconds:
                heard = loop.time()
                if inbox.empty():
                    inbox.put_nowait(None)
            if not all(answer.ended for answer in answers):
                timer = loop.call_at(heard + seconds, notice_silence)

        timer = loop.call_at(heard + seconds, notice_silence)
        while left:
            item = await inbox.get()
            heard = loop.time()
            if item is None:
                self._check_alive(self.worker)
                if self.limits.keep_alive_seconds:
                    yield None
                continue
            answer, update = item
            left -= update.request_finished
            answer.ended = update.request_finished
            self._record(answer, update)
            if isinstance(update.error, ApiError):
                raise update.error
            if update.is_refused:
                raise bad_request(str(update.error))
            if update.error is not None:  # also a ValueError: what raises in a step is no mistake of the client's
                raise failed(f"The model raised {type(update.error).__name__} for this request.")
            try:  # after the check for errors: the engine has accepted these ids
                answer.make_text(update, self.tokenizer)
            except BaseException as error:
                if not is_failure(error):
                    raise
                logger.exception("The tokenizer raised for the new tokens of request %s.", answer.id)
                raise failed(f"The tokenizer raised {type(error).__name__} for the new tokens.") from error
            yield item
        timer.cancel()  # it holds the answers

    def release(self, answers: list[Answer]) -> None:
        """Forget a client's answers, because nobody reads them any more; cancel those that have not ended. May be called twice."""
        for answer in answers:
            self.answers.pop(answer.id, None)
            if answer.deadline is not None:
                answer.deadline.cancel()
            if not answer.ended:
                answer.ended = True
                self._count_ended(answer, "abort")
                if self.worker is not None:
                    self.worker.send(Cancel(answer.id))

    def _record(self, answer: Answer, update: Update) -> None:
        now = time.monotonic()
        answer.num_new += len(update.token_ids)
        answer.num_cached = max(answer.num_cached, update.num_cached_tokens)
        answer.prompt_logprobs = update.prompt_logprobs or answer.prompt_logprobs
        if answer.first is None and update.token_ids:
            answer.first = now
            self.metrics.first_token.observe(now - answer.began)
        answer.statistics = update.statistics or answer.statistics
        if update.request_finished:
            self.metrics.whole.observe(now - answer.began)
            if answer.first is not None and answer.num_new > 1:
                self.metrics.per_token.observe((now - answer.first) / (answer.num_new - 1))
            reason = "error" if update.error is not None else update.finish_reason or "stop"
            self._count_ended(answer, reason)

    def _count_ended(self, answer: Answer, reason: str) -> None:
        figures, adapter = answer.statistics, answer.params.lora
        self.metrics.request_ended(reason, answer.num_prompt, answer.num_cached, figures, adapter)
        if self.spans is not None:
            self.spans.request(answer, adapter or self.served[0], reason)
