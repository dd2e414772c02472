"""A headless Chromium, driven by its DevTools protocol over two pipes."""

import base64
import contextlib
import itertools
import json
import os
import select
import shutil
import subprocess
import tempfile
import time

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")


def find_browser():
    """The path of a Chromium; None if there is none."""
    return next((path for path in map(shutil.which, NAMES) if path), None)


class Browser:
    """One page of a headless browser.

    Args:
        size: of the page in pixels.
    """

    def __init__(self, size=(1000, 900)):
        self.folder = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
        to_read, self.write = os.pipe()
        self.read, to_write = os.pipe()
        flags = (
            "--headless=new --no-sandbox --disable-gpu --disable-dev-shm-usage --no-first-run --remote-debugging-pipe"
        )
        command = (
            f"exec {find_browser()} {flags} --user-data-dir={self.folder.name} about:blank 3<&{to_read} 4>&{to_write}"
        )
        self.process = subprocess.Popen(
            ["bash", "-c", command], pass_fds=(to_read, to_write), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        os.close(to_read)
        os.close(to_write)
        self.numbers, self.buffer, self.session = itertools.count(1), b"", None
        self.problems = []  # what the page logged as an error or threw
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self.session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log"):
            self.call(f"{domain}.enable")
        self.resize(*size)

    def close(self):
        """End the browser."""
        self.process.terminate()
        self.process.wait(timeout=30)
        os.close(self.read)
        os.close(self.write)
        with contextlib.suppress(OSError):
            self.folder.cleanup()

    def call(self, method, **params):
        """The result of one command of the protocol."""
        number = next(self.numbers)
        message = {"id": number, "method": method, "params": params}
        if self.session:
            message["sessionId"] = self.session
        os.write(self.write, json.dumps(message).encode() + b"\0")
        while True:
            found = self._message()
            if found.get("id") == number:
                assert "error" not in found, found
                return found["result"]
            if found.get("method") == "Runtime.exceptionThrown":
                self.problems.append(found["params"]["exceptionDetails"])
            if found.get("method") == "Log.entryAdded" and found["params"]["entry"]["level"] == "error":
                self.problems.append(found["params"]["entry"])

    def _message(self, seconds=60):
        while b"\0" not in self.buffer:
            assert select.select([self.read], [], [], seconds)[0], "The browser does not answer."
            piece = os.read(self.read, 1 << 16)
            assert piece, "The browser has ended."
            self.buffer += piece
        found, self.buffer = self.buffer.split(b"\0", 1)
        return json.loads(found)

    def resize(self, width, height, mobile=False):
        """Change the size of the page."""
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=mobile)

    def run(self, script):
        """The value of an expression in the page."""
        found = self.call("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in found, found
        return found["result"].get("value")

    def wait(self, script, seconds=60):
        """Until an expression is true."""
        deadline = time.monotonic() + seconds
        while not self.run(script):
            assert time.monotonic() < deadline, f"{script} has not become true."
            time.sleep(0.1)

    def screenshot(self):
        """The page as PNG."""
        return base64.b64decode(self.call("Page.captureScreenshot", format="png")["data"])
