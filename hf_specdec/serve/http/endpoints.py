"""The endpoints that generate text: how a request is submitted, and how its answer is sent, whole or as a stream."""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import replace
from functools import partial
from typing import Any, Literal

from fastapi import Request
from fastapi.responses import Response, StreamingResponse
from pydantic_core import to_json

from ...sampling.grammar import Reasoning
from ..engine.encoder import EncoderInput
from ..engine.structured import StructuredOutputsParams, reasoning_before, reasoning_marks
from ..engine.text import token_bytes, token_text
from ..ipc.messages import Update
from .bodies import Body, read_body
from .chat_parser import Delta, MessageParser, joined_calls, without_tools
from .errors import ApiError, bad_request, shown
from .guard import SPACE
from .lanes import LONG_BYTES
from .logprobs import TextOffsets, chat_logprobs, completion_logprobs, prompt_logprobs
from .protocol import ChatRequest, CompletionRequest, StreamOptions
from .server import Answer, Server

IGNORED_HEADER = "x-ignored-fields"
_to_json = json.JSONEncoder(separators=(",", ":"), allow_nan=False).encode


class Endpoint(ABC):
    """One client's request to an endpoint that generates text. It may hold several prompts, each with `n` choices.

    One of the server's lanes makes and prepares it, perhaps in another process, whose copy of the server it leaves behind. The other
    methods are called in the event loop's thread.
    """

    form: type[Body]
    object: str  # OpenAI's name for the frames of a stream; for the whole answer: without ".chunk"
    prefix: str  # of the id
    reads: Literal["prompt", "conversation"] = "conversation"

    def __init__(self, server: Server, body: Any, space: str):
        self.server, self.body, self.space = server, body, space
        server.check_model(body.model)
        self.ids: list[list[int]] = []  # of the prompts
        self.images: EncoderInput | None = None  # of the prompt, as the model reads them
        self.fetched: dict[str, bytes] = {}  # images that were named by an address
        self.decoder_prompt: list[int] | None = None  # how a decoder begins, if an encoder reads the prompts
        self.params = server.facts.defaults
        self.reasoning: Reasoning | None = None
        self.answers: list[Answer] = []  # to the prompts, in their order
        self.options = body.stream_options or StreamOptions()
        self.ignored_fields: list[str] = []
        self.grammar: StructuredOutputsParams | None = None  # what the text must match
        self.base = {  # the fields that every frame begins with
            "id": f"{self.prefix}-{uuid.uuid4().hex}", "object": self.object, "created": int(time.time()),
            "model": body.model or server.names[0],
        }  # fmt: skip

    @abstractmethod
    def prepare(self) -> None:
        """Check the request and set what `submit` sends. Raises ApiError: the request cannot be served."""
        self.server.check_reads(self.reads)
        if self.body.prompt_logprobs is not None and self.body.stream:
            message = "prompt_logprobs are not sent in streams: leave out stream, or prompt_logprobs."
            raise bad_request(message, "prompt_logprobs")
        self.grammar = self.body.grammar()

    def set_params(self, max_tokens: int | None, **more: Any) -> None:
        """Set `params`. Arguments: see `SamplingFields.sampling_params`."""
        if self.body.prediction is not None:
            more["prediction"] = self.server.text_ids(self.body.prediction.text, "prediction", add_special_tokens=False)
        if self.body.model not in (None, *self.server.names):
            more["lora"] = self.body.model  # which may have gone since `check_model`: the engine then refuses it
        defaults = self.server.facts.defaults
        self.params = self.body.sampling_params(defaults, max_tokens, structured_outputs=self.grammar, **more)

    def submit(self) -> None:
        """Send the prompts to the engine, each as a request of its own, and set `answers`. Errors: see `Server.submit`."""
        more = (self.params, self.reasoning, self.answers, self.body.max_time, self.space)
        for ids in self.ids:
            begins, given = ids, self.images
            if self.decoder_prompt is not None:
                begins, given = self.decoder_prompt, EncoderInput(ids)
            self.answers.append(self.server.submit(begins, *more, encoder=given))

    def is_long(self, answer: Answer, update: Update) -> bool:
        """Whether the events of an update may be long, so that a thread has to make them."""
        return False

    @abstractmethod
    def choice(self, number: int, update: Update) -> dict[str, Any]:
        """The `choices` entry of a frame, without its index: what `update` adds to a choice of prompt `number`."""

    @abstractmethod
    def whole(self, number: int, update: Update) -> dict[str, Any]:
        """The same for the whole answer, from all updates of a choice as one."""

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "server": None}

    @classmethod
    async def respond(cls, server: Server, request: Request, raw: bytes) -> Response:
        """Serve a request, whose body is `raw`: return the whole answer, or a stream. Raises ApiError: it cannot be served."""
        _ = server.running_worker  # before the model is loaded, the length of prompts is not known
        given = cls, raw, dict(request.headers), request.scope.get(SPACE, "")
        self = await server.lanes.run(len(raw), _prepared, *given)
        if isinstance(self, list):
            # few bytes may be a large image, or name a long text: short bodies do not wait for it
            fetched = await server.media.fetch({url for url in self if not url.startswith("data:")})
            self = await server.lanes.run(max(len(raw), LONG_BYTES + 1), _prepared, *given, fetched)
        self.server = server
        headers = ignored_header(self.ignored_fields)
        await server.compile(self.grammar)
        with contextlib.ExitStack() as at_end:
            at_end.callback(server.release, self.answers)
            self.submit()
            if self.body.stream:
                return EventStream(self.stream(), at_end.pop_all().close, headers)
            results: list[list[Update]] = [[] for _ in self.answers]
            async for item in server.updates(self.answers):
                if item is not None:
                    results[item[0].number].append(item[1])
            # in a thread: with log-probabilities an answer may hold a million entries
            answer = await asyncio.to_thread(lambda: to_json(self.answer(results)))
            return Response(answer, headers=headers, media_type="application/json")

    def token_bytes(self, token: int) -> bytes:
        """The bytes of a token's text, which may be a part of a character."""
        return token_bytes(self.server.tokenizer, token)

    def answer(self, results: list[list[Update]]) -> dict[str, Any]:
        """The body of the whole answer, from all updates of each prompt. Any thread may call it."""
        choices = []
        for number, updates in enumerate(results):
            for index in range(self.body.n):
                parts = [update for update in updates if update.index == index]
                written = replace(
                    parts[-1], text="".join(part.text for part in parts), token_ids=[id for part in parts for id in part.token_ids],
                    logprobs=[entry for part in parts for entry in part.logprobs or []],
                )  # fmt: skip
                choices.append({"index": number * self.body.n + index, **self.whole(number, written)})
        body = {**self.base, "object": self.object.removesuffix(".chunk"), "choices": choices, "usage": self.usage()}
        if len(self.answers) == 1 and self.body.n == 1:
            body["metrics"] = self.answers[0].timings()
            if results[0][-1].kv_transfer_params is not None:
                body["kv_transfer_params"] = results[0][-1].kv_transfer_params
        return body

    def usage(self) -> dict[str, Any]:
        """The field `usage`: numbers of tokens, over all prompts and choices so far."""
        names = "num_prompt", "num_new", "num_cached"
        num_prompt, num_new, num_cached = (sum(getattr(answer, name) for answer in self.answers) for name in names)
        return {
            "prompt_tokens": num_prompt, "completion_tokens": num_new, "total_tokens": num_prompt + num_new,
            "prompt_tokens_details": {"cached_tokens": num_cached},
            **({} if self.params.prediction is None else {"completion_tokens_details": self.predicted_tokens()}),
        }  # fmt: skip

    def predicted_tokens(self) -> dict[str, int]:
        """How many drafts from the prediction were accepted and rejected, in the answers that have ended; empty without a prediction."""
        if self.params.prediction is None:
            return {}
        drafters = [(answer.statistics or {}).get("drafters", {}) for answer in self.answers]
        figures = [by_name["prediction"] for by_name in drafters if "prediction" in by_name]
        accepted, drafted = (sum(row[f"num_{name}_tokens"] for row in figures) for name in ("accepted", "draft"))
        return {"accepted_prediction_tokens": accepted, "rejected_prediction_tokens": drafted - accepted}

    async def stream(self) -> AsyncIterator[bytes]:
        """Yield server-sent events. An error ends the stream with an event that holds it, because the status has been sent."""
        yield self.begin()
        try:
            async for item in self.server.updates(self.answers):
                if item is None:
                    yield b": ping\n\n"
                elif self.is_long(*item):
                    yield await asyncio.to_thread(self.events, *item)
                else:
                    yield self.events(*item)
            yield self.end()
        except Exception as error:
            yield self.end(shown(error))

    def begin(self) -> bytes:
        """The events before the first update."""
        return b""

    def events(self, answer: Answer, update: Update) -> bytes:
        """The events of an update."""
        handed = {} if update.kv_transfer_params is None else {"kv_transfer_params": update.kv_transfer_params}
        index = answer.number * self.body.n + update.index
        return self._frame([{"index": index, **self.choice(answer.number, update)}], **handed)

    def end(self, error: ApiError | None = None) -> bytes:
        """The last events; `error`: what ended the stream."""
        end = b"data: [DONE]\n\n"
        if error is not None:
            return sse(error.body) + end
        if not self.options.include_usage:
            return end
        more = {"usage": self.usage()}
        if len(self.answers) == 1 and self.body.n == 1:
            more["metrics"] = self.answers[0].timings()
        return sse({**self.base, "choices": [], **more}) + end

    def _frame(self, choices: list[dict[str, Any]], **more: Any) -> bytes:
        """One event. If the client wants token counts, all frames have the field, but only some have numbers."""
        counts = {"usage": self.usage() if self.options.continuous_usage_stats else None}
        return sse({**self.base, "choices": choices, **(counts if self.options.include_usage else {}), **more})


def _prepared(
    server: Server,
    kind: type[Endpoint],
    raw: bytes,
    headers: dict[str, str],
    space: str,
    fetched: dict[str, bytes] | None = None,
) -> Endpoint | list[str]:
    """An endpoint of this kind, made of the bytes of a body and prepared. If `fetched` is None, and it has images or goes on with a
    stored conversation: the addresses of its images. Raises: ApiError, the request cannot be served."""
    body = read_body(kind.form, raw, headers)
    endpoint = kind(server, body, space)
    urls = server.media_urls(endpoint.body)
    if fetched is None and (urls or getattr(body, "previous_response_id", None)):
        return urls
    endpoint.fetched = fetched or {}
    endpoint.ignored_fields = body.unknown_fields
    endpoint.prepare()
    for read in (body, endpoint.body):
        read.leave_out_what_is_done()
    return endpoint


class Completions(Endpoint):
    """POST /v1/completions."""

    form = CompletionRequest
    object = "text_completion"
    prefix = "cmpl"
    reads = "prompt"

    def prepare(self) -> None:
        super().prepare()
        body = self.body
        self._prepare_decoder()
        counts = [body.prompt_logprobs, body.logprobs if body.echo else None]
        scored = max((count for count in counts if count is not None), default=None)
        self.set_params(1 if body.max_tokens == 0 else body.max_tokens, logprobs=body.logprobs, prompt_logprobs=scored)
        self.prompts = body.prompts()  # texts or ids, as the client gave them
        self.ids = [self.server.prompt_ids(prompt, "prompt") for prompt in self.prompts]
        self.offsets: dict[tuple[int, int], TextOffsets] = {}  # by number of the prompt and index of the choice
        self.special_ids = set(self.server.tokenizer.all_special_ids)
        if body.echo and body.logprobs is not None:  # special tokens that were added before each prompt
            self.num_added = [
                len(ids) - len(self.server.encode(prompt, False)) if isinstance(prompt, str) else 0
                for prompt, ids in zip(self.prompts, self.ids, strict=True)
            ]

    def _prepare_decoder(self) -> None:
        """Set `decoder_prompt`. Raises ApiError: 400, a field is for models of the other kind."""
        body, encoder = self.body, self.server.facts.encoder
        if encoder is None:
            if body.decoder_prompt is not None:
                raise bad_request("decoder_prompt is for encoder-decoder models.", "decoder_prompt")
            return
        for name in ("echo", "prompt_logprobs"):
            if (given := getattr(body, name)) is not None and given is not False:
                raise bad_request(f"{name} is for decoder-only models: an encoder reads this one's prompt.", name)
        begins = body.decoder_prompt
        if isinstance(begins, str):
            begins = encoder.decoder_prompt + self.server.text_ids(begins, "decoder_prompt", add_special_tokens=False)
        self.decoder_prompt = begins or encoder.decoder_prompt

    def usage(self) -> dict[str, Any]:
        """As of any request, but with `max_tokens` 0 without the token that the engine draws all the same: it is shown nowhere."""
        counts = super().usage()
        if self.body.max_tokens == 0:
            counts |= {"completion_tokens": 0, "total_tokens": counts["prompt_tokens"]}
        return counts

    def _logprobs(self, number: int, update: Update, offsets: TextOffsets, echoed: bool) -> dict[str, Any] | None:
        """The field `logprobs` for new tokens. With `echoed`, the prompt's tokens come first. `offsets` is told all of them."""
        if self.body.logprobs is None:
            return None
        tokens, entries, places = update.token_ids, list(update.logprobs or []), []
        if echoed:
            prompt, num_added = self.ids[number], self.num_added[number]
            pieces = [b"" if i < num_added else self.token_bytes(id) for i, id in enumerate(prompt)]
            if num_added < len(pieces) and not self._prompt_text(number).startswith(" "):
                pieces[num_added] = pieces[num_added].removeprefix(b" ")  # SentencePiece's, which is not in the text
            places = [offsets.add(piece) for piece in pieces]
            # None for prompt tokens that were not read before the answer's time was over
            entries = [*(self.answers[number].prompt_logprobs or []), *[None] * len(prompt)][: len(prompt)] + entries
        hides = self.body.skip_special_tokens
        places += [offsets.add(b"" if hides and id in self.special_ids else self.token_bytes(id)) for id in tokens]
        tokens = [*self.ids[number], *tokens] if echoed else tokens
        texts = [token_text(self.server.tokenizer, token) or "" for token in tokens]
        how = places, self.token_bytes, self.body.return_tokens_as_token_ids
        return completion_logprobs(entries, tokens, texts, self.body.logprobs, *how)

    def is_long(self, answer: Answer, update: Update) -> bool:
        return self.body.echo and (answer.number, update.index) not in self.offsets

    def choice(self, number: int, update: Update) -> dict[str, Any]:
        key = number, update.index
        is_first = key not in self.offsets
        echoed = self.body.echo and is_first
        if self.body.max_tokens == 0:
            reason = update.finish_reason and "length"
            update = replace(update, text="", token_ids=[], logprobs=[], finish_reason=reason)
        choice = {
            "text": (self._prompt_text(number) if echoed else "") + update.text,
            "logprobs": self._logprobs(number, update, self.offsets.setdefault(key, TextOffsets()), echoed),
            "finish_reason": update.finish_reason, "stop_reason": update.stop_reason,
        }  # fmt: skip
        if self.body.return_token_ids:
            choice |= {"token_ids": update.token_ids, **({"prompt_token_ids": self.ids[number]} if is_first else {})}
        return choice

    def whole(self, number: int, update: Update) -> dict[str, Any]:
        scored = prompt_logprobs(self.answers[number].prompt_logprobs, self.ids[number], self.body.prompt_logprobs)
        absent = {"token_ids": None, "prompt_token_ids": None}
        return {**absent, **self.choice(number, update), "prompt_logprobs": scored}

    def _prompt_text(self, number: int) -> str:
        prompt = self.prompts[number]
        return prompt if isinstance(prompt, str) else self.server.tokenizer.decode(prompt)


class Chat(Endpoint):
    """POST /v1/chat/completions. The text is parsed by `template`; if that is None, all of it is content."""

    form: type[Body] = ChatRequest
    object = "chat.completion.chunk"
    prefix = "chatcmpl"
    effort_field = "reasoning_effort"
    template: dict | None
    prompt_text: str  # with its special tokens; "" without a template
    parsers: list[MessageParser]

    def prepare(self) -> None:
        super().prepare()
        body = self.body
        if body.reasoning_effort is not None and not self.server.template_reads_effort:
            self.ignored_fields.append(self.effort_field)
        if body.top_logprobs is not None and not body.logprobs:
            raise bad_request("top_logprobs needs logprobs: true.", "top_logprobs")
        most = body.max_completion_tokens if body.max_completion_tokens is not None else body.max_tokens
        top, budget = (body.top_logprobs or 0) if body.logprobs else None, body.thinking_token_budget
        self.set_params(most, logprobs=top, prompt_logprobs=body.prompt_logprobs, thinking_token_budget=budget)
        if any((image.get("detail") or "auto") != "auto" for image in body.images):
            self.ignored_fields.append("image_url.detail")
        ids, self.images = self.server.chat_ids(body, self.fetched)
        self.fetched = {}
        self.ids = [ids]
        self.reasoning = self._choose_template(ids)
        if self.template is not None:  # the marks it looks for may be special tokens
            self.params = self.params.copy(skip_special_tokens=False)
            if body.skip_special_tokens and "skip_special_tokens" in body.model_fields_set:
                self.ignored_fields.append("skip_special_tokens")

    def submit(self) -> None:
        body, make = self.body, None
        if self.template is not None:
            of_text = {"prefix": self.prompt_text, "tools": body.offered_tools}
            make = partial(self.server.tokenizer.get_response_parser, self.template, **of_text)
        self.parsers = [MessageParser(make, body.forced_tool, body.parallel_tool_calls) for _ in range(body.n)]
        super().submit()

    def _choose_template(self, ids: list[int]) -> Reasoning | None:
        """Set `template` and `prompt_text`. Returns the reasoning before a grammar. Raises ApiError 400: no template has tool calls."""
        body, tokenizer = self.body, self.server.tokenizer
        template, tools = self.server.response_template, body.offered_tools
        if tools and body.forced_tool is None and "tool_calls" not in (template or {"fields": ()})["fields"]:
            raise bad_request(
                "The server does not know how this model writes tool calls (--response-template): force a call by "
                "tool_choice, or set it to 'none'.", "tools",
            )  # fmt: skip
        template = self.template = template if tools and self.grammar is None else without_tools(template)
        self.prompt_text = "" if template is None else tokenizer.decode(ids)
        is_limited = self.params.thinking_token_budget is not None
        if is_limited and reasoning_marks(template) is None:
            message = "The server does not know how this model marks its reasoning (--response-template)."
            raise bad_request(message, "thinking_token_budget")
        if self.grammar is None and not is_limited:
            return None
        return reasoning_before(tokenizer, template, self.prompt_text, is_constrained=self.grammar is not None)

    def answer(self, results: list[list[Update]]) -> dict[str, Any]:
        scored = prompt_logprobs(self.answers[0].prompt_logprobs, self.ids[0], self.body.prompt_logprobs)
        shown_ids = self.ids[0] if self.body.return_token_ids else None
        return {**super().answer(results), "prompt_logprobs": scored, "prompt_token_ids": shown_ids}

    def begin(self) -> bytes:
        ids = {"prompt_token_ids": self.ids[0]} if self.body.return_token_ids else {}
        choice = {"delta": {"role": "assistant", "content": ""}, "logprobs": None, "finish_reason": None}
        return b"".join(self._frame([{"index": index, **choice}], **ids) for index in range(self.body.n))

    def choice(self, number: int, update: Update) -> dict[str, Any]:
        parser = self.parsers[update.index]
        added = parser.feed(update.text, last=update.finish_reason is not None)
        delta: dict[str, Any] = self._shown(added)
        if added.tool_calls:
            delta["tool_calls"] = added.tool_calls
        if not delta and update.finish_reason is None:
            delta["content"] = ""
        return {"delta": delta, **self._ending(parser, update)}

    def whole(self, number: int, update: Update) -> dict[str, Any]:
        parser = self.parsers[update.index]
        written = parser.feed(update.text, last=True)
        calls = joined_calls([written])
        message = {"role": "assistant", "content": None if calls else "", "refusal": None}
        message |= self._shown(written)
        message = {**message, "tool_calls": calls} if calls else message
        return {"message": message, "token_ids": None, **self._ending(parser, update)}

    @staticmethod
    def _shown(delta: Delta) -> dict[str, str]:
        """Content; and reasoning under the two names that clients look for: DeepSeek's and transformers', vLLM's."""
        reasoning = {"reasoning_content": delta.reasoning, "reasoning": delta.reasoning} if delta.reasoning else {}
        return {**reasoning, **({"content": delta.content} if delta.content else {})}

    def _ending(self, parser: MessageParser, update: Update) -> dict[str, Any]:
        # As in vLLM: "tool_calls" if the model chose the function to call, but "stop" if the request named the function.
        how = self.token_bytes, self.body.return_tokens_as_token_ids
        chosen, top = parser.num_calls and self.body.forced_tool in (None, "required"), self.body.top_logprobs or 0
        ending: dict[str, Any] = {
            "logprobs": chat_logprobs(update, top, *how) if self.body.logprobs else None,
            "finish_reason": "tool_calls" if chosen and update.finish_reason == "stop" else update.finish_reason,
            "stop_reason": update.stop_reason,
        }  # fmt: skip
        return {**ending, "token_ids": update.token_ids} if self.body.return_token_ids else ending


class EventStream(StreamingResponse):
    """A response of server-sent events. `release` is called once, after the last event or after the client has disconnected."""

    def __init__(self, events: AsyncIterator[bytes], release: Callable[[], None], headers: dict[str, str]):
        super().__init__(events, media_type="text/event-stream", headers=headers)
        self.release = release

    async def __call__(self, scope, receive, send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self.release()


def ignored_header(names: list[str]) -> dict[str, str]:
    """The header that names a request's ignored fields; none if there are none. Headers must be ASCII, and short."""
    shown = ", ".join(name if name.strip() else repr(name) for name in names)
    ignored = shown[:1000].encode("unicode_escape").decode().strip()
    return {IGNORED_HEADER: ignored} if ignored else {}


def sse(body: dict[str, Any]) -> bytes:
    """Encode one server-sent event. The JSON is ASCII, because some clients end a line at U+2028."""
    return b"data: " + _to_json(body).encode() + b"\n\n"


def named_sse(events: list[dict[str, Any]]) -> bytes:
    """Encode server-sent events, each named by its type."""
    return b"".join(f"event: {event['type']}\n".encode() + sse(event) for event in events)


async def served(
    work: Callable[[Server, Request, bytes], Awaitable[Response]], server: Server, request: Request
) -> Response:
    """Answer a request by `work`, which gets its body, too. Raises ApiError: see `unless_disconnected`."""
    raw = await request.body()
    return await unless_disconnected(request.receive, work(server, request, raw))


async def unless_disconnected(receive: Callable[[], Awaitable[Any]], work: Awaitable[Any]) -> Any:
    """The result of `work`; it is cancelled when the client disconnects, which `receive` tells. Raises ApiError: 499, that has happened."""

    async def wait_for_disconnect() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass

    task, watch = asyncio.ensure_future(work), asyncio.ensure_future(wait_for_disconnect())
    try:
        await asyncio.wait({task, watch}, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        raise ApiError(499, "The client has disconnected.")
    finally:
        task.cancel()
        watch.cancel()
        await asyncio.gather(task, watch, return_exceptions=True)
