"""EngineProcess: an engine in a process of its own, so that it and the HTTP side do not wait for one interpreter lock."""

from __future__ import annotations

import contextlib
import itertools
import pickle
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

from .. import foreign_messages
from .channel import Channel
from .start import Facts
from .structured import StructuredOutputsParams
from .worker import Cancel, Load, Submit, Update

SECONDS_TO_END = 10.0  # for a process to end after it was told to; it is then killed
BEAT_SECONDS = 2.0  # after this time the engine's process says something, even if nothing runs
MOST_SILENT_SECONDS = 10.0  # then it is taken for stopped
SIGNALS = (signal.SIGINT, signal.SIGTERM)  # end the server: the HTTP side handles them


@dataclass
class Begin:
    """Message: load the model and serve it.

    Attributes:
        arguments: the arguments of `LLM`, pickled.
        shows_all: log also what `foreign_messages` holds back.
    """

    arguments: bytes
    shows_all: bool


@dataclass
class Compile:
    """Message: compile a grammar; `Compiled` with the same number is the answer."""

    number: int
    grammar: StructuredOutputsParams


@dataclass
class Compiled:
    """Message: a grammar is compiled, or an error was found in it."""

    number: int
    error: BaseException | None


@dataclass
class Ended:
    """Message: the engine has ended. It is the last one.

    Attributes:
        error: why it has ended, or why the model could not be loaded; None: it was told to end.
        traceback: of the error, as text.
    """

    error: BaseException | None = None
    traceback: str = ""


class EngineTraceback(Exception):
    """Cause of an error that came from the engine's process: its traceback there."""

    def __str__(self) -> str:
        return f"\n{self.args[0]}"


class EngineProcess(threading.Thread):
    """An engine in a process of its own, which begins to load the model at once. The thread reads what the process sends.

    A server uses it like an `EngineWorker`; `engine_main` runs on the other side. The engine's process ends when this process ends, for
    whatever reason.

    Args:
        deliver: called in this thread with the updates of a step; must not block.
        arguments: of `LLM`; they must be picklable.

    Attributes:
        process: the engine's process.
        loaded: what the HTTP side must know about the model, once it is loaded; or the error with which loading failed.
        load: see `Load`; replaced, never changed.
        failure: the error that ended the engine, ChildProcessError if its process was killed; None if no error did.
        heard: `time.monotonic()` when the process last said something.
    """

    def __init__(self, deliver: Callable[[list[Update]], None], arguments: dict[str, Any]):
        super().__init__(name="hf-specdec-engine", daemon=True)
        self.deliver = deliver
        self.loaded: Future[Facts] = Future()
        self.load = Load()
        self.failure: BaseException | None = None
        self.heard = time.monotonic()
        self._has_told_its_end = self._has_ended = False
        self._compiling: dict[int, Future[None]] = {}
        self._numbers = itertools.count()
        begin = Begin(pickle.dumps(arguments), shows_all=not foreign_messages.are_held_back())
        own, theirs = socket.socketpair()
        with theirs:
            self.process = _start(theirs.fileno())
        self._channel = Channel(own)
        self._channel.put(begin)
        self.start()

    def send(self, message: Submit | Cancel) -> None:
        """Send a message. May be called in any thread."""
        self._channel.put(message)

    @property
    def is_silent(self) -> bool:
        """True if the process, which is alive, has said nothing for so long that it must be stopped (SIGSTOP), or be waiting for memory."""
        return time.monotonic() - self.heard > MOST_SILENT_SECONDS

    def compile(self, grammar: StructuredOutputsParams) -> Future[None]:
        """Begin to compile a grammar. The future's error is ValueError for a malformed one, ChildProcessError if the engine ends."""
        future, number = Future(), next(self._numbers)
        future.set_running_or_notify_cancel()  # so that it cannot be cancelled
        self._compiling[number] = future
        self._channel.put(Compile(number, grammar))
        if self._has_ended:  # perhaps `_give_up` ran before this future was added
            self._give_up()
        return future

    def stop(self) -> None:
        """End the process after the current step, or at once if it is loading; running requests are aborted."""
        self._channel.put(None)

    def end(self) -> None:
        """End the process and wait for it; kill it if it takes longer than `SECONDS_TO_END`."""
        self.stop()
        self.join(SECONDS_TO_END)
        self.process.kill()
        self.join()

    def run(self) -> None:
        """Read what the process sends until it has ended."""
        try:
            while True:
                messages = self._channel.get()
                self.heard = time.monotonic()
                for message in messages:
                    self._handle(message)
        except EOFError:
            pass
        except BaseException as error:
            self.failure = error
            self.process.kill()
            raise
        finally:
            self._channel.close()
            self._note_end(_exit_code(self.process))

    def _handle(self, message: list[Update] | Load | Compiled | Facts | Ended) -> None:
        if isinstance(message, list):
            self.deliver(message)
        elif isinstance(message, Load):
            self.load = message
        elif isinstance(message, Compiled):
            future = self._compiling.pop(message.number)
            future.set_result(None) if message.error is None else future.set_exception(message.error)
        elif isinstance(message, Facts):
            self.loaded.set_result(message)
        else:
            self._has_told_its_end, self.failure = True, message.error
            if message.error is not None:
                message.error.__cause__ = EngineTraceback(message.traceback)

    def _note_end(self, code: int) -> None:
        """The process has ended with this exit code: set `failure`, and end whatever waits for it."""
        self._has_ended, killed = True, ChildProcessError(_how_it_ended(code))
        if not self._has_told_its_end and self.failure is None:
            self.failure = killed
        if not self.loaded.done():
            self.loaded.set_exception(self.failure or killed)
        self._give_up()

    def _give_up(self) -> None:
        """Fail the futures of all grammars that have not been compiled."""
        with contextlib.suppress(KeyError):  # popitem: nothing is left
            while True:
                self._compiling.popitem()[1].set_exception(ChildProcessError("The engine has ended."))


def _start(descriptor: int) -> subprocess.Popen:
    """Start the engine's process. `descriptor`: its end of the connection.

    Ctrl-C reaches both processes, and systemd sends SIGTERM to both: the signals are blocked until the new one ignores them.
    """
    # The path is set before anything is imported: Python would look in the working directory first.
    begin = f"import sys; sys.path[:] = {sys.path!r}; from hf_specdec.serve.engine_main import main; main({descriptor})"
    before = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
    try:
        return subprocess.Popen([sys.executable, "-c", begin], pass_fds=[descriptor])
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _exit_code(process: subprocess.Popen) -> int:
    """Wait until a process that has closed its connection ends, but not for ever. Returns its exit code."""
    try:
        return process.wait(SECONDS_TO_END)
    except subprocess.TimeoutExpired:
        process.kill()
        return process.wait()


def _how_it_ended(code: int) -> str:
    """A sentence about an exit code, as `subprocess` gives it."""
    if code != -signal.SIGKILL:
        return f"The engine's process has ended with exit code {code}."
    return "The engine's process was killed (SIGKILL), by somebody or because memory ran out."
