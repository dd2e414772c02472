"""POST /v1/messages, Anthropic's API: the request is translated into a chat request; its answer into blocks and events."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field
from pydantic_core import from_json

from ..engine.structured import reasoning_marks
from ..ipc.messages import Update
from .bodies import Body, Items, Part
from .chat_parser import Delta
from .endpoints import Chat, named_sse
from .errors import ApiError, bad_request
from .protocol import MOST_MESSAGES, ChatRequest
from .responses import TextFormat, TranslatedRequest
from .server import Answer, Server

_BY_TYPE = Field(discriminator="type")
_THINKS = "enable_thinking"  # Qwen's name for a switch in chat templates, which others have adopted
# by type of a block: the type of its events, their field, and the block's
_DELTAS = {
    "text": ("text_delta", "text", "text"), "thinking": ("thinking_delta", "thinking", "thinking"),
    "tool_use": ("input_json_delta", "partial_json", "input"),
}  # fmt: skip


class TextBlock(Part):
    """A text."""

    type: Literal["text"]
    text: str

    def for_chat(self) -> dict[str, Any]:
        """The same part of a chat message."""
        return {"type": "text", "text": self.text}


class Base64Source(Part):
    """A file within the request: its media type, such as image/png, and its bytes in base64."""

    type: Literal["base64"]
    media_type: str
    data: str

    @property
    def address(self) -> str:
        """A data URL."""
        return f"data:{self.media_type};base64,{self.data}"


class UrlSource(Part):
    """A file by its URL: a data URL, or one of a host of --allowed-media-hosts."""

    type: Literal["url"]
    url: str

    @property
    def address(self) -> str:
        """The URL itself."""
        return self.url


class ImageBlock(Part):
    """An image, for models that read images."""

    type: Literal["image"]
    source: Annotated[Base64Source | UrlSource, _BY_TYPE]

    def for_chat(self) -> dict[str, Any]:
        """The same part of a chat message."""
        return {"type": "image_url", "image_url": {"url": self.source.address}}


class ToolResultBlock(Part):
    """What a tool returned for the call with this id; default: nothing."""

    type: Literal["tool_result"]
    tool_use_id: str
    content: str | Items[Annotated[TextBlock | ImageBlock, _BY_TYPE]] = ""


class ThinkingBlock(Part):
    """Reasoning of an earlier answer."""

    type: Literal["thinking"]
    thinking: str


class ToolUseBlock(Part):
    """A call of a tool in an earlier answer: its id, the tool's name and its arguments, an object."""

    type: Literal["tool_use"]
    id: str
    name: str
    input: Any

    def for_chat(self) -> dict[str, Any]:
        """The same call of a chat message."""
        return {"id": self.id, "type": "function", "function": {"name": self.name, "arguments": self.input}}


class SystemMessage(Part):
    """Instructions within the conversation."""

    role: Literal["system"]
    content: str | Annotated[Items[TextBlock], Field(min_length=1)]

    def for_chat(self) -> list[dict[str, Any]]:
        """The same messages of a chat."""
        return [{"role": "system", "content": _parts(self.content)}]


class UserMessage(Part):
    """What the user wrote, and results of tools."""

    role: Literal["user"]
    content: str | Annotated[Items[Annotated[TextBlock | ImageBlock | ToolResultBlock, _BY_TYPE]], Field(min_length=1)]

    def for_chat(self) -> list[dict[str, Any]]:
        """The same messages of a chat, where a tool's result is a message."""
        if isinstance(self.content, str):
            return [{"role": "user", "content": self.content}]
        messages: list[dict[str, Any]] = []
        for block in self.content:
            if isinstance(block, ToolResultBlock):
                messages.append({"role": "tool", "tool_call_id": block.tool_use_id, "content": _parts(block.content)})
            elif messages and messages[-1]["role"] == "user":
                messages[-1]["content"].append(block.for_chat())
            else:
                messages.append({"role": "user", "content": [block.for_chat()]})
        return messages


class AssistantMessage(Part):
    """An earlier answer, with its reasoning and calls; the last message may be the beginning of the answer."""

    role: Literal["assistant"]
    content: str | Items[Annotated[TextBlock | ThinkingBlock | ToolUseBlock, _BY_TYPE]]

    def for_chat(self) -> list[dict[str, Any]]:
        """The same message of a chat."""
        if isinstance(self.content, str):
            return [{"role": "assistant", "content": self.content}]
        message: dict[str, Any] = {"role": "assistant"}
        if reasoning := "".join(block.thinking for block in self.content if isinstance(block, ThinkingBlock)):
            message["reasoning_content"] = reasoning
        if calls := [block.for_chat() for block in self.content if isinstance(block, ToolUseBlock)]:
            message["tool_calls"] = calls
        texts = [block for block in self.content if isinstance(block, TextBlock)]
        return [{**message, "content": _parts(texts)} if texts or not calls else message]


def _parts(content: str | list[Any]) -> str | list[dict[str, Any]]:
    return content if isinstance(content, str) else [block.for_chat() for block in content]


class InputTool(Part):
    """A function that the model may call."""

    type: Literal["custom"] | None = None
    name: str
    description: str | None = None
    input_schema: dict[str, Any]

    def for_chat(self) -> dict[str, Any]:
        """The same tool of a chat request."""
        shown = self.model_dump(include={"name", "description"}, exclude_none=True)
        return {"type": "function", "function": {**shown, "parameters": self.input_schema}}


class ToolChoice(Part):
    """Whether the model must call a tool: auto (it chooses), any (it must), none (it must not)."""

    type: Literal["auto", "any", "none"]
    disable_parallel_tool_use: bool = False


class NamedToolChoice(Part):
    """The tool that the model must call."""

    type: Literal["tool"]
    name: str
    disable_parallel_tool_use: bool = False


class Thinking(Part):
    """Whether the model thinks before it answers."""

    type: Literal["disabled", "adaptive"]


class LimitedThinking(Part):
    """The model thinks, for at most `budget_tokens` tokens."""

    type: Literal["enabled"]
    budget_tokens: int = Field(ge=1)


class OutputConfig(Part):
    """How much the model thinks (effort, for chat templates that read it), and what the text must be (format)."""

    effort: str | None = None
    format: TextFormat | None = None


class CountTokensRequest(Body):
    """POST /v1/messages/count_tokens."""

    model: str | None = None
    messages: Annotated[
        Items[Annotated[UserMessage | AssistantMessage | SystemMessage, Field(discriminator="role")]],
        Field(min_length=1, max_length=MOST_MESSAGES),
    ]
    system: str | Items[TextBlock] | None = None
    tools: list[InputTool] | None = None
    tool_choice: Annotated[ToolChoice | NamedToolChoice, _BY_TYPE] | None = None
    thinking: Annotated[Thinking | LimitedThinking, _BY_TYPE] | None = None
    output_config: OutputConfig | None = None
    chat_template_kwargs: dict[str, Any] | None = None

    def conversation(self) -> dict[str, Any]:
        """The fields of a chat's `Conversation`. If the last message is the assistant's, the answer continues it."""
        messages = [{"role": "system", "content": _parts(self.system)}] if self.system else []
        messages += [made for message in self.messages for made in message.for_chat()]
        fields: dict[str, Any] = {"messages": messages, "chat_template_kwargs": self.chat_template_kwargs}
        fields["continue_final_message"] = self.messages[-1].role == "assistant"
        if self.thinking is not None and self.thinking.type != "adaptive":
            asked = {_THINKS: self.thinking.type == "enabled"}
            fields["chat_template_kwargs"] = {**asked, **(self.chat_template_kwargs or {})}
        if self.output_config is not None:
            fields["reasoning_effort"] = self.output_config.effort
        fields["tools"] = [tool.for_chat() for tool in self.tools or []] or None
        if isinstance(self.tool_choice, NamedToolChoice):
            fields["tool_choice"] = {"type": "function", "function": {"name": self.tool_choice.name}}
        elif self.tool_choice is not None:
            fields["tool_choice"] = {"any": "required"}.get(self.tool_choice.type, self.tool_choice.type)
        return fields


class MessagesRequest(CountTokensRequest, TranslatedRequest):
    """POST /v1/messages."""

    not_served: ClassVar = ("container", "context_management", "mcp_servers", "response_format")
    max_tokens: int = Field(ge=1)
    stop: Items[str] | None = Field(None, alias="stop_sequences")  # type: ignore[assignment]

    def to_chat(self, can_think: bool) -> ChatRequest:
        """The chat request. `can_think`: the server knows how the model marks its reasoning."""
        fields = {**self.conversation(), "max_tokens": self.max_tokens}
        if self.thinking is not None and self.thinking_token_budget is not None:
            raise bad_request("Give either thinking or thinking_token_budget.", "thinking_token_budget")
        if isinstance(self.thinking, LimitedThinking):
            fields["thinking_token_budget"] = self.thinking.budget_tokens
        elif self.thinking is not None and self.thinking.type == "disabled" and can_think:
            fields["thinking_token_budget"] = 0
        if self.tool_choice is not None:
            fields["parallel_tool_calls"] = not self.tool_choice.disable_parallel_tool_use
        if self.output_config is not None and self.output_config.format is not None:
            fields["response_format"] = self.output_config.format.for_chat()
        return self.as_chat(fields)


class Blocks:
    """The blocks of a message while they are generated; the last may still be growing. Methods return events."""

    def __init__(self) -> None:
        self.blocks: list[dict[str, Any]] = []
        self._text = ""  # of the last block; of a call, its input as JSON

    def add(self, delta: Delta) -> list[dict[str, Any]]:
        """Append what one update adds: reasoning, then text, then calls."""
        thinking = {"type": "thinking", "thinking": "", "signature": ""}
        events = self._write(thinking, delta.reasoning) + self._write({"type": "text", "text": ""}, delta.content)
        for call in delta.tool_calls:
            function = call["function"]
            block = {"type": "tool_use", "id": call.get("id"), "name": function.get("name"), "input": {}}
            events += self._write(block, function["arguments"], begins="id" in call)
        return events

    def close(self) -> list[dict[str, Any]]:
        """End the last block, if there is one. The input of a call that was cut off ends where its JSON does."""
        if not self.blocks:
            return []
        block = self.blocks[-1]
        block[_DELTAS[block["type"]][2]] = _input_of(self._text) if block["type"] == "tool_use" else self._text
        return [self._event("stop")]

    def _write(self, block: dict[str, Any], text: str, begins: bool = False) -> list[dict[str, Any]]:
        """Append text to the last block; begin this one first if the last is of another type."""
        events = []
        if begins or (text and (not self.blocks or self.blocks[-1]["type"] != block["type"])):
            events = self.close()
            self.blocks.append(block)
            self._text = ""
            events.append(self._event("start", content_block=dict(block)))
        if text:
            self._text += text
            kind, name, _ = _DELTAS[block["type"]]
            events.append(self._event("delta", delta={"type": kind, name: text}))
        return events

    def _event(self, kind: str, **fields: Any) -> dict[str, Any]:
        return {"type": f"content_block_{kind}", "index": len(self.blocks) - 1, **fields}


def _input_of(text: str) -> Any:
    """The input of a call, from its JSON, which may have been cut off; the text itself if it is not JSON."""
    try:
        return from_json(text or "{}", allow_inf_nan=False, allow_partial=True)
    except ValueError:
        return text


class Messages(Chat):
    """POST /v1/messages. Submits and parses like `Chat`; only the answer's shape differs."""

    form = MessagesRequest
    effort_field = "output_config.effort"
    prefix = "msg"

    def __init__(self, server: Server, body: MessagesRequest, space: str):
        can_think = reasoning_marks(server.response_template) is not None
        super().__init__(server, body.to_chat(can_think), space)
        self.blocks = Blocks()
        is_unread = not can_think and _THINKS not in str(server.tokenizer.chat_template)
        self.ignores_thinking = is_unread and body.thinking is not None and body.thinking.type == "disabled"

    def prepare(self) -> None:
        super().prepare()
        if self.ignores_thinking:
            self.ignored_fields.append("thinking")

    def answer(self, results: list[list[Update]]) -> dict[str, Any]:
        (updates,) = results
        for update in updates:
            self._add(update)
        return {**self._message(), **self._stop(updates[-1]), "metrics": self.answers[0].timings()}

    def begin(self) -> bytes:
        return named_sse([{"type": "message_start", "message": self._message()}])

    def events(self, answer: Answer, update: Update) -> bytes:
        events = self._add(update)
        if update.request_finished:
            whole = {"delta": self._stop(update), "usage": self.usage(), "metrics": answer.timings()}
            events += [{"type": "message_delta", **whole}, {"type": "message_stop"}]
        return named_sse(events)

    def end(self, error: ApiError | None = None) -> bytes:
        return b"" if error is None else named_sse([error.anthropic])

    def usage(self) -> dict[str, Any]:
        """Numbers of tokens; as in Anthropic's API, `input_tokens` are those that were not cached."""
        (answer,) = self.answers
        cached = {"cache_creation_input_tokens": 0, "cache_read_input_tokens": answer.num_cached}
        return {"input_tokens": answer.num_prompt - answer.num_cached, **cached, "output_tokens": answer.num_new}

    def _add(self, update: Update) -> list[dict[str, Any]]:
        """Append an update's text to the blocks. Returns its events."""
        is_last = update.finish_reason is not None
        events = self.blocks.add(self.parsers[0].feed(update.text, last=is_last))
        return events + (self.blocks.close() if is_last else [])

    def _message(self) -> dict[str, Any]:
        return {
            "id": self.base["id"], "type": "message", "role": "assistant", "model": self.base["model"],
            "content": self.blocks.blocks, "stop_reason": None, "stop_sequence": None, "usage": self.usage(),
        }  # fmt: skip

    def _stop(self, last: Update) -> dict[str, str | None]:
        """Why the message has ended. `last`: the update that ended it."""
        text = last.stop_reason if isinstance(last.stop_reason, str) else None
        reason = "end_turn" if text is None else "stop_sequence"
        if last.finish_reason == "length":
            reason = "max_tokens"
        elif self.parsers[0].num_calls:
            reason = "tool_use"
        return {"stop_reason": reason, "stop_sequence": text}
