"""A server process for tests: started on a free port, asked over plain HTTP, and stopped."""

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from pathlib import Path

ROOT = Path(__file__).parents[1]


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


class Process:
    """A server in a process of its own. `before`: code that it runs first."""

    def __init__(self, *flags, before="pass"):
        self.port, self.headers = free_port(), {}  # headers of every request
        self.url = f"http://127.0.0.1:{self.port}"
        code = f"import sys; {before}; from hf_specdec.cli import main; sys.exit(main())"
        environment = {**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
        arguments = ["serve", "tiny", "--dtype", "float32", "--port", str(self.port), *flags]
        self.log = tempfile.TemporaryFile("w+")  # a pipe that nobody reads would stop a server that says much  # noqa: SIM115
        self.process = subprocess.Popen(
            [sys.executable, "-c", code, *arguments], cwd=ROOT, env=environment, stdout=self.log,
            stderr=subprocess.STDOUT, text=True,
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
                    self.log.seek(0)
                    raise AssertionError(self.log.read()) from None
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

    def stop(self):
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(timeout=60)

    def post(self, path, body, headers=None):
        """(status, headers, body)."""
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        request = urllib.request.Request(
            self.url + path,
            data,
            {"Content-Type": "application/json", **self.headers, **(headers or {})},
            method="POST",
        )
        try:
            with urllib.request.urlopen(request, timeout=60) as answer:
                return answer.status, answer.headers, json.loads(answer.read())
        except urllib.error.HTTPError as error:
            return error.code, error.headers, json.loads(error.read())

    def metrics(self):
        request = urllib.request.Request(self.url + "/metrics", headers=self.headers)
        with urllib.request.urlopen(request, timeout=60) as answer:
            lines = answer.read().decode().splitlines()
        return {
            line.rpartition(" ")[0].partition("{")[0]: float(line.rpartition(" ")[2])
            for line in lines
            if line[0] != "#"
        }
