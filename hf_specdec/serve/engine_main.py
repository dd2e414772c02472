"""The main function of the process that `EngineProcess` starts: it loads the model and serves what the HTTP side sends."""

from __future__ import annotations

import os
import pickle
import signal
import socket
import threading
import traceback

import torch.distributed as dist

from .. import foreign_messages
from .channel import Channel, portable
from .engine_process import BEAT_SECONDS, SECONDS_TO_END, SIGNALS, Begin, Compile, Compiled, Ended
from .llm import LLM
from .start import facts_of, worker_of
from .worker import EngineWorker, Update


class Reader(threading.Thread):
    """Reads what the HTTP side sends, and passes it on to the engine's thread. Ends the process when the HTTP side's ends.

    Attributes:
        worker: the engine's thread; None while the model is being loaded.
        is_over: True once the engine has ended; the channel is then closed on this side.
    """

    def __init__(self, channel: Channel):
        super().__init__(name="hf-specdec-reader", daemon=True)
        self.channel = channel
        self.worker: EngineWorker | None = None
        self.is_over = False

    def run(self) -> None:
        """Read until the channel is closed."""
        try:
            while True:
                for message in self.channel.get():
                    if message is None:
                        self._end()
                    elif isinstance(message, Compile):
                        self._compile(message)
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

    def _compile(self, message: Compile) -> None:
        """Have a grammar compiled in another thread, which then sends the outcome."""
        assert self.worker is not None

        def send(future) -> None:
            error = future.exception()
            self.channel.put(Compiled(message.number, None if error is None else portable(error)))

        self.worker.compile(message.grammar).add_done_callback(send)


def main(descriptor: int) -> None:
    """Load the model and serve it until the HTTP side tells this process to end, or has ended itself.

    Args:
        descriptor: file descriptor of this end of the connection.
    """
    for each in SIGNALS:  # not SIG_IGN, which processes that are started here would inherit
        signal.signal(each, lambda *_: None)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
    end = socket.socket(fileno=descriptor)
    end.set_inheritable(False)
    channel = Channel(end)
    try:
        (begin,) = channel.get()
    except EOFError:
        return
    reader = Reader(channel)
    reader.start()
    error = _serve(begin, channel, reader)
    if error is None:
        channel.put(Ended())
    else:
        lines = traceback.format_exception(type(error), error, error.__traceback__)
        channel.put(Ended(portable(error), "".join(lines)))
    reader.is_over = True
    channel.close()
    if dist.is_initialized():  # the threads of a group must not outlive `main`
        dist.destroy_process_group()


def _serve(begin: Begin, channel: Channel, reader: Reader) -> BaseException | None:
    """Load the model and run its engine. Returns the error that ended either; None: it was told to end."""

    def deliver(updates: list[Update]) -> None:
        for update in updates:
            if update.error is not None:
                update.error = portable(update.error)
        channel.put(updates)

    try:
        if begin.shows_all:
            foreign_messages.show()
        llm = LLM(**pickle.loads(begin.arguments))
        facts, worker = facts_of(llm, llm.tokenizer), worker_of(llm, deliver)
    except BaseException as error:
        return error
    reader.worker, worker.on_load = worker, channel.put
    channel.put(worker.load)
    channel.put(facts)
    worker.start()
    while worker.is_alive():
        worker.join(BEAT_SECONDS)
        channel.put(worker.load)  # the HTTP side takes a process that says nothing for stopped
    return worker.failure
