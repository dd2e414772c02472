"""What goes over the wire: fields that are named as ignored, log-probabilities in every form, errors, CORS, and the queue's limit."""

import asyncio
import copy
import gzip
import json
import re
import threading
import urllib.error
import urllib.request
from types import SimpleNamespace

import pytest
from fastapi.testclient import TestClient
from helpers_server import in_thread
from tokenizers.processors import TemplateProcessing

from hf_specdec import LLM
from hf_specdec.cli.serve import _api_keys
from hf_specdec.serve import SamplingParams
from hf_specdec.serve.http.api import ROUTES, make_app
from hf_specdec.serve.http.endpoints import Completions
from hf_specdec.serve.http.errors import ApiError
from hf_specdec.serve.http.protocol import ChatRequest, TokenizeRequest
from hf_specdec.serve.http.server import Limits, Privacy, Server
from hf_specdec.serve.ipc.messages import Facts, Load, Submit, Update
from hf_specdec.serve.ipc.worker import EngineWorker

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
USER = [{"role": "user", "content": "x"}]
ORIGIN = "http://page.example"


@pytest.fixture(scope="module")
def server():
    config = {"method": "eagle3", "model": "tiny-eagle3", "num_speculative_tokens": 3}
    options = {"max_model_len": 256, "max_body_bytes": 50000}
    with in_thread(config, api_keys=["secret"], allowed_origins=[ORIGIN], **options) as made:
        made.headers = {"Authorization": "Bearer secret"}
        yield made


# ---- ignored fields -------------------------------------------------------------------------------------------------


FORMAT = {"type": "json_schema", "json_schema": {"name": "n", "strict": True, "schema": {"type": "null"}, "odd": 1}}
TOOL = {"type": "function", "function": {"name": "f", "strict": True}, "odd": 1}
CACHED = {"type": "text", "text": "x", "cache_control": {"type": "ephemeral"}}


@pytest.mark.parametrize(
    ("path", "body", "names"),
    [
        (COMPLETIONS, {"prompt": "x", "max_tokens": 1, "foo": 1, "bar": 2}, "bar, foo"),
        (CHAT, {"messages": USER, "response_format": FORMAT}, "response_format.json_schema.name, response_format.json_schema.odd"),
        (CHAT, {"messages": USER, "max_tokens": 1, "tools": [TOOL] * 2, "tool_choice": "none"}, "tools.odd"),
        ("/v1/responses", {"input": "x", "max_output_tokens": 1, "text": {"odd": 1}, "foo": 1}, "foo, text.odd"),
        ("/v1/responses", {"input": "x", "max_output_tokens": 1, "text": {"format": {"type": "text", "odd": 1}}}, "text.format.odd"),
        ("/v1/messages", {"messages": USER, "max_tokens": 1, "metadata": {"user_id": "me"}, "stop": "x"}, "metadata, stop"),
        ("/v1/messages", {"messages": [{"role": "user", "content": [CACHED]}], "max_tokens": 1}, "messages.content.cache_control"),
        ("/v1/messages", {"messages": USER, "max_tokens": 1, "thinking": {"type": "disabled"}}, "thinking"),
        ("/v1/messages/count_tokens", {"messages": USER, "max_tokens": 1, "system": [CACHED]}, "max_tokens, system.cache_control"),
        ("/tokenize", {"prompt": "x", "foo": 1}, "foo"),
        ("/tokenize", {"prompt": "x", "": 1, " ": 1}, "'', ' '"),
        ("/tokenize", {"messages": USER, "add_special_tokens": True, "tools": [TOOL], "n": 1}, "add_special_tokens, n, tools.odd"),
        ("/tokenize", {"prompt": "x", "chat_template_kwargs": {}, "tool_choice": "none"}, "chat_template_kwargs, tool_choice"),
        ("/detokenize", {"tokens": [5], "foo": 1}, "foo"),
        (CHAT, {"messages": [{**USER[0], "name": "me"}], "max_tokens": 1}, None),  # the template may show it
    ],
)  # fmt: skip
def test_ignored_fields_are_named_wherever_they_are(server, path, body, names):
    status, headers, answer = server.post(path, body)
    assert (status, headers["x-ignored-fields"]) == (200, names), answer


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (COMPLETIONS, {"prompt": "Once upon", "max_tokens": 5}),
        (CHAT, {"messages": USER, "max_tokens": 5}),
        ("/v1/responses", {"input": "Once upon", "max_output_tokens": 5}),
        ("/v1/messages", {"messages": USER, "max_tokens": 5}),
        ("/tokenize", {"prompt": "Once upon"}),
    ],
)
def test_null_is_the_same_as_nothing(server, path, body):
    """Clients send null for what they leave open: OpenAI's fields may be null, `n`, `stream`, `echo` and penalties among them."""
    body = body if path == "/tokenize" else {**body, "temperature": 0}
    api = json.loads(server.ask("/openapi.json")[2])
    reference = api["paths"][path]["post"]["requestBody"]["content"]["application/json"]["schema"]["$ref"]
    names = api["components"]["schemas"][reference.rpartition("/")[2]]["properties"]
    assert len(names) > 4
    expected = server.post(path, body)
    status, headers, answer = server.post(path, {**dict.fromkeys(names), **body})
    assert (status, headers["x-ignored-fields"]) == (200, None), answer
    for name in {"tokens", "choices", "output", "content", "usage"} & answer.keys():
        assert _without_ids(answer[name]) == _without_ids(expected[2][name])
    if path != "/tokenize":  # within a part, too; but what is needed may not be null
        assert server.post(path, {**body, "speculative_config": {"method": None}, "stream_options": None})[0] == 200
    assert server.post(path, {**body, next(iter(body)): None})[0] == 400


def _without_ids(value):
    if isinstance(value, dict):
        return {
            name: _without_ids(each)
            for name, each in value.items()
            if name not in ("id", "prompt_tokens_details", "input_tokens_details")
        }
    return [_without_ids(each) for each in value] if isinstance(value, list) else value


# ---- log-probabilities ----------------------------------------------------------------------------------------------


def test_echoed_prompts_are_scored_in_every_form(server):
    """For each of several choices, and in a stream, as for one choice that is sent whole."""
    body = {"prompt": "Once upon a time", "echo": True, "logprobs": 1, "max_tokens": 6, "temperature": 0}
    (alone,) = server.post(COMPLETIONS, body)[2]["choices"]
    expected = alone["logprobs"]
    assert expected["token_logprobs"][0] is None and len(expected["tokens"]) == 4 + 6
    assert [
        alone["text"][offset:].startswith(token)
        for offset, token in zip(expected["text_offset"], expected["tokens"], strict=True)
    ]
    status, _, several = server.post(COMPLETIONS, {**body, "n": 3, "return_token_ids": True})
    assert status == 200, several
    for choice in several["choices"]:
        assert choice["text"] == alone["text"] and choice["logprobs"]["tokens"] == expected["tokens"]
        assert choice["logprobs"]["token_logprobs"][1:] == pytest.approx(expected["token_logprobs"][1:], abs=1e-4)
        assert len(choice["token_ids"]) == 6  # those of the answer
    for n in (1, 2):
        found = {}
        for frame in server.streamed(COMPLETIONS, {**body, "n": n}):
            for choice in frame["choices"]:
                into = found.setdefault(choice["index"], {name: [] for name in expected} | {"text": ""})
                into["text"] += choice["text"]
                for name in expected:
                    into[name] += choice["logprobs"][name]
        assert len(found) == n
        for each in found.values():
            assert (each["text"], each["tokens"]) == (alone["text"], expected["tokens"])
            assert each["text_offset"] == expected["text_offset"] and len(each["top_logprobs"]) == 10
            assert each["token_logprobs"][1:] == pytest.approx(expected["token_logprobs"][1:], abs=1e-4)


@pytest.mark.parametrize("echo", [True, False])
def test_places_of_tokens_are_those_in_the_text(server, echo):
    """Whatever a frame holds back (a stop text may have begun, a character is not complete) and leaves out (special tokens)."""
    more = {
        "max_tokens": 30,
        "temperature": 0,
        "logprobs": 0,
        "echo": echo,
        "ignore_eos": True,
        "return_token_ids": True,
    }
    for body in (
        {"prompt": "def f(x):\n    return", "stop": ["zz zz"]},
        {"prompt": "Once upon a time", "stop": ["here wax", "was b", "little gil"]},
        {"prompt": "é日本 x", "structured_outputs": {"regex": "é😀 [a-z]{3} 日本!"}, "stop": [" !", "本?"]},
    ):
        (whole,) = server.post(COMPLETIONS, {**body, **more})[2]["choices"]
        places, text = whole["logprobs"]["text_offset"], ""
        assert "return" not in body["prompt"] or "<|end|>" in whole["logprobs"]["tokens"]
        for token, place in zip(whole["logprobs"]["tokens"], places, strict=True):
            shown = not token.startswith(("bytes:", "<|"))
            assert not shown or whole["text"][place:].startswith(token), (token, place)
            text += token * shown
        assert len(text) > 20 or "regex" in str(body)
        frames = server.streamed(COMPLETIONS, {**body, **more})
        choices = [choice for frame in frames for choice in frame["choices"]]
        assert "".join(choice["text"] for choice in choices) == whole["text"]
        assert [place for choice in choices for place in choice["logprobs"]["text_offset"]] == places


def test_scoring_alone_is_the_same_in_a_stream(server):
    """max_tokens 0: the token that the engine draws is shown nowhere."""
    body = {"prompt": "Once upon a time", "echo": True, "logprobs": 1, "max_tokens": 0, "return_token_ids": True}
    answer = server.post(COMPLETIONS, body)[2]
    (whole,), usage = answer["choices"], answer["usage"]
    frame, last = server.streamed(COMPLETIONS, {**body, "stream_options": {"include_usage": True}})
    (choice,) = frame["choices"]
    for found in (usage, last["usage"]):
        assert (found["prompt_tokens"], found["completion_tokens"], found["total_tokens"]) == (4, 0, 4)
    assert choice["text"] == whole["text"] and choice["logprobs"] == whole["logprobs"]
    assert choice["token_ids"] == whole["token_ids"] == [] and choice["finish_reason"] == "length"


def test_a_prompt_that_was_not_read_in_time_has_no_scores(server):
    """More choices than rows, and no time: some prompts are never read. That is no failure of the server."""
    body = {"prompt": ["Once upon a time " * 30] * 40, "echo": True, "logprobs": 0, "max_tokens": 100, "max_time": 1e-9}
    status, _, answer = server.post(COMPLETIONS, body)
    assert status == 200, answer
    for choice in answer["choices"]:
        assert len(choice["logprobs"]["tokens"]) == len(choice["logprobs"]["token_logprobs"]) >= 100


def test_bytes_of_tokens_make_the_text(server):
    """Characters of several tokens: each token has its own bytes, not those of U+FFFD."""
    body = {"messages": USER, "max_tokens": 30, "temperature": 0, "logprobs": True, "top_logprobs": 2}
    body |= {"structured_outputs": {"regex": "é😀 [a-z]{3} 日本!"}}
    (choice,) = server.post(CHAT, body)[2]["choices"]
    entries = choice["logprobs"]["content"]
    assert any(entry["token"] == "�" for entry in entries)
    assert bytes(byte for entry in entries for byte in entry["bytes"]).decode() == choice["message"]["content"]
    body = {
        "prompt": "x",
        "max_tokens": 30,
        "temperature": 0,
        "logprobs": 0,
        "structured_outputs": {"regex": "é😀日本!"},
    }
    (choice,) = server.post(COMPLETIONS, body)[2]["choices"]
    assert choice["logprobs"]["tokens"][0] == "bytes:\\xc3" and choice["text"] == "é😀日本!"


def test_prompts_are_scored_on_request(server):
    """vLLM's field, with ids as keys."""
    ids = server.post("/tokenize", {"prompt": "Once upon a time"})[2]["tokens"]
    echoed = server.post(COMPLETIONS, {"prompt": ids, "echo": True, "logprobs": 1, "max_tokens": 0})[2]["choices"][0]
    body = {"prompt": ids, "max_tokens": 3, "temperature": 0, "prompt_logprobs": 1, "n": 2}
    for choice in server.post(COMPLETIONS, body)[2]["choices"]:
        found = choice["prompt_logprobs"]
        assert found[0] is None and len(found) == len(ids) and choice["logprobs"] is None
        for token, entry, value in zip(ids[1:], found[1:], echoed["logprobs"]["token_logprobs"][1:], strict=True):
            assert entry[str(token)]["logprob"] == pytest.approx(value, abs=1e-4)
            assert set(entry[str(token)]) == {"logprob", "rank", "decoded_token"} and len(entry) in (1, 2)
    answer = server.post(CHAT, {"messages": USER, "max_tokens": 1, "prompt_logprobs": 0})[2]
    assert (
        len(answer["prompt_logprobs"]) == answer["usage"]["prompt_tokens"]
        and "prompt_logprobs" not in answer["choices"][0]
    )
    for wrong in ({"stream": True}, {"prompt_logprobs": 21}, {"prompt_logprobs": -1}):
        status, _, answer = server.post(COMPLETIONS, {**body, **wrong})
        assert status == 400 and answer["error"]["param"] == "prompt_logprobs"
    status, _, answer = server.post("/v1/responses", {"input": "x", "prompt_logprobs": 1})
    assert status == 400 and answer["error"]["param"] == "prompt_logprobs"


def test_ids_and_reasons_in_every_form(server):
    """vLLM's `token_ids`, `prompt_token_ids` and `stop_reason`: in answers and in streams, there the prompt's in the first frame only."""
    body = {"max_tokens": 20, "temperature": 0, "return_token_ids": True, "stop": [" "], "n": 2}
    for path, more in ((COMPLETIONS, {"prompt": ["Once upon", "Lily"]}), (CHAT, {"messages": USER})):
        whole = server.post(path, {**body, **more})[2]
        prompts, frames = {}, server.streamed(path, {**body, **more})
        for choice in whole["choices"]:
            own = [(frame, each) for frame in frames for each in frame["choices"] if each["index"] == choice["index"]]
            assert [token for _, each in own for token in each.get("token_ids", [])] == choice["token_ids"] != []
            assert choice["stop_reason"] == own[-1][1]["stop_reason"] == " "
            assert not any(each.get("stop_reason") for _, each in own[:-1])
            told = [each.get("prompt_token_ids") or frame.get("prompt_token_ids") for frame, each in own]
            prompts[choice["index"]] = choice.get("prompt_token_ids") or whole["prompt_token_ids"]
            assert told == [prompts[choice["index"]]] + [None] * (len(own) - 1)
        if path == COMPLETIONS:
            ids = [server.post("/tokenize", {"prompt": text})[2]["tokens"] for text in more["prompt"]]
            assert [prompts[i] for i in range(4)] == [ids[0]] * 2 + [ids[1]] * 2
        else:
            assert prompts[0] == server.post("/tokenize", {"messages": USER})[2]["tokens"]


def test_refusals_of_earlier_turns_are_text(server):
    def tokens(path, content):
        name, usage = ("messages", "prompt_tokens") if path == CHAT else ("input", "input_tokens")
        body = {name: [{"role": "user", "content": "x"}, {"role": "assistant", "content": content}]}
        status, _, answer = server.post(path, {**body, "max_tokens" if path == CHAT else "max_output_tokens": 1})
        assert status == 200, answer
        return answer["usage"][usage]

    for path in (CHAT, "/v1/responses"):
        assert tokens(path, [{"type": "refusal", "refusal": "I cannot."}]) == tokens(path, "I cannot.")


# ---- errors and CORS ------------------------------------------------------------------------------------------------


def test_bodies_that_are_not_json_are_told_what_is_wrong(server):
    status, _, answer = server.post(COMPLETIONS, b'{"prompt": "x",}')
    assert (status, answer["error"]["param"]) == (400, None) and "not JSON" in answer["error"]["message"]
    assert "column 16" in answer["error"]["message"]
    for wrong in ("text/plain", "application/x-www-form-urlencoded"):  # the latter is curl's, without -H
        status, _, answer = server.post(COMPLETIONS, {"prompt": "x"}, {"Content-Type": wrong})
        assert status == 400 and "Content-Type: application/json" in answer["error"]["message"]
    status, _, answer = server.post(COMPLETIONS, {"prompt": "x", "best_of": 4})
    assert status == 400 and answer["error"]["message"].startswith("best_of is not served")
    compressed = gzip.compress(b'{"prompt": "x"}')
    for body, headers, message in (
        (b'{"prompt": "caf\xe9"}', {}, "'utf-8' codec"),
        (compressed, {"Content-Encoding": "gzip"}, "compressed (gzip), which is not supported"),
    ):
        status, _, answer = server.post(COMPLETIONS, body, headers)
        assert status == 400 and message in answer["error"]["message"], answer


@pytest.mark.parametrize(
    ("path", "body", "param", "message"),
    [
        (COMPLETIONS, {"prompt": None}, "prompt", "Input should be a valid string or a valid list"),
        (COMPLETIONS, {"prompt": [5, "x"]}, "prompt.0", "Input should be a valid string"),
        (COMPLETIONS, {"prompt": "x", "stop": 5}, "stop", "Input should be a valid string or a valid list"),
        (CHAT, {"messages": USER, "tool_choice": "any"}, "tool_choice", "Input should be 'none', 'auto' or 'required'"),
        (CHAT, {"messages": USER, "tool_choice": {"type": "function"}}, "tool_choice.function", "Field required"),
        (CHAT, {"messages": [{"role": "user", "content": 5}]}, "messages.0.content", "a valid string or a valid list"),
        (CHAT, {"messages": [*USER, {"content": "x"}]}, "messages.1.role", "Field required"),
        (CHAT, {"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages", "the text of a part"),
        (CHAT, {"messages": [{"role": "user", "content": [{"type": "text", "text": None}]}]}, "messages", "the text of a part"),
        (CHAT, {"messages": USER, "structured_outputs": {"xml": 1}}, "structured_outputs", "has no 'xml'; its keys are json"),
        (COMPLETIONS, {}, "prompt", "Field required"),
        ("/tokenize", {"messages": USER, "chat_template_kwargs": 5}, "chat_template_kwargs", "Input should be a valid dictionary"),
        ("/tokenize", {"messages": USER, "prompt": "x"}, None, "either prompt or messages"),
        ("/v1/responses", {"input": 5}, "input", "Input should be a valid string or a valid list"),
        (COMPLETIONS, {"prompt": [5] * 300}, "prompt", "300 tokens"),
        (CHAT, {"messages": [{"role": "user", "content": "x" * 300}]}, "messages", "tokens; with max_model_len 256"),
        (COMPLETIONS, {"prompt": "x", "stream_options": {"include_usage": True}}, "stream_options", "stream: true"),
        (CHAT, {"messages": USER, "add_generation_prompt": True, "continue_final_message": True}, "add_generation_prompt", "leave out"),
        (COMPLETIONS, {"prompt": "x", "logit_bias": {"5": 1, "no": 1}}, "logit_bias", "no are no ids"),
        (CHAT, {"messages": [{"role": "user", "content": [{"type": "input_audio"}]}]}, "messages", "a part with audio has"),
    ],
)  # fmt: skip
def test_errors_name_the_field_and_what_it_may_be(server, path, body, param, message):
    status, _, answer = server.post(path, body)
    error = answer["error"]
    assert (status, error["param"]) == (400, param) and message in error["message"] and "[" not in error["message"], (
        error
    )


@pytest.mark.parametrize(("name", "value"), [("best_of", 2), ("suffix", ""), ("modalities", ["text"])])
def test_values_that_ask_for_what_is_done_anyway(server, name, value):
    status, headers, answer = server.post(COMPLETIONS, {"prompt": "x", "max_tokens": 1, "n": 2, name: value})
    assert (status, headers["x-ignored-fields"]) == (200, name), answer


def asked(server, method, path, headers, body=None):
    """(status, headers) of a request as a browser sends it."""
    request = urllib.request.Request(server.url + path, body, headers, method=method)
    try:
        with urllib.request.urlopen(request, timeout=60) as answer:
            return answer.status, answer.headers
    except urllib.error.HTTPError as error:
        return error.code, error.headers


def test_pages_of_allowed_origins_may_read_answers_and_errors(server):
    wanted = {"Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "authorization"}
    status, headers = asked(
        server, "OPTIONS", COMPLETIONS, {"Origin": ORIGIN, **wanted}
    )  # browsers send no key with it
    assert status == 200 and headers["Access-Control-Allow-Origin"] == ORIGIN
    assert "authorization" in headers["Access-Control-Allow-Headers"].lower()
    for own, expected in (({}, 401), (server.headers, 405)):
        status, headers = asked(server, "GET", COMPLETIONS, {"Origin": ORIGIN, **own})
        assert (status, headers["Access-Control-Allow-Origin"]) == (expected, ORIGIN)
        assert "x-ignored-fields" in headers["Access-Control-Expose-Headers"].lower()
    status, headers = asked(server, "POST", COMPLETIONS, {"Origin": ORIGIN, **server.headers}, b"x" * 60_000)
    assert (status, headers["Access-Control-Allow-Origin"]) == (413, ORIGIN)
    status, headers = asked(server, "GET", "/v1/models", {"Origin": "http://other.example", **server.headers})
    assert status == 200 and headers["Access-Control-Allow-Origin"] is None
    assert asked(server, "OPTIONS", COMPLETIONS, {"Origin": "http://other.example", **wanted})[0] == 400
    assert asked(server, "OPTIONS", COMPLETIONS, {})[0] == 401  # no preflight, and no key


def test_no_page_may_read_unless_it_is_asked_for(tiny_tokenizer):
    app = make_app(Server(tiny_tokenizer, ["tiny"], Limits()))

    def answered(method, path, *headers):
        """(status, names of headers), without a network."""
        sent, body = [], [{"type": "http.request", "body": b"", "more_body": False}]

        async def receive():
            return body.pop() if body else await asyncio.Future()  # the client stays

        async def send(message):
            sent.append(message)

        scope = {"type": "http", "method": method, "path": path, "headers": [(b"origin", ORIGIN.encode()), *headers]}
        asyncio.run(app({**scope, "query_string": b"", "http_version": "1.1", "scheme": "http"}, receive, send))
        return sent[0]["status"], [name.decode() for name, _ in sent[0]["headers"]]

    for status, names in (
        answered("OPTIONS", COMPLETIONS, (b"access-control-request-method", b"POST")),
        answered("GET", "/version"),
    ):
        assert status in (200, 405) and not [name for name in names if name.startswith("access-control")]


@pytest.mark.parametrize(("stream", "threads"), [(False, [False]), (True, [False, True])])
def test_long_answers_are_made_off_the_event_loop(tiny_tokenizer, monkeypatch, stream, threads):
    """Whole ones, and frames that echo a prompt: with log-probabilities they may take seconds."""
    in_loop, name = [], "choice" if stream else "whole"
    made = getattr(Completions, name)

    def noting(*args):
        in_loop.append(threading.current_thread() is threading.main_thread())
        return made(*args)

    async def updates(answers):
        yield answers[0], Update(answers[0].id, text="a", token_ids=[7])
        yield answers[0], Update(answers[0].id, text="b", token_ids=[8], finish_reason="length", request_finished=True)

    monkeypatch.setattr(Completions, name, noting)
    server = Server(tiny_tokenizer, ["tiny"], Limits())
    server.facts.max_model_len, server.updates = 256, updates
    server.worker = SimpleNamespace(failure=None, is_alive=lambda: True, send=lambda message: None, load=Load())
    body = json.dumps({"prompt": "x", "echo": True, "stream": stream}).encode()
    unread, sent = [{"type": "http.request", "body": body, "more_body": False}], []

    async def receive():
        if not unread:
            await asyncio.sleep(60)
        return unread.pop()

    async def send(message):
        sent.append(message.get("body", b""))

    scope = {"type": "http", "method": "POST", "path": COMPLETIONS, "headers": [(b"content-type", b"application/json")]}
    asyncio.run(
        make_app(server)({**scope, "query_string": b"", "http_version": "1.1", "scheme": "http"}, receive, send)
    )
    assert in_loop == threads and b'"text":"xa' in b"".join(sent)


# ---- the queue ------------------------------------------------------------------------------------------------------


def test_a_burst_does_not_overfill_the_queue(tiny_tokenizer):
    """Requests that came while the engine computes one step count, too; rows that are free do not make anybody wait."""

    async def accepted(load, n=1):
        server = Server(tiny_tokenizer, ["tiny"], Limits(max_queued_requests=2))
        server.facts.max_model_len = 256
        server.worker = SimpleNamespace(failure=None, is_alive=lambda: True, send=lambda message: None, load=load)
        answers = []
        for _ in range(10):
            try:
                answers.append(server.submit([5], server.facts.defaults.copy(n=n)))
            except ApiError as error:
                assert error.status == 429
        server.release(answers)
        return len(answers)

    def found(load, **more):
        return asyncio.run(accepted(load, **more))

    assert found(Load(running=2, free_rows=0)) == 2
    assert found(Load(running=2, waiting=1, free_rows=0)) == 1
    assert found(Load(running=2, waiting=2, free_rows=0)) == 0
    assert found(Load(free_rows=4)) == 6
    assert found(Load(free_rows=4), n=2) == 3
    assert found(Load(running=2, waiting=1, free_rows=4)) == 1  # they wait for blocks
    assert found(Load(running=2, free_rows=0), n=8) == 1  # a request is not cut: its choices wait beyond the limit


def test_the_engine_tells_its_load_while_a_step_runs(tiny_model, tiny_tokenizer):
    """A request that was just scheduled does not count as waiting while its first step is computed."""
    llm = LLM(tiny_model, tiny_tokenizer, {"method": "none"}, max_model_len=64, max_num_seqs=2)
    worker = EngineWorker(llm.engine, lambda updates: None, llm.engine)
    seen, step = [], llm.engine.decoder.step
    llm.engine.decoder.step = lambda *args: seen.append(worker.load) or step(*args)
    for i in range(3):
        worker.send(Submit(str(i), None, [5, 6, 7], SamplingParams(temperature=0, max_tokens=2)))
    with llm.engine.decoder.active():
        assert worker._step()
    (load,) = seen
    assert (load.running, load.waiting, load.free_rows, load.num_read) == (2, 1, 0, 3)
    llm.close()


# ---- chat templates -------------------------------------------------------------------------------------------------


def test_a_tokenizer_without_a_chat_template_gets_chatml_and_the_log_says_so(tiny_tokenizer, caplog):
    facts = Facts(SamplingParams(), 64, None)
    own = Server(tiny_tokenizer, ["tiny"], Limits())
    own.know(facts)
    assert "ChatML" not in caplog.text
    bare = copy.deepcopy(tiny_tokenizer)
    bare.chat_template = None
    server = Server(bare, ["tiny"], Limits())
    server.know(facts)
    assert "no chat template" in caplog.text and "ChatML" in caplog.text
    messages = [{"role": "system", "content": "Be nice."}, {"role": "user", "content": "Hi"}]
    text = server.chat_text(ChatRequest.model_validate({"messages": messages}))
    expected = "<|im_start|>system\nBe nice.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    assert text == expected
    assert own.chat_text(ChatRequest.model_validate({"messages": messages})) != text
    bare.bos_token = "<|endoftext|>"  # a token that is not added to texts is not added here
    assert server.chat_text(ChatRequest.model_validate({"messages": messages})) == text
    first = [("<|endoftext|>", bare.bos_token_id)]
    bare.backend_tokenizer.post_processor = TemplateProcessing(single="<|endoftext|> $A", special_tokens=first)
    assert server.chat_text(ChatRequest.model_validate({"messages": messages})) == "<|endoftext|>" + text


def test_tokenize_makes_the_prompt_that_chat_makes(tiny_tokenizer):
    """Whatever a field does to the prompt of a chat request, it does here."""
    shows_all = copy.deepcopy(tiny_tokenizer)
    shows_all.chat_template = (
        "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}{{ tools | tojson }}{{ mood }}"
        "{% if add_generation_prompt %}assistant: {% endif %}"
    )
    server, base = Server(shows_all, ["tiny"], Limits()), {"messages": USER}
    seen = [server.chat_text(TokenizeRequest.model_validate(base))]
    for more in (
        {"tools": [TOOL]}, {"add_generation_prompt": False}, {"continue_final_message": True, "add_generation_prompt": False},
        {"chat_template_kwargs": {"mood": "glad"}}, {"messages": [{"role": "user", "content": [{"type": "text", "text": "parts"}]}]},
    ):  # fmt: skip
        text = server.chat_text(TokenizeRequest.model_validate({**base, **more}))
        assert text == server.chat_text(ChatRequest.model_validate({**base, **more})) and text not in seen, more
        seen.append(text)
    assert server.chat_text(TokenizeRequest.model_validate({**base, "tools": [TOOL], "tool_choice": "none"})) == seen[0]


def test_openapi_describes_what_is_served(tiny_tokenizer):
    """Every path with its methods; schemathesis checks the rest."""
    app = make_app(Server(tiny_tokenizer, ["tiny"], Limits()), ["secret"])
    document = app.openapi()
    served = {(re.sub("{.*}", "{}", route.path), method) for route in app.routes for method in route.methods - {"HEAD"}}
    ours = {
        (re.sub("{.*}", "{}", path), method.upper()) for path, found in document["paths"].items() for method in found
    }
    assert ours == {
        each for each in served if each[0] not in ("/openapi.json", "/docs", "/docs/oauth2-redirect", "/redoc")
    }
    for path, found in document["paths"].items():
        for operation in found.values():
            assert ("401" in operation["responses"]) == (path != "/health")
    (page,) = document["paths"]["/v1/responses/{id}/input_items"].values()
    assert [(each["name"], each["in"]) for each in page["parameters"]] == [
        ("id", "path"), ("limit", "query"), ("order", "query"), ("after", "query")
    ]  # fmt: skip
    assert not [name for name, schema in document["components"]["schemas"].items() if not schema.get("description")]
    assert "x-ignored-fields" in document["paths"]["/v1/lookup/{name}"]["put"]["responses"]["200"]["headers"]


def test_an_empty_api_key_is_refused(monkeypatch):
    """A request without a key would have it: `--api-key "$UNSET"`, or a variable so set, would look like protection."""
    monkeypatch.setenv("HF_SPECDEC_API_KEY", "")
    for keys in ([""], ["secret", ""], _api_keys(SimpleNamespace(api_key=None))):
        with pytest.raises(ValueError, match="An API key is empty"):
            Privacy().check(None, keys)


def test_head_is_answered_wherever_get_is(tiny_tokenizer):
    """With the same status, and no body."""
    client = TestClient(make_app(Server(tiny_tokenizer, ["tiny"], Limits())))
    paths = [route.path for route in ROUTES if route.method == "GET"]
    assert {client.get(path).status_code for path in paths} >= {200, 403, 404, 503}
    for path in paths:
        answer = client.head(path)
        assert (answer.status_code, answer.text) == (client.get(path).status_code, ""), path


def test_long_texts_are_refused_before_they_are_tokenized(tiny_tokenizer):
    """Unless their tokens are long, too: then they are counted."""
    server, sizes = Server(tiny_tokenizer, ["tiny"], Limits()), []
    server.facts.max_model_len, encode = 64, server.encode
    server.encode = lambda text, *more: sizes.append(len(text)) or encode(text, *more)
    with pytest.raises(ApiError, match="more than 64 tokens; with max_model_len 64 it may have 63") as error:
        server.prompt_ids("Once upon a time " * 50_000, "prompt")
    assert error.value.body["error"]["code"] == "context_length_exceeded" and sum(sizes) < 20_000
    with pytest.raises(ApiError, match="has 65 tokens"):
        server.prompt_ids([5] * 65, "prompt")
    sizes.clear()
    server.encode = lambda text, *more: sizes.append(len(text)) or [5] * (len(text) // 1000)
    assert len(server.prompt_ids("x" * 5000, "prompt")) == 5 and sizes == [512, 1024, 2048, 4096, 5000]
    with pytest.raises(ApiError, match="at most 1048576"):
        server.text_ids("x" * 2**21, "prompt")
