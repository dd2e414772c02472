"""Learner: trains a head between the steps it drafts for, and puts better weights in."""

from __future__ import annotations

import json
import logging
import random
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ..core.outcome import StepOutcome
from ..core.output import Taps
from ..core.sequence import Sequence
from ..training.base import Estimate, HeadTrainer, judge
from ..training.state import load_state, read_log, save_state
from .folder import WORK, export, unchanged_flags
from .texts import LearntTexts, Recorder, batch_of

logger = logging.getLogger(__name__)


class Learner:
    """Learns from every text that ends, in the time that an account allows.

    Every `JUDGE` steps of training the head's drafts are compared with those of the weights in use, on texts that neither was
    trained on. Better weights are written to the folder and put in place when `SpeculativeDecoder.active` is next entered; much
    worse ones are dropped. Running texts keep what the head has read of them with the old weights: that costs acceptance, never
    exactness, since output does not depend on drafts.

    Args:
        trainer: holds the head as the folder has it.
        served: the module that drafts, with the same parameters.
        folder: where the head is kept; `learning/` in it has the state to go on from and `log.jsonl`.
        share: share of the decoding thread's time that learning may take.

    Raises:
        ValueError: the two heads' parameters differ, or the folder's state is of another head.
    """

    TOKENS = 384  # in a training batch, about
    JUDGE = 16  # steps of training between two comparisons
    BETTER, WORSE = 0.01, 0.15  # differences of tau with which weights are taken, or dropped
    FEWEST = 6  # texts before learning begins
    MOST_SAVED = 2.0  # seconds that the account holds at most
    MOST_BYTES = 64 << 20  # of hidden states of past texts to train on
    clock = staticmethod(time.thread_time)  # seconds that this thread has worked

    def __init__(self, trainer: HeadTrainer, served: nn.Module, folder: Path, share: float):
        self.trainer, self.served, self.folder, self.share = trainer, served, folder, share
        self.taps: Taps = trainer.taps
        self.recorder, self.texts = Recorder(self.taps), LearntTexts(self.MOST_BYTES)
        self.parameters = {name: p for name, p in trainer.head.named_parameters() if p.requires_grad}
        places = dict(served.named_parameters())
        wrong = [name for name, p in self.parameters.items() if name not in places or places[name].shape != p.shape]
        if wrong:
            raise ValueError(
                f"The head that drafts lacks parameters of the trained head, or has them in another shape: {', '.join(wrong[:3])}."
            )
        self.places = {name: places[name] for name in self.parameters}
        self.rate = trainer.options.learning_rate / 3  # for single small batches
        self.best = self._copied()
        self.steps, self.swaps, self.rollbacks, self.seconds = 0, 0, 0, 0.0
        self.tau: float | None = None  # of the weights in use, on held-out texts
        self.history: list[dict[str, Any]] = []
        self._rng, self._account, self._judged_at = random.Random(0), 0.0, 0
        self._ready: dict[str, torch.Tensor] | None = None
        self._at: float | None = None
        self._new_optimizer()
        self._resume()

    def observe(self, outcome: StepOutcome) -> None:
        """A step was verified."""
        self.recorder.observe(outcome)

    def ended(self, seq: Sequence) -> None:
        """A sequence leaves, finished or not."""
        text = self.recorder.ended(seq)
        if text is not None:
            self.texts.add(text)

    def forget_texts(self) -> None:
        """Forget all texts, because the target's weights have changed: its hidden states were of other weights."""
        self.recorder, self.tau = Recorder(self.taps), None
        self.texts.training.clear()
        self.texts.held_out.clear()
        self.texts.num_bytes = 0

    def between_steps(self) -> None:
        """Learn for as long as the account allows: at most one unit of work."""
        now = self.clock()
        if self._at is not None:
            self._account = min(self._account + self.share * (now - self._at), self.MOST_SAVED)
        self._at = now
        if self._account <= 0 or len(self.texts.training) < self.FEWEST or not self.texts.held_out:
            return
        with unchanged_flags(self.trainer.target.model):
            if self.steps - self._judged_at >= self.JUDGE:
                self._judge()
            else:
                self._train()
        now = self.clock()
        self._account -= now - self._at
        self.seconds += now - self._at
        self._at = now

    @property
    def has_swap(self) -> bool:
        """Whether better weights wait for decoding to pause."""
        return self._ready is not None

    def swap(self) -> bool:
        """Put better weights in place, if there are any. No step may be under way."""
        if self._ready is None:
            return False
        self._put(self._ready, self.places)
        self._ready = None
        self.swaps += 1
        return True

    def report(self) -> dict[str, Any]:
        """What was learnt, for statistics."""
        return {
            "texts": self.texts.count, "tokens": self.texts.num_tokens, "steps": self.steps, "swaps": self.swaps,
            "rollbacks": self.rollbacks, "seconds": round(self.seconds, 3), "held_out_tau": self.tau,
        }  # fmt: skip

    def _train(self) -> None:
        batch = self.texts.drawn(self.TOKENS, self._rng).to(self.trainer.target.device)
        with torch.enable_grad(), torch.random.fork_rng(devices=[]):
            out = self.trainer.loss(batch)
            (out.loss / out.weight.clamp(min=1)).backward()
        norm = nn.utils.clip_grad_norm_(list(self.parameters.values()), self.trainer.options.max_grad_norm or 1.0)
        self.steps += 1
        if bool(torch.isfinite(norm)):
            self.optimizer.step()
        else:
            self._roll_back()
        # Also after a rollback: later gradients are added to these, and a sum with NaN is NaN.
        self.optimizer.zero_grad(set_to_none=True)

    def _judge(self) -> None:
        """Compare the weights that were trained with those in use; take them, drop them, or train on."""
        self._judged_at = self.steps
        batch = batch_of(self.texts.held_out).to(self.trainer.target.device)
        trained, new = self._copied(), self._tau(batch)
        self._put(self.best, self.parameters)
        self.tau = self._tau(batch)
        self._put(trained, self.parameters)
        taken = new > self.tau + self.BETTER
        figures = {"tau": round(new, 4), "served_tau": round(self.tau, 4), "taken": taken}
        counts = {"texts": self.texts.count, "steps": self.steps}
        self.history.append({**counts, **figures, "seconds": round(self.seconds, 3)})
        if taken:
            self.best, self._ready, self.tau = trained, trained, new
            facts = {"num_samples": self.texts.count, "num_tokens": self.texts.num_tokens, "step": self.steps}
            export(self.trainer, self.folder, facts)
        elif new < self.tau - self.WORSE:
            self._roll_back()
        self._save()
        with open(self.folder / WORK / "log.jsonl", "a", encoding="utf-8") as log:
            log.write(json.dumps(self.history[-1]) + "\n")

    @torch.no_grad()
    def _tau(self, batch) -> float:
        """Tokens per step on held-out texts: the drafts are compared with what the target wrote."""
        head = self.trainer.head.eval()
        accepted, offered = judge(self.trainer.guesses(batch), batch.ahead(batch.input_ids, 1), batch)
        head.train()
        return Estimate.of(accepted, offered).tau

    def _roll_back(self) -> None:
        self._put(self.best, self.parameters)
        self.rollbacks += 1
        self.rate /= 2
        self._new_optimizer()
        logger.info("learn: back to the weights in use; the learning rate is now %.2g.", self.rate)

    def _new_optimizer(self) -> None:
        share = self.trainer.rate_share
        groups = [{"params": [p], "lr": self.rate * share(name)} for name, p in self.parameters.items()]
        self.optimizer = torch.optim.AdamW(groups, betas=(0.9, 0.95), weight_decay=0.0)

    @torch.no_grad()
    def _copied(self) -> dict[str, torch.Tensor]:
        return {name: parameter.detach().clone() for name, parameter in self.parameters.items()}

    @torch.no_grad()
    def _put(self, weights: dict[str, torch.Tensor], into: dict[str, nn.Parameter]) -> None:
        for name, parameter in into.items():
            parameter.copy_(weights[name])

    def _save(self) -> None:
        state = {
            "trained": self._copied(), "optimizer": self.optimizer.state_dict(), "rate": self.rate,
            "counts": [self.steps, self.swaps, self.rollbacks, self.texts.count, self.texts.num_tokens],
        }  # fmt: skip
        (self.folder / WORK).mkdir(parents=True, exist_ok=True)
        save_state(self.folder / WORK / "state.pt", state)

    def _resume(self) -> None:
        """Go on from the folder's state. The weights in use are those of the folder's head, which the trainer holds."""
        state = load_state(self.folder / WORK / "state.pt")
        if state is None:
            return
        theirs = {name: tensor.shape for name, tensor in state["trained"].items()}
        if theirs != {name: parameter.shape for name, parameter in self.parameters.items()}:
            raise ValueError(
                f"{self.folder / WORK} holds the state of a head of another shape: remove it, or name another folder."
            )
        self._put(state["trained"], self.parameters)
        self.rate = state["rate"]
        self._new_optimizer()
        self.optimizer.load_state_dict(state["optimizer"])
        self.steps, self.swaps, self.rollbacks, self.texts.count, self.texts.num_tokens = state["counts"]
        self._judged_at = self.steps
        self.history = read_log(self.folder / WORK / "log.jsonl")
