"""POST /v1/responses: the request is translated into a chat request, and its answer into items and events."""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import AsyncIterator
from typing import Annotated, Any, Literal

from pydantic import Field, StrictInt, ValidationError

from .endpoints import Chat
from .errors import bad_request, shown
from .messages import Delta
from .protocol import MOST_MESSAGES, ChatRequest, Items, JsonSchema, Part, SamplingFields, joined_text
from .server import Server
from .worker import Update

_UNSUPPORTED_FIELDS = (
    "previous_response_id", "conversation", "background", "store", "prompt", "include", "top_logprobs", "max_tool_calls",
    "context_management", "messages", "response_format", "max_tokens", "max_completion_tokens", "logprobs",
    "prompt_logprobs", "return_token_ids", "kv_transfer_params",
)  # fmt: skip
_TEXT_PARTS = ("input_text", "output_text", "text", "reasoning_text", "summary_text")


class TextFormat(JsonSchema):
    """What the answer's text must be: `response_format` of chat in another shape."""

    type: Literal["text", "json_object", "json_schema"] = "text"


class TextOptions(Part):
    """The field `text` of a request."""

    format: TextFormat | None = None


class FunctionTool(Part):
    """A function that the model may call."""

    type: Literal["function"]
    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None

    @property
    def without_effect(self) -> list[str]:
        """Also `strict`: forced calls are always strict, and those that the model chooses to make never are."""
        return [*super().without_effect, *([] if self.strict is None else ["strict"])]


class NamedTool(Part):
    """The form of `tool_choice` that names a function."""

    type: Literal["function"]
    name: str


class ResponsesRequest(SamplingFields):
    """POST /v1/responses."""

    input: str | Annotated[Items[dict[str, Any]], Field(max_length=MOST_MESSAGES)]
    instructions: str | None = None
    max_output_tokens: StrictInt | None = Field(None, ge=1)
    tools: list[FunctionTool] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = None
    parallel_tool_calls: bool = True
    text: TextOptions | None = None
    metadata: dict[str, str] | None = None
    user: str | None = None
    truncation: Literal["disabled"] | None = None
    chat_template_kwargs: dict[str, Any] | None = None

    @property
    def without_effect(self) -> list[str]:
        """Also `stream_options`: a stream always ends with the usage, and has it nowhere else."""
        return [*super().without_effect, *(["stream_options"] if self.stream_options is not None else [])]

    def to_chat(self) -> ChatRequest:
        """The same request for /v1/chat/completions.

        Raises:
            ApiError: 400, it has a field or an item that is not supported, or a bad value.
        """
        for name in _UNSUPPORTED_FIELDS:
            value = getattr(self, name, None)
            if value is not None if name == "prompt_logprobs" else value not in (None, False, []):
                raise bad_request(
                    f"{name} is not served here: responses are not stored, and hold only text and calls.", name
                )
        if self.n != 1:
            raise bad_request("n must be 1.", "n")
        fields = {name: getattr(self, name) for name in SamplingFields.model_fields if name in self.model_fields_set}
        fields |= {"messages": self._messages(), "parallel_tool_calls": self.parallel_tool_calls}
        fields |= {"max_completion_tokens": self.max_output_tokens, "chat_template_kwargs": self.chat_template_kwargs}
        if self.tools:
            fields["tools"] = [
                {
                    "type": "function",
                    "function": tool.model_dump(include={"name", "description", "parameters"}, exclude_none=True),
                }
                for tool in self.tools
            ]
        if isinstance(self.tool_choice, NamedTool):
            fields["tool_choice"] = {"type": "function", "function": {"name": self.tool_choice.name}}
        elif self.tool_choice is not None:
            fields["tool_choice"] = self.tool_choice
        wanted = self.text.format if self.text is not None else None
        if wanted is not None:
            schema = {"json_schema": {"schema": wanted.schema_}} if wanted.type == "json_schema" else {}
            fields["response_format"] = {"type": wanted.type, **schema}
        try:
            return ChatRequest.model_validate(fields)
        except ValidationError as error:
            first = error.errors()[0]
            raise bad_request(f"{'.'.join(map(str, first['loc']))}: {first['msg']}.", "input") from None

    def _messages(self) -> list[dict[str, Any]]:
        """The items as messages of a conversation. Reasoning joins the assistant's next message; successive calls share a message."""
        found = [{"role": "system", "content": self.instructions}] if self.instructions else []
        items = [{"role": "user", "content": self.input}] if isinstance(self.input, str) else self.input
        reasoning = ""
        for item in items:
            kind = str(item.get("type") or "message")
            if kind == "reasoning":
                reasoning += _text_of(item.get("content") or item.get("summary") or [])
                continue
            if kind.startswith("function_call"):
                _check_texts(item, ("call_id", "name") if kind == "function_call" else ("call_id",))
            if kind == "function_call":
                function = {"name": item.get("name"), "arguments": item.get("arguments")}
                call = {"id": item.get("call_id"), "type": "function", "function": function}
                if found and found[-1].get("tool_calls"):
                    found[-1]["tool_calls"].append(call)
                    continue
                message: dict[str, Any] = {"role": "assistant", "tool_calls": [call]}
            elif kind == "function_call_output":
                message = {"role": "tool", "tool_call_id": item.get("call_id"), "content": _text_of(item.get("output"))}
            elif kind == "message" and isinstance(item.get("role"), str):
                role = "system" if item["role"] == "developer" else item["role"]
                message = {"role": role, "content": _text_of(item.get("content"))}
            else:
                raise bad_request(f"input: items of type {kind!r} are not served here.", "input")
            if reasoning and message["role"] == "assistant":
                message["reasoning_content"], reasoning = reasoning, ""
            found.append(message)
        return found


def _check_texts(item: dict[str, Any], names: tuple[str, ...]) -> None:
    """Raise ApiError 400 unless these fields of an item hold text."""
    for name in names:
        if not isinstance(item.get(name), str):
            raise bad_request(f"input: {name} of a {item['type']} must be a text.", "input")


def _text_of(content: Any) -> str:
    """An item's content as one text: the content itself, or the joined texts of its parts.

    Raises:
        ApiError: 400, a part is not text.
    """
    if isinstance(content, str):
        return content
    if not isinstance(content, list) or not all(isinstance(part, dict) for part in content):
        raise bad_request("input: the content of an item is a text or a list of parts.", "input")
    return joined_text(content, _TEXT_PARTS, "input")


class Output:
    """The items of a response while they are generated. Methods return events, still without their sequence numbers.

    Attributes:
        items: the items so far; the last may still be growing.
    """

    def __init__(self) -> None:
        self.items: list[dict[str, Any]] = []
        self._open: dict[str, Any] | None = None

    def add(self, delta: Delta) -> list[dict[str, Any]]:
        """Append a piece of the message. Returns its events."""
        events = []
        if delta.reasoning:
            events += self._write("reasoning", "reasoning_text", delta.reasoning)
        if delta.content:
            events += self._write("message", "output_text", delta.content)
        for call in delta.tool_calls:
            events += self._call(call)
        return events

    def close(self, status: str = "completed") -> list[dict[str, Any]]:
        """End the item that is growing, if any, with this status. Returns its events."""
        item, self._open = self._open, None
        if item is None:
            return []
        item["status"] = status
        place = {"item_id": item["id"], "output_index": len(self.items) - 1}
        if item["type"] == "function_call":
            done = {**place, "arguments": item["arguments"], "name": item["name"]}
            events = [{"type": "response.function_call_arguments.done", **done}]
        else:
            part = item["content"][0]
            place["content_index"] = 0
            more = {"logprobs": []} if item["type"] == "message" else {}
            events = [
                {"type": f"response.{part['type']}.done", **place, "text": part["text"], **more},
                {"type": "response.content_part.done", **place, "part": dict(part)},
            ]
        return [
            *events,
            {"type": "response.output_item.done", "output_index": len(self.items) - 1, "item": _copy(item)},
        ]

    def _write(self, kind: str, part_type: str, text: str) -> list[dict[str, Any]]:
        """Append text to the item that is growing; begin one if it is of another kind."""
        events = []
        if self._open is None or self._open["type"] != kind:
            part: dict[str, Any] = {"type": part_type, "text": ""}
            if kind == "message":
                part |= {"annotations": [], "logprobs": []}
                item = {"id": _id("msg"), "type": kind, "role": "assistant", "status": "in_progress", "content": []}
            else:
                item = {"id": _id("rs"), "type": kind, "summary": [], "status": "in_progress", "content": []}
            events += self._begin(item)
            place = {"item_id": item["id"], "output_index": len(self.items) - 1, "content_index": 0}
            events.append({"type": "response.content_part.added", **place, "part": dict(part)})
            item["content"].append(part)
        item = self._open
        assert item is not None
        item["content"][0]["text"] += text
        place = {"item_id": item["id"], "output_index": len(self.items) - 1, "content_index": 0}
        more = {"logprobs": []} if kind == "message" else {}
        return [*events, {"type": f"response.{part_type}.delta", **place, "delta": text, **more}]

    def _call(self, call: dict[str, Any]) -> list[dict[str, Any]]:
        """Append a piece of a tool call; the first piece, which has an id, begins an item."""
        events, function = [], call["function"]
        if "id" in call:
            item = {"id": _id("fc"), "type": "function_call", "status": "in_progress", "call_id": call["id"]}
            events += self._begin({**item, "name": function["name"], "arguments": ""})
        item = self._open
        assert item is not None
        if function["arguments"]:
            item["arguments"] += function["arguments"]
            place = {"item_id": item["id"], "output_index": len(self.items) - 1}
            events.append({"type": "response.function_call_arguments.delta", **place, "delta": function["arguments"]})
        return events

    def _begin(self, item: dict[str, Any]) -> list[dict[str, Any]]:
        """End the item that is growing and begin this one."""
        events = self.close()
        self.items.append(item)
        self._open = item
        return [
            *events,
            {"type": "response.output_item.added", "output_index": len(self.items) - 1, "item": _copy(item)},
        ]


class Responses(Chat):
    """POST /v1/responses. Submits and parses like `Chat`; only the answer's shape differs."""

    form = ResponsesRequest

    def __init__(self, server: Server, body: ResponsesRequest):
        super().__init__(server, body.to_chat())
        self.request, self.output = body, Output()
        self.id, self.created, self.num_reasoning = _id("resp"), time.time(), 0

    def answer(self, results: list[list[Update]]) -> dict[str, Any]:
        """The body of the whole response."""
        (updates,) = results
        for update in updates:
            self._add(update)
        return self._response(updates[-1])

    async def stream(self) -> AsyncIterator[bytes]:
        """Yield server-sent events; the last is response.completed, response.incomplete or response.failed."""
        number = 0

        def frame(event: dict[str, Any]) -> bytes:
            nonlocal number
            number += 1
            text = json.dumps({**event, "sequence_number": number - 1}, separators=(",", ":"), allow_nan=False)
            return f"event: {event['type']}\ndata: {text}\n\n".encode()

        yield frame({"type": "response.created", "response": self._response(None)})
        yield frame({"type": "response.in_progress", "response": self._response(None)})
        try:
            async for found in self.server.updates(self.answers):
                if found is None:
                    yield b": ping\n\n"
                    continue
                _, update = found
                for event in self._add(update):
                    yield frame(event)
                if update.request_finished:
                    response = self._response(update)
                    yield frame({"type": f"response.{response['status']}", "response": response})
        except Exception as error:
            told = shown(error)
            code, message = "server_error" if told.status >= 500 else "invalid_prompt", told.body["error"]["message"]
            response = {**self._response(None), "status": "failed", "error": {"code": code, "message": message}}
            yield frame({"type": "response.failed", "response": response})

    def _add(self, update: Update) -> list[dict[str, Any]]:
        """Append an update's text to the items. Returns its events."""
        delta = self.parsers[0].feed(update.text, last=update.finish_reason is not None)
        if delta.reasoning:
            self.num_reasoning = update.num_tokens
        events = self.output.add(delta)
        if update.finish_reason is not None:
            events += self.output.close("incomplete" if update.finish_reason == "length" else "completed")
        return events

    def _response(self, last: Update | None) -> dict[str, Any]:
        """The response object. `last`: the update that ended it; None while it is being generated."""
        request, answer = self.request, self.answers[0]
        cut = last is not None and last.finish_reason == "length"
        wanted = request.text.format if request.text is not None else None
        found = {
            "id": self.id, "object": "response", "created_at": self.created, "model": self.base["model"],
            "status": "in_progress" if last is None else "incomplete" if cut else "completed", "error": None,
            "incomplete_details": {"reason": "max_output_tokens"} if cut else None, "output": [_copy(each) for each in self.output.items],
            "instructions": request.instructions, "max_output_tokens": request.max_output_tokens, "metadata": request.metadata or {},
            "parallel_tool_calls": request.parallel_tool_calls, "previous_response_id": None, "store": False, "background": False,
            "temperature": answer.params.temperature, "top_p": answer.params.top_p, "truncation": "disabled",
            "tool_choice": request.model_dump(include={"tool_choice"})["tool_choice"] or "auto",
            "tools": [tool.model_dump() for tool in request.tools or []], "user": request.user,
            "text": {"format": {"type": "text"} if wanted is None else wanted.model_dump(by_alias=True, exclude_none=True)},
            "usage": None,
        }  # fmt: skip
        if last is not None:
            found["usage"] = {
                "input_tokens": answer.num_prompt, "input_tokens_details": {"cached_tokens": answer.num_cached, "cache_write_tokens": 0},
                "output_tokens": answer.num_new, "output_tokens_details": {"reasoning_tokens": self.num_reasoning},
                "total_tokens": answer.num_prompt + answer.num_new,
            }  # fmt: skip
            found["metrics"] = self.server.timings(answer, last)
        return found


def _id(prefix: str) -> str:
    return f"{prefix}_{uuid.uuid4().hex}"


def _copy(item: dict[str, Any]) -> dict[str, Any]:
    """A copy of an item as it is now: events are encoded after the item has changed again."""
    return {**item, "content": [dict(part) for part in item["content"]]} if "content" in item else dict(item)
