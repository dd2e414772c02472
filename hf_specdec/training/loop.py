"""The training loop: steps, logs, estimates and checkpoints of one run in one folder."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import logging
import math
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.progress import TextColumn
from torch import nn

from ..core.output import Taps
from .base import Estimate, HeadTrainer, StepLoss, judge
from .batch import Batch, BatchOrder, in_order
from .data import Sample
from .features import Features
from .options import TrainingError, TrainingOptions
from .state import Log, check_room, figures, load_state, plot, progress_bar, save_state

logger = logging.getLogger(__name__)

# These options may differ when a run is resumed, because they do not change its results.
_FREE = ("eval_every", "save_every", "log_every", "max_held_out")


class _Objective(nn.Module):
    """The loss as a module, for DistributedDataParallel; the head is its only submodule."""

    def __init__(self, trainer: HeadTrainer):
        super().__init__()
        self.head, self.trainer = trainer.head, [trainer]

    def forward(self, batch: Batch) -> StepLoss:
        return self.trainer[0].loss(batch)


class Run:
    """A training run. Each step depends only on the checkpoint, the options and the step's number.

    Args:
        folder: `state.pt`, `log.jsonl`, `curves.png`.
        identity: what, besides the options, must be the same when the run is resumed (target, data).

    Raises:
        TrainingError: the folder holds another run, the head of `init_from` cannot be used, or the disk is full.
    """

    def __init__(
        self,
        trainer: HeadTrainer,
        training: list[Sample],
        held_out: list[Sample],
        features: Features,
        folder: Path,
        identity: dict[str, Any],
        accelerator: Any,
        quiet: bool = False,
    ):
        self.trainer, self.options, self.target = trainer, trainer.options, trainer.target
        self.training, self.features, self.folder = training, features, folder
        self.accelerator, self.quiet = accelerator, quiet
        self.is_main = accelerator.is_main_process
        folder.mkdir(parents=True, exist_ok=True)
        if self.is_main:
            for leftover in folder.glob("*.partial"):
                leftover.unlink()
        options, world = self.options, accelerator.num_processes
        lengths = [len(sample) for sample in training]
        per_step = options.gradient_accumulation * world
        self.order = BatchOrder(lengths, options.tokens_per_batch, per_step, options.seed)
        self.num_steps = options.max_steps or self.order.num_steps(options.epochs)
        self.held_out = in_order(held_out[: options.max_held_out], options.tokens_per_batch)
        kept = {key: value for key, value in options.to_dict().items() if key not in _FREE}
        self.settings = {"method": trainer.method, **identity, "processes": world, **kept}
        seed_everything(options.seed)
        trainer.head = trainer.build(self._token_counts()).to(self.target.device).train()
        if options.init_from is not None:
            try:
                trainer.begin_as(options.init_from)
            except TrainingError as error:
                raise TrainingError(f"--init-from {options.init_from}: {error}") from None
        self.parameters = {name: p for name, p in trainer.head.named_parameters() if p.requires_grad}
        self.num_parameters = sum(p.numel() for p in self.parameters.values())
        self._check_parameters()
        self.optimizer = torch.optim.AdamW(self._groups(), lr=options.learning_rate, betas=(0.9, 0.95))
        self.step, self.tokens, self.seconds = 0, 0, 0.0
        self.pending: dict[str, list[float]] = {}  # sums and weights since the last log line
        self._resume()
        check_room(folder, 5 * self.num_parameters * 4, "The checkpoint (and its successor) and the exported head")
        self.log = Log(folder / "log.jsonl", self.step, self.is_main)
        self.autocast = torch.autocast(self.target.device.type, dtype=torch.bfloat16, enabled=options.bf16)
        self.objective, self.optimizer = accelerator.prepare(_Objective(trainer), self.optimizer)

    def _token_counts(self) -> torch.Tensor:
        counts = torch.zeros(self.target.vocab_size, dtype=torch.long)
        for sample in self.training:
            ids = torch.from_numpy(sample.token_ids[sample.loss_mask]).long()
            counts += torch.bincount(ids, minlength=len(counts))
        return counts

    def _check_parameters(self) -> None:
        frozen = {p.data_ptr() for p in self.target.model.parameters()}
        wrong = [n for n, p in self.parameters.items() if p.dtype != torch.float32 or p.data_ptr() in frozen]
        if wrong or not self.parameters:
            what = f"{type(self.trainer).__name__}.build must return float32 parameters that are not the target's own"
            raise ValueError(f"{what}: {wrong or 'it returned none'}.")

    def _groups(self) -> list[dict[str, Any]]:
        """Parameter groups by weight decay (matrices only) and factor of the learning rate."""
        groups: dict[tuple[float, float], list[nn.Parameter]] = {}
        for name, parameter in self.parameters.items():
            decay = self.options.weight_decay if parameter.dim() > 1 else 0.0
            groups.setdefault((decay, self.trainer.rate_share(name)), []).append(parameter)
        names = ("weight_decay", "rate_share")
        return [{"params": params, **dict(zip(names, key, strict=True))} for key, params in groups.items()]

    def _resume(self) -> None:
        state = load_state(self.folder / "state.pt")
        if state is None:
            return
        defaults = {field.name: field.default for field in dataclasses.fields(self.options)}  # of later options
        theirs = {key: value for key, value in defaults.items() if key not in _FREE} | json.loads(state["settings"])
        changed = sorted(k for k in theirs.keys() | self.settings.keys() if theirs.get(k) != self.settings.get(k))
        if changed:
            what = ", ".join(f"{key} ({theirs.get(key)!r} then, {self.settings.get(key)!r} now)" for key in changed)
            raise TrainingError(
                f"{self.folder} holds a run with other settings: {what}. Give the same settings to continue it, or another --output."
            )
        with torch.no_grad():
            for name, parameter in self.parameters.items():
                parameter.copy_(state["head"][name])
        self.optimizer.load_state_dict(state["optimizer"])
        self.step, self.tokens, self.seconds = state["step"], state["tokens"], state["seconds"]
        self.pending = state["pending"]
        logger.info("%s: continuing at step %d of %d.", self.folder, self.step, self.num_steps)

    def save(self) -> None:
        """Write the checkpoint and the plot."""
        if not self.is_main:
            return
        state = {
            "settings": json.dumps(self.settings),
            "head": {name: parameter.detach().cpu() for name, parameter in self.parameters.items()},
            "optimizer": self.optimizer.state_dict(),
            "step": self.step,
            "tokens": self.tokens,
            "seconds": self.seconds,
            "pending": self.pending,
        }
        save_state(self.folder / "state.pt", state)
        plot(self.log.entries, self.folder / "curves.png", f"{self.trainer.method} for {self.target.name}")

    def train(self) -> Estimate | None:
        """Train to the end. Returns the last estimate, None without held-out text."""
        began, before = time.perf_counter(), self.seconds
        with progress_bar(self.is_main and not self.quiet, TextColumn("{task.fields[figures]}")) as progress:
            shown = {"completed": self.step, "figures": figures(self.log.latest)}
            bar = progress.add_task(self.trainer.method, total=self.num_steps, **shown)
            for batches in self.order.steps(self.step) if self.step < self.num_steps else ():
                self._step(batches)
                self.step += 1
                self.seconds = before + time.perf_counter() - began
                last = self.step == self.num_steps
                if self.step % self.options.log_every == 0 or last:
                    self._log_step()
                if self.held_out and (self.step % self.options.eval_every == 0 or last):
                    self.log.add({"step": self.step, **dataclasses.asdict(self.estimate())})
                progress.update(bar, completed=self.step, figures=figures(self.log.latest))
                if self.step % self.options.save_every == 0 or last:
                    self.save()
                if last:
                    break
        estimates = [entry for entry in self.log.entries if "tau" in entry]
        return Estimate(**{key: estimates[-1][key] for key in ("acceptance", "tau", "anchors")}) if estimates else None

    def _step(self, batches: list) -> None:
        """One optimizer step from the batches of all processes."""
        rate = learning_rate(self.options, self.step, self.num_steps)
        self.trainer.progress = self.step / self.num_steps
        for group in self.optimizer.param_groups:
            group["lr"] = rate * group["rate_share"]
        self.tokens += sum(int(self.order.lengths[indices].sum()) for indices in batches)
        indices_of_ours = batches[self.accelerator.process_index :: self.accelerator.num_processes]
        sums: dict[str, torch.Tensor] = {}
        for i, indices in enumerate(indices_of_ours):
            batch = self.features([self.training[j] for j in indices], self.trainer.taps)
            seed_everything(self.options.seed, 1 + self.step, i, self.accelerator.process_index)
            last = i == len(indices_of_ours) - 1
            with contextlib.nullcontext() if last else self.accelerator.no_sync(self.objective):
                with self.autocast:
                    out: StepLoss = self.objective(batch)
                self.accelerator.backward(out.loss)
            for name, (total, weight) in {**out.metrics, "loss": (out.loss, out.weight)}.items():
                pair = torch.stack([torch.as_tensor(part).detach().float() for part in (total, weight)])
                sums[name] = sums.get(name, 0) + pair
        names = sorted(sums)
        totals = self.accelerator.reduce(torch.stack([sums[name] for name in names]), "sum")
        weight = totals[names.index("loss"), 1]
        # With several processes, gradients are the mean of the processes' sums.
        scale = self.accelerator.num_processes / weight.clamp(min=1e-9)
        for parameter in self.parameters.values():
            if parameter.grad is not None:
                parameter.grad.mul_(scale)
        most = self.options.max_grad_norm or float("inf")
        norm = nn.utils.clip_grad_norm_(list(self.parameters.values()), most)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self._account({**dict(zip(names, totals.tolist(), strict=True)), "grad_norm": [float(norm), 1.0]}, rate)

    def _account(self, sums: dict[str, list[float]], rate: float) -> None:
        total, weight = sums["loss"]
        if not (abs(total) < float("inf") and sums["grad_norm"][0] < float("inf")):  # written so that NaN fails too
            raise TrainingError(
                f"The loss of step {self.step} is {total / max(weight, 1e-9)} and its gradient's norm {sums['grad_norm'][0]}: the run "
                f"has diverged. Lower --learning-rate (now {self.options.learning_rate}), raise --warmup, or look at the data. The last "
                "checkpoint was written before this step."
            )
        for name, (value, count) in sums.items():
            have = self.pending.get(name, [0.0, 0.0])
            self.pending[name] = [have[0] + value, have[1] + count]
        self.pending["learning_rate"] = [rate, 1.0]

    def _log_step(self) -> None:
        means = {name: value / count if count else None for name, (value, count) in self.pending.items()}
        means = {"step": self.step, "loss": means.pop("loss"), **means}
        self.log.add({**means, "tokens": self.tokens, "seconds": round(self.seconds, 2)})
        self.pending = {}

    @torch.no_grad()
    def estimate(self) -> Estimate:
        """τ on the held-out text."""
        head = self.trainer.head
        head.eval()
        counts = torch.zeros(2, self.trainer.num_guesses, dtype=torch.long, device=self.target.device)
        for samples in self.held_out[self.accelerator.process_index :: self.accelerator.num_processes]:
            batch = self.features(samples, self.trainer.taps | Taps(last_hidden=True))
            with self.autocast:
                guesses = self.trainer.guesses(batch)
            counts += torch.stack(judge(guesses, self.target.choices(batch), batch))
        head.train()
        accepted, offered = self.accelerator.reduce(counts, "sum")
        return Estimate.of(accepted, offered)


def learning_rate(options: TrainingOptions, step: int, num_steps: int) -> float:
    """The learning rate of step `step` (from 0): linear warm-up, then the schedule down to `final_learning_rate` times the peak."""
    warmup = min(math.ceil(options.warmup * num_steps), num_steps - 1)
    if step < warmup:
        return options.learning_rate * (step + 1) / (warmup + 1)
    passed = (step - warmup) / max(1, num_steps - warmup)
    shares = {"cosine": 0.5 + 0.5 * math.cos(math.pi * passed), "linear": 1.0 - passed, "constant": 1.0}
    end = options.final_learning_rate if options.schedule != "constant" else 1.0
    return options.learning_rate * (end + (1.0 - end) * shares[options.schedule])


def seed_everything(*parts: int) -> None:
    """Seed torch's generators, on all devices, from a tuple of integers."""
    torch.manual_seed(int(np.random.SeedSequence(parts).generate_state(1, np.uint64)[0] >> np.uint64(1)))
