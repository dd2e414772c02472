"""Channel: messages between the process of the HTTP side and that of the engine, in both directions; and how errors are sent."""

from __future__ import annotations

import contextlib
import pickle
import queue
import socket
import threading
from typing import Any

_END = object()  # put after the last message
_BUFFER_BYTES = 1 << 16


class Channel:
    """One end of a connection between two processes. Messages are put one by one; those that wait are sent together. `close` closes it."""

    def __init__(self, end: socket.socket):
        self._socket, self._file = end, end.makefile("rb", buffering=_BUFFER_BYTES)
        self._outbox: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._sender = threading.Thread(target=self._send, name="hf-specdec-sender", daemon=True)
        self._sender.start()

    def put(self, message: Any) -> None:
        """Send a message, which must be picklable and must not change any more. Does not block; any thread may call it."""
        self._outbox.put(message)

    def get(self) -> list[Any]:
        """Wait for messages from the other process and return them in the order sent. Call it in one thread only, until it raises
        EOFError: one of the ends is closed, or the other process has ended.
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
        """The sending thread: send what has come, all of it in one piece, until `close`."""
        is_open = True
        try:
            while is_open:
                batch = [self._outbox.get()]
                with contextlib.suppress(queue.Empty):
                    while batch[-1] is not _END:
                        batch.append(self._outbox.get_nowait())
                if batch[-1] is _END:
                    batch.pop()
                    is_open = False
                if batch:
                    self._socket.sendall(pickle.dumps(batch, pickle.HIGHEST_PROTOCOL))
        except (BrokenPipeError, ConnectionResetError):
            return  # the other process has ended, which `get` reports
        finally:  # whatever failed: both sides' `get` must end
            with contextlib.suppress(OSError):  # it is not connected any more
                self._socket.shutdown(socket.SHUT_RDWR)
            self._socket.close()


class RemoteError(Exception):
    """An error of the other process whose class is not built into Python. Instances belong to a subclass with that class's name."""

    def __reduce__(self) -> tuple:
        return _remote, (type(self).__name__, _expected(self), str(self))


def portable(error: BaseException) -> BaseException:
    """An error in a form that any process can read: the error itself if its class is built into Python, else a `RemoteError`. If the
    error is a ValueError, OSError or ImportError, so is the `RemoteError`, because readers treat these differently.
    """
    if type(error).__module__ == "builtins":
        with contextlib.suppress(Exception):  # one of its arguments cannot be sent
            return pickle.loads(pickle.dumps(error))
    return _remote(type(error).__name__, _expected(error), str(error))


def _expected(error: BaseException) -> type[BaseException] | None:
    """The class, among those that readers treat differently, that an error belongs to; None if it belongs to none of them."""
    return next((kind for kind in (ValueError, OSError, ImportError) if isinstance(error, kind)), None)


def _remote(name: str, base: type[BaseException] | None, text: str) -> BaseException:
    return type(name, (RemoteError,) if base is None else (RemoteError, base), {})(text)
