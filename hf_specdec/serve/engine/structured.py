"""Structured output: grammars that a text must match, compiled by llguidance in a thread of their own."""

from __future__ import annotations

import json
import threading
from collections import OrderedDict
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, fields
from typing import Any

from ...sampling.grammar import Reasoning, shortened

# Largest grammar, in bytes: it compiles in a few seconds at most, and cannot be nested so deeply that the stack overflows.
MOST_BYTES = 32 << 10
_STACK_BYTES = 256 << 20  # stack of the compiling thread, which recurses as deeply as the grammar is nested
_MOST_KEPT = 64  # number of compiled grammars that are kept
# By default JSON may have one space after "," and ":", and no other white space, on which a model could spend all of its tokens.
_ONE_SPACE = {"whitespace_flexible": False, "item_separator": ", ?", "key_separator": ": ?"}
REASONING = ("reasoning_content", "thinking", "reasoning")  # names of the reasoning field in response templates
WHITE_SPACE = frozenset({"disable_any_whitespace", "whitespace_pattern"})  # fields that only say how JSON is spaced


@dataclass
class StructuredOutputsParams:
    """What a text must match. Give exactly one of the first five; names are vLLM's.

    Attributes:
        json: a JSON schema, as a dictionary or text.
        json_object: any JSON object.
        regex: a regular expression for the whole text.
        choice: one of these texts.
        grammar: a context-free grammar, in Lark's or GBNF's notation.
        disable_any_whitespace: JSON without white space between its parts, where one space may otherwise follow "," and ":".
        whitespace_pattern: a regular expression for the white space that may stand at any place between the parts of JSON.

    Raises:
        ValueError: none or several are given, or one is empty, of the wrong type, or too large.
    """

    json: str | dict | None = None
    json_object: bool | None = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    disable_any_whitespace: bool = False
    whitespace_pattern: str | None = None

    def __post_init__(self) -> None:
        names = ("json", "json_object", "regex", "choice", "grammar")
        given = [name for name in names if getattr(self, name) not in (None, False)]
        if len(given) != 1:
            raise ValueError(f"structured_outputs needs exactly one of {', '.join(names)}; {len(given)} are given.")
        for name, kind in (("regex", str), ("grammar", str), ("json", (str, dict)), ("whitespace_pattern", str)):
            value = getattr(self, name)
            if value is not None and not isinstance(value, kind):
                raise ValueError(f"structured_outputs: {name} has the wrong type, {type(value).__name__}.")
        spaces = [name for name in sorted(WHITE_SPACE) if getattr(self, name)]
        if len(spaces) > 1 or (spaces and self.json is None and not self.json_object):
            raise ValueError(f"structured_outputs: give either {' or '.join(sorted(WHITE_SPACE))}, for JSON only.")
        choice = ["a text"] if self.choice is None else self.choice
        if not isinstance(choice, list) or not choice or not all(isinstance(text, str) and text for text in choice):
            raise ValueError("structured_outputs: choice must be a list of texts that are not empty.")
        try:
            size = len(self.source.encode())
        except (RecursionError, TypeError, UnicodeEncodeError) as error:
            raise ValueError(f"structured_outputs: {given[0]} cannot be written as JSON text: {error}") from None
        if size > MOST_BYTES:
            raise ValueError(f"structured_outputs: {given[0]} has {size} bytes; {MOST_BYTES} are allowed.")

    @classmethod
    def of(cls, given: dict[str, Any]) -> StructuredOutputsParams:
        """From a dictionary. Raises ValueError: a key does not exist, or see the class."""
        names = [field.name for field in fields(cls)]
        unknown = ", ".join(repr(key) for key in given if key not in names)
        if unknown:
            raise ValueError(f"structured_outputs has no {unknown}; its keys are {', '.join(names)}.")
        return cls(**given)

    @property
    def source(self) -> str:
        """All fields as text: equal for equal grammars."""
        json_text = self.json if self.json is None or isinstance(self.json, str) else json.dumps(self.json)
        return json.dumps(
            [json_text, self.json_object, self.regex, self.choice, self.grammar, self.disable_any_whitespace, self.whitespace_pattern],
            ensure_ascii=False,
        )  # fmt: skip

    def to_llguidance(self) -> str:
        """The grammar in llguidance's notation. Raises ValueError: the grammar is malformed."""
        from llguidance import LLMatcher
        from llguidance.gbnf_to_lark import any_to_lark

        if self.regex is not None:
            return LLMatcher.grammar_from_regex(self.regex)
        if self.choice is not None:
            return LLMatcher.grammar_from_lark("start: " + " | ".join(map(json.dumps, self.choice)))
        if self.grammar is not None:
            try:
                return LLMatcher.grammar_from_lark(any_to_lark(self.grammar))
            except Exception as error:  # its parser has no error class of its own
                raise ValueError(f"structured_outputs: the grammar cannot be read: {shortened(str(error))}") from None
        schema = '{"type": "object"}' if self.json is None else self.json
        spaces: dict[str, Any] = {"whitespace_flexible": False} if self.disable_any_whitespace else _ONE_SPACE
        if self.whitespace_pattern is not None:
            spaces = {"whitespace_flexible": True, "whitespace_pattern": self.whitespace_pattern}
        try:
            return LLMatcher.grammar_from_json_schema(schema, defaults=spaces)  # type: ignore[arg-type]
        except (ValueError, RecursionError) as error:
            raise ValueError(f"structured_outputs: the schema is not valid JSON: {shortened(str(error))}") from None


class GrammarCompiler:
    """Compiles and keeps the grammars of a model with a fast tokenizer. Any thread may call it; a thread of its own compiles. `ends`:
    end-of-sequence ids, which may follow a complete text.
    """

    def __init__(self, tokenizer: Any, vocab_size: int, ends: frozenset[int]):
        self.tokenizer, self.ends = tokenizer, ends
        self.vocab_size = vocab_size if tokenizer is None else max(vocab_size, len(tokenizer))
        self._llguidance: Any = None  # llguidance's form of the tokenizer, which takes a second to make
        self._kept: OrderedDict[str, Any] = OrderedDict()  # compiled grammars by source, least recently used first
        self._lock = threading.Lock()
        self._thread: ThreadPoolExecutor | None = None

    def start(self, params: StructuredOutputsParams) -> Future:
        """Begin to compile a grammar, unless it is kept. The future's result is its matcher, which must be copied before it is used; its
        error is ValueError if the grammar is malformed or too complex, or llguidance or a fast tokenizer is missing.
        """
        with self._lock:
            matcher = self._kept.get(params.source)
            if matcher is not None:
                self._kept.move_to_end(params.source)
                done = Future()
                done.set_result(matcher)
                return done
            if self._thread is None:
                self._thread, size = ThreadPoolExecutor(1, "hf-specdec-grammar"), threading.stack_size(_STACK_BYTES)
                try:
                    self._thread.submit(int).result()  # starts the thread
                finally:
                    threading.stack_size(size)
            return self._thread.submit(self._compile, params)

    def matcher(self, params: StructuredOutputsParams) -> Any:
        """A new matcher at the beginning of a grammar, within microseconds if the grammar is kept. Raises ValueError: see `start`."""
        return self.start(params).result().deep_copy()

    def close(self) -> None:
        """End the thread; compiled grammars are kept."""
        with self._lock:
            if self._thread is not None:
                self._thread.shutdown(wait=False)
                self._thread = None

    def _compile(self, params: StructuredOutputsParams) -> Any:
        """Compile and keep a grammar, and compute one mask with it. Runs in the compiling thread."""
        try:
            from llguidance import LLMatcher, hf
        except ImportError:
            raise ValueError("structured_outputs need llguidance: pip install 'hf-specdec[serve]'.") from None
        if not getattr(self.tokenizer, "is_fast", False):
            raise ValueError("structured_outputs need a fast tokenizer (one with a tokenizer.json).")
        if self._llguidance is None:
            size, ends = self.vocab_size, sorted(self.ends) or None
            self._llguidance = hf.from_tokenizer(self.tokenizer, n_vocab=size, eos_token=ends)
        matcher = LLMatcher(self._llguidance, params.to_llguidance(), log_level=0)
        trial = matcher.deep_copy()
        if not trial.is_error():
            trial.compute_bitmask()  # some grammars fail only here
        if trial.is_error():
            raise ValueError(f"structured_outputs: {shortened(trial.get_error())}")
        with self._lock:
            self._kept[params.source] = matcher
            while len(self._kept) > _MOST_KEPT:
                self._kept.popitem(last=False)
        return matcher


def response_template_of(tokenizer: Any, model: Any) -> dict | None:
    """The tokenizer's response template, or the one that transformers has for this family of models; None if neither exists."""
    template = getattr(tokenizer, "response_template", None)
    if template is not None or not hasattr(tokenizer, "get_response_parser"):
        return template
    try:
        from transformers.cli.serving.utils import get_response_template
    except ImportError:  # this version of transformers has no such function, or has moved it
        return None
    return get_response_template(tokenizer, model)


def reasoning_marks(template: dict | None) -> tuple[str, tuple[str, ...], tuple[str, ...]] | None:
    """The template's name for reasoning, the texts that begin it, and those that end it; None if it does not say."""
    fields = {} if template is None else template["fields"]
    name = next((name for name in REASONING if name in fields), None)
    if name is None or not {"open", "close"} <= fields[name].keys():
        return None
    marks = (fields[name][key] for key in ("open", "close"))
    opens, closes = ((mark,) if isinstance(mark, str) else tuple(mark) for mark in marks)
    return name, opens, closes


def reasoning_before(
    tokenizer: Any, template: dict | None, prefix: str, is_constrained: bool = True
) -> Reasoning | None:
    """The reasoning that may come between a prompt, whose text is `prefix`, and the answer itself. None if none can come, or the template
    does not say how reasoning begins and ends. `is_constrained`: a grammar describes the answer.
    """
    marks = reasoning_marks(template)
    if marks is None:
        return None
    name, opens, closes = marks
    state = None
    for event in tokenizer.get_response_parser(template, prefix=prefix).initial_events:
        if event["field"] == name and event["type"] != "region_chunk":
            state = event["type"]
    if state == "region_close":
        return None
    end = tuple(tokenizer.encode(closes[0], add_special_tokens=False))
    if state == "region_open":
        return Reasoning((), closes, end)
    ids = tuple(tokenizer.encode(opens[0], add_special_tokens=False))
    # Before a grammar, only a special token can begin it: an ordinary one, such as "<", may also be the answer's first token.
    may_begin = bool(ids) and (not is_constrained or ids[0] in tokenizer.added_tokens_decoder)
    return Reasoning(ids, closes, end) if may_begin else None
