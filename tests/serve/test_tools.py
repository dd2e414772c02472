"""Tool calls and reasoning: parsed by transformers' response templates, streamed, and forced by grammars."""

import copy
import json

import openai
import pytest
import torch
from helpers_server import in_thread
from oracle import tiny_llama

from hf_specdec.serve import LLM, SamplingParams
from hf_specdec.serve.engine.structured import (
    GrammarCompiler,
    StructuredOutputsParams,
    reasoning_before,
    response_template_of,
)
from hf_specdec.serve.http.chat_parser import (
    MessageParser,
    joined_calls,
    tool_grammar,
    without_tools,
)
from hf_specdec.serve.http.errors import ApiError
from hf_specdec.serve.http.protocol import ChatRequest
from hf_specdec.serve.http.server import Limits, Server

SPACES = {"226": 100, "453": 100}  # " " and ' "'
TEMPLATE = {
    "defaults": {"role": "assistant"},
    "start_anchor": "<|assistant|>",
    "fields": {
        "reasoning_content": {"open": "<think>", "close": "</think>", "content": "text"},
        "tool_calls": {
            "open_pattern": r"\s*<tool_call>",
            "close": "</tool_call>",
            "repeats": True,
            "content": "json",
            "transform": {"type": "function", "function": "{content}"},
        },
        "content": {"close": "<|end|>", "content": "text"},
    },
}
WEATHER = {
    "type": "object",
    "properties": {"city": {"enum": ["Rome", "Oslo"]}, "days": {"type": "integer", "minimum": 1, "maximum": 9}},
    "required": ["city", "days"],
    "additionalProperties": False,
}
TOOLS = [
    {"type": "function", "function": {"name": "weather", "description": "Tells the weather.", "parameters": WEATHER}},
    {
        "type": "function",
        "function": {"name": "clock", "parameters": {"type": "object", "additionalProperties": False}},
    },
]
ASK = [{"role": "user", "content": "What is the weather?"}]
CALL = r'<tool_call>\{"name": "weather", "arguments": \{"city": "Oslo", "days": [1-9]\}\}</tool_call>'


def parser_of(tokenizer, prefix="<|assistant|>", tools=None, forced=None, template=TEMPLATE, parallel=True):
    return MessageParser(lambda: tokenizer.get_response_parser(template, prefix=prefix, tools=tools), forced, parallel)


def fed(parser, text, size):
    pieces = [text[i : i + size] for i in range(0, len(text), size)]
    return [parser.feed(piece, last=i == len(pieces) - 1) for i, piece in enumerate(pieces)]


@pytest.mark.parametrize("size", [1, 3, 7, 1000])
def test_text_is_sorted_however_it_is_cut(tiny_tokenizer, size):
    text = (
        '<think>\nIs it warm? \n</think>\n\nI will look. <tool_call>{"name": "weather", "arguments": {"city": "Oslo"}}'
        '</tool_call>\n<tool_call>{"name": "clock", "arguments": {}}</tool_call>'
    )
    parser = parser_of(tiny_tokenizer)
    found = fed(parser, text, size)
    assert "".join(each.reasoning for each in found) == "Is it warm?"
    assert "".join(each.content for each in found) == "I will look."
    calls = joined_calls(found)
    assert [call["function"] for call in calls] == [
        {"name": "weather", "arguments": '{"city": "Oslo"}'},
        {"name": "clock", "arguments": "{}"},
    ]
    assert len({call["id"] for call in calls}) == 2 and parser.num_calls == 2
    parsed = tiny_tokenizer.parse_response(text, TEMPLATE, prefix="<|assistant|>")  # transformers' own answer
    assert parsed["reasoning_content"] == "Is it warm?"
    assert [call["function"]["name"] for call in parsed["tool_calls"]] == ["weather", "clock"]
    only_one = parser_of(tiny_tokenizer, parallel=False)
    assert len(joined_calls(fed(only_one, text, size))) == 1


@pytest.mark.parametrize("size", [1, 1000])
def test_what_no_template_describes_is_shown(tiny_tokenizer, size):
    found = fed(parser_of(tiny_tokenizer), 'Well. <tool_call>{"name": weather</tool_call> Done.', size)
    assert "".join(each.content for each in found) == 'Well.{"name": weather Done.' and not joined_calls(found)
    cut = fed(parser_of(tiny_tokenizer), 'Well. <tool_call>{"name": wea', size)
    assert "".join(each.content for each in cut) == 'Well.{"name": wea' and not joined_calls(cut)
    plain = fed(parser_of(tiny_tokenizer, template=without_tools(TEMPLATE)), "A <tool_call>x</tool_call>", size)
    assert "".join(each.content for each in plain) == "A <tool_call>x</tool_call>"


@pytest.mark.parametrize("size", [1, 1000])
@pytest.mark.parametrize(
    ("close", "text", "content"),
    [
        ({"close_pattern": r"</tool_call>\s*"}, "<tool_call>{bad</tool_call>\n Done.", "{badDone."),
        ({"close": ["</tool_call>", "</tool_call>!"]}, "<tool_call>{bad</tool_call>Done.", "{badDone."),
        ({"close": ["!", "xxx!"]}, "<tool_call>{bad xx!Done.", "{bad xxDone."),
        ({"close": "</tool_call>"}, "<tool_call>{bad</tool_", "{bad</tool_"),
    ],
)
def test_no_character_is_lost_where_the_parser_fails(tiny_tokenizer, size, close, text, content):
    """It fails where a call ends, which may be known only after the next character, or in the middle of the mark."""
    calls = {key: value for key, value in TEMPLATE["fields"]["tool_calls"].items() if key != "close"}
    template = {**TEMPLATE, "fields": {**TEMPLATE["fields"], "tool_calls": {**calls, **close}}}
    found = fed(parser_of(tiny_tokenizer, template=template), text, size)
    assert "".join(each.content for each in found) == content and not joined_calls(found)


@pytest.mark.parametrize("size", [1, 1000])
@pytest.mark.parametrize(
    "body", ['{"x": 1}', '{"name": "f"}', '{"name": 1, "arguments": {}}', "[1]", '"f"', "null", "[" * 3000]
)
def test_json_that_is_no_call_is_content(tiny_tokenizer, size, body):
    found = fed(parser_of(tiny_tokenizer), f"Well. <tool_call>{body}</tool_call> Done.", size)
    content = "".join(each.content for each in found)
    assert content.replace(" ", "") == f"Well.{body}Done.".replace(" ", "") and not joined_calls(found)


@pytest.mark.parametrize("size", [1, 1000])
@pytest.mark.parametrize("forced", ["required", "weather"])
def test_a_forced_call_that_is_cut_is_still_a_call(forced, size):
    """Wherever the text ends: nothing of it is content, and the last call has what was written of its arguments."""
    names, arguments = ["weather", 'clo"ck', "n"], ['{"city": "a\\\\]}, {\\"name", "days": [1, 2]}', "{}", "-1.5"]
    pairs = zip(map(json.dumps, names), arguments, strict=True)
    text = "[" + ", ".join(f'{{"name": {name}, "parameters": {each}}}' for name, each in pairs) + "]"
    text = text if forced == "required" else arguments[0]
    for end in range(len(text) + 1):
        parser, begun = MessageParser(None, forced), text[:end]
        pieces = [begun[i : i + size] for i in range(0, end, size)]
        found = [*map(parser.feed, pieces), parser.feed("", last=True)]
        calls = [call["function"] for call in joined_calls(found)]
        assert not any(each.content for each in found)
        num_calls = begun.count('"parameters":') if forced == "required" else min(end, 1)
        assert [call["name"] for call in calls] == names[:num_calls]
        written = [call["arguments"] for call in calls]
        assert written[:-1] == arguments[: max(num_calls - 1, 0)]
        assert not calls or arguments[num_calls - 1].startswith(written[-1])
    assert written == arguments[:num_calls] and num_calls == (3 if forced == "required" else 1)


def test_reasoning_that_the_prompt_began(tiny_tokenizer):
    found = fed(parser_of(tiny_tokenizer, prefix="<|assistant|><think>\n"), "hm</think> yes", 2)
    assert "".join(each.reasoning for each in found) == "hm" and "".join(each.content for each in found) == "yes"
    begun = reasoning_before(tiny_tokenizer, TEMPLATE, "<|user|>x<|assistant|><think>\n")
    assert begun.opens == () and begun.closes == ("</think>",)
    assert reasoning_before(tiny_tokenizer, TEMPLATE, "<|assistant|><think>\n\n</think>\n\n") is None
    assert reasoning_before(tiny_tokenizer, TEMPLATE, "<|assistant|>") is None  # "<" is an ordinary token
    fields = {"reasoning_content": {"open": "<|system|>", "close": "x"}, "content": {}}
    may = reasoning_before(
        tiny_tokenizer, {"start_anchor": "<|assistant|>", "fields": fields}, "<|user|>x<|assistant|>"
    )
    assert tiny_tokenizer.decode(may.opens) == "<|system|>"
    assert reasoning_before(tiny_tokenizer, None, "") is None
    free = reasoning_before(tiny_tokenizer, TEMPLATE, "<|assistant|>", is_constrained=False)
    assert tiny_tokenizer.decode(free.opens) == "<think>" and tiny_tokenizer.decode(free.end) == "</think>"


def test_templates_that_transformers_knows(tiny_tokenizer, tiny_model):
    class Model:
        class config:
            model_type = "qwen3"

    found = response_template_of(tiny_tokenizer, Model)
    assert found is None or "tool_calls" in found["fields"]  # None: this version of transformers keeps none
    assert response_template_of(tiny_tokenizer, tiny_model) is None


def test_llm_limits_the_reasoning(tiny_model, tiny_tokenizer):
    tokenizer = copy.deepcopy(tiny_tokenizer)
    tokenizer.response_template = TEMPLATE
    llm = LLM(tiny_model, tokenizer, {"method": "ngram", "prompt_lookup_min": 1}, max_model_len=128)
    params, text = SamplingParams(temperature=0, max_tokens=24), "<|assistant|><think>Once upon a time"
    wanted = [text, text, "<|assistant|>Once upon a time"]
    own = [params, params.copy(thinking_token_budget=4), params.copy(thinking_token_budget=4)]
    free, limited, other = (each.outputs[0].token_ids for each in llm.generate(wanted, own, use_tqdm=False))
    end = tokenizer.encode("</think>", add_special_tokens=False)
    assert limited[: 4 + len(end)] == free[:4] + end and len(limited) == 24
    (unlimited,) = llm.generate(wanted[2:], params, use_tqdm=False)
    assert other == unlimited.outputs[0].token_ids
    llm.close()


# ---- over HTTP ------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def server():
    fields = {
        **TEMPLATE["fields"],
        "reasoning_content": {"open": "<think>", "close": [".", "</think>"]},
    }  # the model writes "."
    config = {"method": "draft_model", "model": "tiny-draft", "num_speculative_tokens": 3}
    with in_thread(config, response_template={**TEMPLATE, "fields": fields}) as made:
        yield made


def both(client, **arguments):
    """The message and finish reason, after checking that the stream has the same."""
    arguments = {"model": "tiny", "messages": ASK, "temperature": 0, "max_completion_tokens": 300, **arguments}
    whole = client.chat.completions.create(**arguments).choices[0]
    content, reasoning, reasons, calls = "", "", [], {}
    for frame in client.chat.completions.create(**arguments, stream=True):
        delta = frame.choices[0].delta
        content += delta.content or ""
        reasoning += getattr(delta, "reasoning_content", None) or ""
        for call in delta.tool_calls or []:
            if call.id:
                assert call.index not in calls and call.type == "function"
                calls[call.index] = [call.function.name, ""]
            calls[call.index][1] += call.function.arguments
        reasons.append(frame.choices[0].finish_reason)
    assert reasons[-1] == whole.finish_reason and not any(reasons[:-1])
    assert content == (whole.message.content or "")
    assert reasoning == (getattr(whole.message, "reasoning_content", None) or "")
    written = [[call.function.name, call.function.arguments] for call in whole.message.tool_calls or []]
    assert [calls[i] for i in sorted(calls)] == written
    return whole.message, whole.finish_reason


def test_the_model_chooses_to_call(client):
    """The text is forced, as a trained model would write it. A grammar of the client's is about the text, so calls are text too."""
    text = f"<think>[a-z ]{{3,20}}</think>I look\\.{CALL}"
    message, reason = both(client, tools=TOOLS, extra_body={"structured_outputs": {"regex": text}})
    assert message.content.startswith("I look.<tool_call>") and reason == "stop" and not message.tool_calls
    assert message.reasoning_content


def test_calls_that_the_model_makes(client, tiny_tokenizer):
    """The call is begun for the model, and its turn ends there."""
    begun = '<tool_call>{"name": "weather", "arguments": {"city": "Oslo", "days": 2}}'
    space = tiny_tokenizer.convert_tokens_to_ids("Ġ")
    more = {"continue_final_message": True, "add_generation_prompt": False, "allowed_token_ids": [space]}
    messages = [*ASK, {"role": "assistant", "content": begun}]
    message, reason = both(client, messages=messages, tools=TOOLS, stop=[" "], extra_body=more)
    (call,) = message.tool_calls
    assert (reason, call.function.name, message.content) == ("tool_calls", "weather", None)
    assert json.loads(call.function.arguments) == {"city": "Oslo", "days": 2}
    message, reason = both(client, messages=messages, tools=TOOLS, tool_choice="none", stop=[" "], extra_body=more)
    assert not message.tool_calls and reason == "stop"


def test_forced_calls(client):
    message, reason = both(client, tools=TOOLS, tool_choice={"type": "function", "function": {"name": "weather"}})
    assert reason == "stop" and message.content is None
    (call,) = message.tool_calls
    assert call.function.name == "weather" and json.loads(call.function.arguments)["city"] in ("Rome", "Oslo")
    message, reason = both(client, tools=TOOLS, tool_choice="required", parallel_tool_calls=False)
    assert reason == "tool_calls" and len(message.tool_calls) == 1
    arguments = json.loads(message.tool_calls[0].function.arguments)
    assert set(arguments) == (set(WEATHER["required"]) if message.tool_calls[0].function.name == "weather" else set())
    for most in (1, 20):
        message, reason = both(client, tools=TOOLS[:1], tool_choice="required", max_completion_tokens=most)
        assert reason == "length" and not message.content and len(message.tool_calls or []) == (most > 1)


def test_how_json_is_spaced(client):
    """At most one space after "," and ":", in calls and formats alike; `structured_outputs` may say otherwise."""
    named = {"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "weather"}}}
    schema = {"type": "json_schema", "json_schema": {"name": "weather", "schema": WEATHER}}
    for wanted in (named, {"response_format": schema}):
        for more, separators in (({}, (", ", ": ")), ({"disable_any_whitespace": True}, (",", ":"))):
            message, _ = both(client, **wanted, extra_body={"structured_outputs": more, "logit_bias": SPACES})
            text = message.content or message.tool_calls[0].function.arguments
            assert text == json.dumps(json.loads(text), separators=separators)
        message, _ = both(client, **wanted, extra_body={"structured_outputs": {"whitespace_pattern": " {2}"}})
        assert (message.content or message.tool_calls[0].function.arguments).startswith('{  "city"')
    with pytest.raises(openai.BadRequestError, match="cannot be combined"):
        both(client, **named, extra_body={"structured_outputs": {"regex": "a"}})


def test_the_answer_after_the_reasoning_is_constrained(client):
    story = {"role": "user", "content": "Tell me a story about a dog."}
    messages = [story, {"role": "assistant", "content": "<think>Once upon a time"}]
    wanted = {"type": "json_schema", "json_schema": {"name": "weather", "schema": WEATHER}}
    more = {"continue_final_message": True, "add_generation_prompt": False}
    message, reason = both(client, messages=messages, response_format=wanted, extra_body=more)
    assert message.reasoning_content and set(json.loads(message.content)) == {"city", "days"} and reason == "stop"
    message, _ = both(client, messages=messages, tools=TOOLS, tool_choice="required", extra_body=more)
    assert message.reasoning_content and message.tool_calls and message.content is None


def test_the_reasoning_has_a_budget(client):
    """After so many tokens "." follows, the first text that ends it; `reasoning_effort` means nothing to this template."""
    messages = [{"role": "user", "content": "x"}, {"role": "assistant", "content": "<think>Once upon a time"}]
    more = {"continue_final_message": True, "add_generation_prompt": False, "return_token_ids": True}
    free, _ = both(client, messages=messages, extra_body=more)
    message, _ = both(client, messages=messages, extra_body={**more, "thinking_token_budget": 3})
    assert len(free.reasoning_content) > len(message.reasoning_content) > 0
    assert free.reasoning_content.startswith(message.reasoning_content) and message.content
    answer = client.chat.completions.with_raw_response.create(
        model="tiny", messages=messages, max_tokens=1, reasoning_effort="low", extra_body=more
    )
    assert "reasoning_effort" in answer.headers["x-ignored-fields"]


TEXTS = ['{"city": "Os', "null", "5", "[1]", "Oslo", "[" * 2000, r'{"a": "\ud800"}', '{"a": NaN}', "{}", ""]


def test_calls_are_shown_to_templates_as_they_were_written(tiny_tokenizer):
    """`arguments` are free text: an object if they are one, else the text, whatever the template does with it."""

    def shown(template, arguments):
        tokenizer = copy.deepcopy(tiny_tokenizer)
        tokenizer.chat_template = "{% for call in messages[0].tool_calls %}" + template + "{% endfor %}"
        call = {"id": "1", "type": "function", "function": {"name": "weather", "arguments": arguments}}
        body = ChatRequest.model_validate({"messages": [{"role": "assistant", "content": None, "tool_calls": [call]}]})
        return Server(tokenizer, ["tiny"], Limits()).chat_text(body)

    told = "{% set given = call.function.arguments %}{{ given if given is string else given | tojson }}"
    quoted = "{{ call.function.arguments | tojson }}"
    walked = "{% for k, v in call.function.arguments | items %}{{ k }}={{ v }}{% endfor %}"
    for text in TEXTS:
        assert shown(told, text) == text or (text == "" and shown(told, text) == "{}")
        assert shown(quoted, text) in (json.dumps(text), text, "{}")
        if text in ("", "{}"):
            assert shown(walked, text) == ""
        else:
            with pytest.raises(ApiError, match=r"refused the messages: .*are no JSON object"):
                shown(walked, text)
    for value, text in ((None, "{}"), (5, "5"), ([1, "é"], '[1, "é"]'), ({"a": None}, '{"a": null}')):
        assert shown(told, value) == text
    assert (
        shown(walked, '{"city": "Oslo", "days": 2}') == shown(walked, {"city": "Oslo", "days": 2}) == "city=Oslodays=2"
    )


def test_a_conversation_with_calls_goes_on(server):
    for arguments in ['{"city": "Oslo"}', *TEXTS, None, 5, [1], {"city": "Oslo"}]:
        call = {"id": "call_1", "type": "function", "function": {"name": "weather", "arguments": arguments}}
        messages = [*ASK, {"role": "assistant", "content": "", "tool_calls": [call]},
                    {"role": "tool", "tool_call_id": "call_1", "content": "It rains."}]  # fmt: skip
        status, _, answer = server.post("/v1/chat/completions", {"messages": messages, "max_tokens": 1, "tools": TOOLS})
        assert status == 200, answer
        items = [
            {"type": "function_call", "call_id": "1", "name": "weather", "arguments": arguments},
            {"role": "user", "content": "?"},
        ]
        status, _, answer = server.post("/v1/responses", {"input": items, "max_output_tokens": 1})
        assert status == 200, answer


def test_special_tokens_are_not_skipped_where_a_template_reads_them(server):
    for path, body in (("/v1/chat/completions", {"messages": ASK}), ("/v1/responses", {"input": "x"})):
        for value, ignored in ((True, "skip_special_tokens"), (False, None)):
            status, headers, _ = server.post(path, {**body, "max_time": 0.1, "skip_special_tokens": value})
            assert (status, headers["x-ignored-fields"]) == (200, ignored)


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"tools": [{}]}, "tools"),
        ({"tools": [{"type": "function", "function": {"name": ""}}]}, "tools"),
        ({"tools": TOOLS * 100}, "tools"),
        ({"tool_choice": "required"}, "needs tools"),
        ({"tools": TOOLS, "tool_choice": "always"}, "tool_choice"),
        ({"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "x"}}}, "not among the tools"),
        ({"tools": TOOLS, "tool_choice": "required", "response_format": {"type": "json_object"}}, "cannot be combined"),
        (
            {"tools": [{"type": "function", "function": {"name": "f", "parameters": {"not": {}}}}], "tool_choice": "required"},
            "Unimplemented",
        ),
    ],
)  # fmt: skip
def test_bad_tools_are_the_clients_errors(server, more, message):
    status, _, answer = server.post("/v1/chat/completions", {"messages": ASK, **more})
    assert status == 400 and message in answer["error"]["message"], answer


PLACE = {
    "type": "object",
    "properties": {"city": {"$ref": "#/$defs/City"}, "next": {"anyOf": [{"type": "null"}, {"$ref": "#"}]}},
    "required": ["city", "next"],
    "additionalProperties": False,
    "$defs": {"City": {"enum": ["Rome", "Oslo"]}},
}
TRIP = {
    "type": "object",
    "properties": {"by": {"$ref": "#/$defs/City"}},
    "required": ["by"],
    "additionalProperties": False,
    "$defs": {"City": {"$ref": "#/$defs/Way"}, "Way": {"enum": ["bus", "ship"]}},  # the name means something else here
}


def accepts(tokenizer, schema, text):
    """True if the whole text is what a schema describes."""
    compiler = GrammarCompiler(tokenizer, len(tokenizer), frozenset({3}))
    matcher = compiler.matcher(StructuredOutputsParams(json=schema))
    compiler.close()
    ids = [tokenizer.convert_tokens_to_ids({" ": "Ġ"}.get(character, character)) for character in text]
    return matcher.validate_tokens(ids) == len(ids) and matcher.consume_tokens(ids) and matcher.is_accepting()


def test_schemas_of_functions_may_have_definitions(tiny_tokenizer):
    """As pydantic writes them. Each function's references are to its own schema, wherever that stands in the grammar."""
    rome = {"city": "Rome", "next": {"city": "Oslo", "next": None}}
    for forced in ("required", "place"):
        schema = tool_grammar({"place": PLACE, "trip": TRIP}, forced, parallel=True)

        def fits(*calls, schema=schema, forced=forced):
            wanted = [{"name": name, "parameters": own} for name, own in calls] if forced == "required" else calls[0][1]
            return accepts(tiny_tokenizer, schema, json.dumps(wanted, separators=(",", ":")))

        assert fits(("place", rome))
        assert not fits(("place", {"city": "bus", "next": None})) and not fits(("place", {"city": "Rome"}))
        assert not fits(("place", {"city": "Rome", "next": {"city": "ship", "next": None}}))
    schema = tool_grammar({"place": PLACE, "trip": TRIP}, "required", parallel=True)
    both = [{"name": "trip", "parameters": {"by": "ship"}}, {"name": "place", "parameters": rome}]
    assert accepts(tiny_tokenizer, schema, json.dumps(both, separators=(",", ":")))
    assert not accepts(tiny_tokenizer, schema, '[{"name":"trip","parameters":{"by":"Rome"}}]')
    assert PLACE["properties"]["next"]["anyOf"][1] == {"$ref": "#"}  # the client's schema is as it was


@pytest.mark.parametrize(
    ("more", "reference"),
    [
        (
            {"$schema": "http://json-schema.org/draft-07/schema#"},
            "#/definitions/by",
        ),  # as zod-to-json-schema writes them
        ({"$schema": "http://json-schema.org/draft-04/schema#"}, "#/definitions/by"),
        ({"$id": "https://example.org/trip"}, "https://example.org/trip#/definitions/by"),
        ({"$id": "https://example.org/trip"}, "#/definitions/by"),
    ],
)
def test_schemas_of_functions_may_name_their_draft_and_themselves(tiny_tokenizer, more, reference):
    trip = {"type": "object", "properties": {"by": {"$ref": reference}}, "required": ["by"]}
    definitions = {"trip": {**trip, "additionalProperties": False}, "by": {"enum": ["bus", "ship"]}}
    whole = {**more, "$ref": reference.replace("/by", "/trip"), "definitions": definitions}
    schema = tool_grammar({"place": PLACE, "trip": whole}, "required", parallel=True)
    assert accepts(tiny_tokenizer, schema, '[{"name":"trip","parameters":{"by":"ship"}}]')
    assert not accepts(tiny_tokenizer, schema, '[{"name":"trip","parameters":{"by":"Rome"}}]')


def test_a_text_that_looks_like_a_reference_is_none(tiny_tokenizer):
    properties = {"$ref": {"const": "#/x"}, "a": {"enum": [{"$ref": "#"}]}, "default": {"$ref": "#/$defs/One"}}
    odd = {"type": "object", "properties": properties, "required": list(properties), "additionalProperties": False}
    schema = tool_grammar({"odd": {**odd, "$defs": {"One": {"const": 1}}}}, "required", parallel=False)
    assert accepts(tiny_tokenizer, schema, '[{"name":"odd","parameters":{"$ref":"#/x","a":{"$ref":"#"},"default":1}}]')
    assert not accepts(
        tiny_tokenizer, schema, '[{"name":"odd","parameters":{"$ref":"#/x","a":{"$ref":"#"},"default":2}}]'
    )


def test_forced_calls_with_definitions(client):
    tools = [{"type": "function", "function": {"name": name, "parameters": TRIP}} for name in ("trip", "journey")]
    message, reason = both(client, tools=tools, tool_choice="required", parallel_tool_calls=False)
    (call,) = message.tool_calls
    assert reason == "tool_calls" and json.loads(call.function.arguments)["by"] in ("bus", "ship")


# ---- a model that calls --------------------------------------------------------------------------------------------

WRITTEN = {"name": "weather", "arguments": {"city": "Oslo", "days": 2}}
CHAT_TEMPLATE = (
    "{% for tool in tools or [] %}{{ tool.function.name }}{% endfor %}{% for message in messages %}<|{{ message.role }}|>"
    "{{ message.content }}{% for call in message.tool_calls or [] %}<tool_call>{{ call.function | tojson }}</tool_call>"
    "{% endfor %}<|end|>{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


@pytest.fixture(scope="module")
def caller(tmp_path_factory, tiny_tokenizer):
    """A server whose small model knows one conversation by heart: it thinks, calls `weather`, and answers once that has returned."""
    tokenizer, folder = copy.deepcopy(tiny_tokenizer), tmp_path_factory.mktemp("caller")
    tokenizer.chat_template = CHAT_TEMPLATE
    called = {"role": "assistant", "content": "", "tool_calls": [{"function": WRITTEN}]}
    turns = {
        f"<think>I look.</think><tool_call>{json.dumps(WRITTEN)}</tool_call><|end|>": ASK,
        "Take a coat.<|end|>": [*ASK, called, {"role": "tool", "content": "It rains."}],
    }
    rows = []
    for text, messages in turns.items():
        prompt = tokenizer.apply_chat_template(messages, tools=TOOLS, add_generation_prompt=True, return_dict=False)
        answer = tokenizer.encode(text)
        rows.append((torch.tensor([prompt + answer]), torch.tensor([[-100] * len(prompt) + answer])))
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "num_hidden_layers": 2, "num_key_value_heads": 4, "max_position_embeddings": 512}
    model = tiny_llama(0, len(tokenizer), **sizes, initializer_range=0.02)
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
    for _ in range(80):
        optimizer.zero_grad()
        loss = sum(model(input_ids=ids, labels=labels).loss for ids, labels in rows)
        loss.backward()
        optimizer.step()
    assert loss < 0.2
    model.generation_config.eos_token_id = tokenizer.eos_token_id
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    with (
        in_thread({"method": "ngram"}, model=folder, response_template=TEMPLATE) as made,
        openai.OpenAI(base_url=made.url + "/v1", api_key="none", max_retries=0) as client,
    ):
        yield client


def test_a_whole_round_of_a_tool(caller):
    """The model calls a function of its own accord, and reads what that returned."""
    message, reason = both(caller, tools=TOOLS)
    (call,) = message.tool_calls
    assert (reason, message.content, message.reasoning_content) == ("tool_calls", None, "I look.")
    assert (call.function.name, json.loads(call.function.arguments)) == ("weather", WRITTEN["arguments"])
    asked = {"role": "assistant", "content": "", "tool_calls": [call.to_dict()]}
    told = {"role": "tool", "tool_call_id": call.id, "content": "It rains."}
    message, reason = both(caller, messages=[*ASK, asked, told], tools=TOOLS)
    assert (reason, message.content, message.tool_calls) == ("stop", "Take a coat.", None)


def test_a_whole_round_of_a_tool_in_responses(caller):
    functions = [{"type": "function", **tool["function"]} for tool in TOOLS]
    arguments = {"model": "tiny", "temperature": 0, "tools": functions}
    answer = caller.responses.create(input="What is the weather?", **arguments)
    thought, call = answer.output
    assert thought.content[0].text == "I look." and json.loads(call.arguments) == WRITTEN["arguments"]
    told = {"type": "function_call_output", "call_id": call.call_id, "output": "It rains."}
    items = [{"role": "user", "content": "What is the weather?"}, *(each.to_dict() for each in answer.output[1:]), told]
    assert caller.responses.create(input=items, **arguments).output_text == "Take a coat."


def test_a_whole_round_of_a_tool_in_messages(caller):
    def asked(*turns):
        body = {"max_tokens": 300, "temperature": 0, "tools": tools, "messages": [*ASK, *turns]}
        return caller.post("/messages", body=body, cast_to=dict)

    names = {"name": "name", "description": "description", "input_schema": "parameters"}
    tools = [
        {name: tool["function"][other] for name, other in names.items() if other in tool["function"]} for tool in TOOLS
    ]
    answer = asked()
    thought, call = answer["content"]
    assert (thought["thinking"], call["input"], answer["stop_reason"]) == ("I look.", WRITTEN["arguments"], "tool_use")
    told = {"type": "tool_result", "tool_use_id": call["id"], "content": "It rains."}
    answer = asked({"role": "assistant", "content": answer["content"]}, {"role": "user", "content": [told]})
    assert (answer["content"], answer["stop_reason"]) == ([{"type": "text", "text": "Take a coat."}], "end_turn")


def test_a_call_that_was_cut_off_is_no_dead_end(caller):
    """Its text goes back to the model, whatever `max_completion_tokens` left of it."""
    named = {"type": "function", "function": {"name": "weather"}}
    for choice in (named, "required", "auto"):
        for most in (1, 9, 20, 40):
            message, reason = both(caller, tools=TOOLS, tool_choice=choice, max_completion_tokens=most)
            assert reason in ("length", "stop", "tool_calls")
            told = [
                {"role": "tool", "tool_call_id": call.id, "content": "It rains."} for call in message.tool_calls or []
            ]
            both(caller, messages=[*ASK, message.to_dict(), *told], tools=TOOLS, max_completion_tokens=1)
