"""Replicas by Ray Serve, and a router in front of two servers."""

import asyncio
import importlib
import importlib.util
import json
import os
import socket
import subprocess
import sys
import time
import types
import urllib.error
import urllib.request

import pytest
from paths import ROOT
from transformers import AutoTokenizer

from hf_specdec.bundled import resolve_model
from hf_specdec.cli import main

ENVIRONMENT = {
    **os.environ,
    "OMP_NUM_THREADS": "1",
    "HF_HUB_OFFLINE": "1",
    "PYTHONPATH": str(ROOT),
    "RAY_USAGE_STATS_ENABLED": "0",
}
has_ray = importlib.util.find_spec("ray") is not None


@pytest.mark.skipif(has_ray, reason="Ray is installed")
def test_without_ray_the_error_names_the_extra(capsys):
    assert main(["serve", "tiny", "--replicas", "2"]) == 2
    assert "pip install 'hf-specdec[ray]'" in capsys.readouterr().err


@pytest.mark.parametrize("flag", ["--tokenizer", "--request-read-timeout", "--shutdown-timeout"])
def test_flags_that_replicas_do_not_get_are_refused(flag, capsys):
    assert main(["serve", "tiny", "--replicas", "2", flag, "5"]) == 2
    assert f"--replicas does not support {flag}" in capsys.readouterr().err


@pytest.fixture
def replicas(monkeypatch):
    """The module of replicas. Without Ray, empty modules stand in for it: these tests call no function of Ray's."""
    if not has_ray:
        ray = {name: types.ModuleType(name) for name in ("ray", "ray.serve", "ray.exceptions")}
        ray["ray"].serve, ray["ray.exceptions"].RayError = ray["ray.serve"], RuntimeError
        for name, module in ray.items():
            monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.delitem(sys.modules, "hf_specdec.serve.ray", raising=False)
    yield importlib.import_module("hf_specdec.serve.ray")
    sys.modules.pop("hf_specdec.serve.ray")


def test_limits_reach_the_replicas(replicas, monkeypatch):
    pytest.importorskip("fastapi")
    from hf_specdec.serve.http.server import Limits

    started = []
    monkeypatch.setattr(replicas, "run", lambda arguments, *address: started.append(arguments))
    limits = ["--max-body-bytes", "1000", "--sse-keep-alive-interval", "0", "--max-request-seconds", "5"]
    engine = ["--max-model-len", "64", "--kv-cache-memory-bytes", "4000000", "--dtype", "float32"]
    assert main(["serve", "tiny", "--replicas", "2", "--port", "0", *limits, *engine]) == 0
    (arguments,) = started

    async def answer():
        replica = replicas.Replica.__new__(replicas.Replica)
        await replica.__init__(arguments)
        scope = {
            "type": "http",
            "method": "POST",
            "path": "/v1/completions",
            "query_string": b"",
            "headers": [],
            "root_path": "",
        }
        return replica.server.limits, [piece async for piece in replica.stream(scope, b"x" * 1001)]

    found, ((status, _), *_) = asyncio.run(answer())
    assert status == 413
    assert found == Limits(max_body_bytes=1000, keep_alive_seconds=0, answer_seconds=5)


def test_an_address_in_use_is_known_before_replicas_are_started(replicas, monkeypatch, capsys):
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setattr(replicas, "run", lambda *args: pytest.fail("started"))
    with socket.create_server(("127.0.0.1", 0)) as taken:
        assert main(["serve", "tiny", "--replicas", "2", "--port", str(taken.getsockname()[1])]) == 2
    assert "in use" in capsys.readouterr().err


def test_a_replica_reads_its_tokenizer_as_the_arguments_say(replicas, monkeypatch):
    pytest.importorskip("fastapi")
    pytest.importorskip("prometheus_client")
    load, asked = AutoTokenizer.from_pretrained, []
    monkeypatch.setattr(
        AutoTokenizer, "from_pretrained", lambda *args, **more: asked.append(more) or load(*args, **more)
    )

    async def start(**llm):
        replica = object.__new__(replicas.Replica)
        llm = {"max_model_len": 64, "kv_cache_memory_bytes": 8 << 20, "speculative_config": {"method": "ngram"}, **llm}
        await replica.__init__(replicas.Arguments("tiny", llm=llm))
        assert replica.server.tokenizer is replica.llm.tokenizer

    for llm in ({"revision": "v1", "trust_remote_code": True}, {"tokenizer": resolve_model("tiny"), "revision": "v1"}):
        asked.clear()
        asyncio.run(start(**llm))
        assert [each["revision"] for each in asked] == ["v1"]
        assert asked[0]["trust_remote_code"] == llm.get("trust_remote_code", False)


@pytest.mark.slow
def test_a_replica_that_is_killed_loses_no_request(tmp_path):
    pytest.importorskip("ray")
    file = tmp_path / "report.json"
    command = [sys.executable, str(ROOT / "benchmarks" / "replicas.py"), "--requests", "60", "--json", str(file)]
    done = subprocess.run(command, env=ENVIRONMENT, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stderr[-3000:]
    report = json.loads(file.read_text())
    assert report["answered"] == report["equal"] == 60 and report["lost"] == 0


def _answers(url, body=None, seconds=120):
    ends = time.monotonic() + seconds
    while True:
        request = urllib.request.Request(url, body, {"Content-Type": "application/json"})
        try:
            with urllib.request.urlopen(request, timeout=60) as answer:
                return answer.read()
        except (urllib.error.URLError, ConnectionError):
            if time.monotonic() > ends:
                raise
            time.sleep(0.5)


@pytest.mark.slow
def test_sglang_router_in_front_of_two_servers():
    """Requests that begin alike go to one server; the answers are those of the servers."""
    pytest.importorskip("sglang_router")
    ports, entrance = (18511, 18512), 18510
    serve = [sys.executable, "-m", "hf_specdec", "serve", "tiny", "--dtype", "float32", "--max-model-len", "256",
             "--kv-cache-memory-bytes", "16000000", "--speculative-config", '{"method": "ngram"}']  # fmt: skip
    router = [
        sys.executable,
        "-m",
        "sglang_router.launch_router",
        "--port",
        str(entrance),
        "--policy",
        "cache_aware",
        "--worker-urls",
    ]
    processes = [subprocess.Popen([*serve, "--port", str(port)], env=ENVIRONMENT) for port in ports]
    try:
        for port in ports:
            _answers(f"http://127.0.0.1:{port}/health")
        processes.append(subprocess.Popen([*router, *(f"http://127.0.0.1:{port}" for port in ports)], env=ENVIRONMENT))
        body = json.dumps({"model": "tiny", "prompt": "Once upon a time", "max_tokens": 12, "temperature": 0}).encode()
        own = json.loads(_answers(f"http://127.0.0.1:{ports[0]}/v1/completions", body))["choices"][0]["text"]
        texts = {
            json.loads(_answers(f"http://127.0.0.1:{entrance}/v1/completions", body))["choices"][0]["text"]
            for _ in range(6)
        }
        assert texts == {own}
        counts = [_answers(f"http://127.0.0.1:{port}/metrics").decode() for port in ports]
        served = [sum(float(line.split()[-1]) for line in each.splitlines() if line.startswith("hf_specdec_requests_total"))
                  for each in counts]  # fmt: skip
        assert sum(served) == 7, counts
        assert 0 <= min(served) <= 1, served
    finally:
        for process in processes:
            process.terminate()
        for process in processes:
            process.wait(60)


EVENTS = [(b"content-type", b"text/event-stream; charset=utf-8")]


class Handle:
    """Stands in for Ray's handle of the replicas. `answers`: what the calls return, one by one; an error is raised, None never ends."""

    def __init__(self, answers):
        self.answers, self.asked, self.cancelled = list(answers), [], 0
        self.stream = types.SimpleNamespace(remote=self._remote)

    def options(self, stream):
        return self

    def _remote(self, scope, body):
        self.asked.append((scope["path"], body))
        return Response(self, self.answers.pop(0))


class Response:
    """One call of a replica."""

    def __init__(self, handle, answer):
        self.handle, self.answer = handle, answer

    def cancel(self):
        self.handle.cancelled += 1

    async def __aiter__(self):
        if isinstance(self.answer, Exception):
            raise self.answer
        status, headers, *pieces = self.answer or (200, [], None)
        yield status, headers
        for piece in pieces:
            if piece is None:
                await asyncio.Event().wait()
            if isinstance(piece, Exception):
                raise piece
            yield piece


def answered(replicas, handle, pieces, leaves_after=None):
    """(messages, seconds) of the ingress for a request whose body is these pieces; its client leaves so many seconds after them."""
    pytest.importorskip("fastapi")
    pytest.importorskip("prometheus_client")
    from hf_specdec.serve.http.server import Limits

    sent = []

    async def ask():
        unread = [{"type": "http.request", "body": each, "more_body": True} for each in pieces]
        unread.append({"type": "http.request", "body": b"", "more_body": False})

        async def receive():
            if unread:
                return unread.pop(0)
            await asyncio.sleep(1000 if leaves_after is None else leaves_after)
            return {"type": "http.disconnect"}

        async def send(message):
            sent.append(message)

        scope = {"type": "http", "method": "POST", "path": "/v1/completions", "headers": []}
        ingress = replicas.Ingress(handle, Limits(max_body_bytes=1000))
        await asyncio.wait_for(ingress.serve(scope, receive, send), 30)

    began = time.monotonic()
    asyncio.run(ask())
    return sent, time.monotonic() - began


def test_the_ingress_passes_a_request_on(replicas):
    handle = Handle([(200, [(b"a", b"b")], b"whole")])
    sent, _ = answered(replicas, handle, [b'{"prompt"', b': "x"}'])
    assert handle.asked == [("/v1/completions", b'{"prompt": "x"}')] and not handle.cancelled
    assert sent[0]["status"] == 200 and sent[0]["headers"] == [(b"a", b"b")] and sent[1]["body"] == b"whole"


def test_the_ingress_limits_bodies(replicas):
    handle = Handle([])
    sent, _ = answered(replicas, handle, [b" " * 100] * 11)
    assert sent[0]["status"] == 413 and b"1000 bytes" in sent[1]["body"] and not handle.asked


def test_the_ingress_sends_events_as_they_come(replicas):
    """Whatever asked for them: a recording is sent in a form, which is no JSON."""
    handle = Handle([(200, EVENTS, b"data: first\n\n", None)])
    sent, _ = answered(replicas, handle, [b"--form"], leaves_after=0.2)
    assert [message.get("body") for message in sent] == [None, b"data: first\n\n"]


@pytest.mark.parametrize("body", [b'{"prompt": "x"}', b'{"prompt": "x", "stream": true}'])
def test_a_client_of_the_ingress_that_leaves_ends_its_request(replicas, body):
    handle = Handle([None])
    _, seconds = answered(replicas, handle, [body], leaves_after=0.05)
    assert handle.cancelled == 1 and seconds < 10


def test_the_ingress_gives_up_at_once_after_its_last_attempt(replicas, monkeypatch):
    handle = Handle([replicas.RayError("dead")] * 4)
    monkeypatch.setattr(replicas, "_PAUSE", 0.3)
    sent, seconds = answered(replicas, handle, [b"{}"])
    assert sent[0]["status"] == 503 and len(handle.asked) == 4 and seconds < 1.2


def test_a_replica_that_dies_before_its_answer_has_begun_is_replaced(replicas, monkeypatch):
    """A stream that has begun ends with an error: what has been sent cannot be taken back."""
    monkeypatch.setattr(replicas, "_PAUSE", 0)
    dies, answers = (200, [], b"half", replicas.RayError("dead")), (200, [], b"whole")
    for body, first in ((b"{}", dies), (b'{"stream": true}', replicas.RayError("dead"))):
        handle = Handle([first, answers])
        sent, _ = answered(replicas, handle, [body])
        assert len(handle.asked) == 2 and [each.get("body") for each in sent] == [None, b"whole", b""]
    handle = Handle([(200, EVENTS, *dies[2:])])
    sent, _ = answered(replicas, handle, [b'{"stream": true}'])
    assert len(handle.asked) == 1 and sent[1]["body"] == b"half" and b"has died" in sent[2]["body"]
