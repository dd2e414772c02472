"""/v1/messages: whole, streamed, constrained, with thinking and tools; and with the anthropic client, if it is installed."""

import json

import pytest
from helpers_server import in_thread
from pydantic_core import from_json
from test_tools import TEMPLATE, WEATHER

from hf_specdec.serve.http.messages import MessagesRequest

CHAT, MESSAGES, COUNT_TOKENS = "/v1/chat/completions", "/v1/messages", "/v1/messages/count_tokens"
STORY = {"role": "user", "content": "Tell me a story about a dog."}
TOOL = {"name": "weather", "description": "Tells the weather.", "input_schema": WEATHER}
ENDS = {"logit_bias": {"3": 100}}  # "<|end|>"
FIELDS = {"text_delta": "text", "thinking_delta": "thinking", "input_json_delta": "partial_json"}


@pytest.fixture(scope="module")
def server():
    fields = {**TEMPLATE["fields"], "reasoning_content": {"open": "Once", "close": "."}}  # so that the model reasons
    config = {"method": "ngram", "num_speculative_tokens": 3}
    with in_thread(config, response_template={**TEMPLATE, "fields": fields}, api_keys=["secret"]) as made:
        made.headers = {"x-api-key": "secret"}
        yield made


def streamed(server, body):
    """The events of a stream, each named by its type."""
    text = server.ask(MESSAGES, {**body, "stream": True})[2]
    frames = [frame.split("\n") for frame in text.split("\n\n")[:-1]]
    events = [json.loads(data.removeprefix("data: ")) for _, data in frames]
    assert [f"event: {event['type']}" for event in events] == [name for name, _ in frames]
    return events


def without_ids(blocks):
    return [{key: value for key, value in block.items() if key != "id"} for block in blocks]


def both(server, **body):
    """The answer, after checking that the events tell the same."""
    body = {"model": "tiny", "temperature": 0, "max_tokens": 60, "messages": [STORY], **body}
    status, _, whole = server.post(MESSAGES, body)
    assert status == 200, whole
    first, *events, ending, last = streamed(server, body)
    assert (first["type"], last) == ("message_start", {"type": "message_stop"})
    assert first["message"]["content"] == [] and first["message"]["usage"]["output_tokens"] == 0
    assert ending["delta"] == {name: whole[name] for name in ("stop_reason", "stop_sequence")}
    blocks, texts = [], []
    for event in events:
        kind = event["type"].removeprefix("content_block_")
        assert event["index"] == len(blocks) - (kind != "start")
        if kind == "start":
            blocks.append(event["content_block"])
            texts.append("")
        elif kind == "delta":
            texts[-1] += event["delta"][FIELDS[event["delta"]["type"]]]
        else:
            name = {"tool_use": "input"}.get(blocks[-1]["type"], blocks[-1]["type"])
            assert not blocks[-1][name]  # as clients read JSON that was cut off:
            blocks[-1][name] = from_json(texts[-1] or "{}", allow_partial=True) if name == "input" else texts[-1]
    assert without_ids(blocks) == without_ids(whole["content"])
    counts = [sum(usage.values()) for usage in (ending["usage"], whole["usage"])]
    assert counts[0] == counts[1] and ending["usage"]["output_tokens"] == whole["usage"]["output_tokens"]
    return whole


@pytest.mark.parametrize("sampling", [{"temperature": 0}, {"temperature": 1.0, "seed": 7, "top_k": 40, "top_p": 0.9}])
def test_the_text_is_that_of_chat(server, sampling):
    answer = both(server, system=[{"type": "text", "text": "Be short."}], **sampling)
    messages = [{"role": "system", "content": "Be short."}, STORY]
    chat = server.post(CHAT, {"messages": messages, "max_tokens": 60, **sampling})[2]
    message, usage = chat["choices"][0]["message"], answer["usage"]
    blocks = {block["type"]: block.get(block["type"]) for block in answer["content"]}
    assert blocks.get("text", "") == message["content"]
    assert blocks.get("thinking") == message.get("reasoning_content")
    assert (answer["stop_reason"], answer["stop_sequence"], answer["role"]) == ("max_tokens", None, "assistant")
    assert usage["input_tokens"] + usage["cache_read_input_tokens"] == chat["usage"]["prompt_tokens"]
    assert usage["output_tokens"] == chat["usage"]["completion_tokens"] == 60


def test_why_an_answer_ends(server):
    for more, ending in (
        ({"stop_sequences": ["zzz", " dog"]}, ("stop_sequence", " dog")),
        (ENDS, ("end_turn", None)),
        ({"stop_token_ids": [226], "logit_bias": {"226": 100}}, ("end_turn", None)),
        ({"max_time": 0.001}, ("max_tokens", None)),
    ):
        if "max_time" in more:  # how far it comes is chance
            answer = server.post(MESSAGES, {"messages": [STORY], "max_tokens": 400, **more})[2]
        else:
            answer = both(server, **more)
        assert (answer["stop_reason"], answer["stop_sequence"]) == ending


def test_thinking(server):
    free = both(server)
    assert [block["type"] for block in free["content"]] == ["thinking", "text"]
    limited = both(server, thinking={"type": "enabled", "budget_tokens": 3})
    thought, text = limited["content"]
    assert free["content"][0]["thinking"].startswith(thought["thinking"]) and text["type"] == "text"
    assert 0 < len(thought["thinking"]) < len(free["content"][0]["thinking"])
    assert [block["type"] for block in both(server, thinking={"type": "disabled"})["content"]] == ["text"]
    assert both(server, thinking={"type": "adaptive"})["content"] == free["content"]


def test_an_answer_that_was_begun_goes_on(server):
    begun = {"role": "assistant", "content": "Once upon a time. The"}
    (block,) = both(server, messages=[STORY, begun], max_tokens=12)["content"]
    more = {"continue_final_message": True, "max_tokens": 12, "temperature": 0}
    chat = server.post(CHAT, {"messages": [STORY, begun], **more})[2]
    assert block == {"type": "text", "text": chat["choices"][0]["message"]["content"]}


def test_forced_calls(server):
    arguments = {"tools": [TOOL], "max_tokens": 300}
    for choice in ({"type": "any", "disable_parallel_tool_use": True}, {"type": "tool", "name": "weather"}):
        answer = both(server, tool_choice=choice, **arguments)
        (call,) = answer["content"]
        assert (call["type"], call["name"], answer["stop_reason"]) == ("tool_use", "weather", "tool_use")
        assert set(call["input"]) == {"city", "days"} and call["id"].startswith("call_")
    two = both(server, tool_choice={"type": "any"}, logit_bias={"17": 100, "66": -100}, max_tokens=60, tools=[TOOL])
    assert len(two["content"]) > 1


def test_a_call_that_was_cut_off_goes_back(server):
    """Its input is what was written of it."""
    inputs = []
    for most in (1, 9, 12, 15, 20):
        asked = {"tools": [TOOL], "tool_choice": {"type": "tool", "name": "weather"}}
        answer = both(server, max_tokens=most, **asked)
        (call,) = answer["content"]
        assert answer["stop_reason"] in ("max_tokens", "tool_use") and set(call["input"]) <= {"city", "days"}
        inputs.append(call["input"])
        result = {"type": "tool_result", "tool_use_id": call["id"], "content": "rain"}
        turns = [{"role": "assistant", "content": answer["content"]}, {"role": "user", "content": [result]}]
        assert server.post(MESSAGES, {"messages": [STORY, *turns], "max_tokens": 1})[0] == 200
    assert inputs[0] == {} and any(inputs)


def test_schemas(server):
    wanted = {"format": {"type": "json_schema", "schema": WEATHER}}
    (block,) = both(server, output_config=wanted, max_tokens=200)["content"]
    assert set(json.loads(block["text"])) == {"city", "days"}


PNG = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "AAAA"}}
URL = {"type": "image", "source": {"type": "url", "url": "https://x/y.png"}}
CALL = {"type": "tool_use", "id": "1", "name": "weather", "input": {"city": "Oslo"}}
CALLED = {"id": "1", "type": "function", "function": {"name": "weather", "arguments": {"city": "Oslo"}}}


def text(words):
    return {"type": "text", "text": words}


def result(content):
    return {"type": "tool_result", "tool_use_id": "1", "content": content}


def shown(address):
    return {"type": "image_url", "image_url": {"url": address}}


@pytest.mark.parametrize(
    ("role", "content", "messages"),
    [
        ("user", "x", [{"role": "user", "content": "x"}]),
        ("system", [text("x")], [{"role": "system", "content": [text("x")]}]),
        (
            "user", [PNG, text("x"), URL],
            [{"role": "user", "content": [shown("data:image/png;base64,AAAA"), text("x"), shown("https://x/y.png")]}],
        ),
        (
            "user", [result("rain"), result([text("rain"), URL]), text("x"), text("y")],
            [
                {"role": "tool", "tool_call_id": "1", "content": "rain"},
                {"role": "tool", "tool_call_id": "1", "content": [text("rain"), shown("https://x/y.png")]},
                {"role": "user", "content": [text("x"), text("y")]},
            ],
        ),
        (
            "assistant", [{"type": "thinking", "thinking": "hm", "signature": ""}, text("x"), CALL, CALL],
            [{"role": "assistant", "content": [text("x")], "reasoning_content": "hm", "tool_calls": [CALLED, CALLED]}],
        ),
        ("assistant", [CALL], [{"role": "assistant", "tool_calls": [CALLED]}]),
        ("assistant", [], [{"role": "assistant", "content": []}]),
    ],
)  # fmt: skip
def test_blocks_are_parts_of_chat_messages(role, content, messages):
    body = {"max_tokens": 1, "messages": [{"role": role, "content": content}]}
    chat = MessagesRequest.model_validate(body).to_chat(can_think=True)
    assert [message.model_dump(exclude_none=True) for message in chat.messages] == messages


@pytest.mark.parametrize(
    "more", [{}, {"system": "Be short."}, {"tools": [TOOL], "tool_choice": {"type": "none"}}, {"messages": [STORY] * 3}]
)
def test_tokens_are_counted_as_they_are_read(server, more):
    body = {"messages": [STORY], **more}
    usage = server.post(MESSAGES, {**body, "max_tokens": 1})[2]["usage"]
    status, _, answer = server.post(COUNT_TOKENS, body)
    counted = {"input_tokens": usage["input_tokens"] + usage["cache_read_input_tokens"]}
    assert (status, answer) == (200, counted)


def message(*blocks, role="user"):
    return {"messages": [{"role": role, "content": list(blocks)}]}


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({"max_tokens": None}, "max_tokens"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages.0: Input tag 'tool'"),
        (message(), "messages.0.content"),
        (message({"type": "document"}), "messages.0.content.0: Input tag 'document'"),
        (message({"type": "text"}), "messages.0.content.0.text: Field required"),
        (message(CALL), "Input tag 'tool_use'"),
        (message({"type": "redacted_thinking", "data": "x"}, role="assistant"), "redacted_thinking"),
        (message(URL), "no images"),
        ({"system": 5}, "system"),
        ({"tools": [{"type": "web_search_20250305", "name": "web_search", "input_schema": {}}]}, "tools.0.type"),
        ({"tools": [{"name": "f"}]}, "tools.0.input_schema: Field required"),
        ({"tools": [TOOL], "tool_choice": {"type": "tool", "name": "x"}}, "not among the tools"),
        ({"tool_choice": {"type": "any"}}, "needs tools"),
        ({"thinking": {"type": "enabled"}}, "thinking.budget_tokens: Field required"),
        ({"thinking": {"type": "adaptive"}, "thinking_token_budget": 5}, "either thinking or"),
        ({"mcp_servers": [{"type": "url"}]}, "mcp_servers is not served"),
        ({"temperature": -1}, "temperature"),
        ({"n": 2}, "n must be 1"),
    ],
)
def test_what_is_not_served_is_said(server, more, words):
    status, _, answer = server.post(MESSAGES, {"messages": [STORY], "max_tokens": 5, **more})
    error = answer["error"]
    assert (status, answer["type"], error["type"]) == (400, "error", "invalid_request_error")
    assert words in error["message"], error


def test_errors_have_anthropics_shape(server):
    for path, body, headers, expected in (
        (MESSAGES, {"model": "other"}, {}, (404, "not_found_error")),
        (COUNT_TOKENS, {"model": "other"}, {}, (404, "not_found_error")),
        (f"{MESSAGES}/batches", {}, {}, (404, "not_found_error")),
        (MESSAGES, {}, {"x-api-key": "wrong"}, (401, "authentication_error")),
        (MESSAGES, {}, {"x-api-key": "secret"}, None),
        (MESSAGES, {}, {"x-api-key": "", "Authorization": "Bearer secret"}, None),
    ):
        status, _, answer = server.post(path, {"messages": [STORY], "max_tokens": 1, **body}, headers)
        assert status == 200 if expected is None else (status, answer["error"]["type"]) == expected, answer
    failing = {"structured_outputs": {"choice": ["a"]}, "allowed_token_ids": [5]}  # known only while it runs
    events = streamed(server, {"messages": [STORY], "max_tokens": 5, "temperature": 0, **failing})
    assert events[-1]["type"] == "error" and "none of the tokens" in events[-1]["error"]["message"]
    assert events[-1]["error"]["type"] == "invalid_request_error"


def test_anthropics_client(server):
    anthropic = pytest.importorskip("anthropic")
    more = {"model": "tiny", "max_tokens": 300, "messages": [STORY], "extra_body": {"temperature": 0}}
    tools = {"tools": [TOOL], "tool_choice": {"type": "any", "disable_parallel_tool_use": True}}
    with anthropic.Anthropic(base_url=server.url, api_key="secret", max_retries=0) as client:
        for extra in ({}, tools):
            whole = client.messages.create(**more, **extra)
            with client.messages.stream(**more, **extra) as stream:
                final = stream.get_final_message()
            blocks = [without_ids(block.to_dict() for block in each.content) for each in (whole, final)]
            assert blocks[0] == blocks[1] and whole.stop_reason == final.stop_reason
            assert whole.usage.output_tokens == final.usage.output_tokens
        result = {"type": "tool_result", "tool_use_id": whole.content[0].id, "content": "rain"}
        turns = [STORY, whole.to_param(), {"role": "user", "content": [result]}]
        answer = client.messages.create(**{**more, "messages": turns, "max_tokens": 5}, tools=[TOOL])
        counted = client.messages.count_tokens(model="tiny", messages=turns, tools=[TOOL])
        assert counted.input_tokens == answer.usage.input_tokens + answer.usage.cache_read_input_tokens
        for key, model, error in (("secret", "other", "NotFoundError"), ("no", "tiny", "AuthenticationError")):
            with pytest.raises(getattr(anthropic, error)):
                client.with_options(api_key=key).messages.create(**{**more, "model": model})
