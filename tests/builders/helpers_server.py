"""A server process for tests: started on a free port, asked over plain HTTP, and stopped."""

import asyncio
import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import urllib.error
import urllib.request
from pathlib import Path

from paths import ROOT


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def children(pid, word):
    """Ids of the running processes that this one has started, and whose command line contains a word."""
    found = []
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            try:
                line, status = (folder / "cmdline").read_text(), (folder / "status").read_text()
            except OSError:
                continue
            if word in line and f"PPid:\t{pid}\n" in status and "State:\tZ" not in status:
                found.append(int(folder.name))
    return found


class Served:
    """Something that serves at `url`, asked over plain HTTP with `headers`."""

    url: str
    headers: dict[str, str]

    def ask(self, path, body=None, headers=None, method=None):
        """(status, headers, text). `body`: bytes, or what is sent as JSON; without one and a `method` it is a GET."""
        data = body if body is None or isinstance(body, bytes) else json.dumps(body).encode()
        headers = {"Content-Type": "application/json", **self.headers, **(headers or {})}
        request = urllib.request.Request(self.url + path, data, headers, method=method)
        try:
            with urllib.request.urlopen(request, timeout=300) as answer:
                return answer.status, answer.headers, answer.read().decode()
        except urllib.error.HTTPError as error:
            return error.code, error.headers, error.read().decode()

    def post(self, path, body, headers=None):
        """(status, headers, body)."""
        status, headers, text = self.ask(path, body, headers, "POST")
        return status, headers, json.loads(text)

    def streamed(self, path, body):
        """The frames of a stream of OpenAI's API."""
        _, headers, text = self.ask(path, {**body, "stream": True})
        assert headers["Content-Type"].startswith("text/event-stream"), text
        *frames, end = [line.removeprefix("data: ") for line in text.splitlines() if line.startswith("data: ")]
        assert end == "[DONE]"
        return [json.loads(frame) for frame in frames]

    def metrics(self):
        lines = [line for line in self.ask("/metrics")[2].splitlines() if line[0] != "#"]
        return {line.rpartition(" ")[0].partition("{")[0]: float(line.rpartition(" ")[2]) for line in lines}


@contextlib.contextmanager
def in_thread(
    speculative_config=None, *, model="tiny", tokenizer=None, response_template=None, api_keys=None, allowed_origins=None,
    max_model_len=512, media_hosts=None, updates_weights=False, store=None, **limits,
):  # fmt: skip
    """The application with its engine in a thread of this process: what it answers is the same, and it starts in a moment."""
    import uvicorn
    from transformers import AutoTokenizer

    import hf_specdec
    from hf_specdec.serve.http.api import make_app
    from hf_specdec.serve.http.server import Limits, Server

    llm = hf_specdec.LLM(
        str(model),
        tokenizer=tokenizer,
        dtype="float32",
        max_model_len=max_model_len,
        speculative_config=speculative_config,
    )
    folder = hf_specdec.resolve_model(tokenizer or str(model))
    more = {"processor": llm.processor, "media_hosts": media_hosts, "updates_weights": updates_weights, "store": store}
    server = Server(AutoTokenizer.from_pretrained(folder), ["tiny"], Limits(**limits), response_template, **more)

    @contextlib.asynccontextmanager
    async def lifespan(app):
        server.start(llm, asyncio.get_running_loop())
        yield
        await asyncio.to_thread(server.stop)

    served = Served()
    port, served.headers = free_port(), {}
    served.url = f"http://127.0.0.1:{port}"
    app = make_app(server, api_keys, allowed_origins, lifespan)
    running = uvicorn.Server(uvicorn.Config(app, port=port, log_level="warning", access_log=False))
    thread = threading.Thread(target=running.run)
    thread.start()
    try:
        while not running.started:
            assert thread.is_alive()
            time.sleep(0.01)
        yield served
    finally:
        running.should_exit = True
        thread.join()
        llm.close()


class Process(Served):
    """A server in processes of its own. `model`: its name or folder; `before`: code that each of them runs first."""

    def __init__(self, *flags, model="tiny", before=None, **more):
        self.port, self.headers = free_port(), {}  # headers of every request
        self.url = f"http://127.0.0.1:{self.port}"
        code = "import sys; from hf_specdec.cli import main; sys.exit(main())"
        environment = {**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
        if before is not None:  # Python imports this module in every process
            self.folder = tempfile.TemporaryDirectory(prefix="server-")
            Path(self.folder.name, "sitecustomize.py").write_text(before)
            environment["PYTHONPATH"] = os.pathsep.join([self.folder.name, environment.get("PYTHONPATH", "")])
        arguments = ["serve", str(model), "--dtype", "float32", "--port", str(self.port), *flags]
        self.log = tempfile.TemporaryFile("w+")  # a pipe that nobody reads would stop a server that says much  # noqa: SIM115
        self.process = subprocess.Popen(
            [sys.executable, "-c", code, *arguments], cwd=ROOT, env=environment, stdout=self.log,
            stderr=subprocess.STDOUT, text=True, **more,
        )  # fmt: skip

    def wait(self, seconds=120):
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            try:
                with urllib.request.urlopen(self.url + "/health", timeout=5) as answer:
                    assert answer.status == 200
                    return self
            except (urllib.error.URLError, ConnectionError):
                if self.process.poll() is not None:
                    raise AssertionError(self.said()) from None
                time.sleep(0.1)
        raise AssertionError("The server did not come up.")

    @classmethod
    @contextlib.contextmanager
    def running(cls, *flags, **options):
        """A server that is up; it must end well."""
        made = cls(*flags, **options)
        try:
            yield made.wait()
            assert made.stop() == 0
        finally:
            made.process.kill()

    def engine(self):
        """The id of the engine's process."""
        (found,) = children(self.process.pid, "engine_process")
        return found

    def copies(self):
        """The ids of its other processes: copies of the first."""
        return set(children(self.process.pid, "hf_specdec.cli")) - {self.engine()}

    def said(self):
        """What both processes have written."""
        self.log.seek(0)
        return self.log.read()

    def stop(self):
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(timeout=60)
