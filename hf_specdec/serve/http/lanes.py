"""Lanes: where bodies are read and tokenized, so that the event loop, and with it every stream, need not wait."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import multiprocessing
import os
import signal
import threading
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from typing import Any

from ..ipc.engine_process import SIGNALS
from .errors import shutting_down
from .reader import RequestReader

logger = logging.getLogger(__name__)

LONG_BYTES = 32 << 10  # the text of a longer body may take more than 0.1 s
_NICENESS = 10  # of the process for long bodies: where cores are few, streams go first


class Lanes:
    """Two lanes, one for short bodies and one for long ones: a short request never waits for a long one. Tasks of a lane run in the order
    in which they came.

    The short lane is a thread. So is the long one, until `fork` makes a process for it: parsers and checks of a body keep the
    interpreter's lock, for seconds if it holds a million items.
    """

    def __init__(self, reader: RequestReader):
        self._reader = reader
        self._short, self._long = (ThreadPoolExecutor(1, f"hf-specdec-{size}-bodies") for size in ("short", "long"))
        self._process: ProcessPoolExecutor | None = None
        self._pid = 0
        self._waiting: set[asyncio.Future] = set()
        self._has_ended = False

    def fork(self) -> None:
        """Fork this process for long bodies. The copy has the tokenizer and needs little memory. Call before other threads are started."""
        gc.collect()
        gc.freeze()  # collections would copy the memory that the processes share, and make streams wait
        try:
            context = multiprocessing.get_context("fork")
            self._process = ProcessPoolExecutor(1, context, initializer=_begin, initargs=(self._reader,))
        except (OSError, NotImplementedError, ValueError) as error:  # no semaphores, as without /dev/shm; no fork
            logger.warning("There is no process for long bodies, which may hold up streams: %s", error)
            return
        self._pid = self._process.submit(os.getpid).result()

    def close(self) -> None:
        """Kill the process, which may be busy with a text that takes a minute."""
        for lane in (self._short, self._long):
            lane.shutdown(wait=False, cancel_futures=True)
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError):  # somebody else has killed it
                os.kill(self._pid, signal.SIGKILL)
            self._process.shutdown()  # its thread has nothing to wait for, and must not end while the interpreter does
            self._process = None

    async def run(self, num_bytes: int, function: Callable[..., Any], *args: Any) -> Any:
        """Returns `function(reader, *args)`. If the caller is cancelled before its turn comes, the function is not called.

        Args:
            num_bytes: size of the body. For a long one, the arguments and the result must be picklable.

        Raises:
            ApiError: 503, see `end`.
            BrokenProcessPool: the process has ended.
        """
        try:
            if num_bytes > LONG_BYTES and self._process is not None:
                task = self._process.submit(_call, self._reader.facts, function, args)
            else:
                task = (self._long if num_bytes > LONG_BYTES else self._short).submit(function, self._reader, *args)
            waiting = asyncio.wrap_future(task)
            self._waiting.add(waiting)
            waiting.add_done_callback(self._waiting.discard)
            return await waiting
        except BrokenProcessPool:
            self._process = None
            logger.warning("The process for long bodies has ended; a thread takes its place.")
            raise
        except asyncio.CancelledError:
            if self._has_ended:
                raise shutting_down() from None
            raise

    def end(self) -> None:
        """End whatever waits with an error, because the time for draining is over. Call in the event loop's thread."""
        self._has_ended = True
        for future in self._waiting:
            future.cancel()


_reader: Any = None  # in the forked process: its copy


def _begin(reader: RequestReader) -> None:
    """Begin the forked process: only the other process ends it, by a signal that cannot be ignored or by its own end."""
    global _reader
    _reader = reader
    os.nice(_NICENESS)
    gc.disable()  # collections would take most of the time that it takes to read a million items
    for number in SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    multiprocessing.parent_process().join()  # type: ignore[union-attr]
    os._exit(1)


def _call(facts: Any, function: Callable[..., Any], args: tuple) -> Any:
    """Run a task in the forked process. `facts`: what the server has been told about the model since."""
    if facts != _reader.facts:
        _reader.know(facts)
    try:
        return function(_reader, *args)
    finally:
        gc.collect()
