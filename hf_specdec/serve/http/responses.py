"""POST /v1/responses: the request is translated into a chat request, or refused (ApiError, 400); its answer into items and events."""

from __future__ import annotations

import copy
import time
import uuid
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from ..ipc.messages import Update
from .bodies import Items, Part, checked
from .chat_parser import Delta
from .endpoints import Chat, named_sse
from .errors import ApiError, bad_request
from .protocol import MOST_MESSAGES, ChatRequest, JsonSchema, NamedFunction, SamplingFields, joined_text
from .server import Answer, Server

_NOT_IN_TRANSLATIONS = ("logprobs", "top_logprobs", "prompt_logprobs", "return_token_ids",
                        "return_tokens_as_token_ids", "kv_transfer_params")  # fmt: skip
_SHARED_WITH_CHAT = ("parallel_tool_calls", "chat_template_kwargs", "thinking_token_budget", "tool_choice")
_TEXT_PARTS = ("input_text", "output_text", "text", "reasoning_text", "summary_text")


class TextFormat(JsonSchema):
    """What the answer's text must be: `response_format` of chat in another shape."""

    type: Literal["text", "json_object", "json_schema"] = "text"

    def for_chat(self) -> dict[str, Any]:
        """The same as chat's `response_format`."""
        schema = {"json_schema": {"schema": self.schema_}} if self.type == "json_schema" else {}
        return {"type": self.type, **schema}


class TextOptions(Part):
    """The field `text`: what the answer's text must be; default: any text."""

    format: TextFormat | None = None


class ReasoningOptions(Part):
    """The field `reasoning`: how much the model thinks, for chat templates that read it; default: the template's."""

    effort: str | None = None


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


class NamedFunctionTool(NamedFunction):
    """The function that the model must call."""

    type: Literal["function"]


class TranslatedRequest(SamplingFields):
    """A request of another API, which is served as a chat request."""

    not_served: ClassVar[tuple[str, ...]]  # names of fields that would change the answer
    chat_template_kwargs: dict[str, Any] | None = None
    thinking_token_budget: int | None = Field(None, ge=-1)

    @property
    def without_effect(self) -> list[str]:
        """Also `stream_options`: a stream always ends with the usage, and has it nowhere else."""
        return [*super().without_effect, *(["stream_options"] if self.stream_options is not None else [])]

    def as_chat(self, fields: dict[str, Any]) -> ChatRequest:
        """The chat request with these fields, and those that both requests have. Raises ApiError: 400, a field is not served."""
        for name in (*self.not_served, *_NOT_IN_TRANSLATIONS):
            value = getattr(self, name, None)
            if value is not None if name == "prompt_logprobs" else value not in (None, False, []):
                message = f"{name} is not served here: answers hold only text and calls."
                raise bad_request(message, name)
        if self.n != 1:
            raise bad_request("n must be 1.", "n")
        shared = {*SamplingFields.model_fields, *_SHARED_WITH_CHAT} & self.model_fields_set
        return checked(ChatRequest, {name: getattr(self, name) for name in shared} | fields)


class ResponsesRequest(TranslatedRequest):
    """POST /v1/responses."""

    not_served: ClassVar = (
        "conversation", "background", "prompt", "include", "max_tool_calls",
        "context_management", "messages", "response_format", "max_tokens", "max_completion_tokens",
    )  # fmt: skip
    input: str | Annotated[Items[dict[str, Any]], Field(max_length=MOST_MESSAGES)]
    instructions: str | None = None
    max_output_tokens: int | None = Field(None, ge=1)
    tools: list[FunctionTool] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedFunctionTool | None = None
    parallel_tool_calls: bool = True
    text: TextOptions | None = None
    metadata: dict[str, str] | None = None
    user: str | None = None
    truncation: Literal["disabled"] | None = None
    reasoning: ReasoningOptions | None = None
    store: bool | None = None
    previous_response_id: str | None = None

    def to_chat(self, items: list[dict[str, Any]]) -> ChatRequest:
        """The chat request whose conversation these items are."""
        fields = {"messages": self._messages(items), "max_completion_tokens": self.max_output_tokens}
        fields |= {"reasoning_effort": None if self.reasoning is None else self.reasoning.effort}
        shown = {"name", "description", "parameters"}
        functions = [tool.model_dump(include=shown, exclude_none=True) for tool in self.tools or []]
        fields["tools"] = [{"type": "function", "function": function} for function in functions] or None
        if isinstance(self.tool_choice, NamedFunctionTool):
            fields["tool_choice"] = {"type": "function", "function": {"name": self.tool_choice.name}}
        if self.text is not None and self.text.format is not None:
            fields["response_format"] = self.text.format.for_chat()
        return self.as_chat(fields)

    @property
    def items(self) -> list[dict[str, Any]]:
        """`input` as items."""
        return [{"role": "user", "content": self.input}] if isinstance(self.input, str) else self.input

    def _messages(self, items: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """The items as messages of a conversation. Reasoning joins its turn; successive calls share a message."""
        messages: list[dict[str, Any]] = []
        if self.instructions:
            messages.append({"role": "system", "content": self.instructions})
        reasoning = ""
        for item in items:
            kind = str(item.get("type") or "message")
            if kind == "reasoning":
                reasoning += _text_of(item.get("content") or item.get("summary") or [])
                continue
            for name in {"function_call": ("call_id", "name"), "function_call_output": ("call_id",)}.get(kind, ()):
                if not isinstance(item.get(name), str):
                    raise bad_request(f"input: {name} of a {kind} must be a text.", "input")
            if kind == "function_call":
                function = {"name": item["name"], "arguments": item.get("arguments")}
                call = {"id": item["call_id"], "type": "function", "function": function}
                joins = bool(messages and messages[-1].get("tool_calls"))
                message = messages.pop() if joins else {"role": "assistant", "tool_calls": []}
                message["tool_calls"].append(call)
            elif kind == "function_call_output":
                message = {"role": "tool", "tool_call_id": item["call_id"], "content": _content_of(item.get("output"))}
            elif kind == "message" and isinstance(item.get("role"), str):
                role = "system" if item["role"] == "developer" else item["role"]
                message = {"role": role, "content": _content_of(item.get("content"))}
            else:
                raise bad_request(f"input: items of type {kind!r} are not served here.", "input")
            if reasoning and message["role"] != "assistant" and (not messages or messages[-1]["role"] != "assistant"):
                messages.append({"role": "assistant", "content": ""})  # an answer that ended within its reasoning
            if reasoning:
                of = message if message["role"] == "assistant" else messages[-1]
                of["reasoning_content"], reasoning = of.get("reasoning_content", "") + reasoning, ""
            messages.append(message)
        return messages


def _content_of(content: Any) -> str | list[dict[str, Any]]:
    """An item's content for a message: one text, or parts if there are images."""
    made = []
    for part in content if isinstance(content, list) else []:
        if isinstance(part, dict) and part.get("type") == "input_image":
            image = {"url": part.get("image_url"), "detail": part.get("detail") or "auto"}
            made.append({"type": "image_url", "image_url": image})
        else:
            made.append({"type": "text", "text": _text_of([part])})
    return made if any(part["type"] == "image_url" for part in made) else _text_of(content)


def _text_of(content: Any) -> str:
    """An item's content as one text: the content itself, or the joined texts of its parts."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list) or not all(isinstance(part, dict) for part in content):
        raise bad_request("input: the content of an item is a text or a list of parts.", "input")
    return joined_text(content, "input", _TEXT_PARTS)


class ResponseItems:
    """The items of a response while they are generated; the last may still be growing. Methods return events, without sequence numbers.
    They have copies of items, because they are encoded after the items have changed again.
    """

    def __init__(self) -> None:
        self.items: list[dict[str, Any]] = []
        self._open: dict[str, Any] | None = None

    def add(self, delta: Delta) -> list[dict[str, Any]]:
        """Append what one update adds: reasoning, then text, then calls."""
        events = self._write("reasoning", "reasoning_text", delta.reasoning) if delta.reasoning else []
        events += self._write("message", "output_text", delta.content) if delta.content else []
        return events + [event for call in delta.tool_calls for event in self._call(call)]

    def close(self, status: str = "completed") -> list[dict[str, Any]]:
        """End the item that is growing, if any, with this status. Returns its events."""
        item, self._open = self._open, None
        if item is None:
            return []
        item["status"] = status
        whole = self._event("output_item.done", item=copy.deepcopy(item))
        if item["type"] == "function_call":
            done = {"arguments": item["arguments"], "name": item["name"]}
            return [self._event("function_call_arguments.done", item, **done), whole]
        (part,) = item["content"]
        text = self._event(f"{part['type']}.done", item, content_index=0, text=part["text"], **_logprobs(item))
        return [text, self._event("content_part.done", item, content_index=0, part=dict(part)), whole]

    def _event(self, kind: str, of: dict[str, Any] | None = None, **fields: Any) -> dict[str, Any]:
        """An event about the last item; `of`: that item, if the event names it by its id."""
        name = {} if of is None else {"item_id": of["id"]}
        return {"type": f"response.{kind}", **name, "output_index": len(self.items) - 1, **fields}

    def _write(self, kind: str, part_type: str, text: str) -> list[dict[str, Any]]:
        """Append text to the item that is growing; begin one if it is of another kind."""
        events, item = [], self._open
        if item is None or item["type"] != kind:
            part: dict[str, Any] = {"type": part_type, "text": ""}
            item = {"id": _id("rs"), "summary": [], "type": kind, "status": "in_progress", "content": []}
            if kind == "message":
                part |= {"annotations": [], "logprobs": []}
                item = {"id": _id("msg"), "role": "assistant", "type": kind, "status": "in_progress", "content": []}
            events += self._begin(item)
            events.append(self._event("content_part.added", item, content_index=0, part=dict(part)))
            item["content"].append(part)
        item["content"][0]["text"] += text
        return [*events, self._event(f"{part_type}.delta", item, content_index=0, delta=text, **_logprobs(item))]

    def _call(self, call: dict[str, Any]) -> list[dict[str, Any]]:
        """Append a piece of a tool call; the first piece, which has an id, begins an item."""
        events, function = [], call["function"]
        if "id" in call:
            item = {"id": _id("fc"), "type": "function_call", "status": "in_progress", "call_id": call["id"]}
            events += self._begin({**item, "name": function["name"], "arguments": ""})
        assert self._open is not None
        if function["arguments"]:
            self._open["arguments"] += function["arguments"]
            events.append(self._event("function_call_arguments.delta", self._open, delta=function["arguments"]))
        return events

    def _begin(self, item: dict[str, Any]) -> list[dict[str, Any]]:
        events = self.close()
        self.items.append(item)
        self._open = item
        return [*events, self._event("output_item.added", item=copy.deepcopy(item))]


class Responses(Chat):
    """POST /v1/responses. Submits and parses like `Chat`; only the answer's shape differs."""

    form = ResponsesRequest
    effort_field = "reasoning.effort"

    def __init__(self, server: Server, body: ResponsesRequest, space: str):
        store, previous, earlier = server.store, body.previous_response_id, []
        for name in ("previous_response_id", "store") if store is None else ():
            if getattr(body, name):
                raise bad_request(f"{name} is not served here: answers are not stored (--store).", name)
        if store is not None and previous is not None:
            stored = store.load(space, previous)
            earlier = [*stored["input"], *stored["response"]["output"]]
        super().__init__(server, body.to_chat([*earlier, *body.items]), space)
        self.is_stored = store is not None and body.store is not False
        self.items = [*earlier, *map(_shown_item, body.items)] if self.is_stored else []
        self.request, self.output = body, ResponseItems()
        self.id, self.created = _id("resp"), time.time()
        self.num_reasoning = self.num_events = 0

    def answer(self, results: list[list[Update]]) -> dict[str, Any]:
        (updates,) = results
        for update in updates:
            self._add(update)
        return self._ended(updates[-1])

    def is_long(self, answer: Answer, update: Update) -> bool:
        return self.is_stored and update.request_finished

    def _ended(self, last: Update) -> dict[str, Any]:
        """The response object after the last update. It is stored if that is wanted. Raises ApiError: 500, it cannot be."""
        response = self._response(last)
        if self.is_stored and self.server.store is not None:
            self.server.store.save(self.space, response, self.items)
        return response

    def begin(self) -> bytes:
        kinds = ("response.created", "response.in_progress")
        return self._encoded([{"type": kind, "response": self._response(None)} for kind in kinds])

    def events(self, answer: Answer, update: Update) -> bytes:
        """The events of an update; the last one of a response is response.completed, response.incomplete or response.failed."""
        events = self._add(update)
        if update.request_finished:
            response = self._ended(update)
            events.append({"type": f"response.{response['status']}", "response": response})
        return self._encoded(events)

    def end(self, error: ApiError | None = None) -> bytes:
        if error is None:
            return b""
        code, message = "server_error" if error.status >= 500 else "invalid_prompt", error.body["error"]["message"]
        response = {**self._response(None), "status": "failed", "error": {"code": code, "message": message}}
        return self._encoded([{"type": "response.failed", "response": response}])

    def _encoded(self, events: list[dict[str, Any]]) -> bytes:
        numbered = [{**event, "sequence_number": number} for number, event in enumerate(events, self.num_events)]
        self.num_events += len(events)
        return named_sse(numbered)

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
        response = {
            "id": self.id, "object": "response", "created_at": self.created, "model": self.base["model"],
            "status": "in_progress" if last is None else "incomplete" if cut else "completed", "error": None,
            "incomplete_details": {"reason": "max_output_tokens"} if cut else None, "output": copy.deepcopy(self.output.items),
            "instructions": request.instructions, "max_output_tokens": request.max_output_tokens, "metadata": request.metadata or {},
            "parallel_tool_calls": request.parallel_tool_calls, "previous_response_id": request.previous_response_id,
            "store": self.is_stored, "background": False,
            "temperature": answer.params.temperature, "top_p": answer.params.top_p, "truncation": "disabled",
            "tool_choice": request.model_dump(include={"tool_choice"})["tool_choice"] or "auto",
            "tools": [tool.model_dump() for tool in request.tools or []], "user": request.user,
            "text": {"format": {"type": "text"} if wanted is None else wanted.model_dump(by_alias=True, exclude_none=True)},
            "usage": None,
        }  # fmt: skip
        if last is not None:
            response["usage"] = {
                "input_tokens": answer.num_prompt, "input_tokens_details": {"cached_tokens": answer.num_cached, "cache_write_tokens": 0},
                "output_tokens": answer.num_new,
                "output_tokens_details": {"reasoning_tokens": self.num_reasoning, **self.predicted_tokens()},
                "total_tokens": answer.num_prompt + answer.num_new,
            }  # fmt: skip
            response["metrics"] = answer.timings()
        return response


def _shown_item(item: dict[str, Any]) -> dict[str, Any]:
    """An item of a request as it is listed: with an id that no other item has, and a message's content in parts."""
    kind, content = item.get("type") or "message", item.get("content")
    if kind == "message" and isinstance(content, str):
        part = "output_text" if item["role"] == "assistant" else "input_text"
        content = [{"type": part, "text": content, **({"annotations": []} if part == "output_text" else {})}]
    id = _id("msg" if kind == "message" else "item")
    shown = {"status": "completed", **item, "id": id, "type": kind}
    return shown if content is None else {**shown, "content": content}


def _id(prefix: str) -> str:
    return f"{prefix}_{uuid.uuid4().hex}"


def _logprobs(item: dict[str, Any]) -> dict[str, Any]:
    """A field that OpenAI's clients expect in events about a message's text."""
    return {"logprobs": []} if item["type"] == "message" else {}
