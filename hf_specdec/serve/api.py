"""The HTTP API: OpenAI's endpoints on an EngineWorker."""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import json
import logging
import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, Response, StreamingResponse
from starlette.exceptions import HTTPException

import hf_specdec

from ..integration import model_lock
from .errors import ApiError, bad_request, failed, overloaded
from .frames import chat_logprobs, completion_logprobs, usage
from .llm import LLM
from .metrics import Metrics
from .params import SamplingParams
from .protocol import ChatRequest, CompletionRequest, DetokenizeRequest, SamplingFields, TokenizeRequest
from .worker import Cancel, EngineWorker, Load, Submit, Update

logger = logging.getLogger(__name__)

CHATML = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
_UNKNOWN_HEADER = "x-ignored-fields"
_LOOK_AFTER_SECONDS = 15.0  # of silence, whether the engine is still there


@dataclass
class Limits:
    """What the server refuses.

    Attributes:
        max_body_bytes: of a request.
        max_queued_requests: that wait for the engine; beyond them the answer is 429. None: no limit.
        keep_alive_seconds: of silence, after which a stream sends a comment; 0: never.
    """

    max_body_bytes: int = 16 << 20
    max_queued_requests: int | None = None
    keep_alive_seconds: float = 15.0


@dataclass
class Answer:
    """The updates of one request, as they come."""

    id: str
    num_prompt: int
    params: SamplingParams
    began: float = field(default_factory=time.monotonic)
    first: float | None = None
    num_new: int = 0
    num_cached: int = 0
    queue: asyncio.Queue[Update] = field(default_factory=asyncio.Queue)


class Server:
    """Requests of all endpoints, on their way to the engine and back.

    Args:
        tokenizer: of the model.
        names: the model's; the first is what answers say.

    Attributes:
        worker: None until the model is loaded (`start`).
        defaults: sampling parameters of requests that leave them out.
    """

    def __init__(self, tokenizer: Any, names: list[str], limits: Limits):
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
        self.worker = EngineWorker(llm.engine, self.deliver, model_lock(llm.model))
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
            if answer is not None:
                answer.queue.put_nowait(update)

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
        template = None if self.tokenizer.chat_template is not None else CHATML
        final = getattr(body, "continue_final_message", False)
        try:
            return self.tokenizer.apply_chat_template(
                messages, chat_template=template, add_generation_prompt=body.add_generation_prompt and not final,
                continue_final_message=final, tokenize=True, return_dict=False, **more,
            )  # fmt: skip
        except Exception as error:  # templates are programs of the checkpoint's: they raise what they like
            raise bad_request(f"The chat template refused the messages: {error}", "messages") from None

    def submit(self, prompt: str | list[int], ids: list[int], params: SamplingParams) -> Answer:
        """Send a request to the engine.

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
        answer = Answer(uuid.uuid4().hex, len(ids), params)
        self.answers[answer.id] = answer
        engine.send(Submit(answer.id, prompt if isinstance(prompt, str) else None, ids, params))
        return answer

    async def updates(self, answer: Answer) -> AsyncIterator[Update | None]:
        """The request's updates until its end; None after every `keep_alive_seconds` without one. If the reader leaves, the request is
        cancelled.

        Raises:
            ApiError: what ended the request.
        """
        finished, silence = False, self.limits.keep_alive_seconds
        try:
            while not finished:
                try:
                    update = await asyncio.wait_for(answer.queue.get(), silence or _LOOK_AFTER_SECONDS)
                except asyncio.TimeoutError:
                    _ = self.engine  # raises if it has stopped
                    if silence:
                        yield None
                    continue
                finished = update.request_finished
                self._note(answer, update)
                if isinstance(update.error, ValueError):
                    raise bad_request(str(update.error))
                if update.error is not None:
                    raise failed(f"The model raised {type(update.error).__name__} for this request.")
                yield update
        finally:
            self.answers.pop(answer.id, None)
            if not finished:
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


# ---- endpoints ------------------------------------------------------------------------------------------------------


def make_app(
    server: Server, api_keys: list[str] | None = None, allowed_origins: list[str] | None = None, lifespan=None
):
    """The ASGI application.

    Args:
        api_keys: any of them opens everything; /health needs none. None: all is open.
        allowed_origins: of pages that may call from a browser (CORS); none by default.
        lifespan: loads the model and starts the engine.
    """
    app = FastAPI(title="hf-specdec", version=hf_specdec.__version__, lifespan=lifespan)
    if allowed_origins:
        from fastapi.middleware.cors import CORSMiddleware

        app.add_middleware(CORSMiddleware, allow_origins=allowed_origins, allow_methods=["*"], allow_headers=["*"])
    app.add_middleware(Guard, keys=[key.encode() for key in api_keys or []], most=server.limits.max_body_bytes)  # type: ignore[arg-type]

    @app.exception_handler(ApiError)
    async def on_api_error(request: Request, error: ApiError) -> Response:
        return JSONResponse(error.body, error.status, error.headers)

    @app.exception_handler(RequestValidationError)
    async def on_invalid(request: Request, error: RequestValidationError) -> Response:
        first = error.errors()[0]
        place = ".".join(str(part) for part in first["loc"] if part != "body")
        return JSONResponse(bad_request(f"{place or 'The body'}: {first['msg']}.", place or None).body, 400)

    @app.exception_handler(HTTPException)
    async def on_http(request: Request, error: HTTPException) -> Response:
        messages = {404: f"There is no {request.url.path}.", 405: f"{request.method} is not for {request.url.path}."}
        body = ApiError(error.status_code, messages.get(error.status_code, str(error.detail))).body
        return JSONResponse(body, error.status_code, error.headers)

    @app.exception_handler(Exception)
    async def on_error(request: Request, error: Exception) -> Response:
        return JSONResponse(failed("The server failed; its log says why.").body, 500, {"x-should-retry": "false"})

    @app.get("/health")
    async def health() -> Response:
        """200 once the model is loaded."""
        _ = server.engine
        return Response()

    @app.get("/version")
    async def version() -> dict[str, str]:
        return {"version": hf_specdec.__version__}

    @app.get("/metrics")
    async def metrics() -> Response:
        _ = server.engine
        return Response(server.metrics.text(), media_type="text/plain; version=0.0.4; charset=utf-8")

    @app.get("/v1/models")
    async def models() -> dict[str, Any]:
        one = {
            "object": "model",
            "created": server.created,
            "owned_by": "hf-specdec",
            "max_model_len": server.max_model_len,
        }
        return {"object": "list", "data": [{"id": name, **one} for name in server.names]}

    @app.post("/tokenize")
    async def tokenize(body: TokenizeRequest) -> dict[str, Any]:
        server.check_model(body.model)
        if (body.prompt is None) == (body.messages is None):
            raise bad_request("Give either prompt or messages.", "prompt")
        ids = server.chat_prompt(body) if body.prompt is None else server.encode(body.prompt, body.add_special_tokens)
        return {"tokens": ids, "count": len(ids), "max_model_len": server.max_model_len}

    @app.post("/detokenize")
    async def detokenize(body: DetokenizeRequest) -> dict[str, str]:
        server.check_model(body.model)
        size = len(server.tokenizer)
        if any(not 0 <= token < size for token in body.tokens):
            raise bad_request(f"tokens must be ids from 0 to {size - 1}.", "tokens")
        return {"prompt": server.tokenizer.decode(body.tokens)}

    @app.post("/v1/completions")
    async def completions(body: CompletionRequest, request: Request) -> Response:
        return await Completions(server, body).respond(request)

    @app.post("/v1/chat/completions")
    async def chat(body: ChatRequest, request: Request) -> Response:
        return await Chat(server, body).respond(request)

    return app


class Endpoint(ABC):
    """One request of an endpoint that writes text: its parts, its whole answer, its stream."""

    object: str
    prefix: str

    def __init__(self, server: Server, body: SamplingFields):
        self.server, self.body = server, body
        server.check_model(body.model)
        self.answers: list[Answer] = []
        self.base = {
            "id": f"{self.prefix}-{uuid.uuid4().hex}", "object": self.object, "created": int(time.time()),
            "model": body.model or server.names[0],
        }  # fmt: skip

    @abstractmethod
    def submit(self) -> None:
        """Send it to the engine.

        Raises:
            ApiError: it cannot be served.
        """

    def begin_frames(self, index: int) -> list[dict[str, Any]]:
        """Choices of the frames before the first text."""
        return []

    @abstractmethod
    def choice(self, number: int, update: Update) -> dict[str, Any]:
        """A frame's choice, for an update of prompt `number`."""

    @abstractmethod
    def whole(self, number: int, index: int, updates: list[Update]) -> dict[str, Any]:
        """A choice of the whole answer."""

    async def respond(self, request: Request) -> Response:
        """The answer, or the stream."""
        headers = {_UNKNOWN_HEADER: ", ".join(self.body.unknown_fields)} if self.body.unknown_fields else {}
        try:
            self.submit()
        except BaseException:
            for answer in self.answers:
                self.server.answers.pop(answer.id, None)
                self.server.engine.send(Cancel(answer.id))
            raise
        if self.body.stream:
            return StreamingResponse(self.stream(), media_type="text/event-stream", headers=headers)
        return JSONResponse(await unless_gone(request, self.collect()), headers=headers)

    def index(self, number: int, index: int) -> int:
        """A choice's index in the answer."""
        return number * self.body.n + index

    async def collect(self) -> dict[str, Any]:
        """The whole answer."""
        results = await asyncio.gather(*(self._all(answer) for answer in self.answers))
        choices = []
        for number, updates in enumerate(results):
            for index in range(self.body.n):
                own = [update for update in updates if update.index == index]
                choices.append({"index": self.index(number, index), **self.whole(number, index, own)})
        body = {**self.base, "object": self.object.removesuffix(".chunk"), "choices": choices, "usage": self.usage()}
        if len(self.answers) == 1 and self.body.n == 1:
            body["metrics"] = self.server.timings(self.answers[0], results[0][-1])
        return body

    async def _all(self, answer: Answer) -> list[Update]:
        return [update async for update in self.server.updates(answer) if update is not None]

    def usage(self) -> dict[str, Any]:
        """Tokens of all prompts and choices so far."""
        return usage(
            *(sum(getattr(each, name) for each in self.answers) for name in ("num_prompt", "num_new", "num_cached"))
        )

    async def stream(self) -> AsyncIterator[bytes]:
        """Server-sent events."""
        options = self.body.stream_options
        wants_usage, running = bool(options and options.include_usage), bool(options and options.continuous_usage_stats)
        merged: asyncio.Queue = asyncio.Queue()
        readers = [asyncio.create_task(self._read(i, answer, merged)) for i, answer in enumerate(self.answers)]
        left, last = len(readers), None

        def frame(choices: list[dict[str, Any]], **more: Any) -> bytes:
            counts = {"usage": self.usage() if running else None} if wants_usage or running else {}
            return sse({**self.base, "choices": choices, **counts, **more})

        try:
            for number in range(len(readers)):
                for index in range(self.body.n):
                    for choice in self.begin_frames(self.index(number, index)):
                        yield frame([choice])
            while left:
                number, update = await merged.get()
                if isinstance(update, BaseException):
                    error = update if isinstance(update, ApiError) else failed("The server failed; its log says why.")
                    yield sse(error.body)
                    break
                if update is None:
                    yield b": ping\n\n"
                    continue
                left -= update.request_finished
                last = update if update.request_finished else last
                yield frame([{"index": self.index(number, update.index), **self.choice(number, update)}])
            else:
                if wants_usage:
                    more = {"usage": self.usage()}
                    if len(self.answers) == 1 and self.body.n == 1 and last is not None:
                        more["metrics"] = self.server.timings(self.answers[0], last)
                    yield sse({**self.base, "choices": [], **more})
            yield b"data: [DONE]\n\n"
        finally:
            for reader in readers:
                reader.cancel()
            await asyncio.gather(*readers, return_exceptions=True)

    async def _read(self, number: int, answer: Answer, merged: asyncio.Queue) -> None:
        try:
            async for update in self.server.updates(answer):
                merged.put_nowait((number, update))
        except Exception as error:
            merged.put_nowait((number, error))


class Completions(Endpoint):
    """POST /v1/completions."""

    object = "text_completion"
    prefix = "cmpl"
    body: CompletionRequest

    def submit(self) -> None:
        """Every prompt is a request."""
        body = self.body
        more: dict[str, Any] = {"logprobs": body.logprobs}
        if body.echo and body.logprobs is not None:
            more["prompt_logprobs"] = body.logprobs
        self.prompts = body.prompts()
        self.ids = [self.server.encode(prompt) for prompt in self.prompts]
        self.shown: dict[tuple[int, int], int] = {}
        tokens = body.max_tokens if body.max_tokens is None else max(body.max_tokens, 1)
        for prompt, ids in zip(self.prompts, self.ids, strict=True):
            params = body.sampling_params(self.server.defaults, tokens, **more)
            self.answers.append(self.server.submit(prompt, ids, params))

    def _echoed(self, number: int) -> str:
        prompt = self.prompts[number]
        return prompt if isinstance(prompt, str) else self.server.tokenizer.decode(prompt)

    def _texts(self, tokens: list[int]) -> list[str]:
        return [self.server.tokenizer.decode([token]) for token in tokens]

    def _logprobs(self, number: int, update_tokens, entries, offset: int) -> dict[str, Any] | None:
        if self.body.logprobs is None:
            return None
        return completion_logprobs(entries, update_tokens, self._texts(update_tokens), self.body.logprobs, offset)

    def choice(self, number: int, update: Update) -> dict[str, Any]:
        """Text since the last frame; the prompt's before the first, with `echo`."""
        key = number, update.index
        first = key not in self.shown
        text = (self._echoed(number) if self.body.echo and first else "") + (
            update.text if self.body.max_tokens != 0 else ""
        )
        offset = self.shown.get(key, 0)
        self.shown[key] = offset + len(text)
        found = {
            "text": text, "logprobs": self._logprobs(number, update.token_ids, update.logprobs or [], offset),
            "finish_reason": update.finish_reason,
        }  # fmt: skip
        return {**found, "token_ids": update.token_ids} if self.body.return_token_ids else found

    def whole(self, number: int, index: int, updates: list[Update]) -> dict[str, Any]:
        """All of it."""
        tokens = [token for update in updates for token in update.token_ids]
        entries: list = [entry for update in updates for entry in update.logprobs or []]
        text, reason = "".join(update.text for update in updates), updates[-1].finish_reason
        if self.body.max_tokens == 0:
            tokens, entries, text, reason = [], [], "", "length"
        echoed = self._echoed(number) if self.body.echo else ""
        offset = len(echoed)
        if self.body.echo and self.body.logprobs is not None:
            prompt = next((u.prompt_logprobs for u in updates if u.prompt_logprobs is not None), None) or []
            entries, tokens, offset = [*prompt, *entries], [*self.ids[number], *tokens], 0
        found = {
            "text": echoed + text, "logprobs": self._logprobs(number, tokens, entries, offset), "finish_reason": reason,
            "stop_reason": updates[-1].stop_reason,
        }  # fmt: skip
        return {**found, "token_ids": tokens} if self.body.return_token_ids else found


class Chat(Endpoint):
    """POST /v1/chat/completions."""

    object = "chat.completion.chunk"
    prefix = "chatcmpl"
    body: ChatRequest

    def submit(self) -> None:
        """The conversation is one request."""
        body = self.body
        if body.top_logprobs is not None and not body.logprobs:
            raise bad_request("top_logprobs needs logprobs: true.", "top_logprobs")
        most = body.max_completion_tokens if body.max_completion_tokens is not None else body.max_tokens
        params = body.sampling_params(
            self.server.defaults, most, logprobs=(body.top_logprobs or 0) if body.logprobs else None
        )
        ids = self.server.chat_prompt(body)
        self.answers.append(self.server.submit(ids, ids, params))

    def _logprobs(self, entries, tokens) -> dict[str, Any] | None:
        return chat_logprobs(entries, tokens, self.body.top_logprobs or 0) if self.body.logprobs else None

    def begin_frames(self, index: int) -> list[dict[str, Any]]:
        """The role."""
        delta = {"role": "assistant", "content": ""}
        return [{"index": index, "delta": delta, "logprobs": None, "finish_reason": None}]

    def choice(self, number: int, update: Update) -> dict[str, Any]:
        """Text since the last frame."""
        return {
            "delta": {"content": update.text} if update.text or update.finish_reason is None else {},
            "logprobs": self._logprobs(update.logprobs or [], update.token_ids),
            "finish_reason": update.finish_reason,
        }

    def whole(self, number: int, index: int, updates: list[Update]) -> dict[str, Any]:
        """The message."""
        tokens = [token for update in updates for token in update.token_ids]
        entries = [entry for update in updates for entry in update.logprobs or []]
        return {
            "message": {"role": "assistant", "content": "".join(update.text for update in updates), "refusal": None},
            "logprobs": self._logprobs(entries, tokens),
            "finish_reason": updates[-1].finish_reason,
            "stop_reason": updates[-1].stop_reason,
        }


# ---- around them ----------------------------------------------------------------------------------------------------


def sse(body: dict[str, Any]) -> bytes:
    """One server-sent event. JSON in ASCII: some clients split lines at U+2028."""
    return b"data: " + json.dumps(body, separators=(",", ":"), allow_nan=False).encode() + b"\n\n"


async def unless_gone(request: Request, work: Awaitable[Any]) -> Any:
    """The result of `work`, which is cancelled when the client leaves."""

    async def gone() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass

    task, watch = asyncio.ensure_future(work), asyncio.ensure_future(gone())
    try:
        await asyncio.wait({task, watch}, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        raise ApiError(499, "The client has left.")
    finally:
        for each in (task, watch):
            each.cancel()
        await asyncio.gather(task, watch, return_exceptions=True)


class Guard:
    """ASGI middleware: keys, and the size of bodies.

    Args:
        keys: none: everything is open.
        most: bytes of a body.
    """

    def __init__(self, app: Callable, keys: list[bytes], most: int):
        self.app, self.keys, self.most = app, keys, most

    async def __call__(self, scope, receive, send) -> None:
        """Pass a request on, or answer it with an error."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        headers = dict(scope["headers"])
        if self.keys and scope["path"] != "/health" and scope["method"] != "OPTIONS" and not self._opens(headers):
            error = ApiError(
                401, "The API key is missing or wrong: send 'Authorization: Bearer KEY'.", code="invalid_api_key"
            )
            await JSONResponse(error.body, 401, {"WWW-Authenticate": "Bearer"})(scope, receive, send)
            return
        too_large = ApiError(413, f"The body has more than {self.most} bytes.")
        length = headers.get(b"content-length", b"0")
        if length.isdigit() and int(length) > self.most:
            await JSONResponse(too_large.body, 413)(scope, receive, send)
            return
        seen = 0

        async def counted():
            nonlocal seen
            message = await receive()
            seen += len(message.get("body", b""))
            if seen > self.most:
                raise too_large
            return message

        await self.app(scope, counted, send)

    def _opens(self, headers: dict[bytes, bytes]) -> bool:
        given = headers.get(b"authorization", b"").removeprefix(b"Bearer ")
        return sum(hmac.compare_digest(given, key) for key in self.keys) > 0  # all are compared: time tells nothing
