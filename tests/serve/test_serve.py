"""`hf-specdec serve`: a real process on loopback, asked by the openai client and by plain HTTP."""

import asyncio
import gc
import json
import re
import signal
import socket
import threading
import time
import urllib.error
import urllib.request
import weakref
from types import SimpleNamespace

import openai
import pytest
import torch
from helpers_server import Process, free_port

from hf_specdec.serve.http.endpoints import Completions
from hf_specdec.serve.http.protocol import CompletionRequest
from hf_specdec.serve.http.responses import Responses, ResponsesRequest
from hf_specdec.serve.http.server import Limits, Server
from hf_specdec.serve.ipc.messages import Cancel, Load, Submit, Update

CONFIG = {"method": "eagle3", "model": "tiny-eagle3", "num_speculative_tokens": 3}
SERVED = {
    "method": "per_request",
    "methods": {"head": CONFIG, "copy": {"method": "ngram", "num_speculative_tokens": 2, "prompt_lookup_min": 1}},
}
STORY = "Once upon a time there was a little girl. Once upon a time"


@pytest.fixture(scope="module")
def server():
    with Process.running(
        "--speculative-config", json.dumps(SERVED), "--max-model-len", "256", "--max-body-bytes", "100000"
    ) as made:
        yield made


def written(model, ids, max_new_tokens, config=None, **sampling):
    out = model.generate(
        torch.tensor([ids]), attention_mask=torch.ones(1, len(ids), dtype=torch.long), max_new_tokens=max_new_tokens,
        speculative_config=config, **{"do_sample": False, **sampling},
    )  # fmt: skip
    return out[0, len(ids) :].tolist()


def test_completions_are_those_of_generate(client, tiny_model, tiny_tokenizer):
    answer = client.completions.create(
        model="tiny", prompt=[STORY, "Lily"], max_tokens=20, temperature=0, extra_body={"return_token_ids": True}
    )
    assert [choice.index for choice in answer.choices] == [0, 1] and answer.usage.completion_tokens <= 40
    for prompt, choice in zip([STORY, "Lily"], answer.choices, strict=True):
        expected = written(tiny_model, tiny_tokenizer(prompt)["input_ids"], 20)
        assert choice.token_ids == expected
        assert choice.text.strip() == tiny_tokenizer.decode(expected, skip_special_tokens=True).strip()
        assert choice.finish_reason in ("length", "stop")


def test_streams_hold_the_same_text(client):
    arguments = {"model": "tiny", "prompt": STORY, "max_tokens": 24, "temperature": 0.8, "seed": 5, "n": 2}
    whole = client.completions.create(**arguments)
    texts, reasons, usage = ["", ""], [None, None], None
    for frame in client.completions.create(**arguments, stream=True, stream_options={"include_usage": True}):
        usage = frame.usage or usage
        for choice in frame.choices:
            texts[choice.index] += choice.text
            assert reasons[choice.index] is None
            reasons[choice.index] = choice.finish_reason
    assert texts == [choice.text for choice in whole.choices] and texts[0] != texts[1]
    assert reasons == [choice.finish_reason for choice in whole.choices]
    assert usage.completion_tokens == whole.usage.completion_tokens


def test_a_seed_is_that_of_generate(server, tiny_model, tiny_tokenizer):
    body = {"prompt": STORY, "max_tokens": 16, "temperature": 0.7, "seed": 3, "return_token_ids": True}
    _, _, answer = server.post("/v1/completions", body)
    sampling = {"do_sample": True, "temperature": 0.7, "top_k": 0, "top_p": 1.0}
    config = {"method": "none", "seed": 3}
    assert answer["choices"][0]["token_ids"] == written(
        tiny_model, tiny_tokenizer(STORY)["input_ids"], 16, config, **sampling
    )


def test_chat(client, tiny_model, tiny_tokenizer):
    messages = [{"role": "user", "content": "Tell me a story about a dog."}]
    answer = client.chat.completions.create(model="tiny", messages=messages, max_completion_tokens=20, temperature=0)
    ids = tiny_tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=True, return_dict=False)
    expected = tiny_tokenizer.decode(written(tiny_model, ids, 20), skip_special_tokens=True)
    assert answer.choices[0].message.content.strip() == expected.strip() and answer.usage.prompt_tokens == len(ids)
    deltas = list(
        client.chat.completions.create(
            model="tiny", messages=messages, max_completion_tokens=20, temperature=0, stream=True, logprobs=True,
            top_logprobs=2,
        )
    )  # fmt: skip
    assert deltas[0].choices[0].delta.role == "assistant"
    assert "".join(d.choices[0].delta.content or "" for d in deltas) == answer.choices[0].message.content
    entries = [entry for d in deltas if d.choices[0].logprobs for entry in d.choices[0].logprobs.content]
    assert len(entries) == answer.usage.completion_tokens and all(len(entry.top_logprobs) == 2 for entry in entries)
    assert all(entry.token == entry.top_logprobs[0].token for entry in entries)  # greedy
    speculation = answer.metrics["speculative_decoding"]
    assert sum(speculation["acceptance_histogram"]) == speculation["num_spec_steps"]
    assert len(speculation["acceptance_histogram"]) == speculation["num_spec_tokens"] + 1 == 4


def test_echo_with_logprobs_scores_a_text(server, tiny_model, tiny_tokenizer):
    """As lm-eval asks: prompts as ids, max_tokens 0."""
    ids = tiny_tokenizer(STORY)["input_ids"]
    _, _, answer = server.post(
        "/v1/completions", {"prompt": [ids], "echo": True, "logprobs": 1, "max_tokens": 0, "temperature": 0}
    )
    found = answer["choices"][0]["logprobs"]
    expected = tiny_model(torch.tensor([ids])).logits[0].detach().log_softmax(-1)
    assert found["token_logprobs"][0] is None and len(found["token_logprobs"]) == len(ids)
    for row, token, value in zip(expected, ids[1:], found["token_logprobs"][1:], strict=False):
        assert value == pytest.approx(float(row[token]), abs=1e-4)


def test_structured_output(server, client):
    """By OpenAI's field and by vLLM's, whole and streamed."""
    schema = {
        "type": "object",
        "properties": {"dog": {"enum": ["big", "small"]}},
        "required": ["dog"],
        "additionalProperties": False,
    }
    messages = [{"role": "user", "content": "Which dog?"}]
    wanted = {"type": "json_schema", "json_schema": {"name": "dog", "schema": schema}}
    arguments = {
        "model": "tiny",
        "messages": messages,
        "temperature": 0,
        "response_format": wanted,
        "max_completion_tokens": 120,
    }
    answer = client.chat.completions.create(**arguments)
    assert json.loads(answer.choices[0].message.content)["dog"] in ("big", "small")
    assert answer.choices[0].finish_reason == "stop"
    frames = list(client.chat.completions.create(**arguments, stream=True))
    assert "".join(f.choices[0].delta.content or "" for f in frames) == answer.choices[0].message.content
    body = {"prompt": [STORY, "Tom"], "max_tokens": 30, "structured_outputs": {"regex": "(yes|no), [a-z]{3,9}"}, "n": 2}
    _, _, found = server.post("/v1/completions", body)
    assert all(re.fullmatch("(yes|no), [a-z]{3,9}", choice["text"]) for choice in found["choices"]), found


def test_stop_texts_are_never_shown(server):
    _, _, whole = server.post("/v1/completions", {"prompt": STORY, "max_tokens": 30, "temperature": 0})
    text = whole["choices"][0]["text"]
    stop = text[10:16]
    body = {"prompt": STORY, "max_tokens": 30, "temperature": 0, "stop": [stop]}
    _, _, cut = server.post("/v1/completions", body)
    assert cut["choices"][0]["text"] == text[: text.index(stop)] and cut["choices"][0]["finish_reason"] == "stop"
    frames = server.streamed("/v1/completions", body)
    assert "".join(frame["choices"][0]["text"] for frame in frames) == text[: text.index(stop)]


def test_prefixes_are_counted_as_cached(server):
    body = {"prompt": STORY * 3, "max_tokens": 2, "temperature": 0, "speculative_config": {"enabled": False}}
    server.post("/v1/completions", body)
    _, _, again = server.post("/v1/completions", body)
    assert again["usage"]["prompt_tokens_details"]["cached_tokens"] > 0
    assert again["metrics"]["speculative_decoding"]["num_draft_tokens"] == 0


def test_a_request_chooses_its_drafter(server):
    """All write the same text; the copying one drafts at most two tokens a step."""
    texts = set()
    for method in (None, "head", "copy"):
        body = {"prompt": STORY * 2, "max_tokens": 16, "temperature": 0, "speculative_config": {"method": method}}
        _, _, answer = server.post("/v1/completions", body)
        texts.add(answer["choices"][0]["text"])
        drafted = answer["metrics"]["speculative_decoding"]
        per_round = drafted["num_draft_tokens"] / drafted["num_spec_steps"]
        assert 0 < per_round <= 2 if method == "copy" else 2 < per_round <= 3, drafted
    assert len(texts) == 1
    status, _, answer = server.post("/v1/completions", {"prompt": "x", "speculative_config": {"method": "nosuch"}})
    assert status == 400 and "head, copy" in answer["error"]["message"]


def test_other_endpoints(server, client, tiny_tokenizer):
    (listed,) = client.models.list()
    assert listed.id == "tiny" and client.models.retrieve("tiny") == listed
    for name in ("huge", "org/huge", "tiny/"):
        with pytest.raises(openai.NotFoundError) as error:
            client.models.retrieve(name)
        assert error.value.code == "model_not_found" and error.value.param == "model"
    _, _, found = server.post("/tokenize", {"prompt": STORY})
    assert found["tokens"] == tiny_tokenizer(STORY)["input_ids"] and found["count"] == len(found["tokens"])
    assert server.post("/detokenize", {"tokens": found["tokens"]})[2]["prompt"] == tiny_tokenizer.decode(
        found["tokens"]
    )
    server.post("/v1/completions", {"prompt": STORY, "max_tokens": 20, "temperature": 0})
    metrics = server.metrics()
    assert metrics["hf_specdec_requests_running"] == 0 and metrics["hf_specdec_generation_tokens_total"] > 0
    assert (
        metrics["vllm:spec_decode_num_draft_tokens_total"] >= metrics["vllm:spec_decode_num_accepted_tokens_total"] > 0
    )


@pytest.mark.parametrize(
    ("path", "body", "status", "message"),
    [
        ("/v1/completions", b"{", 400, "JSON"),
        ("/v1/completions", b"[]", 400, "dictionary|object"),
        ("/v1/completions", b"\xff\xfe", 400, "error|JSON|decode"),
        ("/v1/completions", {}, 400, "prompt"),
        ("/v1/completions", {"prompt": []}, 400, "empty"),
        ("/v1/completions", {"prompt": [[]]}, 400, "at least one token"),
        ("/v1/completions", {"prompt": [10**9]}, 400, "ids 0 to"),
        ("/v1/completions", {"prompt": "x", "model": "gpt-5"}, 404, "does not exist"),
        ("/v1/completions", {"prompt": "x", "temperature": -1}, 400, "temperature"),
        ("/v1/completions", {"prompt": "x", "top_p": "high"}, 400, "top_p"),
        ("/v1/completions", {"prompt": "x", "n": 0}, 400, "n: "),
        ("/v1/completions", {"prompt": "x", "logprobs": 99}, 400, "logprobs"),
        ("/v1/completions", {"prompt": "x", "stop": [str(i) for i in range(10000)]}, 400, "stop"),
        ("/v1/completions", {"prompt": "x", "logit_bias": {"a": 1}}, 400, "logit_bias"),
        ("/v1/completions", {"prompt": "x", "logit_bias": {"99999": 1}}, 400, "logit_bias"),
        ("/v1/completions", {"prompt": "x", "speculative_config": {"method": "x"}}, 400, "speculative_config"),
        ("/v1/completions", {"prompt": "word " * 2000}, 400, "max_model_len"),
        ("/v1/completions", {"prompt": "x" * 200_000}, 413, "bytes"),
        ("/v1/chat/completions", {"messages": []}, 400, "messages"),
        (
            "/v1/chat/completions",
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:"}}]}]},
            400,
            "tiny reads no images",
        ),
        (
            "/v1/chat/completions",
            {"messages": [{"role": "user", "content": "x"}], "top_logprobs": 3},
            400,
            "needs logprobs",
        ),
        (
            "/v1/chat/completions",
            {
                "messages": [{"role": "user", "content": "x"}],
                "tools": [{"type": "function", "function": {"name": "f"}}],
            },
            400,
            "does not know how this model writes tool calls",
        ),
        (
            "/v1/completions",
            {"prompt": "x", "structured_outputs": {"regex": "(a"}},
            400,
            "unclosed group",
        ),
        ("/v1/completions", {"prompt": "x", "structured_outputs": {}}, 400, "exactly one of"),
        ("/v1/completions", {"prompt": "x", "structured_outputs": {"regex": "a", "choice": ["a"]}}, 400, "2 are given"),
        ("/v1/completions", {"prompt": "x", "structured_outputs": {"regex": "(" * 40000}}, 400, "are allowed"),
        ("/v1/completions", {"prompt": "x", "guided_regex": "a"}, 400, "use structured_outputs"),
        ("/v1/completions", {"prompt": "x", "response_format": {"type": "xml"}}, 400, "response_format"),
        ("/v1/completions", {"prompt": "x", "response_format": {"type": "json_schema"}}, 400, "json_schema.schema"),
        (
            "/v1/completions",
            {"prompt": "x", "response_format": {"type": "json_schema", "json_schema": {"schema": {"not": {}}}}},
            400,
            "Unimplemented keys",
        ),
        (
            "/v1/completions",
            {"prompt": "x", "structured_outputs": {"choice": ["a"]}, "allowed_token_ids": [5], "temperature": 0},
            400,
            "none of the tokens",
        ),
        ("/v1/nothing", {}, 404, "served at /v1/nothing"),
        ("/health", {}, 405, "does not accept POST"),
        ("/tokenize", {}, 400, "prompt or messages"),
    ],
)
def test_bad_requests_are_the_clients_errors(server, path, body, status, message):
    code, _, answer = server.post(path, body)
    assert (code, set(answer)) == (status, {"error"}), answer
    assert set(answer["error"]) == {"message", "type", "param", "code"}
    assert re.search(message, answer["error"]["message"]), answer["error"]


def test_fields_that_mean_nothing_are_named(server):
    status, headers, _ = server.post("/v1/completions", {"prompt": "x", "max_tokens": 1, "beam_width": 3, "foo": 1})
    assert status == 200 and headers["x-ignored-fields"] == "beam_width, foo"


def test_clients_that_leave_give_their_blocks_back(server):
    """In the middle of a stream, and before an answer."""
    body = json.dumps({"prompt": "Lily", "max_tokens": 200, "stream": True, "ignore_eos": True, "n": 4}).encode()
    for stream in (True, False):
        own = body if stream else body.replace(b'"stream": true', b'"stream": false')
        with socket.create_connection(("127.0.0.1", server.port)) as sock:
            head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(own)}\r\n\r\n"
            sock.sendall(head.encode() + own)
            if stream:
                sock.recv(2000)
            else:
                time.sleep(0.3)
    deadline = time.monotonic() + 30
    while server.metrics()["hf_specdec_requests_running"] and time.monotonic() < deadline:
        time.sleep(0.05)
    metrics = server.metrics()
    assert metrics["hf_specdec_requests_running"] == 0 == metrics["hf_specdec_kv_cache_usage_ratio"]


def test_many_clients_at_once(server, tiny_model, tiny_tokenizer):
    """Each gets what it would alone."""
    prompts = [f"{name} went to the park" for name in ("Tom", "Lily", "Ben", "Anna", "Max", "Sue", "Tim", "Mia")]
    found = {}

    def ask(prompt):
        body = {"prompt": prompt, "max_tokens": 16, "temperature": 0, "return_token_ids": True}
        found[prompt] = server.post("/v1/completions", body)[2]["choices"][0]["token_ids"]

    threads = [threading.Thread(target=ask, args=(prompt,)) for prompt in prompts]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for prompt in prompts:
        assert found[prompt] == written(tiny_model, tiny_tokenizer(prompt)["input_ids"], 16)


LONG = {"prompt": "Lily", "max_tokens": 900, "ignore_eos": True, "temperature": 0}


def in_threads(process, bodies, path="/v1/completions"):
    """Send each body in a thread; returns the threads and the list that their answers are appended to."""
    found = []
    send = lambda body: found.append(process.post(path, body))  # noqa: E731
    threads = [threading.Thread(target=send, args=(body,)) for body in bodies]
    for thread in threads:
        thread.start()
    return threads, found


def wait_for(process, **wanted):
    """Wait until metrics have these values."""
    deadline = time.monotonic() + 60
    while any(process.metrics()[f"hf_specdec_{name}"] != value for name, value in wanted.items()):
        assert time.monotonic() < deadline, process.metrics()
        time.sleep(0.02)


def test_keys_drain_and_a_full_queue():
    process = Process(
        "--api-key", "secret", "--api-key", "other", "--max-num-seqs", "1", "--max-num-queued-reqs", "1",
        "--shutdown-timeout", "300",
    )  # fmt: skip
    try:
        process.wait()
        process.headers = {"Authorization": "Bearer other"}
        status, _, answer = process.post("/v1/completions", {"prompt": "x"}, {"Authorization": "Bearer no"})
        assert status == 401 and answer["error"]["code"] == "invalid_api_key"
        assert process.post("/v1/completions", {"prompt": "x", "max_tokens": 1})[0] == 200
        (first,), running = in_threads(process, [LONG])
        wait_for(process, requests_running=1)
        (second,), waiting = in_threads(process, [LONG])
        wait_for(process, requests_running=1, requests_waiting=1)
        status, headers, _ = process.post("/v1/completions", LONG)
        assert status == 429 and headers["Retry-After"] == "1"
        process.process.send_signal(signal.SIGTERM)
        first.join()
        second.join()
        assert process.process.wait(timeout=60) == 0
        for status, _, answer in running + waiting:
            assert status == 200 and answer["usage"]["completion_tokens"] == LONG["max_tokens"]  # drained, not cut
    finally:
        process.process.kill()


def test_answers_that_do_not_end_in_time_end_with_an_error():
    """After SIGTERM and `--shutdown-timeout`: whole answers 503, streams an event; running or waiting."""
    process = Process("--max-num-seqs", "1", "--shutdown-timeout", "0.2")
    try:
        process.wait()
        threads, found = in_threads(process, [{**LONG, "n": 8}] * 2)
        wait_for(process, requests_running=1, requests_waiting=15)
        request = urllib.request.Request(
            process.url + "/v1/completions", json.dumps({**LONG, "stream": True}).encode(), {"Content-Type": "application/json"}
        )  # fmt: skip
        with urllib.request.urlopen(request) as stream:
            process.process.send_signal(signal.SIGTERM)
            events = [line for line in stream.read().decode().splitlines() if line.startswith("data: ")]
        assert "shutting down" in json.loads(events[-2].removeprefix("data: "))["error"]["message"]
        for thread in threads:
            thread.join()
        for status, headers, answer in found:
            assert status == 503 and headers["Retry-After"] == "5" and answer["error"]["type"] == "service_unavailable"
        assert process.process.wait(timeout=60) == 0
    finally:
        process.process.kill()


def test_a_call_that_waits_for_a_trainer_ends_with_the_server():
    """After SIGTERM and `--shutdown-timeout`, although the trainer never comes."""
    process = Process("--enable-weight-updates", "--shutdown-timeout", "0.2")
    try:
        process.wait()
        process.post("/v1/completions", {"prompt": "x", "max_tokens": 1})
        group = {"master_address": "127.0.0.1", "master_port": free_port()}
        (thread,), found = in_threads(process, [group], "/init_weights_update_group")
        time.sleep(1)
        assert not found
        began = time.monotonic()
        process.process.send_signal(signal.SIGTERM)
        thread.join()
        assert time.monotonic() - began < 4  # not only once uvicorn gives up
        ((status, headers, answer),) = found
        assert status == 503 and headers["Retry-After"] == "5" and "shutting down" in answer["error"]["message"]
        assert process.process.wait(timeout=60) == 0
        assert time.monotonic() - began < 9  # nobody had to kill the engine
    finally:
        process.process.kill()


def test_silence_in_a_stream_and_readers_that_leave(tiny_tokenizer):
    """None after every so many seconds without an update, not before; who leaves before the end cancels what has not ended."""

    async def read():
        sent, silence = [], 0.05
        server = Server(tiny_tokenizer, ["tiny"], Limits(keep_alive_seconds=silence))
        server.facts.max_model_len = 256
        server.worker = SimpleNamespace(failure=None, is_alive=lambda: True, send=sent.append, load=Load())
        answers = []
        for prompt in ([5], [6]):
            answers.append(server.submit(prompt, server.facts.defaults.copy(lora="north"), among=answers))
        updates = server.updates(answers)
        began = time.monotonic()
        assert await anext(updates) is None and await anext(updates) is None
        assert time.monotonic() - began >= 1.8 * silence  # timers end a little early
        await asyncio.sleep(0.7 * silence)
        server._route(
            [Update(answers[1].id, token_ids=[7], request_finished=True), Update(answers[0].id, token_ids=[8])]
        )
        assert [(await anext(updates))[0].number for _ in range(2)] == [1, 0]
        began = time.monotonic()
        assert await anext(updates) is None and time.monotonic() - began >= 0.9 * silence
        server.release(answers)
        server.release(answers)
        assert [type(each) for each in sent] == [Submit, Submit, Cancel] and sent[2].id == answers[0].id
        assert not server.answers
        metrics = server.metrics.text()
        assert metrics.count(b'hf_specdec_generation_tokens_total{model_name="tiny"} 2.0') == 1
        for reason in (b"stop", b"abort"):  # both counted as the adapter's
            assert b'hf_specdec_requests_total{finish_reason="%s",model_name="north"} 1.0' % reason in metrics

    asyncio.run(read())


def test_nothing_is_kept_of_an_answer_that_has_been_read(tiny_tokenizer):
    async def read():
        server = Server(tiny_tokenizer, ["tiny"], Limits(keep_alive_seconds=60))
        server.facts.max_model_len = 256
        server.worker = SimpleNamespace(failure=None, is_alive=lambda: True, send=lambda message: None, load=Load())
        answers = [server.submit([5], server.facts.defaults)]
        server._route([Update(answers[0].id, token_ids=[7], request_finished=True)])
        assert len([update.token_ids async for _, update in server.updates(answers)]) == 1
        server.release(answers)
        ended = weakref.ref(answers[0])
        del answers
        gc.collect()
        assert ended() is None

    asyncio.run(read())


@pytest.mark.parametrize("path", ["completions", "responses"])
def test_a_stream_in_which_the_server_fails(tiny_tokenizer, caplog, path):
    """It ends with an error, and the log has the traceback."""

    async def broken(answers):
        raise RuntimeError("a bug of ours")
        yield

    async def read():
        server = Server(tiny_tokenizer, ["tiny"], Limits())
        server.facts.max_model_len, server.updates = 256, broken
        server.worker = SimpleNamespace(failure=None, is_alive=lambda: True, send=lambda message: None, load=Load())
        if path == "completions":
            endpoint = Completions(server, CompletionRequest(prompt="x", stream=True), "")
        else:
            endpoint = Responses(server, ResponsesRequest(input="x", stream=True), "")
        endpoint.prepare()
        endpoint.submit()
        return b"".join([piece async for piece in endpoint.stream()]).decode()

    stream = asyncio.run(read())
    assert "server_error" in stream and "its log says why" in stream and "a bug of ours" not in stream
    assert ("response.failed" in stream) == (path == "responses")
    assert "a bug of ours" in caplog.text and "Traceback" in caplog.text
