"""An engine in a process of its own, so that it and the HTTP side do not wait for one interpreter lock.

`EngineProcess` is the HTTP side's end, a `Channel` is between, and `main` runs in the process.
"""

from __future__ import annotations

import contextlib
import gc
import itertools
import os
import pickle
import queue
import signal
import socket
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from multiprocessing.pool import RemoteTraceback  # type: ignore[attr-defined]
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from .messages import Ask, Call, Cancel, Done, Ended, Facts, Load, Submit, Update

if TYPE_CHECKING:
    from .worker import EngineWorker

SECONDS_TO_END = 10.0  # for a process to end after it was told to; it is then killed
BEAT_SECONDS = 2.0  # after this time the engine's process says something, even if nothing runs
MOST_SILENT_SECONDS = 10.0  # then it is taken for stopped
SIGNALS = (signal.SIGINT, signal.SIGTERM)  # end the server: the HTTP side handles them


class EngineProcess(threading.Thread):
    """An engine in a process of its own, which begins to load the model at once. The thread reads what the process sends.

    A server uses it like an `EngineWorker`. The engine's process ends when this process ends, for whatever reason.

    Args:
        deliver: called in this thread with the updates of a step; must not block.
        arguments: of `LLM`; they must be picklable.
    """

    def __init__(self, deliver: Callable[[list[Update]], None], arguments: dict[str, Any]):
        super().__init__(name="hf-specdec-engine", daemon=True)
        self.deliver = deliver
        self.loaded: Future[Facts] = Future()  # its error is that with which loading failed
        self.load = Load()  # replaced, never changed
        self.failure: BaseException | None = None  # what ended the engine; ChildProcessError if its process was killed
        self.heard = time.monotonic()  # when the process last said something
        self._has_told_its_end = self._has_ended = False
        self._asked: dict[int, Future[None]] = {}
        self._numbers = itertools.count()
        pickled = pickle.dumps(arguments)
        ours, theirs = socket.socketpair()
        with theirs:
            self.process = _start(theirs.fileno())
        self._channel = Channel(ours)
        self._channel.put(pickled)
        self.start()

    def send(self, message: Submit | Cancel) -> None:
        self._channel.put(message)

    @property
    def is_silent(self) -> bool:
        """True if the process, which is alive, has said nothing for so long that it must be stopped (SIGSTOP), or be waiting for memory."""
        return time.monotonic() - self.heard > MOST_SILENT_SECONDS

    def ask(self, call: Call) -> Future[None]:
        """See `EngineWorker.ask`. The future's error is also ChildProcessError if the engine ends."""
        future, number = Future(), next(self._numbers)
        future.set_running_or_notify_cancel()  # so that it cannot be cancelled
        self._asked[number] = future
        self._channel.put(Ask(number, call))
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
        try:
            while True:
                message = self._channel.get()
                self.heard = time.monotonic()
                self._handle(message)
        except EOFError:
            pass
        except BaseException as error:
            self.failure = error
            self.process.kill()
            raise
        finally:
            self._channel.close()
            self._note_end()

    def _handle(self, message: list[Update] | Load | Done | Facts | Ended) -> None:
        if isinstance(message, list):
            self.deliver(message)
        elif isinstance(message, Load):
            self.load = message
        elif isinstance(message, Done):
            future = self._asked.pop(message.number)
            future.set_result(None) if message.error is None else future.set_exception(message.error)
        elif isinstance(message, Facts):
            self.loaded.set_result(message)
        else:
            self._has_told_its_end, self.failure = True, message.error
            if message.error is not None:
                message.error.__cause__ = RemoteTraceback(f"\n{message.traceback}")

    def _note_end(self) -> None:
        """The process has closed its end: wait for it, but not for ever; set `failure`, and end whatever waits for it."""
        try:
            code = self.process.wait(SECONDS_TO_END)
        except subprocess.TimeoutExpired:
            self.process.kill()
            code = self.process.wait()
        how = f"has ended with exit code {code}"
        if code == -signal.SIGKILL:
            how = "was killed (SIGKILL), by somebody or because memory ran out"
        self._has_ended, killed = True, ChildProcessError(f"The engine's process {how}.")
        if not self._has_told_its_end and self.failure is None:
            self.failure = killed
        if not self.loaded.done():
            self.loaded.set_exception(self.failure or killed)
        self._give_up()

    def _give_up(self) -> None:
        with contextlib.suppress(KeyError):  # popitem: nothing is left
            while True:
                self._asked.popitem()[1].set_exception(ChildProcessError("The engine has ended."))


def _start(descriptor: int) -> subprocess.Popen:
    """Start the engine's process; `descriptor`: its end of the connection. Signals are blocked until it ignores Ctrl-C and SIGTERM."""
    # The path is set before anything is imported: Python would look in the working directory first.
    begin = f"import sys; sys.path[:] = {sys.path!r}; from {__name__} import main; main({descriptor})"
    before = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
    try:
        return subprocess.Popen([sys.executable, "-c", begin], pass_fds=[descriptor])
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


_END = object()  # put after the last message


class Channel:
    """One end of a connection between two processes. `close` closes it."""

    def __init__(self, end: socket.socket):
        self._socket, self._file = end, end.makefile("rb", buffering=1 << 16)
        self._outbox: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._sender = threading.Thread(target=self._send, name="hf-specdec-sender", daemon=True)
        self._sender.start()

    def put(self, message: Any) -> None:
        """Send a message, which must be picklable and must not change any more. Does not block; any thread may call it."""
        self._outbox.put(message)

    def get(self) -> Any:
        """Wait for the next message from the other process. Call it in one thread only, until it raises EOFError: one of the ends is
        closed, or the other process has ended.
        """
        try:
            return pickle.load(self._file)
        except (EOFError, OSError, pickle.UnpicklingError) as error:  # the last two if it was killed while it sent
            self._file.close()
            raise EOFError(str(error)) from error

    def close(self) -> None:
        """Send what has been put and close this end. Call once; `get` must be called until it raises."""
        self._outbox.put(_END)
        self._sender.join()

    def _send(self) -> None:
        try:
            batch: list[Any] = []
            while _END not in batch:
                batch = [self._outbox.get()]
                while not self._outbox.empty():  # what waits is sent in one piece, so that the other process wakes once
                    batch.append(self._outbox.get())
                pickled = (pickle.dumps(message, pickle.HIGHEST_PROTOCOL) for message in batch if message is not _END)
                self._socket.sendall(b"".join(pickled))
        except (BrokenPipeError, ConnectionResetError):
            return  # the other process has ended, which `get` reports
        finally:  # whatever failed: both sides' `get` must end
            with contextlib.suppress(OSError):  # it is not connected any more
                self._socket.shutdown(socket.SHUT_RDWR)
            self._socket.close()


def portable(error: BaseException) -> BaseException:
    """An error in a form that any process can read: the error itself if its class is built into Python, else one whose class has the same
    name. If the error is a ValueError, OSError or ImportError, so is that one, because readers treat these differently.
    """
    if type(error).__module__ == "builtins":
        with contextlib.suppress(Exception):  # one of its arguments cannot be sent
            return pickle.loads(pickle.dumps(error))
    kinds = (kind for kind in (ValueError, OSError, ImportError) if isinstance(error, kind))
    return _remote(type(error).__name__, next(kinds, Exception), str(error))


def _remote(name: str, base: type[Exception], text: str) -> BaseException:
    return type(name, (base,), {"__reduce__": lambda self: (_remote, (name, base, text))})(text)


def main(descriptor: int) -> None:
    """Load the model and serve it until the HTTP side tells this process to end, or has ended itself."""
    for number in SIGNALS:  # not SIG_IGN, which processes that are started here would inherit
        signal.signal(number, lambda *_: None)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
    end = socket.socket(fileno=descriptor)
    end.set_inheritable(False)
    channel = Channel(end)
    try:
        arguments = channel.get()
    except EOFError:
        return
    reader = _Reader(channel)
    reader.start()
    error = _serve(arguments, channel, reader)
    lines = [] if error is None else traceback.format_exception(type(error), error, error.__traceback__)
    channel.put(Ended(None if error is None else portable(error), "".join(lines)))
    reader.is_over = True
    channel.close()
    if dist.is_initialized():  # the threads of a group must not outlive `main`
        dist.destroy_process_group()


def _serve(arguments: bytes, channel: Channel, reader: _Reader) -> BaseException | None:
    """Load the model and run its engine. Returns the error that ended either; None: it was told to end."""

    def deliver(updates: list[Update]) -> None:
        for update in updates:
            if update.error is not None:
                update.error = portable(update.error)
        channel.put(updates)

    try:
        from ..llm import LLM  # here only: the HTTP side needs no engine

        llm = LLM(**pickle.loads(arguments))
        facts, worker = Facts.of(llm, llm.tokenizer), llm.make_worker(deliver, channel.put)
    except BaseException as error:
        return error
    reader.worker = worker
    gc.collect()
    gc.freeze()  # later collections, for which every stream waits, need not look at the model's modules
    channel.put(worker.load)
    channel.put(facts)
    worker.start()
    while worker.is_alive():
        worker.join(BEAT_SECONDS)
        channel.put(worker.load)  # the HTTP side takes a process that says nothing for stopped
    return worker.failure


class _Reader(threading.Thread):
    """Passes what the HTTP side sends on to the engine's thread, and ends the process with it. `is_over`: the engine has ended."""

    def __init__(self, channel: Channel):
        super().__init__(name="hf-specdec-reader", daemon=True)
        self.channel = channel
        self.worker: EngineWorker | None = None
        self.is_over = False

    def run(self) -> None:
        try:
            while True:
                message = self.channel.get()
                if message is None:
                    self._end()
                elif self.worker is not None and isinstance(message, Ask):
                    self.worker.ask(message.call).add_done_callback(partial(self._tell, message.number))
                elif self.worker is not None:
                    self.worker.send(message)
        except EOFError:
            if not self.is_over:
                self._end().join(SECONDS_TO_END)
                os._exit(1)

    def _end(self) -> EngineWorker:
        """End the engine after its step. If the model is still being loaded, exit: only that can stop the loading."""
        if self.worker is None:
            os._exit(1)
        self.worker.stop()
        return self.worker

    def _tell(self, number: int, done: Future) -> None:
        error = done.exception()
        self.channel.put(Done(number, None if error is None else portable(error)))
