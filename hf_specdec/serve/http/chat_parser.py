"""Sorts the text that a model writes in a conversation into content, reasoning and tool calls, by transformers' response templates."""

from __future__ import annotations

import json
import logging
import re
import uuid
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from ..engine.structured import REASONING

logger = logging.getLogger(__name__)

# Raised by transformers' parser for text that breaks the template; RecursionError for JSON that is nested too deeply.
_PARSER_ERRORS = (ValueError, KeyError, TypeError, RecursionError)
_JSON = json.JSONDecoder()
# A call in the JSON of "required" (`tool_grammar`), up to its arguments, with what divides it from the call before.
_FORCED_CALL = re.compile(r'(?:\s*\})?\s*[\[,]\s*\{\s*"name"\s*:\s*("(?:[^"\\]|\\.)*")\s*,\s*"parameters"\s*:\s*')


@dataclass
class Delta:
    """What a piece of text adds to a message. `tool_calls` are in OpenAI's shape for streams."""

    content: str = ""
    reasoning: str = ""
    tool_calls: list[dict[str, Any]] = field(default_factory=list)


def without_tools(template: dict | None) -> dict | None:
    """The template without its tool calls: text that looks like one then stays in the content."""
    if template is None or "tool_calls" not in template["fields"]:
        return template
    return {**template, "fields": {name: mark for name, mark in template["fields"].items() if name != "tool_calls"}}


class MessageParser:
    """Sorts the text of one choice while it is generated.

    Args:
        make_parser: makes a `ResponseParser` of transformers; None: all text is content.
        forced: "required" or a function's name: the text after the reasoning is JSON that a grammar has forced (`tool_grammar`).
            None: the model decides whether to call a function.
        parallel: False: calls after the first are dropped.
    """

    def __init__(self, make_parser: Callable[[], Any] | None, forced: str | None = None, parallel: bool = True):
        self._make, self._fed = make_parser, ""
        self._parser: Any = None if make_parser is None else make_parser()
        self._forced, self._parallel = forced, parallel
        self._body = ""  # text of the structured region that is open
        self._calls = ""  # with "required": the JSON of the calls so far
        self._space: str | None = None  # held back: delivered if text follows; None: the region has no text yet
        self.num_calls = 0

    def feed(self, text: str, last: bool = False) -> Delta:
        """Returns what new text adds to the message. `last`: no more text will come."""
        delta = Delta()
        if self._parser is None:
            self._content(delta, text)
        else:
            self._parse(delta, text, last)
            self._fed += text
        if last and self._forced == "required":
            self._required(delta)
        return delta

    def _parse(self, delta: Delta, text: str, last: bool) -> None:
        """Sort text with transformers' parser. If that fails, the rest of the message is content."""
        rest = ""
        try:
            events = self._parser.feed(text)
        except _PARSER_ERRORS as error:
            events, rest = self._events_before_failure(text, error)
        if last and self._parser is not None:
            held = _unread(self._parser)
            try:
                events = [*events, *self._parser.finalize()[1]]
            except _PARSER_ERRORS as error:
                rest = held
                self._give_up(error)
        for event in events:
            self._take(delta, event)
        if self._parser is None:  # it has failed: what it could not parse becomes content
            delta.content, self._body = delta.content + self._body + rest, ""

    def _events_before_failure(self, text: str, error: Exception) -> tuple[list[dict[str, Any]], str]:
        """The events up to where the parser fails in `text`, read again character by character, and the text that no event has told."""
        assert self._make is not None
        again, events = self._make(), []
        again.feed(self._fed)
        self._give_up(error)
        for i, character in enumerate(text):
            known = len(again._body)
            try:
                events += again.feed(character)
            except _PARSER_ERRORS:
                return events, again._body[known:] + _unread(again) + text[i + 1 :]
        raise error

    def _give_up(self, error: Exception) -> None:
        logger.warning("The model's text does not follow its response template: %s", error)
        self._parser = None

    def _take(self, delta: Delta, event: dict[str, Any]) -> None:
        kind, name = event["type"], event["field"]
        if kind == "region_open":
            self._body, self._space = "", None
        elif kind == "region_close":
            if name == "tool_calls":
                self._calls_of(delta, event["value"])
            self._body, self._space = "", None
        elif event.get("dirty") or name == "tool_calls":
            self._body += event["text"]
        elif name in REASONING:
            delta.reasoning += self._stripped(event["text"])
        elif name == "content":
            self._content(delta, self._stripped(event["text"]))

    def _stripped(self, text: str) -> str:
        """A piece of a region's text, without white space at the region's ends, as transformers strips whole regions."""
        text = text.lstrip() if self._space is None else self._space + text
        kept = text.rstrip()
        if kept or self._space is not None:
            self._space = text[len(kept) :]
        return kept

    def _content(self, delta: Delta, text: str) -> None:
        if self._forced is None:
            delta.content += text
        elif self._forced == "required":
            self._calls += text
        elif text:
            if not self.num_calls:
                self._call(delta, self._forced, "")
            delta.tool_calls.append({"index": 0, "function": {"arguments": text}})

    def _required(self, delta: Delta) -> None:
        """Add the calls of "required", whose text is complete now. The last one's arguments may have been cut off."""
        end = 0
        while (call := _FORCED_CALL.match(self._calls, end)) is not None:
            start = call.end()
            try:
                end = _JSON.raw_decode(self._calls, start)[1]
            except (ValueError, RecursionError):
                end = len(self._calls)
            self._call(delta, json.loads(call[1]), self._calls[start:end])

    def _calls_of(self, delta: Delta, value: Any) -> None:
        """Add the calls of a region, which are what the template makes of its text. If that is not of calls, the text is content."""
        calls = value if isinstance(value, list) else [value]
        functions: list[Any] = [call.get("function") if isinstance(call, dict) else None for call in calls]
        if not all(isinstance(of, dict) and isinstance(of.get("name"), str) and "arguments" in of for of in functions):
            delta.content += self._body
            return
        for function in functions:
            self._call(delta, function["name"], function["arguments"])

    def _call(self, delta: Delta, name: str, arguments: Any) -> None:
        """Add a tool call, unless there is one already and parallel calls are not allowed."""
        if self.num_calls and not self._parallel:
            return
        text = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
        function = {"name": name, "arguments": text}
        call = {"index": self.num_calls, "id": f"call_{uuid.uuid4().hex}", "type": "function", "function": function}
        delta.tool_calls.append(call)
        self.num_calls += 1


def _unread(parser: Any) -> str:
    """The text that a parser has been fed and that belongs to no region yet. transformers has no public name for it."""
    return parser._buffer[parser._pos :]


def joined_calls(deltas: list[Delta]) -> list[dict[str, Any]]:
    """Whole tool calls from their pieces, in the order of their indices."""
    calls: dict[int, dict[str, Any]] = {}
    for call in (call for delta in deltas for call in delta.tool_calls):
        if "id" in call:
            calls[call["index"]] = {"id": call["id"], "type": "function", "function": dict(call["function"])}
        else:
            calls[call["index"]]["function"]["arguments"] += call["function"]["arguments"]
    return list(calls.values())


def tool_grammar(functions: dict[str, dict[str, Any]], forced: str, parallel: bool) -> dict[str, Any]:
    """The JSON schema of `forced` calls: the arguments of a named function, or with "required" a list of calls; of one call unless
    `parallel`. `functions`: name → JSON schema of the parameters.
    """
    if forced != "required":
        return functions[forced]
    calls: list[dict[str, Any]] = [
        {
            "type": "object", "properties": {"name": {"const": name}, "parameters": {"$ref": f"#/$defs/{i}"}},
            "required": ["name", "parameters"], "additionalProperties": False,
        }
        for i, name in enumerate(functions)
    ]  # fmt: skip
    # With an `$id`, a schema's references to its parts lead into itself, wherever it stands. In older drafts an `$id` beside a `$ref` is
    # ignored, so no schema names its draft.
    bodies = [{key: part for key, part in schema.items() if key != "$schema"} for schema in functions.values()]
    schemas = {str(i): {"$id": f"urn:function:{i}", **body} for i, body in enumerate(bodies)}
    most = {} if parallel else {"maxItems": 1}
    return {"type": "array", "items": {"anyOf": calls}, "minItems": 1, **most, "$defs": schemas}
