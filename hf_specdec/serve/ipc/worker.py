"""EngineWorker: runs the engine in a thread of its own. Messages are sent to it one by one; each step delivers a list of updates."""

from __future__ import annotations

import contextlib
import logging
import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

from ...core.errors import is_failure
from ...core.ranks import Ranks
from ..engine.engine import Engine
from ..engine.request import Request
from .messages import Call, Cancel, Load, Submit, Update

logger = logging.getLogger(__name__)
_Change = tuple[Call, Future]
_POLL_TRANSFERS_SECONDS = 0.2  # how often transfers are polled while no request is running
_POLL_OFTEN_SECONDS = 0.005  # the same while a decode server is about to ask for blocks


def load_of(engine: Engine, num_read: int = 0) -> Load:
    """How busy an engine is, which has read `num_read` choices."""
    scheduler, cache, learner = engine.scheduler, engine.decoder.cache, engine.decoder.learner
    num_running, caches = len(scheduler.running), [cache] if cache.cross is None else [cache, cache.cross]
    usage = max(cache.pool.num_used / max(cache.most_blocks, 1) for cache in caches)
    return Load(
        num_running, len(scheduler.waiting), usage, scheduler.num_preemptions, None if learner is None else learner.report(),
        scheduler.max_num_seqs - num_running, num_read, engine.control.acceptance.report(), engine.control.is_paused,
        bool(engine.control.asleep),
    )  # fmt: skip


class EngineWorker(threading.Thread):
    """Runs an engine's steps until it is stopped. On several ranks, each of which has one, all handle the messages that rank 0 is sent.

    Args:
        deliver: called in this thread with the updates of a step; must not block.
        on_load: called in this thread with a `load` that differs from the one before.
    """

    def __init__(
        self, engine: Engine, deliver: Callable[[list[Update]], None], lock: Any, ranks: Ranks | None = None,
        on_load: Callable[[Load], None] = lambda load: None
    ):  # fmt: skip
        super().__init__(name="hf-specdec-engine", daemon=True)
        self.engine, self.deliver, self.lock, self.ranks, self.on_load = engine, deliver, lock, ranks, on_load
        self.failure: BaseException | None = None  # what ended the thread
        self._inbox: queue.SimpleQueue[Submit | Cancel | _Change | None] = queue.SimpleQueue()
        self._changes: list[_Change] = []  # of adapters or weights, which wait until no step runs
        self._pausing: list[Future] = []  # asked to pause, which ends when no request that may run is left
        self._num_read = 0
        self.load = load_of(engine)  # replaced when a step begins and when it ends, never changed
        self._requests: dict[str, Request] = {}

    def send(self, message: Submit | Cancel) -> None:
        self._inbox.put(message)

    def ask(self, call: Call) -> Future:
        """Begin a call. Any thread may do that. The future's error is ValueError for what is malformed, too large or too complex, and for
        what cannot be done."""
        if call.part == "grammars":
            return self.engine.grammars.start(**call.arguments)
        future: Future = Future()
        if self.ranks is not None:
            future.set_exception(ValueError("The model is sharded: this needs a whole model (tensor_parallel_size 1)."))
        elif call.part == "corpora":
            return self.engine.corpora.start(**call.arguments)
        elif call.method == "join":  # it waits for the trainer, and steps go on
            threading.Thread(target=self._change, args=(call, future), name="hf-specdec-join", daemon=True).start()
        else:
            self._inbox.put((call, future))
        return future

    def stop(self) -> None:
        """End the thread after the current step; running requests are aborted."""
        self._inbox.put(None)

    def run(self) -> None:
        with contextlib.nullcontext() if self.ranks is None else self.ranks.watched():
            try:
                self._run()
            except BaseException as error:
                self.failure = error
                logger.exception("The engine has stopped.")
                raise
            finally:
                self.engine.close()

    def _run(self) -> None:
        while self._changes or self._read(block=not self.engine.has_work):
            with self.lock:
                changes, self._changes = self._changes, []
                for change in changes:
                    self._change(*change)
                self._end_pauses()
                if self.engine.has_work:
                    with self.engine.decoder.active():
                        while self.engine.has_work and not (self._changes or self.engine.wants_pause):
                            if not self._step():
                                return
                self.engine.free_adapters()
            self._end_pauses()

    def _change(self, call: Call, future: Future) -> None:
        """Do what was asked. A pause is done once no request that may run is left."""
        try:
            if call.part == "control":
                self._control(call.method, call.arguments)
            else:
                getattr(self.engine.adapters, call.method)(**call.arguments)
        except Exception as error:
            logger.warning("%s", error)
            future.set_exception(error)
            return
        if call.method == "pause":
            self._pausing.append(future)
        else:
            future.set_result(None)

    def _control(self, method: str, arguments: dict[str, Any]) -> None:
        control, ends = self.engine.control, method == "sleep" or arguments.get("mode") == "abort"
        if method == "join":
            control.weights.join(**arguments)
            return
        if method == "sleep":
            control.check_sleep(**arguments)
        for name in list(self._requests) if ends else ():
            self._cancel(Cancel(name, "abort"))
        getattr(control, method)(**arguments)
        self._note_load()

    def _end_pauses(self) -> None:
        control = self.engine.control
        if self._pausing and (control.is_paused or self.engine.scheduler.newest is None):
            self._note_load()
            for future in self._pausing:
                future.set_result(None)
            self._pausing.clear()

    def _step(self) -> bool:
        """Handle messages and run one step. False if the thread must end."""
        if not self._read(block=False):
            return False
        if not self.engine.has_work:
            return True
        updates = [update for request in self.engine.step(self._note_load) for update in self._updates(request)]
        self._note_load()
        if updates:
            self.deliver(updates)
        return True

    def _read(self, block: bool) -> bool:
        """Handle all messages that have come. False if the thread must end."""
        messages = self._received(block) if self.ranks is None or self.ranks.leads else None
        if self.ranks is not None:
            messages = self.ranks.same_object(messages)
        for message in messages or ():
            if message is None:
                return False
            if isinstance(message, Submit):
                self._submit(message)
            elif isinstance(message, Cancel):
                self._cancel(message)
            else:
                self._changes.append(message)
        return True

    def _received(self, block: bool) -> list[Submit | Cancel | _Change | None]:
        """Remove and return the messages in the inbox, up to an order to stop or a change. `block`: wait for the first one."""
        messages: list[Submit | Cancel | _Change | None] = []
        while not messages or isinstance(messages[-1], (Submit, Cancel)):
            waits = block and not messages
            try:
                # KV that other engines have read must be freed even while no request arrives.
                transfers, seconds = self.engine.transfers, None
                if waits and transfers is not None and transfers.is_busy:
                    seconds = _POLL_OFTEN_SECONDS if transfers.producer.awaits_consumer else _POLL_TRANSFERS_SECONDS
                messages.append(self._inbox.get(waits, seconds))
            except queue.Empty:
                if not waits or self.engine.transfers is None:
                    break
                with self.lock, self.engine.decoder.active():
                    self.engine.transfers.poll()
        return messages

    def _submit(self, message: Submit) -> None:
        self._num_read += message.params.n
        try:
            request = self.engine.add(*message)
        except BaseException as error:
            if not is_failure(error):
                raise
            self._note_load()
            is_refused = isinstance(error, ValueError)
            self.deliver([Update(message.id, request_finished=True, error=error, is_refused=is_refused)])
        else:
            self._requests[message.id] = request
            self._note_load()

    def _cancel(self, message: Cancel) -> None:
        if message.id not in self._requests:
            return
        self.engine.abort(self._requests[message.id], reason=message.reason or "abort")
        updates = self._updates(self._requests[message.id])  # also removes the request from the dictionary
        self._note_load()
        if message.reason is not None:
            self.deliver(updates)

    def _updates(self, request: Request) -> list[Update]:
        """A request's updates since the last call. The last one says that it has ended; an error ends this request alone."""
        with self.engine.boundary(request):
            return self._new_updates(request)
        self._requests.pop(request.id, None)
        return [Update(request.id, request_finished=True, error=request.error)]

    def _new_updates(self, request: Request) -> list[Update]:
        scored = request.prompt_logprobs
        if scored is not None and len(scored) < len(request.prompt_token_ids) and not request.finished:
            return []  # another choice than the one that scores the prompt has begun: its tokens wait
        is_first = all(choice.taken is None for choice in request.choices)
        updates = [
            Update(request.id, choice.output.index, *new, len(choice.output.token_ids), request.num_cached_tokens,
                   choice.output.finish_reason, choice.output.stop_reason, hides_end=choice.hides_end)
            for choice in request.choices if (new := choice.take()) is not None
        ]  # fmt: skip
        if request.announcement is not None:
            updates.insert(0, Update(request.id, kv_transfer_params=request.announcement))
            request.announcement = None
        if is_first and updates:
            updates[0].prompt_logprobs = scored
        if request.finished:
            self._requests.pop(request.id, None)
            updates = updates or [Update(request.id)]
            last = updates[-1]
            last.request_finished, last.error, last.is_refused = True, request.error, request.is_refused
            last.num_cached_tokens, last.prompt_logprobs = request.num_cached_tokens, scored
            last.kv_transfer_params, last.token_times = request.kv_transfer_params, request.token_times
            last.statistics = request.figures(self.engine.decoder.config.longest_draft)
        return updates

    def _note_load(self) -> None:
        load, self.load = self.load, load_of(self.engine, self._num_read)
        if self.load != load:
            self.on_load(self.load)
