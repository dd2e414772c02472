"""Control: pauses an engine, puts it to sleep and updates its weights, while requests wait."""

from __future__ import annotations

import itertools
import logging
import os
from collections.abc import Callable, Iterable
from typing import Any, Literal

import torch

from ...candidate_generators.checkpoints.target_parts import renew_copies
from ...decoding.decoder import SpeculativeDecoder
from ...model.options.replaced_linears import ReplacedLinears
from .request import RequestChoice
from .scheduler import Scheduler
from .weights import Weights

logger = logging.getLogger(__name__)

_PARTS = ("weights", "kv_cache")


class Acceptance:
    """Tokens per step of a row (τ), with the weights in use and with earlier ones. Weights count once they have made `FEWEST` steps. If
    drafts then gain less than half as much as with the best weights before, a warning says so, once until they gain more again.
    """

    FEWEST = 64

    def __init__(self) -> None:
        self.updates = 0
        self.best: float | None = None  # of earlier weights
        self._steps = self._tokens = 0
        self._has_collapsed = False

    @property
    def now(self) -> float | None:
        """τ with the weights in use; None: they have made too few steps."""
        return self._tokens / self._steps if self._steps >= self.FEWEST else None

    def note(self, steps: int, tokens: int) -> None:
        """Count the rows of a step, and their new tokens."""
        self._steps += steps
        self._tokens += tokens
        if self.best is None or (now := self.now) is None:
            return
        had_collapsed, self._has_collapsed = self._has_collapsed, now - 1 < (self.best - 1) / 2
        if self._has_collapsed and not had_collapsed:
            logger.warning(
                "After update %d of the weights a step gives %.2f tokens, and gave %.2f before: the drafter no longer fits. Train it on "
                "texts of the new weights, or set 'learn'.", self.updates, now, self.best,
            )  # fmt: skip

    def updated(self) -> None:
        """The weights have changed."""
        if self.now is not None:
            self.best = max(self.now, self.best or 1.0)
        self.updates += 1
        self._steps = self._tokens = 0

    def report(self) -> dict[str, Any] | None:
        """Figures for metrics; None before the first update."""
        if not self.updates:
            return None
        taus = {"accepted_length": self.now, "best_accepted_length": self.best}
        return {"updates": self.updates, **{name: tau and round(tau, 3) for name, tau in taus.items()}}


class Control:
    """What training loops ask of an engine. Requests that come meanwhile wait. Call methods outside `decoder.active()`; their errors are
    ValueError, and nothing has changed then.

    Args:
        allocate: makes the decoder's KV pools anew.
        exchanges_kv: with other engines, which must have the same weights.
    """

    def __init__(
        self, decoder: SpeculativeDecoder, scheduler: Scheduler, allocate: Callable[[], None], exchanges_kv: bool
    ):
        self._decoder, self._scheduler, self._allocate = decoder, scheduler, allocate
        self.weights = Weights(decoder.target, exchanges_kv)
        self.acceptance = Acceptance()
        self._is_updating = False
        self.asleep: set[str] = set()  # of _PARTS

    @property
    def obstacle(self) -> str | None:
        """Why no step can run; None: it can, unless the engine is paused."""
        if self.asleep:
            return "The engine sleeps: wake it up."
        if self.weights.unsure:
            return f"{len(self.weights.unsure)} weights are missing, such as {min(self.weights.unsure)}: send them."
        return "An update of the weights has begun: finish it." if self._is_updating else None

    @property
    def is_paused(self) -> bool:
        """True once no request that may run is left."""
        return self._scheduler.newest is not None and not self._scheduler.has_rows

    def pause(self, mode: Literal["abort", "wait", "keep"]) -> None:
        """Let no further request run. With `mode` "wait" those that have come run to their end, and `is_paused` tells when; otherwise they
        stay as they are until `resume`. For "abort" the caller aborts them. A second pause lets no more run than the first."""
        if mode != "wait":
            self._scheduler.newest = -1
        elif self._scheduler.newest is None:
            numbers = [choice.request.number for choice in self._choices()]
            if numbers and self.obstacle is not None:
                raise ValueError(f"Requests wait. {self.obstacle}")
            self._scheduler.newest = max(numbers, default=-1)

    def resume(self) -> None:
        """Undo `pause`."""
        self._scheduler.newest = None

    def start_update(self) -> None:
        """Let no step run until `finish_update`."""
        self.weights.places()
        self._is_updating = True

    def update(self, weights: str | os.PathLike | Iterable[tuple[str, torch.Tensor]]) -> None:
        """Write weights: a folder in transformers' format, which must be whole, or names and tensors. Rows that run go on with them."""
        if isinstance(weights, (str, os.PathLike)):
            self.weights.load(weights)
        else:
            self.weights.write(weights)
        self._updated()

    def receive(self, names: list[str], dtype_names: list[str], shapes: list[list[int]]) -> None:
        """Write what the trainer broadcasts: see `Weights.receive`, also for errors after which weights are missing."""
        self.weights.receive(names, dtype_names, shapes)
        self._updated()

    def finish_update(self) -> None:
        """Let steps run again, with the new weights."""
        if not self._is_updating:
            raise ValueError("No update of the weights has begun.")
        if self.weights.unsure:
            raise ValueError(self.obstacle)
        self._is_updating = False
        self._updated()

    def reset_prefix_cache(self) -> None:
        """Drop the KV of texts that have ended."""
        if self._decoder.target.ranks is not None:
            raise ValueError("The model is sharded (tensor_parallel_size): its ranks must keep the same prefixes.")
        self._decoder.forget_prefixes()

    def sleep(self, level: int = 1) -> None:
        """Free the KV cache and move the weights of a GPU to host memory (level 1), or free them (level 2: `update` all of them after
        `wake_up`). Level 2 may follow level 1. No request may have begun."""
        self.check_sleep(level)
        if any(choice.is_added for choice in self._choices()):
            raise ValueError("Requests have begun: pause with mode 'abort' or 'wait' first.")
        self.weights.put_away(level)
        for option in self._decoder.target.active_options:
            if isinstance(option, ReplacedLinears):
                option.forget()
        if "kv_cache" not in self.asleep:
            self._decoder.release(keeps_pools=False)
            self._allocate()  # pools that take memory once they are used
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        self.asleep = set(_PARTS)

    def check_sleep(self, level: int) -> None:
        """Raise ValueError if the engine cannot sleep, whatever becomes of its requests."""
        if level not in (1, 2):
            raise ValueError(f"level {level}: use 1 or 2.")
        self.weights.places(even_away=True)

    def wake_up(self, tags: list[str] | None = None) -> None:
        """Bring back what sleeps: "weights", "kv_cache"; None: both."""
        wanted = set(_PARTS if tags is None else tags)
        if wanted - set(_PARTS):
            raise ValueError(f"tags: use {' and '.join(_PARTS)}.")
        if "weights" in wanted & self.asleep:
            self.weights.bring_back()
        self.asleep -= wanted

    def _choices(self) -> Iterable[RequestChoice]:
        return itertools.chain(self._scheduler.waiting, self._scheduler.running)

    def _updated(self) -> None:
        """Renew what was computed from the weights, unless more are to come."""
        if self._is_updating:
            return
        decoder = self._decoder
        for choice in list(self._scheduler.running):
            self._scheduler.preempt(choice)  # its text will be read again
        for choice in self._scheduler.waiting:
            if choice.sequence.source is not None:
                choice.sequence.source.outputs = None
            scored = choice.request.prompt_logprobs or []
            if len(scored) < len(choice.request.prompt_token_ids):
                del scored[1:]
        decoder.forget_prefixes()
        renew_copies(decoder.target.model)
        if decoder.learner is not None:
            decoder.learner.forget_texts()
        self.acceptance.updated()
