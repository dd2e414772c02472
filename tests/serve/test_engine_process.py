"""The engine in a process of its own: whichever process ends, and however, the other one does what it should, and nothing stays."""

import asyncio
import json
import os
import signal
import socket
import threading
import time
import urllib.error
import urllib.request
from pathlib import Path

import pytest
from helpers_server import Process, children

from hf_specdec import LLM
from hf_specdec.serve import SamplingParams, StructuredOutputsParams
from hf_specdec.serve.http.errors import ApiError
from hf_specdec.serve.http.server import Limits, Server
from hf_specdec.serve.ipc.engine_process import Channel, portable

pytestmark = pytest.mark.ci
LONG = {"prompt": "Once upon a time", "max_tokens": 400, "ignore_eos": True, "temperature": 0}
NEVER_LOADED = (
    "import time, transformers; transformers.AutoModelForCausalLM.from_pretrained = lambda *_, **__: time.sleep(600)"
)
ODD = """
import transformers
class OddError(Exception):
    pass
def load(*_, **__):
    raise OddError("not today", print)
transformers.AutoModelForCausalLM.from_pretrained = load
"""
SCHEDULE_RAISES = """
import hf_specdec.serve.engine.scheduler as scheduler
before = scheduler.Scheduler.schedule
def schedule(self, only=None):
    if any(choice.request.params.seed == 666 for choice in self.waiting):
        raise KeyError("a bug")
    return before(self, only)
scheduler.Scheduler.schedule = schedule
"""
IMPATIENT = """
from hf_specdec.serve.ipc import engine_process
engine_process.BEAT_SECONDS, engine_process.MOST_SILENT_SECONDS = 0.1, 1.0
"""
NOTE_MODELS = """
import os
from transformers import PreTrainedModel
before = PreTrainedModel.__init__
def init(self, *arguments, **more):
    open(os.path.join({folder!r}, str(os.getpid())), "w").close()
    before(self, *arguments, **more)
PreTrainedModel.__init__ = init
"""


def is_gone(pid, seconds=30):
    """Whether a process, which may be nobody's child any more, ends in time."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        try:
            if "State:\tZ" in Path(f"/proc/{pid}/status").read_text():
                return True
        except OSError:
            return True
        time.sleep(0.05)
    return False


def stream(server, **more):
    """A stream that has begun: its response, of which one event has been read."""
    body = json.dumps({**LONG, "stream": True, **more}).encode()
    request = urllib.request.Request(server.url + "/v1/completions", body, {"Content-Type": "application/json"})
    answer = urllib.request.urlopen(request, timeout=60)
    assert answer.readline().startswith(b"data: {")
    return answer


def events(answer):
    """The events that are left of a stream."""
    with answer:
        return [line.removeprefix("data: ") for line in answer.read().decode().splitlines() if line]


def engine_of(server):
    """The id of the engine's process, once it has been started."""
    deadline = time.monotonic() + 60
    while not (found := children(server.process.pid, "engine_process")):
        assert time.monotonic() < deadline and server.process.poll() is None, server.said()
        time.sleep(0.02)
    return found[0]


@pytest.fixture
def started():
    """Starts servers, each in a process group of its own; none outlives the test."""
    servers = []

    def start(*flags, **options):
        servers.append(Process("--max-model-len", "512", *flags, start_new_session=True, **options))
        return servers[-1]

    yield start
    for server in servers:
        try:
            os.killpg(server.process.pid, signal.SIGKILL)
        except ProcessLookupError:
            continue  # both processes have ended
        finally:
            server.process.wait()


def test_an_engine_that_is_stopped_for_a_while_and_then_killed(started):
    """Stopped: /health and new requests get 503 meanwhile; an answer that had begun waits, and goes on. Killed: answers and server end."""
    server = started(before=IMPATIENT).wait()
    server.post("/v1/completions", LONG)
    whole = server.post("/v1/completions", LONG)[2]["choices"][0]["text"]
    engine, running = server.engine(), stream(server)

    def health_becomes(status):
        deadline = time.monotonic() + 20
        while server.ask("/health")[0] != status:
            assert time.monotonic() < deadline
            time.sleep(0.05)

    os.kill(engine, signal.SIGSTOP)
    try:
        health_becomes(503)
        status, headers, answer = server.post("/v1/completions", LONG)
        assert (status, headers["Retry-After"]) == (503, "5") and "has said nothing" in answer["error"]["message"]
        assert server.ask("/v1/models")[0] == 200
    finally:
        os.kill(engine, signal.SIGCONT)
    health_becomes(200)
    frames = [json.loads(event)["choices"][0] for event in events(running)[:-1]]
    assert whole.endswith("".join(frame["text"] for frame in frames)) and frames[-1]["finish_reason"] == "length"
    assert server.post("/v1/completions", LONG)[2]["choices"][0]["text"] == whole

    running = stream(server, n=128)  # long enough to be running when the engine ends
    found = []
    thread = threading.Thread(target=lambda: found.append(server.post("/v1/completions", {**LONG, "n": 128})))
    thread.start()
    time.sleep(0.3)
    os.kill(engine, signal.SIGKILL)
    began = time.monotonic()
    *_, last, done = events(running)
    assert "engine has stopped" in json.loads(last)["error"]["message"] and done == "[DONE]"
    thread.join()
    assert found[0][0] == 503 and time.monotonic() - began < 10  # at once, not at the next keep-alive comment
    with pytest.raises(urllib.error.HTTPError) as error:
        urllib.request.urlopen(server.url + "/health", timeout=5)
    assert error.value.code == 503
    assert server.post("/v1/completions", LONG)[0] == 503
    assert server.post("/v1/completions", {**LONG, "structured_outputs": {"regex": "a+"}})[0] == 503
    assert server.process.wait(timeout=30) == 2 and is_gone(engine)
    (line,) = [line for line in server.said().splitlines() if line.startswith("hf-specdec serve: error: ")]
    assert "SIGKILL" in line


def test_no_engine_outlives_the_server_and_only_it_holds_the_model(started, tmp_path):
    server = started(before=NOTE_MODELS.format(folder=str(tmp_path))).wait()
    engine, copies, running = server.engine(), server.copies(), stream(server, n=32)
    pids = {int(file.name) for file in tmp_path.iterdir()}
    assert engine in pids and server.process.pid not in pids
    assert ".safetensors" not in Path(f"/proc/{server.process.pid}/maps").read_text()
    server.process.send_signal(signal.SIGKILL)
    server.process.wait()
    assert len(copies) == 1 and all(map(is_gone, [engine, *copies]))
    running.close()
    assert server.said().count("Traceback") == 0


def test_servers_that_end_while_the_model_is_loaded(started):
    killed, told = (started(before=NEVER_LOADED) for _ in range(2))
    engines = [engine_of(each) for each in (killed, told)]
    for server in (killed, told):
        deadline = time.monotonic() + 60
        while True:
            try:
                urllib.request.urlopen(server.url + "/health", timeout=5)
            except urllib.error.HTTPError as error:
                assert error.code == 503 and "loading" in error.read().decode()
                break
            except OSError:
                assert time.monotonic() < deadline, server.said()
                time.sleep(0.05)
    killed.process.send_signal(signal.SIGKILL)
    told.process.send_signal(signal.SIGTERM)
    assert told.process.wait(timeout=30) == 0
    assert all(map(is_gone, engines))
    assert "error" not in told.said()


def test_an_engine_that_is_killed_while_it_loads(started):
    server = started(before=NEVER_LOADED)
    os.kill(engine_of(server), signal.SIGKILL)
    assert server.process.wait(timeout=60) == 2
    assert "hf-specdec serve: error: The engine's process was killed (SIGKILL)" in server.said()


def test_a_load_that_fails_says_why_in_one_line(started):
    positions, odd = started("--max-model-len", "99999"), started(before=ODD)
    assert [each.process.wait(timeout=120) for each in (positions, odd)] == [2, 2]
    lines = [line for line in positions.said().splitlines() if "error: " in line]
    assert lines == ["hf-specdec serve: error: max_model_len is 99999; LlamaForCausalLM has 1024 positions."]
    (line,) = [line for line in odd.said().splitlines() if "error: " in line]
    assert line.startswith("hf-specdec serve: error: OddError: ('not today', <built-in function print>) (--debug shows")
    assert "Traceback" not in odd.said() and "Traceback" not in positions.said()


@pytest.mark.slow
def test_debug_shows_the_traceback_of_the_engine(started):
    shown = started("--debug", before=ODD)
    assert shown.process.wait(timeout=120) == 1
    assert "in load\n" in shown.said() and "sitecustomize.py" in shown.said()


@pytest.mark.parametrize("number", [signal.SIGINT, pytest.param(signal.SIGTERM, marks=pytest.mark.slow)])
def test_a_signal_to_both_processes_drains(started, number):
    """Ctrl-C in a terminal goes to the whole group; systemd sends SIGTERM to each process of a unit."""
    server = started("--shutdown-timeout", "200").wait()
    engine, running = server.engine(), stream(server)
    os.killpg(server.process.pid, number)
    found = events(running)
    assert found[-1] == "[DONE]" and json.loads(found[-2])["choices"][0]["finish_reason"] == "length"
    assert server.process.wait(timeout=30) == 0 and is_gone(engine)
    assert "Traceback" not in server.said()


def test_an_engine_that_raises_leaves_a_server_that_says_so(started):
    """A bug in the engine itself, not in one request's step: as with an engine in a thread, the server stays, and answers 503."""
    server = started(before=SCHEDULE_RAISES).wait()
    engine, running = server.engine(), stream(server)
    assert server.post("/v1/completions", {**LONG, "seed": 666})[0] == 503
    assert "engine has stopped" in json.loads(events(running)[-2])["error"]["message"]
    assert is_gone(engine) and "The engine has stopped." in server.said() and "a bug" in server.said()
    time.sleep(1)
    assert server.post("/v1/completions", LONG)[0] == 503
    assert server.stop() == 0


def test_an_engine_in_a_thread_serves_the_same_application(tiny_model, tiny_tokenizer):
    """As in Ray's replicas and in programs that build the application themselves."""
    pytest.importorskip("llguidance")

    async def serve():
        server = Server(tiny_tokenizer, ["tiny"], Limits())
        server.start(LLM(tiny_model, tiny_tokenizer, max_model_len=128, max_num_seqs=2), asyncio.get_running_loop())
        with pytest.raises(ApiError) as refused:
            await server.compile(StructuredOutputsParams(regex="(a"))
        assert refused.value.status == 400
        wanted = StructuredOutputsParams(regex="(yes|no)!")
        await server.compile(wanted)
        params = SamplingParams(temperature=0, max_tokens=20, structured_outputs=wanted)
        answers = [server.submit(tiny_tokenizer("Lily")["input_ids"], params)]
        text = "".join([found[1].text async for found in server.updates(answers) if found is not None])
        server.release(answers)
        await asyncio.to_thread(server.stop)
        assert text in ("yes!", "no!") and server.worker.failure is None
        with pytest.raises(ApiError) as stopped:
            _ = server.running_worker
        assert stopped.value.status == 503

    asyncio.run(serve())


# ---- what is sent -------------------------------------------------------------------------------------------------------


def pair():
    return [Channel(end) for end in socket.socketpair()]


def read(channel, count):
    return [channel.get() for _ in range(count)]


def test_messages_keep_their_order_and_putting_never_blocks():
    here, there = pair()
    words = [("x" * 1000, i) for i in range(5000)]  # more than a socket holds
    for word in words:
        here.put(word)
    there.put("back")
    assert read(there, len(words)) == words and here.get() == "back"
    here.put("last")
    here.close()
    assert there.get() == "last"
    with pytest.raises(EOFError):
        there.get()
    for _ in range(3):
        there.put("to nobody")
    there.close()


def test_a_channel_leaves_no_thread_and_no_file():
    before = threading.active_count(), len(os.listdir("/proc/self/fd"))
    here, there = pair()
    here.put(1)
    assert there.get() == 1
    for each in (here, there):
        each.close()
        with pytest.raises(EOFError):
            each.get()
    assert (threading.active_count(), len(os.listdir("/proc/self/fd"))) == before


def test_a_message_that_is_cut_off_or_cannot_be_sent_ends_both_sides():
    own, other = socket.socketpair()
    channel = Channel(own)
    other.sendall(b"\x80\x05\x95\xff")
    other.close()
    with pytest.raises(EOFError):
        channel.get()
    channel.close()
    here, there = pair()
    unraised, threading.excepthook = (
        threading.excepthook,
        lambda arguments: None,
    )  # pytest would warn of the thread's error
    try:
        here.put(lambda: None)
        for each in (here, there):
            with pytest.raises(EOFError):
                each.get()
    finally:
        threading.excepthook = unraised
    here.close()
    there.close()


class Unsendable(ValueError):
    def __init__(self, one, two):
        super().__init__(f"{one} and {two}")


def test_errors_keep_the_type_that_somebody_asks_for():
    def sent(error):
        here, there = pair()
        here.put(portable(error))
        found = there.get()
        for each in (here, there):
            each.close()
            with pytest.raises(EOFError):
                each.get()
        return found

    with pytest.raises(ValueError) as malformed:
        json.loads("{")
    with pytest.raises(OSError) as missing:
        Path("/nowhere/at/all").read_text()
    for error, kind in (
        (ValueError("x"), ValueError), (Unsendable(1, 2), ValueError), (malformed.value, ValueError), (missing.value, OSError),
        (ImportError("x", name="some"), ImportError), (RuntimeError("x", 3), RuntimeError), (MemoryError(), MemoryError),
        (RuntimeError(lambda: None), Exception), (type("Odd", (Exception,), {})("why"), Exception),
        (type("Gone", (ConnectionError,), {})("why"), OSError), (UnicodeDecodeError("utf-8", b"x", 0, 1, "y"), ValueError),
    ):  # fmt: skip
        found = sent(error)
        assert isinstance(found, kind) and type(found).__name__ == type(error).__name__ and str(found) == str(error)
        assert isinstance(found, ValueError) == isinstance(error, ValueError)
    found = sent(missing.value)
    assert (found.filename, found.strerror) == (missing.value.filename, missing.value.strerror)
    assert sent(ImportError("x", name="some")).name == "some"
