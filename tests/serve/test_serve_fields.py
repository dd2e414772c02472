"""Every field of a request is acted on, refused, or named in `x-ignored-fields`: a walk through the schemas of all endpoints."""

import json
import re
from dataclasses import dataclass, field
from typing import Any

import pytest
from helpers_server import in_thread
from paths import TESTS
from tokenizers.processors import TemplateProcessing
from transformers import AutoTokenizer

import hf_specdec

pytest.importorskip("uvicorn")
pytest.importorskip("llguidance")

from hf_specdec.serve.http.weights import ROUTES

COMPLETIONS, CHAT, RESPONSES = "/v1/completions", "/v1/chat/completions", "/v1/responses"
MESSAGES, COUNT_TOKENS = "/v1/messages", "/v1/messages/count_tokens"
STORY = "Once upon a time there was a little girl. " * 2 + "Once upon"
USER = {"role": "user", "content": STORY}
CACHED = r'"input_tokens":(\d+),"cache_creation_input_tokens":0,"cache_read_input_tokens":(\d+)'
END, SPECIAL = "3", "1"  # ids of "<|end|>", which ends a text, and of "<|user|>", which does not
# Shows the model all that a request says about a conversation.
TEMPLATE = (
    "{{ mood }}{{ reasoning_effort }}{{ enable_thinking }}"
    "{% for tool in tools or [] %}{{ tool | tojson }}{% endfor %}{% for message in messages %}<|{{ message.role }}|>"
    "{{ message.content }}{{ message.reasoning_content }}{{ message.tool_calls }}{{ message.tool_call_id }}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
PARTS = [
    {"method": "ngram", "num_speculative_tokens": 4},
    {"method": "draft_model", "model": "tiny-draft", "num_speculative_tokens": 3},
]


@dataclass
class Case:
    """What a field does. `more`: what is added to a body that has `base`; `kind`: acts, refused, named or elsewhere."""

    kind: str
    more: dict[str, Any] = field(default_factory=dict)
    base: dict[str, Any] = field(default_factory=dict)
    where: str = ""


def acts(more, **base):
    """The answer is another one."""
    return Case("acts", more, base)


def refused(more, **base):
    """The answer is an error of the client's."""
    return Case("refused", more, base)


def named(more, **base):
    """The header names the field."""
    return Case("named", more, base)


def elsewhere(more, where, **base):
    """The answer is the same by intention; this test, "file::name", shows what the field does."""
    return Case("elsewhere", more, base, where)


def tool(**more):
    return {"type": "function", "function": {"name": "f", **more}}


LONG = {"max_tokens": 100}
SAMPLED = {"temperature": 1.0, "seed": 1, "speculative_config": {"enabled": False}}
ENDS = {"logit_bias": {END: 100}}
SCHEMA = {"type": "json_schema", "json_schema": {"schema": {"enum": ["a", "b"]}}}
TWO_CALLS = {"logit_bias": {"17": 100, "66": -100}}  # "," and "]"
SAMPLING = {
    "model": refused({"model": "other"}),
    "kv_transfer_params": refused({"kv_transfer_params": {"do_remote_decode": True}}),
    "n": acts({"n": 2}),
    "stream": acts({"stream": True}),
    "stream_options": refused({"stream_options": {}}),
    "stream_options.include_usage": acts({"stream_options": {"include_usage": True}}, stream=True),
    "stream_options.continuous_usage_stats": acts(
        {"stream_options": {"include_usage": True, "continuous_usage_stats": True}},
        stream=True,
        stream_options={"include_usage": True},
    ),
    "temperature": acts({"temperature": 2.0}, **SAMPLED),
    "top_p": acts({"top_p": 0.01}, **SAMPLED),
    "top_k": acts({"top_k": 1}, **SAMPLED),
    "min_p": acts({"min_p": 1.0}, **SAMPLED),
    "presence_penalty": acts({"presence_penalty": 2.0}, **LONG),
    "frequency_penalty": acts({"frequency_penalty": 2.0}, **LONG),
    "repetition_penalty": acts({"repetition_penalty": 3.0}),
    "seed": acts({"seed": 2}, **SAMPLED),
    "stop": acts({"stop": "e"}),
    "stop_token_ids": acts({"stop_token_ids": [226]}, logit_bias={"226": 100}),
    "include_stop_str_in_output": acts({"include_stop_str_in_output": True}, stop="e"),
    "ignore_eos": acts({"ignore_eos": True}, **ENDS),
    "min_tokens": acts({"min_tokens": 3}, **ENDS),
    "logit_bias": acts({"logit_bias": {"226": 100}}),
    "allowed_token_ids": acts({"allowed_token_ids": [226]}),
    "bad_words": acts({"bad_words": ["a"]}, **LONG),
    "skip_special_tokens": acts({"skip_special_tokens": False}, logit_bias={SPECIAL: 100}),
    "priority": elsewhere({"priority": -1}, "test_llm.py::test_lower_numbers_run_first"),
    "max_time": acts({"max_time": 0.001}, **LONG),
    "speculative_config": acts({"speculative_config": {"enabled": False}}),
    "speculative_config.method": acts({"speculative_config": {"method": "draft_model"}}),
    "speculative_config.num_speculative_tokens": acts({"speculative_config": {"num_speculative_tokens": 1}}),
    "speculative_config.enabled": acts({"speculative_config": {"enabled": False}}),
    "speculative_config.private": elsewhere(
        {"speculative_config": {"private": True}}, "test_lookup_cache.py::test_responses_can_be_private"
    ),
    "response_format": acts({"response_format": {"type": "json_object"}}),
    "response_format.type": acts({"response_format": {"type": "json_object"}}),
    "response_format.json_schema": acts({"response_format": SCHEMA}),
    "response_format.json_schema.schema": acts({"response_format": SCHEMA}),
    "response_format.json_schema.strict": named(
        {"response_format": {**SCHEMA, "json_schema": {**SCHEMA["json_schema"], "strict": False}}}
    ),
    "structured_outputs": acts({"structured_outputs": {"choice": ["a"]}}),
    "prediction": acts({"prediction": {"type": "content", "content": STORY}}),
    "prediction.content": acts({"prediction": {"type": "content", "content": [{"type": "text", "text": STORY}]}}),
    "prediction.type": refused({"prediction": {"type": "text", "content": STORY}}),
}
ON_PROMPTS = {"prompt_logprobs": acts({"prompt_logprobs": 1}), "return_token_ids": acts({"return_token_ids": True})}
CONVERSATION = {
    "messages": acts({"messages": [{"role": "user", "content": "x"}]}),
    "messages.role": acts({"messages": [{**USER, "role": "critic"}]}),
    "messages.content": acts({"messages": [{**USER, "content": "x"}]}),
    "messages.tool_calls": acts({"messages": [{**USER, "tool_calls": [{"function": {"name": "f"}}]}]}),
    "messages.tool_call_id": acts({"messages": [{**USER, "tool_call_id": "1"}]}),
    "add_generation_prompt": acts({"add_generation_prompt": False}),
    "continue_final_message": acts({"continue_final_message": True}, messages=[{**USER, "role": "assistant"}]),
    "chat_template_kwargs": acts({"chat_template_kwargs": {"mood": "sad"}}),
    "reasoning_effort": acts({"reasoning_effort": "high"}),
    "tools": acts({"tools": [tool()], "tool_choice": "required"}),
    "tools.type": refused({"tools": [{**tool(), "type": "x"}]}),
    "tools.function": acts({"tools": [tool(name="g")]}, tools=[tool()], tool_choice="required"),
    "tools.function.name": acts({"tools": [tool(name="g")]}, tools=[tool()], tool_choice="required"),
    "tools.function.description": acts({"tools": [tool(description="x")]}, tools=[tool()], tool_choice="required"),
    "tools.function.parameters": acts(
        {"tools": [tool(parameters={"type": "null"})]}, tools=[tool()], tool_choice="required"
    ),
    "tool_choice": acts({"tool_choice": "none"}, tools=[tool()], tool_choice="required"),
    "tool_choice.type": refused({"tool_choice": {**tool(), "type": "x"}}, tools=[tool()]),
    "tool_choice.function": acts({"tool_choice": tool()}, tools=[tool()], tool_choice="required"),
    "tool_choice.function.name": acts({"tool_choice": tool()}, tools=[tool()], tool_choice="required"),
}
FUNCTION = {"type": "function", "name": "f"}


def block(of, role="user", **more):
    """The field `messages` of Anthropic's API, with one block of a message. `of`: the block, of which `more` is another part."""
    return {"messages": [{"role": role, "content": [of | more]}, USER]}


TEXT, RESULT = {"type": "text", "text": STORY}, {"type": "tool_result", "tool_use_id": "1", "content": "x"}
THOUGHT, CALL = {"type": "thinking", "thinking": "x"}, {"type": "tool_use", "id": "1", "name": "f", "input": {}}
IMAGE = {"type": "image", "source": {"type": "url", "url": "x"}}
INPUT_TOOL, ANY = {"name": "f", "input_schema": {}}, {"type": "any"}
IMAGES = {
    f"{place}.{name}": refused(more)
    for place, more in (
        ("messages.content", block(IMAGE)),
        ("messages.content.content", block(RESULT, content=[IMAGE])),
    )
    for name in ("source", "source.type", "source.media_type", "source.data", "source.url")
}
IN_MESSAGES = IMAGES | {
    "messages": acts({"messages": [{"role": "user", "content": "x"}]}),
    "messages.role": acts({"messages": [USER, {**USER, "role": "assistant"}]}, messages=[USER, USER]),
    "messages.content": acts({"messages": [{**USER, "content": "x"}]}),
    "messages.content.type": refused(block(TEXT, type="x")),
    "messages.content.text": acts(block(TEXT, text="x"), **block(TEXT)),
    "messages.content.tool_use_id": acts(block(RESULT, tool_use_id="another"), **block(RESULT)),
    "messages.content.content": acts(block(RESULT, content=STORY), **block(RESULT)),
    "messages.content.content.type": refused(block(RESULT, content=[{**TEXT, "type": "x"}])),
    "messages.content.content.text": acts(block(RESULT, content=[TEXT]), **block(RESULT)),
    "messages.content.thinking": acts(block(THOUGHT, "assistant", thinking=STORY), **block(THOUGHT, "assistant")),
    "messages.content.id": acts(block(CALL, "assistant", id="another"), **block(CALL, "assistant")),
    "messages.content.name": acts(block(CALL, "assistant", name="another"), **block(CALL, "assistant")),
    "messages.content.input": acts(block(CALL, "assistant", input={"a": 1}), **block(CALL, "assistant")),
    "system": acts({"system": "x"}),
    "system.type": refused({"system": [{**TEXT, "type": "x"}]}),
    "system.text": acts({"system": [TEXT]}),
    "tools": acts({"tools": [INPUT_TOOL], "tool_choice": ANY}),
    "tools.type": refused({"tools": [{**INPUT_TOOL, "type": "x"}]}),
    "tools.name": acts({"tools": [{**INPUT_TOOL, "name": "longer"}]}, tools=[INPUT_TOOL], tool_choice=ANY),
    "tools.description": acts({"tools": [{**INPUT_TOOL, "description": "x"}]}, tools=[INPUT_TOOL], tool_choice=ANY),
    "tools.input_schema": acts(
        {"tools": [{**INPUT_TOOL, "input_schema": {"type": "null"}}]}, tools=[INPUT_TOOL], tool_choice=ANY
    ),
    "tool_choice": acts({"tool_choice": {"type": "none"}}, tools=[INPUT_TOOL], tool_choice=ANY),
    "tool_choice.type": refused({"tool_choice": {"type": "x"}}, tools=[INPUT_TOOL]),
    "tool_choice.name": refused({"tool_choice": {"type": "tool"}}, tools=[INPUT_TOOL]),
    "thinking": acts({"thinking": {"type": "disabled"}}),
    "thinking.type": refused({"thinking": {"type": "x"}}),
    "thinking.budget_tokens": refused({"thinking": {"type": "enabled"}}),
    "output_config": acts({"output_config": {"effort": "high"}}),
    "output_config.effort": acts({"output_config": {"effort": "high"}}),
    "output_config.format.strict": named({"output_config": {"format": {"type": "text", "strict": False}}}),
    "chat_template_kwargs": acts({"chat_template_kwargs": {"mood": "sad"}}),
}
TRANSLATED = {  # what APIs besides chat make of the fields of `SAMPLING`
    "n": refused({"n": 2}),
    "stream_options.include_usage": named({"stream_options": {"include_usage": True}}, stream=True),
    "stream_options.continuous_usage_stats": named({"stream_options": {"continuous_usage_stats": True}}, stream=True),
    **{name: refused({name: 1}) for name in ("prompt_logprobs", "return_token_ids", "return_tokens_as_token_ids")},
    **{name: refused(SAMPLING[name].more) for name in SAMPLING if name.startswith("response_format")},
    "thinking_token_budget": refused({"thinking_token_budget": 5}),  # no response template
}
FIELDS = {
    COMPLETIONS: SAMPLING | ON_PROMPTS | {
        "prompt": acts({"prompt": "x"}),
        "max_tokens": acts({"max_tokens": 2}),
        "logprobs": acts({"logprobs": 1}),
        "return_tokens_as_token_ids": acts({"return_tokens_as_token_ids": True}, logprobs=1),
        "echo": acts({"echo": True}),
        "decoder_prompt": refused({"decoder_prompt": [1]}),
    },
    CHAT: SAMPLING | ON_PROMPTS | CONVERSATION | {
        "max_tokens": acts({"max_tokens": 2}),
        "max_completion_tokens": acts({"max_completion_tokens": 2}),
        "logprobs": acts({"logprobs": True}),
        "return_tokens_as_token_ids": acts({"return_tokens_as_token_ids": True}, logprobs=True),
        "thinking_token_budget": refused({"thinking_token_budget": 5}),  # no response template
        "top_logprobs": acts({"top_logprobs": 1}, logprobs=True),
        "parallel_tool_calls": acts({"parallel_tool_calls": False}, tools=[tool()], tool_choice="required", **TWO_CALLS),
    },
    RESPONSES: SAMPLING | TRANSLATED | {
        "input": acts({"input": "x"}),
        **{name: refused({name: value}) for name, value in (("store", True), ("previous_response_id", "resp_1"))},  # no --store
        "instructions": acts({"instructions": "x"}),
        "max_output_tokens": acts({"max_output_tokens": 2}),
        "tools": acts({"tools": [FUNCTION], "tool_choice": "required"}),
        "tools.type": refused({"tools": [{**FUNCTION, "type": "x"}]}),
        "tools.name": acts({"tools": [{**FUNCTION, "name": "g"}]}, tools=[FUNCTION], tool_choice="required"),
        "tools.description": acts({"tools": [{**FUNCTION, "description": "x"}]}, tools=[FUNCTION], tool_choice="required"),
        "tools.parameters": acts({"tools": [{**FUNCTION, "parameters": {"type": "null"}}]}, tools=[FUNCTION], tool_choice="required"),
        "tools.strict": named({"tools": [{**FUNCTION, "strict": True}], "tool_choice": "none"}),
        "tool_choice": acts({"tool_choice": "none"}, tools=[FUNCTION], tool_choice="required"),
        "tool_choice.type": refused({"tool_choice": {**FUNCTION, "type": "x"}}, tools=[FUNCTION]),
        "tool_choice.name": refused({"tool_choice": {**FUNCTION, "name": "g"}}, tools=[FUNCTION]),
        "parallel_tool_calls": acts({"parallel_tool_calls": False}, tools=[FUNCTION], tool_choice="required", **TWO_CALLS),
        "text": acts({"text": {"format": {"type": "json_object"}}}),
        "text.format": acts({"text": {"format": {"type": "json_object"}}}),
        "text.format.type": acts({"text": {"format": {"type": "json_object"}}}),
        "text.format.schema": acts({"text": {"format": {"type": "json_schema", "schema": {"enum": [1]}}}}),
        "text.format.strict": named({"text": {"format": {"type": "text", "strict": False}}}),
        "metadata": acts({"metadata": {"a": "b"}}),
        "user": acts({"user": "me"}),
        "truncation": refused({"truncation": "auto"}),
        "chat_template_kwargs": acts({"chat_template_kwargs": {"mood": "sad"}}),
        "reasoning": acts({"reasoning": {"effort": "high"}}),
        "reasoning.effort": acts({"reasoning": {"effort": "high"}}),
    },
    MESSAGES: SAMPLING | TRANSLATED | IN_MESSAGES | {
        "max_tokens": acts({"max_tokens": 2}),
        "stop_sequences": acts({"stop_sequences": ["e"]}),
        "include_stop_str_in_output": acts({"include_stop_str_in_output": True}, stop_sequences=["e"]),
        "tool_choice.disable_parallel_tool_use": acts(
            {"tool_choice": {**ANY, "disable_parallel_tool_use": True}}, tools=[INPUT_TOOL], tool_choice=ANY, **TWO_CALLS
        ),
        "output_config.format": acts({"output_config": {"format": {"type": "json_object"}}}),
        "output_config.format.type": acts({"output_config": {"format": {"type": "json_object"}}}),
        "output_config.format.schema": acts({"output_config": {"format": {"type": "json_schema", "schema": {"enum": [1]}}}}),
    },
    COUNT_TOKENS: IN_MESSAGES | {
        "model": refused({"model": "other"}),
        "tool_choice.disable_parallel_tool_use": elsewhere(  # the prompt does not say what must be written
            {"tool_choice": {**ANY, "disable_parallel_tool_use": True}}, "test_messages.py::test_forced_calls",
            tools=[INPUT_TOOL], tool_choice=ANY,
        ),
        **{
            name: elsewhere({"output_config": {"format": {"type": "json_object"}}}, "test_messages.py::test_schemas")
            for name in ("output_config.format", "output_config.format.type", "output_config.format.schema")
        },
    },
    "/tokenize": CONVERSATION | {
        "model": refused({"model": "other"}),
        "prompt": acts({"prompt": "x"}),
        "add_special_tokens": acts({"add_special_tokens": False}),
        **{  # the prompt does not say which tool must be called
            name: elsewhere({"tool_choice": tool()}, "test_tools.py::test_forced_calls", tools=[tool()], tool_choice="required")
            for name in ("tool_choice.function", "tool_choice.function.name")
        },
    },
    "/detokenize": {"model": refused({"model": "other"}), "tokens": acts({"tokens": [577]})},
}  # fmt: skip
BASES = {
    COMPLETIONS: {"prompt": STORY, "max_tokens": 24, "temperature": 0},
    CHAT: {"messages": [USER], "max_tokens": 24, "temperature": 0},
    RESPONSES: {"input": STORY, "max_output_tokens": 24, "temperature": 0},
    MESSAGES: {"messages": [USER], "max_tokens": 24, "temperature": 0},
    COUNT_TOKENS: {"messages": [USER]},
    "/tokenize": {"prompt": STORY},
    "/detokenize": {"tokens": [540]},
}


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    tokenizer = AutoTokenizer.from_pretrained(hf_specdec.bundled("tiny"))
    first = "<|endoftext|>"  # so that there is a token to add to texts
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(single=f"{first} $A", special_tokens=[(first, 0)])
    tokenizer.chat_template = TEMPLATE
    folder = str(tmp_path_factory.mktemp("tokenizer"))
    tokenizer.save_pretrained(folder)
    with in_thread({"method": "per_request", "methods": PARTS}, tokenizer=folder) as made:
        yield made


def walked(schema, parts, place=""):
    """The names of all fields of a JSON schema, and of those within them, such as "stream_options.include_usage"."""
    if "$ref" in schema:
        schema = parts[schema["$ref"].rpartition("/")[2]]
    for name, each in schema.get("properties", {}).items():
        yield place + name
        yield from walked(each, parts, f"{place}{name}.")
    unions = (part for kind in ("anyOf", "allOf", "oneOf") for part in schema.get(kind, []))
    for each in (*unions, *filter(None, [schema.get("items")])):
        yield from walked(each, parts, place)


def fields_of(server):
    """{path: names of the fields of its body} of all endpoints that have one."""
    api = json.loads(server.ask("/openapi.json")[2])
    found = {}
    for path, methods in api["paths"].items():
        for method in methods.values():
            # test_encoders.py has the forms of audio; tests of their own have those of adapters, corpora and training loops
            if (
                "lora" not in path
                and path not in (*(route.path for route in ROUTES), "/v1/lookup/{name}")
                and "application/json" in method.get("requestBody", {}).get("content", {})
            ):
                schema = method["requestBody"]["content"]["application/json"]["schema"]
                found[path] = sorted(set(walked(schema, api["components"]["schemas"])))
    return found


def asked(server, path, body):
    """(status, ignored fields, what an answer says apart from ids and times)."""
    status, headers, text = server.ask(path, body)
    if status != 200:
        return status, [], text
    text = re.sub(CACHED, lambda counts: str(int(counts[1]) + int(counts[2])), text)
    text = re.sub(r'"(id|item_id|call_id|\w+_ms|created|created_at|cached_tokens)":("[^"]*"|[\d.e-]+)', "", text)
    return status, (headers["x-ignored-fields"] or "").split(", "), text


def test_every_field_of_every_endpoint_does_something(server):
    walk, wrong, before = fields_of(server), [], {}
    assert walk.keys() == FIELDS.keys() and len(walk[CHAT]) > 60
    for path, names in walk.items():
        for name in names:
            case = FIELDS[path].get(name)
            if case is None:
                wrong.append(f"{path}: {name} is in no test")
                continue
            base = {**BASES[path], **case.base}
            if "max_tokens" in case.base and path == RESPONSES:
                base["max_output_tokens"] = base.pop("max_tokens")
            if path == "/tokenize" and (name in CONVERSATION):
                base = {key: value for key, value in base.items() if key != "prompt"} | (
                    {} if "messages" in base else {"messages": [USER]}
                )
            key = path + json.dumps(base)
            if key not in before:
                before[key] = asked(server, path, base)
                assert asked(server, path, base) == before[key], "the same request has two answers"
            status, ignored, text = asked(server, path, base | case.more)
            if case.kind == "refused":
                good = 400 <= status < 500 and json.loads(text)["error"]["message"]
            elif case.kind == "named":
                good = status == 200 and any(f"{name}.".startswith(f"{each}.") for each in ignored)
            else:
                good = (
                    status == before[key][0] == 200
                    and name not in ignored
                    and (text != before[key][2]) == (case.kind == "acts")
                )
            if not good:
                wrong.append(f"{path}: {name} ({case.kind}): {status} {ignored} {text[:200]}")
            if case.where:
                file, _, function = case.where.partition("::")
                assert f"def {function}" in next(TESTS.rglob(file)).read_text(), case.where
    assert not wrong, "\n".join(wrong)


BAD_PREDICTIONS = [
    ({"content": "x"}, "type"),
    ({"type": "content"}, "content"),
    ({"type": "content", "content": 5}, "content"),
    ({"type": "content", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}, "image_url"),
    ({"type": "content", "content": [{"type": "text", "text": 5}]}, "must be a text"),
    ({"type": "content", "content": STORY * 200}, "max_model_len"),
    ({"type": "content", "content": "x" * (2 << 20)}, "characters"),
]  # fmt: skip


@pytest.mark.parametrize(("prediction", "message"), BAD_PREDICTIONS, ids=[message for _, message in BAD_PREDICTIONS])
def test_bad_predictions_are_refused(server, prediction, message):
    status, _, text = asked(server, CHAT, {**BASES[CHAT], "prediction": prediction})
    assert status == 400 and message in json.loads(text)["error"]["message"], text
    off = {"prediction": {"type": "content", "content": "x"}, "speculative_config": {"enabled": False}}
    assert asked(server, CHAT, {**BASES[CHAT], **off})[0] == 400


MORE = {
    "plain": {}, "n": {"n": 2}, "tools": {"tools": [tool()], "tool_choice": "required"},
    "drafter": {"speculative_config": {"method": "draft_model"}},
}  # fmt: skip


@pytest.mark.parametrize("more", MORE.values(), ids=MORE)
def test_predictions_are_counted_and_change_no_text(server, more):
    """Also with options that OpenAI excludes; whole and streamed."""

    def ask(**fields):
        return server.ask(CHAT, {**BASES[CHAT], "max_tokens": 60, **more, **fields})[2]

    def messages(answer):
        return [re.sub(r"call_\w+", "", json.dumps(choice["message"])) for choice in answer["choices"]]

    plain = json.loads(ask())
    message = plain["choices"][0]["message"]
    written = message["content"] or message["tool_calls"][0]["function"]["arguments"]
    prediction = {"type": "content", "content": [{"type": "text", "text": "No. "}, {"type": "text", "text": written}]}
    found = json.loads(ask(prediction=prediction))
    assert messages(found) == messages(plain) and "completion_tokens_details" not in plain["usage"]
    counts = found["usage"]["completion_tokens_details"]
    assert set(counts) == {"accepted_prediction_tokens", "rejected_prediction_tokens"}
    if "tools" not in more:  # its grammar cuts what is predicted
        assert counts["accepted_prediction_tokens"] > 5 and counts["rejected_prediction_tokens"] > 0
    frames = ask(prediction=prediction, stream=True, stream_options={"include_usage": True}).split("data: ")
    assert json.loads(frames[-2])["usage"]["completion_tokens_details"] == counts
