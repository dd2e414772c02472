"""How requests end otherwise than by themselves: their time is over, their client is killed, or the model raises for them."""

import json
import signal
import subprocess
import sys
import threading
import time

import pytest
from helpers_server import Process

pytest.importorskip("uvicorn")
pytest.importorskip("fastapi")
pytest.importorskip("prometheus_client")

LONG = {"prompt": "Once upon a time", "max_tokens": 400, "ignore_eos": True, "temperature": 0}
POISONS = {4000: "RuntimeError", 4001: "ValueError"}
# The embeddings of two ids raise.
RAISES = f"""
import builtins, torch
before = torch.nn.Embedding.forward
def forward(self, ids):
    for poison, error in {POISONS}.items():
        if (ids == poison).any():
            raise getattr(builtins, error)("poisoned")
    return before(self, ids)
torch.nn.Embedding.forward = forward
"""


@pytest.fixture(scope="module")
def server():
    with Process.running("--max-model-len", "512", "--max-num-seqs", "40", "--max-request-seconds", "20") as made:
        made.post("/v1/completions", {"prompt": "x", "max_tokens": 2})
        yield made


def is_empty(server, seconds=30):
    """Whether nothing runs or waits, and no block is used, in time."""
    deadline, names = time.monotonic() + seconds, ("requests_running", "requests_waiting", "kv_cache_usage_ratio")
    while time.monotonic() < deadline:
        metrics = server.metrics()
        if not any(metrics[f"hf_specdec_{name}"] for name in names):
            return True
        time.sleep(0.05)
    return False


def test_an_answer_whose_time_is_over_ends_with_what_is_written(server):
    _, _, whole = server.post("/v1/completions", {**LONG, "return_token_ids": True})
    body = {
        **LONG,
        "n": 48,
        "max_time": 0.4,
        "return_token_ids": True,
    }  # more than can run at once: some wait all the time
    status, _, answer = server.post("/v1/completions", body)
    assert status == 200
    tokens = whole["choices"][0]["token_ids"]
    written = [choice["token_ids"] for choice in answer["choices"]]
    assert {choice["finish_reason"] for choice in answer["choices"]} == {"length"}
    assert all(own == tokens[: len(own)] for own in written)
    assert 0 < max(map(len, written)) < 400 and min(map(len, written)) == 0
    assert answer["usage"]["completion_tokens"] == sum(map(len, written))
    assert is_empty(server)
    # In a stream: its last frames are those of every stream.
    status, found = 0, []
    code = "import json, sys, urllib.request as u; r = u.urlopen(u.Request(sys.argv[1], sys.argv[2].encode(), " \
           "{'Content-Type': 'application/json'})); print(r.read().decode())"  # fmt: skip
    stream = json.dumps({**body, "stream": True, "stream_options": {"include_usage": True}})
    shown = subprocess.run(
        [sys.executable, "-c", code, server.url + "/v1/completions", stream], capture_output=True, text=True
    )
    frames = [line.removeprefix("data: ") for line in shown.stdout.splitlines() if line.startswith("data: ")]
    assert frames[-1] == "[DONE]"
    found = [json.loads(frame) for frame in frames[:-1]]
    ends = [choice["finish_reason"] for frame in found for choice in frame["choices"] if choice["finish_reason"]]
    assert ends == ["length"] * 48 and found[-1]["usage"]["completion_tokens"] > 0
    assert is_empty(server)


def test_a_time_that_is_long_enough_changes_nothing(server):
    _, _, whole = server.post("/v1/completions", LONG)
    assert server.post("/v1/completions", {**LONG, "max_time": 60})[2]["choices"] == whole["choices"]
    for wrong in (0, -1, "soon"):
        assert server.post("/v1/completions", {**LONG, "max_time": wrong})[0] == 400


def test_a_client_that_is_killed_frees_its_blocks(server):
    """kill -9 in the middle of a stream."""
    code = "import sys, urllib.request as u; r = u.urlopen(u.Request(sys.argv[1], sys.argv[2].encode(), " \
           "{'Content-Type': 'application/json'})); [print(line, flush=True) for line in r]"  # fmt: skip
    body = json.dumps({**LONG, "n": 32, "stream": True})
    client = subprocess.Popen(
        [sys.executable, "-c", code, server.url + "/v1/completions", body], stdout=subprocess.PIPE, text=True
    )
    assert "data" in client.stdout.readline() and server.metrics()["hf_specdec_requests_running"] > 0
    client.send_signal(signal.SIGKILL)
    client.wait()
    client.stdout.close()
    assert is_empty(server)
    assert server.post("/v1/completions", {**LONG, "max_tokens": 4})[0] == 200


def test_a_prompt_for_which_the_model_raises_ends_alone():
    """Beside others, which get what they would have got; its client is told not to try again."""
    config = json.dumps({"method": "ngram", "num_speculative_tokens": 2, "native": False})
    short = {**LONG, "max_tokens": 100}
    with Process.running("--speculative-config", config, "--max-model-len", "512", before=RAISES) as server:
        _, _, alone = server.post("/v1/completions", short)
        found = []

        def ask(body):
            found.append((body, *server.post("/v1/completions", body)))

        bodies = [
            short,
            {**short, "prompt": [5, 4000, 7]},
            short,
            {**short, "prompt": [4001], "max_tokens": 3},
            short,
        ]
        threads = [threading.Thread(target=ask, args=(body,)) for body in bodies]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(found) == 5
        for body, status, headers, answer in found:
            if body is short:
                assert status == 200 and answer["choices"] == alone["choices"]
            else:
                assert status == 500 and headers["x-should-retry"] == "false"
                error = next(name for poison, name in POISONS.items() if poison in body["prompt"])
                assert error in answer["error"]["message"] and "poisoned" not in answer["error"]["message"]
        assert is_empty(server)
        assert server.post("/v1/completions", short)[2]["choices"] == alone["choices"]


@pytest.mark.parametrize(
    "more",
    [
        {}, {"include_stop_str_in_output": True}, {"ignore_eos": False, "stop_token_ids": [13, 50], "include_stop_str_in_output": True},
        {"stop_token_ids": [13, 50]}, {"skip_special_tokens": False, "ignore_eos": True},
        {"structured_outputs": {"regex": "(Tom|Lily) (is|was) [a-zé]{2,9}\\."}}, {"max_tokens": 3},
        {"logit_bias": {str(i): 60 for i in range(200, 240)}},
    ],
    ids=lambda more: "-".join(more) or "plain",
)  # fmt: skip
def test_text_is_the_same_wherever_it_is_made(server, more):
    """The engine makes the text of requests with stop texts, to find them; that of all others is made beside its steps."""
    body = {"prompt": ["Once upon a time", "Lily"], "max_tokens": 120, "temperature": 0.8, "n": 2, "seed": 1, **more}
    here, there = (server.post("/v1/completions", {**body, **stop}) for stop in ({}, {"stop": ["\x00 never"]}))
    assert here[0] == there[0] == 200 and here[2]["choices"] == there[2]["choices"]
    assert any(choice["text"] for choice in here[2]["choices"])
