"""EngineWorker: runs the engine in a thread of its own. Messages are sent to it one by one; each step delivers a list of updates."""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

from ..core.errors import is_failure
from ..decoding.outputs import summarize
from ..sampling.grammar import Reasoning
from .engine import Engine
from .outputs import Logprob
from .params import SamplingParams
from .request import Choice, Request
from .structured import StructuredOutputsParams

logger = logging.getLogger(__name__)
_POLL_TRANSFERS_SECONDS = 0.2  # how often transfers are polled while no request is running
_POLL_OFTEN_SECONDS = 0.005  # the same while a decode server is about to ask for blocks


@dataclass
class Submit:
    """Message: add a request. See `Admission.request`."""

    id: str
    prompt: str | None
    prompt_token_ids: list[int]
    params: SamplingParams
    reasoning: Reasoning | None = None


@dataclass
class Cancel:
    """Message: end a request, because its client has disconnected or its time limit is reached.

    Attributes:
        reason: the answer's finish_reason; None: nobody reads the answer any more.
    """

    id: str
    reason: str | None = None


@dataclass
class Update:
    """What a step added to one choice.

    Attributes:
        id, index: of the request and of the choice.
        text, token_ids, logprobs: what is new since the last update. Text that may be the beginning of a stop text is held back. For
            requests without stop texts the engine makes no text; `Answer.make_text` does.
        num_tokens: number of new tokens of the choice so far.
        num_cached_tokens: prompt tokens whose KV was cached.
        finish_reason, stop_reason: see `CompletionOutput`; None while the choice is being generated.
        hides_end: True if the last token ended the choice and is not part of its text.
        prompt_logprobs: see `Request`; in the first update and the last one.
        request_finished: True in the last update of a request.
        statistics: see `statistics_of`; only in the last update.
        kv_transfer_params: see `Request`; in the last update, and in an earlier one that announces a prompt that is still being read.
        error: the error that ended the request.
        is_refused: True if the engine refused the request, which is the client's mistake; False if the model failed.
    """

    id: str
    index: int = 0
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[dict[int, Logprob]] | None = None
    num_tokens: int = 0
    num_cached_tokens: int = 0
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    request_finished: bool = False
    statistics: dict[str, Any] | None = None
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None
    error: BaseException | None = None
    is_refused: bool = False
    hides_end: bool = False
    kv_transfer_params: dict[str, Any] | None = None


@dataclass
class Load:
    """How busy the engine is: numbers after the last step, for metrics.

    Attributes:
        running, waiting: number of choices.
        free_rows: how many more choices could run, if there are blocks for them.
        num_read: number of choices that the engine has been sent so far, and has read.
        kv_usage: share of the KV blocks in use, 0 to 1.
        preemptions: number so far.
        learning: what a learning drafter reports; None without one.
    """

    running: int = 0
    waiting: int = 0
    kv_usage: float = 0.0
    preemptions: int = 0
    learning: dict[str, Any] | None = None
    free_rows: int = 0
    num_read: int = 0


class EngineWorker(threading.Thread):
    """Runs an engine's steps until it is stopped.

    Args:
        deliver: called in this thread with the updates of a step; must not block.
        lock: the model's lock, held while steps run.

    Attributes:
        load: see `Load`; replaced when a step begins and when it ends, never changed.
        on_load: called in this thread with a `load` that differs from the one before.
        failure: the error that ended the thread; None if no error did.
    """

    def __init__(self, engine: Engine, deliver: Callable[[list[Update]], None], lock: Any):
        super().__init__(name="hf-specdec-engine", daemon=True)
        self.engine, self.deliver, self.lock = engine, deliver, lock
        self.failure: BaseException | None = None
        self._inbox: queue.SimpleQueue[Submit | Cancel | None] = queue.SimpleQueue()
        self._num_read = 0
        self.load = Load()
        self.on_load: Callable[[Load], None] = lambda load: None
        self._note_load()
        engine.on_schedule = self._note_load
        self._requests: dict[str, Request] = {}
        # numbers of characters and tokens delivered, by request id and choice index
        self._sent: dict[tuple[str, int], tuple[int, int]] = {}

    def send(self, message: Submit | Cancel) -> None:
        """Send a message. May be called in any thread."""
        self._inbox.put(message)

    def compile(self, grammar: StructuredOutputsParams) -> Future:
        """Begin to compile a grammar, so that the engine need not wait for it later. May be called in any thread.

        The future's error is ValueError for a grammar that is malformed or too complex.
        """
        return self.engine.grammars.start(grammar)

    def stop(self) -> None:
        """End the thread after the current step; running requests are aborted."""
        self._inbox.put(None)

    def run(self) -> None:
        """Run steps, and handle messages between them, until `stop`."""
        try:
            while True:
                if not self._read(block=not self.engine.has_work):
                    break
                if self.engine.has_work:
                    with self.lock, self.engine.decoder.active():
                        while self.engine.has_work and not self.engine.decoder.wants_pause:
                            if not self._step():
                                return
        except BaseException as error:
            self.failure = error
            logger.exception("The engine has stopped.")
            raise
        finally:
            self.engine.close()

    def _step(self) -> bool:
        """Handle messages and run one step. False if the thread must end."""
        if not self._read(block=False):
            return False
        if not self.engine.has_work:
            return True
        updates = [update for request in self.engine.step() for update in self._updates(request)]
        self._note_load()
        if updates:
            self.deliver(updates)
        return True

    def _read(self, block: bool) -> bool:
        """Handle all messages that have come. False if the thread must end.

        Args:
            block: wait for at least one message.
        """
        while True:
            try:
                # KV that other engines have read must be freed even while no request arrives.
                message = self._inbox.get(block=block, timeout=self._poll_after() if block else None)
            except queue.Empty:
                if block and self.engine.transfers is not None:
                    with self.lock, self.engine.decoder.active():
                        self.engine.transfers.poll()
                    continue
                return True
            block = False
            if message is None:
                return False
            if isinstance(message, Submit):
                self._submit(message)
            else:
                self._cancel(message)

    def _poll_after(self) -> float | None:
        """Seconds after which transfers are polled although no request runs; None if they need not be polled."""
        transfers = self.engine.transfers
        if transfers is None or not transfers.is_busy:
            return None
        return _POLL_OFTEN_SECONDS if transfers.expects_messages else _POLL_TRANSFERS_SECONDS

    def _submit(self, message: Submit) -> None:
        self._num_read += message.params.n
        try:
            request = self.engine.add(
                message.id, message.prompt, message.prompt_token_ids, message.params, reasoning=message.reasoning
            )
        except BaseException as error:
            if not is_failure(error):
                raise
            self._note_load()
            self.deliver(
                [Update(message.id, request_finished=True, error=error, is_refused=isinstance(error, ValueError))]
            )
            return
        self._requests[message.id] = request
        self._note_load()

    def _cancel(self, message: Cancel) -> None:
        request = self._requests.get(message.id)
        if request is None:
            return
        self.engine.abort(request, reason=message.reason or "abort")
        updates = self._updates(request)  # also removes the request from the dictionaries
        self._note_load()
        if message.reason is not None:
            self.deliver(updates)

    def _forget(self, request: Request) -> None:
        self._requests.pop(request.id, None)
        for choice in request.choices:
            self._sent.pop((request.id, choice.output.index), None)

    def _updates(self, request: Request) -> list[Update]:
        """The updates of a request's choices since the last call. If it has ended, the last one says so, and the request is forgotten.

        If making them raises, the request ends with that error, and no other does.
        """
        try:
            return self._new_updates(request)
        except BaseException as error:
            if not is_failure(error):
                raise
            logger.exception("Request %s ends, because its updates could not be made.", request.id)
            self.engine.abort(request, error)
            self._forget(request)
            return [Update(request.id, request_finished=True, error=error)]

    def _new_updates(self, request: Request) -> list[Update]:
        scored = request.prompt_logprobs
        if scored is not None and len(scored) < len(request.prompt_token_ids) and not request.finished:
            return []  # another choice than the one that scores the prompt has begun: its tokens wait
        is_first = all((request.id, choice.output.index) not in self._sent for choice in request.choices)
        found = [update for choice in request.choices if (update := self._update(choice)) is not None]
        if request.announcement is not None:
            found.insert(0, Update(request.id, kv_transfer_params=request.announcement))
            request.announcement = None
        if is_first and found:
            found[0].prompt_logprobs = scored
        if request.finished:
            self._forget(request)
            found = found or [Update(request.id)]
            last = found[-1]
            last.request_finished, last.error, last.is_refused = True, request.error, request.is_refused
            last.num_cached_tokens = request.num_cached_tokens
            last.prompt_logprobs = scored
            last.kv_transfer_params = request.kv_transfer_params
            last.statistics = statistics_of(request, self.engine.decoder.config.longest_draft)
        return found

    def _update(self, choice: Choice) -> Update | None:
        """What was added to a choice since the last call; None if nothing was."""
        output, key = choice.output, (choice.request.id, choice.output.index)
        characters, tokens = self._sent.get(key, (0, 0))
        end_was_delivered = characters < 0
        if end_was_delivered or (tokens == len(output.token_ids) and not output.finished()):
            return None
        end = len(output.text) if output.finished() else safe_length(output.text, choice.request.params.stop)
        end = max(end, characters)
        self._sent[key] = (-1 if output.finished() else end, len(output.token_ids))
        return Update(
            key[0],
            key[1],
            output.text[characters:end],
            output.token_ids[tokens:],
            None if output.logprobs is None else output.logprobs[tokens:],
            len(output.token_ids),
            choice.request.num_cached_tokens,
            output.finish_reason,
            output.stop_reason,
            hides_end=choice.hides_end,
        )

    def _note_load(self) -> None:
        scheduler, cache, before = self.engine.scheduler, self.engine.decoder.cache, self.load
        self.load = Load(
            len(scheduler.running),
            len(scheduler.waiting),
            cache.pool.num_used / max(cache.most_blocks, 1),
            scheduler.num_preemptions,
            None if self.engine.decoder.learner is None else self.engine.decoder.learner.report(),
            scheduler.max_num_seqs - len(scheduler.running),
            self._num_read,
        )
        if self.load != before:
            self.on_load(self.load)


def statistics_of(request: Request, longest_draft: int) -> dict[str, Any]:
    """Statistics of a request's speculation: those of `Speculation`, the same in vLLM's form, and counts for metrics.

    Args:
        longest_draft: maximum number of tokens of a draft, which gives the length of vLLM's histogram.
    """
    steps = [step for row in request.statistics for step in row.steps]
    accepted = [count for _, _, _, count in steps]
    drafting = [depth for _, depth, _, _ in steps if depth]
    summary = summarize(request.statistics, 0)
    histogram = [0] * (longest_draft + 1)
    for count in accepted:
        histogram[min(count, longest_draft)] += 1
    return {
        **summary,
        "num_drafts": len(drafting),
        "num_accepted_per_position": [sum(count > i for count in accepted) for i in range(max(drafting, default=0))],
        "speculative_decoding": {
            "mean_acceptance_length": summary["mean_accepted_length"],
            "draft_acceptance_rate": summary["acceptance_rate"],
            "acceptance_histogram": histogram,
            "num_spec_steps": len(steps),
            "num_accepted_draft_tokens": summary["num_accepted_tokens"],
            "num_draft_tokens": summary["num_draft_tokens"],
            "num_spec_tokens": longest_draft,
        },
    }


def safe_length(text: str, stops: list[str]) -> int:
    """Number of characters of a growing text that can be delivered: what follows them may be the beginning of a stop text."""
    for start in range(max(0, len(text) - max(map(len, stops), default=0) + 1), len(text)):
        if any(stop.startswith(text[start:]) for stop in stops):
            return start
    return len(text)
