"""/v1/responses with the openai client: whole, streamed, constrained, with tools."""

import json

import pytest
from helpers_server import in_thread
from pydantic import BaseModel
from test_tools import TEMPLATE, TOOLS, WEATHER

from hf_specdec.serve.http.responses import ResponsesRequest

STORY = "Tell me a story about a dog."
FUNCTIONS = [{"type": "function", **tool["function"]} for tool in TOOLS]


@pytest.fixture(scope="module")
def server():
    fields = {**TEMPLATE["fields"], "reasoning_content": {"open": "Once", "close": "."}}  # so that the model reasons
    config = {"method": "ngram", "num_speculative_tokens": 3}
    with in_thread(config, response_template={**TEMPLATE, "fields": fields}) as made:
        yield made


def without_ids(item):
    found = item.model_dump() if hasattr(item, "model_dump") else dict(item)
    return {key: value for key, value in found.items() if key not in ("id", "call_id")}


def both(client, **arguments):
    """The response, after checking that the events tell the same story in the right order."""
    arguments = {"model": "tiny", "temperature": 0, **arguments}
    whole = client.responses.create(**arguments)
    events = list(client.responses.create(**arguments, stream=True))
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert [event.type for event in events[:2]] == ["response.created", "response.in_progress"]
    assert events[-1].type == f"response.{whole.status}"
    last = events[-1].response
    assert list(map(without_ids, last.output)) == list(map(without_ids, whole.output))
    assert last.usage.output_tokens == whole.usage.output_tokens > 0
    items, texts = {}, {}
    for event in events[2:-1]:
        if event.type == "response.output_item.added":
            assert event.output_index == len(items)
            items[event.output_index], texts[event.output_index] = event.item, ""
            continue
        item = items[event.output_index]
        assert getattr(event, "item_id", item.id) == item.id
        if event.type.endswith(".delta"):
            texts[event.output_index] += event.delta
        elif event.type == "response.output_item.done":
            assert event.item == last.output[event.output_index]
            found = event.item.arguments if event.item.type == "function_call" else event.item.content[0].text
            assert found == texts[event.output_index]
    assert len(items) == len(last.output)
    return whole


def test_text(client):
    answer = both(client, input=STORY, max_output_tokens=30, instructions="Be short.", metadata={"a": "b"})
    assert answer.status == "incomplete" and answer.incomplete_details.reason == "max_output_tokens"
    assert answer.instructions == "Be short." and answer.metadata == {"a": "b"} and answer.store is False
    chat = client.chat.completions.create(
        model="tiny", temperature=0, max_tokens=30,
        messages=[{"role": "system", "content": "Be short."}, {"role": "user", "content": STORY}],
    )  # fmt: skip
    assert answer.output_text == (chat.choices[0].message.content or "")
    assert answer.usage.output_tokens == 30 and answer.usage.input_tokens == chat.usage.prompt_tokens


def test_items_of_a_conversation(client):
    """Lists of messages, parts, reasoning and calls read as the same conversation in chat does."""
    items = [
        {"role": "developer", "content": "Tell stories."},
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "A dog"}, {"type": "input_text", "text": "?"}]},
        {"type": "reasoning", "id": "rs_1", "summary": []},
        {"type": "function_call", "call_id": "call_1", "name": "weather", "arguments": '{"city": "Oslo"}'},
        {"type": "function_call_output", "call_id": "call_1", "output": "rain"},
        {"role": "user", "content": STORY},
    ]  # fmt: skip
    answer = both(client, input=items, max_output_tokens=12)
    messages = [
        {"role": "system", "content": "Tell stories."}, {"role": "user", "content": "A dog?"},
        {"role": "assistant", "tool_calls": [{"id": "call_1", "type": "function", "function": {"name": "weather", "arguments": "{}"}}]},
        {"role": "tool", "tool_call_id": "call_1", "content": "rain"}, {"role": "user", "content": STORY},
    ]  # fmt: skip
    chat = client.chat.completions.create(model="tiny", temperature=0, max_tokens=12, messages=messages)
    assert answer.usage.input_tokens == chat.usage.prompt_tokens
    assert answer.output_text == (chat.choices[0].message.content or "")


def test_reasoning_items(client):
    answer = both(client, input=STORY, max_output_tokens=60)
    kinds = [item.type for item in answer.output]
    assert kinds == ["reasoning", "message"], answer.output
    assert 0 < answer.usage.output_tokens_details.reasoning_tokens < answer.usage.output_tokens


def test_schemas(client):
    wanted = {"format": {"type": "json_schema", "name": "weather", "schema": WEATHER, "strict": True}}
    answer = both(client, input="What is the weather?", text=wanted, max_output_tokens=200)
    assert set(json.loads(answer.output_text)) == {"city", "days"} and answer.status == "completed"

    class Answer(BaseModel):
        yes: bool

    with client.responses.stream(
        model="tiny", input="Is it?", temperature=0, text_format=Answer, max_output_tokens=60
    ) as stream:
        for _ in stream:
            pass
        assert isinstance(stream.get_final_response().output_parsed.yes, bool)


def test_forced_calls(client):
    arguments = {
        "tools": FUNCTIONS[:1],
        "tool_choice": "required",
        "parallel_tool_calls": False,
        "max_output_tokens": 300,
    }
    (call,) = both(client, input="Rome?", **arguments).output
    assert call.type == "function_call" and call.name == "weather" and call.call_id.startswith("call_")
    assert set(json.loads(call.arguments)) == {"city", "days"}


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({}, "input"),
        ({"input": []}, "messages"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "item_reference"),
        ({"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]}, "no images"),
        ({"input": [{"role": "user", "content": 5}]}, "text or a list"),
        ({"input": [5]}, "input"),
        ({"input": [{"type": "function_call"}]}, "input"),
        ({"input": "x", "previous_response_id": "resp_1"}, "previous_response_id is not served"),
        ({"input": "x", "store": True}, "not stored"),
        ({"input": "x", "background": True}, "background"),
        ({"input": "x", "truncation": "auto"}, "truncation"),
        ({"input": "x", "include": ["reasoning.encrypted_content"]}, "include"),
        ({"input": "x", "tools": [{"type": "web_search"}]}, "tools"),
        ({"input": "x", "n": 2}, "n must be 1"),
        ({"input": "x", "max_output_tokens": 0}, "max_output_tokens"),
        ({"input": "x", "text": {"format": {"type": "json_schema"}}}, "schema"),
        ({"input": "x", "temperature": -1}, "temperature"),
    ],
)  # fmt: skip
def test_what_is_not_served_is_said(server, body, message):
    status, _, answer = server.post("/v1/responses", body)
    assert status == 400 and message in answer["error"]["message"], answer


def test_errors_in_a_stream(client):
    """A request that fails while it runs."""
    more = {"structured_outputs": {"choice": ["a"]}, "allowed_token_ids": [5]}
    events = list(client.responses.create(model="tiny", input="x", stream=True, temperature=0, extra_body=more))
    assert events[-1].type == "response.failed" and "none of the tokens" in events[-1].response.error.message


@pytest.mark.parametrize(
    ("kinds", "roles", "thoughts"),
    [
        ("user think0 user think1 say", "user assistant user assistant", {1: "0", 3: "1"}),
        ("user think0 call think1 call output", "user assistant tool", {1: "01"}),
        ("user call think0 output say", "user assistant tool assistant", {1: "0"}),
    ],
)
def test_reasoning_stays_in_its_turn(kinds, roles, thoughts):
    """Also if an answer ends within it, or calls follow it."""
    shapes = {
        "user": {"role": "user", "content": "x"}, "say": {"role": "assistant", "content": "x"},
        "call": {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"},
        "output": {"type": "function_call_output", "call_id": "c", "output": "x"},
    }  # fmt: skip
    items = [
        shapes.get(kind) or {"type": "reasoning", "content": [{"type": "reasoning_text", "text": kind[-1]}]}
        for kind in kinds.split()
    ]
    messages = ResponsesRequest(input=items).to_chat(items).messages
    assert [message.role for message in messages] == roles.split()
    written = {place: message.for_template(False).get("reasoning_content") for place, message in enumerate(messages)}
    assert {place: text for place, text in written.items() if text} == thoughts
