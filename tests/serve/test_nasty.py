"""Requests that nobody sends on purpose, and some that somebody does: no 5xx, no hang, and the next request is served."""

import asyncio
import json
import os
import select
import shutil
import signal
import socket
import subprocess
import threading
import time
from pathlib import Path

import pytest
from helpers_server import Process

pytest.importorskip("uvicorn")

COMPLETIONS, CHAT, RESPONSES = "/v1/completions", "/v1/chat/completions", "/v1/responses"
pytestmark = pytest.mark.ci
USER = [{"role": "user", "content": "x"}]


def nested(depth, inner="1"):
    return "[" * depth + inner + "]" * depth


@pytest.fixture(scope="module")
def server():
    config = json.dumps({"method": "ngram", "num_speculative_tokens": 3})
    flags = ["--max-model-len", "256", "--max-body-bytes", "3000000", "--request-read-timeout", "2", "--seed", "0"]
    process = Process("--speculative-config", config, *flags)
    try:
        yield process.wait()
        assert process.stop() == 0
    finally:
        process.process.kill()


@pytest.fixture(autouse=True)
def still_serves(server):
    """After every test the server answers, nothing runs, and no block is held."""
    yield
    status, _, answer = server.post(COMPLETIONS, {"prompt": "Lily", "max_tokens": 3, "temperature": 0})
    assert status == 200 and answer["usage"]["completion_tokens"] == 3
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline:
        metrics = server.metrics()
        left = [
            metrics[f"hf_specdec_{name}"] for name in ("requests_running", "requests_waiting", "kv_cache_usage_ratio")
        ]
        if not any(left):
            return
        time.sleep(0.05)
    raise AssertionError(left)


BODIES = {
    "not utf-8": (COMPLETIONS, b'{"prompt": "\xff\xfe"}'),
    "half a character": (COMPLETIONS, b'{"prompt": "a\\ud800b"}'),
    "half a character in the name": (COMPLETIONS, b'{"prompt": "x", "model": "\\udc00"}'),
    "half a character as a field": (COMPLETIONS, b'{"prompt": "x", "\\ud800": 1}'),
    "half a character in a part": (CHAT, b'{"messages": [{"role": "user", "content": [{"type": "text", "text": "\\ud800"}]}]}'),
    "half a character in a schema": (CHAT, b'{"messages": [], '
                                     b'"response_format": {"type": "json_schema", "json_schema": {"schema": {"\\ud800": 1}}}}'),
    "half a character in responses": (RESPONSES, b'{"input": "\\ud800"}'),
    "half a character to tokenize": ("/tokenize", b'{"prompt": "\\ud800"}'),
    "deep": (COMPLETIONS, b'{"prompt": ' + nested(100_000).encode() + b"}"),
    "as deep as JSON goes": (COMPLETIONS, b'{"prompt": "x", "foo": ' + nested(900).encode() + b"}"),
    "deep parts": (CHAT, b'{"messages": [{"role": "user", "content": [{"type": "text", "text": ' + nested(400).encode() + b"}]}]}"),
    "deep schema": (CHAT, json.dumps({"messages": USER, "structured_outputs": {"json": json.loads(nested(300)[1:-1])}}).encode()),
    "deep arguments": (CHAT, json.dumps({"messages": [{"role": "assistant", "tool_calls": [
        {"function": {"name": "f", "arguments": nested(100_000)}}]}]}).encode()),
    "deep tools": (CHAT, b'{"messages": [{"role": "user", "content": "x"}], "tools": [{"type": "function", '
                   b'"function": {"name": "f", "parameters": {"a": ' + nested(300).encode() + b"}}}]}"),
    "nothing": (COMPLETIONS, b""),
    "null": (COMPLETIONS, b"null"),
    "a number": (CHAT, b"1e999"),
    "not a number": (COMPLETIONS, b'{"prompt": "x", "temperature": NaN}'),
    "endless bias": (COMPLETIONS, b'{"prompt": "x", "logit_bias": {"5": Infinity}}'),
    "not a number in what is sent back": (RESPONSES, b'{"input": "x", "max_output_tokens": 1, "tool_choice": "none", '
                                          b'"tools": [{"type": "function", "name": "f", "parameters": {"a": NaN}}]}'),
    "endless number in what is sent back": (RESPONSES, b'{"input": "x", "max_output_tokens": 1, '
                                            b'"text": {"format": {"type": "text", "a": 1e999}}}'),
    "not a number in a constant": (COMPLETIONS, b'{"prompt": "x", "structured_outputs": {"json": {"const": NaN}}}'),
    "huge bias": (COMPLETIONS, b'{"prompt": "x", "logit_bias": {"' + b"9" * 400 + b'": 1}}'),
    "many stops": (CHAT, json.dumps({"messages": USER, "stop": [str(i) for i in range(10_000)]}).encode()),
    "many prompts": (COMPLETIONS, json.dumps({"prompt": ["x"] * 5000}).encode()),
    "no tokens": (COMPLETIONS, b'{"prompt": []}'),
    "empty text": (COMPLETIONS, b'{"prompt": ""}'),
    "empty conversation": (CHAT, b'{"messages": []}'),
    "zero tokens": (CHAT, json.dumps({"messages": USER, "max_tokens": 0}).encode()),
    "negative tokens": (CHAT, json.dumps({"messages": USER, "max_tokens": -1}).encode()),
    "an id beyond the vocabulary": (COMPLETIONS, b'{"prompt": [5, 999999999999999999999999]}'),
    "a negative id": (COMPLETIONS, b'{"prompt": [-1]}'),
    "huge minimum": (CHAT, json.dumps({"messages": USER, "min_tokens": 10**30}).encode()),
    "huge seed": (CHAT, json.dumps({"messages": USER, "seed": 10**30}).encode()),
    "huge top_k": (CHAT, json.dumps({"messages": USER, "top_k": 10**30}).encode()),
    "huge priority": (CHAT, json.dumps({"messages": USER, "priority": 10**30}).encode()),
    "huge stop id": (COMPLETIONS, json.dumps({"prompt": "x", "stop_token_ids": [10**30], "min_tokens": 2}).encode()),
    "negative stop id": (COMPLETIONS, json.dumps({"prompt": "x", "stop_token_ids": [-5], "structured_outputs": {"regex": "a"}}).encode()),
    "huge allowed id": (COMPLETIONS, json.dumps({"prompt": "x", "allowed_token_ids": [10**30]}).encode()),
    "tiny temperature": (COMPLETIONS, b'{"prompt": "x", "temperature": 1e-300}'),
    "tiny penalty": (COMPLETIONS, b'{"prompt": "x", "repetition_penalty": 1e-300}'),
    "tensors from the template": (CHAT, json.dumps({"messages": USER, "chat_template_kwargs": {"return_tensors": "pt"}}).encode()),
    "another template": (CHAT, json.dumps({"messages": USER, "chat_template_kwargs": {"chat_template": "{{ 1 }}"}}).encode()),
    "exploding grammar": (COMPLETIONS, json.dumps({"prompt": "x", "structured_outputs": {"grammar": "start: start start"}}).encode()),
    "grammar of everything": (COMPLETIONS, json.dumps({"prompt": "x", "structured_outputs": {"choice": ["y" * 40_000]}}).encode()),
}  # fmt: skip


def test_the_client_is_told(server):
    for name, (path, body) in BODIES.items():
        status, _, answer = server.post(path, body)
        if name == "as deep as JSON goes":  # whether it is too deep depends on the Python
            assert status in (200, 400)
        elif name == "deep arguments":  # they are text that a model wrote, and this template leaves them out
            assert status == 200
        else:
            assert status == 400 and set(answer["error"]) == {"message", "type", "param", "code"}, (
                name,
                status,
                answer,
            )


def held_by(server):
    """Bytes of memory, threads, and open files of a server's two processes together."""
    folders = [Path(f"/proc/{pid}") for pid in (server.process.pid, server.engine())]
    pages = sum(int((folder / "statm").read_text().split()[1]) for folder in folders)
    return pages * os.sysconf("SC_PAGE_SIZE"), *(
        sum(len(list((f / name).iterdir())) for f in folders) for name in ("task", "fd")
    )


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="reads /proc")
def test_bad_requests_leave_nothing_behind(server):
    """Memory, threads, files and sockets, over a thousand of them."""

    def asked(times):
        for _ in range(times):
            for path, body in BODIES.values():
                server.post(path, body)

    asked(8)
    before, *held = held_by(server)
    asked(25)
    after, *now = held_by(server)
    assert after - before < 8 << 20, f"{(after - before) / 2**20:.1f} MiB more"
    assert all(a <= b + 1 for a, b in zip(now, held, strict=True)), (now, held)  # a connection may still be open


def test_odd_requests_that_are_served(server):
    for body in (
        {"prompt": "x", "max_tokens": 0},
        {"prompt": "x", "top_p": 1e-300, "max_tokens": 2}, {"prompt": "x", "top_k": 2**31 - 1, "max_tokens": 2},
        {"prompt": "x", "temperature": 1e-20, "max_tokens": 2}, {"prompt": "x", "temperature": 100, "max_tokens": 2},
        {"prompt": "x", "min_tokens": 2**31 - 1, "max_tokens": None, "n": 2}, {"prompt": "x", "max_tokens": 10**30},
        {"prompt": "x", "max_tokens": 2, "ünïcödé\n\r: x": 1}, {"prompt": "x", "max_tokens": 2, " &": 1},
        {"prompt": "\x00\u2028", "max_tokens": 2},
        {"prompt": "x", "max_tokens": 2, "speculative_config": {"num_speculative_tokens": 10**30}},
    ):  # fmt: skip
        status, _, answer = server.post(COMPLETIONS, body)
        assert status in (200, 400) and (status == 200 or "min_tokens" in body), (body, answer)


def connected(server):
    return socket.create_connection(("127.0.0.1", server.port), timeout=30)


def closed_within(sock, seconds):
    sock.settimeout(seconds)
    received = b""
    while piece := sock.recv(4096):
        received += piece
    return received


def test_what_is_not_http(server):
    for junk in (
        b"\x16\x03\x01\x02\x00\x01\x00",
        b"HELO you\r\n\r\n",
        b"GET /" + b"a" * 100_000 + b" HTTP/1.1\r\n\r\n",
    ):
        with connected(server) as sock:
            sock.sendall(junk)
            answer = closed_within(sock, 10)
        assert answer.startswith(b"HTTP/1.1 4") or not answer
        if answer:
            assert json.loads(answer.partition(b"\r\n\r\n")[2])["error"]["type"] == "invalid_request_error"


def test_slow_headers_and_bodies_are_cut_off(server):
    """Slow-loris: one byte now and then, many times over. Others are served meanwhile."""
    head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: 50\r\n"
    socks = [connected(server) for _ in range(40)]
    for i, sock in enumerate(socks):
        sock.sendall((b"", head, head + b"\r\n", head + b'\r\n{"prompt')[i % 4])
    assert server.post(COMPLETIONS, {"prompt": "x", "max_tokens": 1})[0] == 200
    assert select.select(socks, [], [], 0)[0] == []  # answered while all of them were still open
    answers = [closed_within(sock, 20) for sock in socks]
    for i, answer in enumerate(answers):
        assert (b" 408 " in answer) == (i % 4 >= 2), answer
    for sock in socks:
        sock.close()


def test_drops_of_a_body_are_not_enough(server):
    with connected(server) as sock:
        sock.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 1000\r\n\r\n")
        with pytest.raises(OSError):
            for _ in range(200):  # of 1000 bytes
                sock.sendall(b" ")
                time.sleep(0.2)


def test_half_closed_and_reset_sockets(server):
    body = json.dumps({"prompt": "Lily", "max_tokens": 200, "stream": True, "ignore_eos": True}).encode()
    head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: "
    whole = head + str(len(body)).encode() + b"\r\n\r\n" + body
    for cut in (len(whole), len(whole) - 5, 30):
        with connected(server) as sock:
            sock.sendall(whole[:cut])
            sock.shutdown(socket.SHUT_WR)
            closed_within(sock, 20)
        with connected(server) as sock:
            sock.sendall(whole[:cut])
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\x01\x00\x00\x00\x00\x00\x00\x00")  # a reset


def test_bodies_in_chunks_have_the_same_limit(server):
    with connected(server) as sock:
        sock.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n")
        for size in [0x20000] * 22 + [3_000_001 - 22 * 0x20000]:  # one byte too many
            sock.sendall(b"%x\r\n" % size + b"x" * size + b"\r\n")
        assert b" 413 " in closed_within(sock, 20)


def test_large_requests_do_not_hold_up_streams(server):
    """The longest time between two frames of 32 streams while large requests arrive, which are refused in the end."""
    gaps, is_over = [], threading.Event()

    async def stream():
        data = json.dumps(
            {"prompt": "Once upon a time", "max_tokens": 200, "stream": True, "ignore_eos": True}
        ).encode()
        head = b"POST %s HTTP/1.0\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n"
        while not is_over.is_set():
            reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
            writer.write(head % (COMPLETIONS.encode(), len(data)) + data)
            last = time.monotonic()
            while await reader.read(1 << 16):
                gaps.append(time.monotonic() - last)
                last = time.monotonic()
            writer.close()

    async def streams():
        await asyncio.gather(*(stream() for _ in range(32)))

    words, objects = "Once upon a time there was a girl. " * 80_000, b"[%s[]]" % (b"[]," * 900_000)
    refused = [
        (COMPLETIONS, {"prompt": words}), (COMPLETIONS, {"prompt": [5] * 900_000}), (COMPLETIONS, {"prompt": [[5]] * 500_000}),
        (COMPLETIONS, {"prompt": "x", "stop": [5] * 900_000}), (CHAT, {"messages": USER * 60_000}),
        (RESPONSES, {"input": USER * 20_000}), ("/tokenize", {"messages": USER * 20_000, "chat_template_kwargs": 5}),
        ("/detokenize", {"tokens": [5] * 900_000 + [-1]}), (COMPLETIONS, b'{"prompt": "", "foo": %s}' % objects),
    ]  # fmt: skip
    thread = threading.Thread(target=asyncio.run, args=(streams(),))
    thread.start()
    try:
        time.sleep(1)
        gaps.clear()
        found = [server.post(*each)[0] for each in refused]
    finally:
        is_over.set()
        thread.join()
    # measured: 0.1; on the event loop it would be 5
    assert len(gaps) > 1000 and max(gaps) < 0.75
    assert found == [400] * len(refused)


def test_a_lane_keeps_the_order_and_forgets_who_has_left(tiny_tokenizer):
    """A short body does not wait for a long one."""
    from hf_specdec.serve.http.errors import ApiError
    from hf_specdec.serve.http.lanes import Lanes

    async def check():
        lanes, done, may_end = Lanes(None), [], threading.Event()
        long = asyncio.ensure_future(lanes.run(1 << 20, lambda _: may_end.wait(10)))
        await asyncio.sleep(0)
        left, stays = (
            asyncio.ensure_future(lanes.run(1 << 20, lambda _, name: done.append(name), name)) for name in "ab"
        )
        await asyncio.gather(*(lanes.run(1, lambda _, i: done.append(i), i) for i in range(5)))
        left.cancel()
        await asyncio.sleep(0)
        may_end.set()
        assert await long
        await stays
        assert done == [0, 1, 2, 3, 4, "b"]
        may_end.clear()
        first, second = (asyncio.ensure_future(lanes.run(1 << 20, lambda _: may_end.wait(10))) for _ in range(2))
        await asyncio.sleep(0)
        lanes.end()
        for each in (first, second):
            with pytest.raises(ApiError, match="shutting down"):
                await each
        may_end.set()

    asyncio.run(check())


def test_a_thread_takes_the_place_of_the_process_for_long_bodies(server):
    """The last test: it kills that process."""
    long = {"prompt": "x", "max_tokens": 1, "foo": "x" * 50_000}
    status, headers, _ = server.post(COMPLETIONS, long)
    assert (status, headers["x-ignored-fields"]) == (200, "foo")
    (pid,) = server.copies()
    os.kill(pid, signal.SIGKILL)
    assert server.post(COMPLETIONS, long)[0] == 500
    status, headers, _ = server.post(COMPLETIONS, long)
    assert (status, headers["x-ignored-fields"]) == (200, "foo")
    assert "process for long bodies has ended" in server.said()


SCHEMATHESIS = """
# Whether a valid body can be served depends on the tokenizer, the vocabulary and the template: 400 says that it cannot.
[checks]
positive_data_acceptance.expected-statuses = ["2xx", "400", "404", "429"]
"""


@pytest.mark.slow
def test_schemathesis(tmp_path):
    """Whatever the OpenAPI schema allows, and what it forbids, with all checks. Texts are short, so that many requests fit the time."""
    (tmp_path / "schemathesis.toml").write_text(SCHEMATHESIS)
    command = shutil.which("st", path=os.environ.get("HF_SPECDEC_ST_PATH", os.environ["PATH"]))
    if command is None:
        pytest.skip("schemathesis is not installed (pip install 'hf-specdec[fuzz]', or HF_SPECDEC_ST_PATH)")
    config = json.dumps({"method": "ngram", "num_speculative_tokens": 3})
    process = Process(
        "--speculative-config", config, "--max-model-len", "24", "--max-num-seqs", "16", "--max-num-queued-reqs", "64"
    )
    checks = ["--checks", "all", "--phases", "examples,coverage,fuzzing", "--mode", "all"]
    limits = ["--max-examples", "40", "--seed", "1", "--request-timeout", "60", "--suppress-health-check", "all"]
    try:
        process.wait()
        done = subprocess.run(
            [command, "run", process.url + "/openapi.json", *checks, *limits],
            capture_output=True,
            text=True,
            timeout=500,
            cwd=tmp_path,
        )
        assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
        assert "tested" in done.stdout.lower()
        assert process.post(COMPLETIONS, {"prompt": "Tom", "max_tokens": 4})[0] == 200
        assert process.stop() == 0
    finally:
        process.process.kill()
