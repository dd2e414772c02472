"""The endpoints that generate text: how a request is submitted, and how its answer is sent, whole or as a stream."""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Awaitable, Callable
from functools import partial
from typing import Any

from fastapi import Request
from fastapi.responses import Response, StreamingResponse
from pydantic_core import to_json

from ..sampling.grammar import Reasoning
from .answers import Answer
from .bodies import read_body
from .errors import ApiError, bad_request, shown
from .frames import TextOffsets, chat_logprobs, completion_logprobs, prompt_logprobs, usage
from .guard import SPACE
from .messages import MessageParser, joined_calls, reasoning_before, without_tools
from .protocol import Body, ChatRequest, CompletionRequest, SamplingFields
from .server import Server
from .structured import StructuredOutputsParams
from .text import token_bytes, token_text
from .worker import Update

IGNORED_HEADER = "x-ignored-fields"
_to_json = json.JSONEncoder(separators=(",", ":"), allow_nan=False).encode


class Endpoint(ABC):
    """One client's request to an endpoint that generates text. It may hold several prompts, each with `n` choices.

    One of the server's lanes makes and prepares it, perhaps in another process, whose copy of the server it leaves behind. The other
    methods are called in the event loop's thread.

    Attributes:
        form: the class of the bodies that the endpoint takes.
        object, prefix: OpenAI's name for the frames of a stream (for the whole answer: without ".chunk"), and the prefix of the id.
        ignored_fields: names of the request's fields that the server does not know and therefore ignores.
        prompts: as the client gave them, or as the chat template made them.
        ids: token ids of each prompt.
        params: of all prompts.
        reasoning: what the model writes before the text that a grammar describes.
        answers: the state of each prompt's answer, in the order of the prompts.
        grammar: what the text must match; None: any text.
        space: see `Sequence.space`; named after the request's API key.
        base: the fields that every frame begins with.
    """

    form: type[Body]
    object: str
    prefix: str

    body: SamplingFields

    def __init__(self, server: Server, body: Any):
        self.server, self.body = server, body
        server.check_model(body.model)
        self.prompts: list[str | list[int]] = []
        self.ids: list[list[int]] = []
        self.params = server.defaults
        self.reasoning: Reasoning | None = None
        self.answers: list[Answer] = []
        self.ignored_fields: list[str] = []
        self.grammar: StructuredOutputsParams | None = None
        self.space = ""
        self.base = {
            "id": f"{self.prefix}-{uuid.uuid4().hex}", "object": self.object, "created": int(time.time()),
            "model": body.model or server.names[0],
        }  # fmt: skip

    @abstractmethod
    def prepare(self) -> None:
        """Check the request and set what `submit` sends.

        Raises:
            ApiError: the request cannot be served.
        """
        if self.body.prompt_logprobs is not None and self.body.stream:
            raise bad_request(
                "prompt_logprobs are not sent in streams: leave out stream, or prompt_logprobs.", "prompt_logprobs"
            )
        self.grammar = self.body.grammar()

    def submit(self) -> None:
        """Send the prompts to the engine, each as a request of its own, and set `answers`.

        Raises:
            ApiError: see `Server.submit`.
        """
        for prompt, ids in zip(self.prompts, self.ids, strict=True):
            answer = self.server.submit(
                prompt, ids, self.params, self.reasoning, self.answers, self.body.max_time, self.space
            )
            self.answers.append(answer)

    def begin_frames(self, index: int) -> list[dict[str, Any]]:
        """What the frames hold that are sent for choice `index` before its first text."""
        return []

    def is_long(self, number: int, update: Update) -> bool:
        """Whether the frame of an update may be long, so that a thread has to make it."""
        return False

    @abstractmethod
    def choice(self, number: int, update: Update) -> dict[str, Any]:
        """The `choices` entry of a frame, without its index: what `update` adds to a choice of prompt `number`."""

    @abstractmethod
    def whole(self, number: int, index: int, updates: list[Update]) -> dict[str, Any]:
        """The `choices` entry of the whole answer, without its index, from all updates of choice `index` of prompt `number`."""

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "server": None}

    @classmethod
    async def respond(cls, server: Server, request: Request) -> Response:
        """Serve a request: return the whole answer, or a stream.

        Raises:
            ApiError: the request cannot be served, or the client has disconnected.
        """
        raw = await request.body()
        return await unless_disconnected(request, cls._respond(server, request, raw))

    @classmethod
    async def _respond(cls, server: Server, request: Request, raw: bytes) -> Response:
        _ = server.running_worker  # before the model is loaded, the length of prompts is not known
        self = await server.lanes.run(len(raw), _prepared, cls, raw, dict(request.headers))
        self.server = server
        headers = ignored_header(self.ignored_fields)
        self.space = request.scope.get(SPACE, "")
        await server.compile(self.grammar)
        with contextlib.ExitStack() as at_end:
            at_end.callback(server.release, self.answers)
            self.submit()
            if self.body.stream:
                return EventStream(self.stream(), at_end.pop_all().close, headers)
            results = await self.all_updates()
            # in a thread: with log-probabilities an answer may hold a million entries
            found = await asyncio.to_thread(lambda: to_json(self.answer(results)))
            return Response(found, headers=headers, media_type="application/json")

    def token_bytes(self, token: int) -> bytes:
        """The bytes of a token in the text."""
        return token_bytes(self.server.tokenizer, token)

    def index(self, number: int, index: int) -> int:
        """The index, over all prompts, of choice `index` of prompt `number`."""
        return number * self.body.n + index

    def answer(self, results: list[list[Update]]) -> dict[str, Any]:
        """The body of the whole answer, from all updates of each prompt. Any thread may call it."""
        choices = []
        for number, updates in enumerate(results):
            for index in range(self.body.n):
                own = [update for update in updates if update.index == index]
                choices.append({"index": self.index(number, index), **self.whole(number, index, own)})
        body = {**self.base, "object": self.object.removesuffix(".chunk"), "choices": choices, "usage": self.usage()}
        if len(self.answers) == 1 and self.body.n == 1:
            body["metrics"] = self.server.timings(self.answers[0], results[0][-1])
            if results[0][-1].kv_transfer_params is not None:
                body["kv_transfer_params"] = results[0][-1].kv_transfer_params
        return body

    async def all_updates(self) -> list[list[Update]]:
        """All updates of each answer, in the order of the prompts. Waits until all have ended."""
        found: list[list[Update]] = [[] for _ in self.answers]
        async for each in self.server.updates(self.answers):
            if each is not None:
                found[each[0].number].append(each[1])
        return found

    def usage(self) -> dict[str, Any]:
        """Numbers of tokens, over all prompts and choices so far."""
        return usage(
            *(sum(getattr(each, name) for each in self.answers) for name in ("num_prompt", "num_new", "num_cached"))
        )

    async def stream(self) -> AsyncIterator[bytes]:
        """Yield server-sent events. An error ends the stream with an event that holds it, because the status has been sent."""
        options = self.body.stream_options
        wants_usage = bool(options and options.include_usage)
        running = wants_usage and bool(options and options.continuous_usage_stats)
        last = None

        def frame(choices: list[dict[str, Any]], **more: Any) -> bytes:
            counts = {"usage": self.usage() if running else None} if wants_usage else {}
            return sse({**self.base, "choices": choices, **counts, **more})

        for number in range(len(self.answers)):
            for index in range(self.body.n):
                for fields in self.begin_frames(self.index(number, index)):
                    yield frame(**fields)
        try:
            async for found in self.server.updates(self.answers):
                if found is None:
                    yield b": ping\n\n"
                    continue
                answer, update = found
                last = update if update.request_finished else last
                index = self.index(answer.number, update.index)
                handed = {} if update.kv_transfer_params is None else {"kv_transfer_params": update.kv_transfer_params}
                if self.is_long(answer.number, update):
                    choice = await asyncio.to_thread(self.choice, answer.number, update)
                else:
                    choice = self.choice(answer.number, update)
                yield frame([{"index": index, **choice}], **handed)
            if wants_usage:
                more = {"usage": self.usage()}
                if len(self.answers) == 1 and self.body.n == 1 and last is not None:
                    more["metrics"] = self.server.timings(self.answers[0], last)
                yield sse({**self.base, "choices": [], **more})
        except Exception as error:
            yield sse(shown(error).body)
        yield b"data: [DONE]\n\n"


def _prepared(server: Server, kind: type[Endpoint], raw: bytes, headers: dict[str, str]) -> Endpoint:
    """An endpoint of this kind, made of the bytes of a body and prepared. Raises: ApiError, the request cannot be served."""
    body = read_body(kind.form, raw, headers)
    endpoint = kind(server, body)
    endpoint.ignored_fields = body.unknown_fields
    endpoint.prepare()
    for each in (body, endpoint.body):
        each.leave_out_what_is_done()
    return endpoint


class Completions(Endpoint):
    """POST /v1/completions."""

    form = CompletionRequest
    object = "text_completion"
    prefix = "cmpl"
    body: CompletionRequest

    def prepare(self) -> None:
        """Make token ids of each prompt."""
        super().prepare()
        body = self.body
        counts = [body.prompt_logprobs, body.logprobs if body.echo else None]
        self.params = body.sampling_params(
            self.server.defaults, body.max_tokens if body.max_tokens is None else max(body.max_tokens, 1), logprobs=body.logprobs,
            structured_outputs=self.grammar, prompt_logprobs=max((each for each in counts if each is not None), default=None),
        )  # fmt: skip
        self.prompts = body.prompts()
        self.ids = [self.server.prompt_ids(prompt, "prompt") for prompt in self.prompts]
        self.offsets: dict[tuple[int, int], TextOffsets] = {}  # by number of the prompt and index of the choice
        self.special_ids = set(self.server.tokenizer.all_special_ids)
        if body.echo and body.logprobs is not None:
            self.num_added = [self._num_added(*each) for each in zip(self.prompts, self.ids, strict=True)]

    def _num_added(self, prompt: str | list[int], ids: list[int]) -> int:
        """Number of special tokens that were added before a prompt."""
        return len(ids) - len(self.server.encode(prompt, False)) if isinstance(prompt, str) else 0

    def usage(self) -> dict[str, Any]:
        """As of any request, but with `max_tokens` 0 without the token that the engine draws all the same: it is shown nowhere."""
        found = super().usage()
        if self.body.max_tokens == 0:
            found |= {"completion_tokens": 0, "total_tokens": found["prompt_tokens"]}
        return found

    def _echoed(self, number: int) -> str:
        prompt = self.prompts[number]
        return prompt if isinstance(prompt, str) else self.server.tokenizer.decode(prompt)

    def _texts(self, tokens: list[int]) -> list[str]:
        return [token_text(self.server.tokenizer, token) or "" for token in tokens]

    def _logprobs(
        self, number: int, tokens: list[int], entries: list, offsets: TextOffsets, echoed: bool
    ) -> dict[str, Any] | None:
        """The field `logprobs` for new tokens. With `echoed`, the prompt's tokens come first. `offsets` is told all of them."""
        if self.body.logprobs is None:
            return None
        places = []
        if echoed:
            prompt = self.ids[number]
            num_added = self.num_added[number]
            pieces = [b"" if i < num_added else self.token_bytes(id) for i, id in enumerate(prompt)]
            if num_added < len(pieces) and not self._echoed(number).startswith(" "):
                pieces[num_added] = pieces[num_added].removeprefix(b" ")  # SentencePiece's, which is not in the text
            places = [offsets.add(piece) for piece in pieces]
            # None for prompt tokens that were not read before the answer's time was over
            scored = [*(self.answers[number].prompt_logprobs or []), *[None] * len(prompt)][: len(prompt)]
            entries = [*scored, *entries]
        places += [offsets.add(b"" if self._is_hidden(id) else self.token_bytes(id)) for id in tokens]
        tokens = [*self.ids[number], *tokens] if echoed else tokens
        return completion_logprobs(entries, tokens, self._texts(tokens), self.body.logprobs, places, self.token_bytes)

    def is_long(self, number: int, update: Update) -> bool:
        """True if the frame echoes the prompt."""
        return self.body.echo and (number, update.index) not in self.offsets

    def _is_hidden(self, token: int) -> bool:
        """True if an answer's text leaves this token out."""
        return self.body.skip_special_tokens and token in self.special_ids

    def choice(self, number: int, update: Update) -> dict[str, Any]:
        """The text since the last frame; with `echo`, the first frame begins with the prompt's text."""
        key, echoed = (number, update.index), self.is_long(number, update)
        first = key not in self.offsets
        tokens, entries, new, reason = update.token_ids, update.logprobs or [], update.text, update.finish_reason
        if self.body.max_tokens == 0:
            tokens, entries, new, reason = [], [], "", reason and "length"
        found = {
            "text": (self._echoed(number) if echoed else "") + new,
            "logprobs": self._logprobs(number, tokens, entries, self.offsets.setdefault(key, TextOffsets()), echoed),
            "finish_reason": reason, "stop_reason": update.stop_reason,
        }  # fmt: skip
        return found | self._ids(number, tokens, first)

    def _ids(self, number: int, tokens: list[int], with_prompt: bool = True) -> dict[str, Any]:
        """The ids of new tokens, and of the prompt, if they are wanted."""
        if not self.body.return_token_ids:
            return {}
        return {"token_ids": tokens, **({"prompt_token_ids": self.ids[number]} if with_prompt else {})}

    def whole(self, number: int, index: int, updates: list[Update]) -> dict[str, Any]:
        """The whole text; with `echo`, it begins with the prompt's text."""
        tokens = [token for update in updates for token in update.token_ids]
        entries: list = [entry for update in updates for entry in update.logprobs or []]
        text, reason = "".join(update.text for update in updates), updates[-1].finish_reason
        if self.body.max_tokens == 0:
            tokens, entries, text, reason = [], [], "", "length"
        found = {
            "text": (self._echoed(number) if self.body.echo else "") + text,
            "logprobs": self._logprobs(number, tokens, entries, TextOffsets(), self.body.echo),
            "finish_reason": reason, "stop_reason": updates[-1].stop_reason, "token_ids": None, "prompt_token_ids": None,
            "prompt_logprobs": prompt_logprobs(
                self.answers[number].prompt_logprobs, self.ids[number], self.body.prompt_logprobs
            ),
        }  # fmt: skip
        return found | self._ids(number, tokens)


class Chat(Endpoint):
    """POST /v1/chat/completions.

    Attributes:
        template: the response template by which the text is parsed; None: all of it is content.
        prefix: the prompt's text, if there is a template.
        parsers: one for each choice.
    """

    form = ChatRequest
    object = "chat.completion.chunk"
    prefix = "chatcmpl"
    body: ChatRequest
    template: dict | None
    parsers: list[MessageParser]

    def prepare(self) -> None:
        """Make token ids of the conversation."""
        super().prepare()
        body = self.body
        if body.top_logprobs is not None and not body.logprobs:
            raise bad_request("top_logprobs needs logprobs: true.", "top_logprobs")
        most = body.max_completion_tokens if body.max_completion_tokens is not None else body.max_tokens
        self.params = body.sampling_params(
            self.server.defaults, most, logprobs=(body.top_logprobs or 0) if body.logprobs else None,
            structured_outputs=self.grammar, prompt_logprobs=body.prompt_logprobs,
        )  # fmt: skip
        ids = self.server.prompt_ids(self.server.chat_text(body), "messages", add_special_tokens=False)
        self.prompts, self.ids = [ids], [ids]
        self.reasoning = self._choose_template(ids)
        if self.template is not None:  # the marks it looks for may be special tokens
            self.params = self.params.copy(skip_special_tokens=False)
            if body.skip_special_tokens and "skip_special_tokens" in body.model_fields_set:
                self.ignored_fields = [*self.ignored_fields, "skip_special_tokens"]

    def submit(self) -> None:
        """Send the conversation to the engine."""
        body, make = self.body, None
        if self.template is not None:
            make = partial(
                self.server.tokenizer.get_response_parser, self.template, prefix=self.prefix, tools=body.offered_tools
            )
        self.parsers = [MessageParser(make, body.forced_tool, body.parallel_tool_calls) for _ in range(body.n)]
        super().submit()

    def _choose_template(self, ids: list[int]) -> Reasoning | None:
        """Set `template` and `prefix`. Returns the reasoning that may come before the text that a grammar describes.

        Raises:
            ApiError: 400, the model may choose a tool, and no template says how it writes tool calls.
        """
        body, tokenizer = self.body, self.server.tokenizer
        template, tools = self.server.response_template, body.offered_tools
        if tools and body.forced_tool is None and "tool_calls" not in (template or {"fields": ()})["fields"]:
            raise bad_request(
                "The server does not know how this model writes tool calls (--response-template): set tool_choice to "
                "'required', a function, or 'none'.", "tools",
            )  # fmt: skip
        template = self.template = template if tools and self.grammar is None else without_tools(template)
        self.prefix = "" if template is None else tokenizer.decode(ids)
        return None if self.grammar is None else reasoning_before(tokenizer, template, self.prefix)

    def _finish_reason(self, parser: MessageParser, update: Update) -> str | None:
        """As in vLLM: "tool_calls" if the model chose the function to call, but "stop" if the request named the function."""
        chosen = parser.num_calls and self.body.forced_tool in (None, "required")
        return "tool_calls" if chosen and update.finish_reason == "stop" else update.finish_reason

    def _logprobs(self, entries, tokens) -> dict[str, Any] | None:
        if not self.body.logprobs:
            return None
        return chat_logprobs(entries, tokens, self.body.top_logprobs or 0, self.token_bytes)

    def answer(self, results: list[list[Update]]) -> dict[str, Any]:
        """The body of the whole answer."""
        scored = prompt_logprobs(self.answers[0].prompt_logprobs, self.ids[0], self.body.prompt_logprobs)
        return {
            **super().answer(results), "prompt_logprobs": scored, "prompt_token_ids": None, **self._prompt_ids
        }  # fmt: skip

    @property
    def _prompt_ids(self) -> dict[str, Any]:
        return {"prompt_token_ids": self.ids[0]} if self.body.return_token_ids else {}

    def begin_frames(self, index: int) -> list[dict[str, Any]]:
        """One frame with the role."""
        delta = {"role": "assistant", "content": ""}
        choice = {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}
        return [{"choices": [choice], **self._prompt_ids}]

    def choice(self, number: int, update: Update) -> dict[str, Any]:
        """What the text since the last frame adds to the message."""
        parser = self.parsers[update.index]
        found = parser.feed(update.text, last=update.finish_reason is not None)
        delta: dict[str, Any] = {**_reasoning(found.reasoning), **({"content": found.content} if found.content else {})}
        if found.tool_calls:
            delta["tool_calls"] = found.tool_calls
        if not delta and update.finish_reason is None:
            delta["content"] = ""
        return {"delta": delta, **self._ending(parser, update.token_ids, update.logprobs or [], update)}

    def whole(self, number: int, index: int, updates: list[Update]) -> dict[str, Any]:
        """The whole message."""
        tokens = [token for update in updates for token in update.token_ids]
        entries = [entry for update in updates for entry in update.logprobs or []]
        parser = self.parsers[index]
        found = [parser.feed(update.text, last=update is updates[-1]) for update in updates]
        content, calls = "".join(each.content for each in found), joined_calls(found)
        message = {"role": "assistant", "content": content if content or not calls else None, "refusal": None}
        message |= _reasoning("".join(each.reasoning for each in found))
        message = {**message, "tool_calls": calls} if calls else message
        return {"message": message, "token_ids": None, **self._ending(parser, tokens, entries, updates[-1])}

    def _ending(self, parser: MessageParser, tokens: list[int], entries: list, update: Update) -> dict[str, Any]:
        """What a choice holds besides the message: of these new tokens, and as of this update."""
        found = {
            "logprobs": self._logprobs(entries, tokens), "finish_reason": self._finish_reason(parser, update),
            "stop_reason": update.stop_reason,
        }  # fmt: skip
        return {**found, "token_ids": tokens} if self.body.return_token_ids else found


def _reasoning(text: str) -> dict[str, str]:
    """Reasoning under the two names that clients look for: DeepSeek's and transformers' `reasoning_content`, vLLM's `reasoning`."""
    return {"reasoning_content": text, "reasoning": text} if text else {}


class EventStream(StreamingResponse):
    """A response of server-sent events.

    Args:
        events: encoded by `sse`.
        release: called once, after the last event or after the client has disconnected.
    """

    def __init__(self, events: AsyncIterator[bytes], release: Callable[[], None], headers: dict[str, str]):
        super().__init__(events, media_type="text/event-stream", headers=headers)
        self.release = release

    async def __call__(self, scope, receive, send) -> None:
        """Send the events."""
        try:
            await super().__call__(scope, receive, send)
        finally:
            self.release()


def ignored_header(names: list[str]) -> dict[str, str]:
    """The header that names a request's ignored fields; none if there are none. Headers must be ASCII, and short."""
    ignored = ", ".join(names)[:1000].encode("unicode_escape").decode().strip()
    return {IGNORED_HEADER: ignored} if ignored else {}


def sse(body: dict[str, Any]) -> bytes:
    """Encode one server-sent event. The JSON is ASCII, because some clients end a line at U+2028."""
    return b"data: " + _to_json(body).encode() + b"\n\n"


async def unless_disconnected(request: Request, work: Awaitable[Any]) -> Any:
    """Return the result of `work`; cancel it when the client disconnects.

    Raises:
        ApiError: 499, the client has disconnected.
    """

    async def wait_for_disconnect() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass

    task, watch = asyncio.ensure_future(work), asyncio.ensure_future(wait_for_disconnect())
    try:
        await asyncio.wait({task, watch}, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        raise ApiError(499, "The client has disconnected.")
    finally:
        for each in (task, watch):
            each.cancel()
        await asyncio.gather(task, watch, return_exceptions=True)
