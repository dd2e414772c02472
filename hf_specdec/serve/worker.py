"""EngineWorker: the engine in a thread of its own. Messages go in one by one; one batch of updates comes out per step."""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from ..decoding.outputs import summarize
from ..sampling.grammar import Reasoning
from .engine import Engine
from .outputs import Logprob
from .params import SamplingParams
from .request import Choice, Request

logger = logging.getLogger(__name__)
_LOOK_AT_TRANSFERS = 0.2  # seconds


@dataclass
class Submit:
    """A request for the engine."""

    id: str
    prompt: str | None
    prompt_token_ids: list[int]
    params: SamplingParams
    reasoning: Reasoning | None = None


@dataclass
class Cancel:
    """The client has gone, or its time is over.

    Attributes:
        reason: how the answer ends, if somebody still reads it; None: nobody does.
    """

    id: str
    reason: str | None = None


@dataclass
class Update:
    """What a step gave one choice.

    Attributes:
        text, token_ids, logprobs: since the last update. Text that may be the beginning of a stop text is held back. Without stop
            texts the engine needs no text, and whoever reads the update makes it (`Answer.make_text`).
        hides_end: the last of the tokens has ended the choice and is no part of its text.
        num_tokens: new tokens of the choice so far.
        statistics: of the whole request, with its last update.
        error: what ended the request: the client's mistake (ValueError) or a failure of the model.
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
    hides_end: bool = False
    kv_transfer_params: dict[str, Any] | None = None


@dataclass
class Load:
    """What the engine is at, for metrics; numbers as of the last step."""

    running: int = 0
    waiting: int = 0
    kv_usage: float = 0.0
    preemptions: int = 0
    learning: dict[str, Any] | None = None


class EngineWorker(threading.Thread):
    """Runs an engine's steps until it is stopped.

    Args:
        deliver: called in this thread with the updates of a step; must not block.
        lock: held while steps run.
    """

    def __init__(self, engine: Engine, deliver: Callable[[list[Update]], None], lock: Any):
        super().__init__(name="hf-specdec-engine", daemon=True)
        self.engine, self.deliver, self.lock = engine, deliver, lock
        self.load = Load()
        self.failure: BaseException | None = None
        self._inbox: queue.SimpleQueue[Submit | Cancel | None] = queue.SimpleQueue()
        self._requests: dict[str, Request] = {}
        self._sent: dict[tuple[str, int], tuple[int, int]] = {}  # characters and tokens that were delivered, per choice

    def send(self, message: Submit | Cancel) -> None:
        """Hand a message over; from any thread."""
        self._inbox.put(message)

    def stop(self) -> None:
        """End after the current step; requests that are running are aborted."""
        self._inbox.put(None)

    def run(self) -> None:
        """Steps, and messages between them."""
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
        """One step and the messages that came meanwhile. False: stop."""
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
        """Act on all messages. False: stop."""
        while True:
            try:
                # What other engines have read is freed also while nobody asks for anything.
                waits = block and self.engine.transfers is not None and self.engine.transfers.is_busy
                message = self._inbox.get(block=block, timeout=_LOOK_AT_TRANSFERS if waits else None)
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

    def _submit(self, message: Submit) -> None:
        try:
            request = self.engine.add(
                message.id, message.prompt, message.prompt_token_ids, message.params, reasoning=message.reasoning
            )
        except Exception as error:
            self.deliver([Update(message.id, request_finished=True, error=error)])
            return
        self._requests[message.id] = request
        self._note_load()

    def _cancel(self, message: Cancel) -> None:
        request = self._requests.get(message.id)
        if request is None:
            return
        self.engine.abort(request, reason=message.reason or "abort")
        updates = self._updates(request)  # forgets it, too
        self._note_load()
        if message.reason is not None:
            self.deliver(updates)

    def _forget(self, request: Request) -> None:
        for choice in request.choices:
            self._sent.pop((request.id, choice.output.index), None)

    def _updates(self, request: Request) -> list[Update]:
        found = [update for choice in request.choices if (update := self._update(choice)) is not None]
        if request.finished:
            self._requests.pop(request.id, None)
            self._forget(request)
            found = found or [Update(request.id)]
            last = found[-1]
            last.request_finished, last.error = True, request.error
            last.num_cached_tokens = request.num_cached_tokens
            last.prompt_logprobs = request.prompt_logprobs
            last.kv_transfer_params = request.kv_transfer_params
            last.statistics = statistics_of(request, self.engine.decoder.config.longest_draft)
        return found

    def _update(self, choice: Choice) -> Update | None:
        output, key = choice.output, (choice.request.id, choice.output.index)
        characters, tokens = self._sent.get(key, (0, 0))
        if characters < 0 or (
            tokens == len(output.token_ids) and not output.finished()
        ):  # below 0: its end was delivered
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
        scheduler, cache = self.engine.scheduler, self.engine.decoder.cache
        self.load = Load(
            len(scheduler.running),
            len(scheduler.waiting),
            cache.pool.num_used / max(cache.most_blocks, 1),
            scheduler.num_preemptions,
            None if self.engine.decoder.learner is None else self.engine.decoder.learner.report(),
        )


def statistics_of(request: Request, longest_draft: int) -> dict[str, Any]:
    """What speculation did for a request: `Speculation`, vLLM's form of it, and counts for metrics."""
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
    """How much of a growing text can be shown: no stop text may begin in what is left out."""
    for start in range(max(0, len(text) - max(map(len, stops), default=0) + 1), len(text)):
        if any(stop.startswith(text[start:]) for stop in stops):
            return start
    return len(text)
