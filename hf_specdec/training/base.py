"""HeadTrainer, the contract of a trainer; the data it exchanges with the framework, and its estimate; the registry of trainers."""

from __future__ import annotations

import importlib
import pkgutil
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import nn

from ..candidate_generators.checkpoints.files import CheckpointError, open_checkpoint
from ..config import nearest_hint
from ..core.output import Taps
from .batch import Batch
from .options import TrainingError, TrainingOptions
from .target import TargetModel


@dataclass
class StepLoss:
    """A loss on one micro-batch.

    Attributes:
        loss: scalar, the sum over positions; training minimises the sum of these over a step, divided by the sum of weights.
        weight: scalar, the number (or total weight) of the positions in it.
        metrics: {name: (sum, weight)} without gradients, logged as means: parts of the loss, accuracies.
    """

    loss: torch.Tensor
    weight: torch.Tensor
    metrics: dict[str, tuple[torch.Tensor, torch.Tensor]] = field(default_factory=dict)


@dataclass
class Guesses:
    """Greedy drafts under teacher forcing.

    Attributes:
        tokens: int64 [N, K], of the target's vocabulary; guess k is for the token at anchor + 1 + k.
        rows, anchors: int64 [N], the row of each guess, and the position of its newest token.
    """

    tokens: torch.Tensor
    rows: torch.Tensor
    anchors: torch.Tensor


def every_anchor(tokens: torch.Tensor) -> Guesses:
    """Guesses from tokens [B, S, K] made at every hidden state: [:, t] are made from h_t and the newest token x_{t+1}."""
    num_rows, length, _ = tokens.shape
    rows = torch.arange(num_rows, device=tokens.device).repeat_interleave(length)
    anchors = torch.arange(1, length + 1, device=tokens.device).repeat(num_rows)
    return Guesses(tokens.flatten(0, 1), rows, anchors)


@dataclass
class Estimate:
    """Acceptance on held-out text.

    Attributes:
        acceptance: per position, the share of guesses equal to the target's greedy choice, given that all earlier ones were.
        tau: tokens per target forward: 1 + the sum over positions of the product of acceptances up to there.
        anchors: number of drafts compared.
    """

    acceptance: list[float]
    tau: float
    anchors: int

    @classmethod
    def of(cls, accepted: torch.Tensor, offered: torch.Tensor) -> Estimate:
        """From counts [K] of accepted guesses, and of guesses whose predecessors were all accepted."""
        rates = (accepted.double() / offered.double().clamp(min=1)).cpu()
        return cls(rates.tolist(), 1.0 + float(rates.cumprod(0).sum()), int(offered[0]))


def judge(guesses: Guesses, choices: torch.Tensor, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
    """(accepted, offered) int64 [K]: the numbers of right guesses, and of guesses whose predecessors were all right, among tokens that
    count. `choices`: int64 [B, S], the target's greedy choice after each token.
    """
    num_guesses = guesses.tokens.shape[1]
    steps = torch.arange(num_guesses, device=choices.device)
    places = guesses.anchors[:, None] + steps  # position of the token before each guess
    inside = places + 1 < batch.lengths[guesses.rows, None]
    at, rows = places.clamp(max=choices.shape[1] - 2), guesses.rows[:, None]
    counts = inside & batch.loss_mask[rows, at + 1]
    right = counts & (guesses.tokens == choices[rows, at])
    alive = torch.cat([torch.ones_like(right[:, :1]), right[:, :-1]], dim=1).long().cumprod(1).bool()
    return (right & alive).sum(0), (counts & alive).sum(0)


@dataclass
class Exported:
    """A head in the form it is written to disk: tensors by the layout's names, and config.json. `write_others` is called with the folder to
    write further files (a tokenizer).
    """

    tensors: dict[str, torch.Tensor]
    config: dict[str, Any]
    file_name: str = "model.safetensors"
    write_others: Callable[[Path], None] | None = None


class HeadTrainer(ABC):
    """One method's head, loss, guesses and export. The package's docstring describes the contract.

    Attributes:
        taps: the hidden states it reads of the target.
        formats: layouts for `exported`; the first is the default.
        num_guesses: K, draft length in the estimate and in measurements; set by `build` at the latest.
        progress: share of the run's steps that are done, set by the framework.
    """

    method: ClassVar[str]
    options_class: ClassVar[type[TrainingOptions]]
    taps: Taps = Taps(last_hidden=True)
    formats: ClassVar[tuple[str, ...]] = ("original",)

    def __init__(self, options: Any, target: TargetModel):
        self.options, self.target = options, target
        self.head: Any = nn.Module()  # which each trainer narrows
        self.num_guesses, self.progress = 0, 0.0

    @abstractmethod
    def build(self, token_counts: torch.Tensor) -> nn.Module:
        """The head with its initial weights, float32, on the target's device; torch's generator has been seeded.

        Args:
            token_counts: int64 [V], how often each token occurs in the answers of the training data.
        """

    def rate_share(self, name: str) -> float:
        """Factor on the learning rate for the parameter `name`; 0 leaves it untrained."""
        return 1.0

    @abstractmethod
    def loss(self, batch: Batch) -> StepLoss:
        """The training loss on a batch (on the device, with features)."""

    @abstractmethod
    def guesses(self, batch: Batch) -> Guesses:
        """The head's greedy drafts of `num_guesses` tokens, teacher-forced; called without gradients."""

    @abstractmethod
    def exported(self, form: str) -> Exported:
        """The head in the layout `form`, one of `formats`. Tensors are cast and moved by the caller."""

    @torch.no_grad()
    def begin_as(self, name: str) -> None:
        """Copy the weights of an exported head of the same shape into the head that `build` has made. `name`: bundled name, folder or Hub
        id.

        Raises:
            TrainingError: the checkpoint does not exist, or a tensor is missing in one of the heads or differs in shape. Callers add
                what names the head: an option, or a key.
        """
        shapes = {key: tensor.shape for key, tensor in self.exported(self.formats[0]).tensors.items()}
        try:
            checkpoint = open_checkpoint(name)
            theirs = set(checkpoint.names())
            if theirs != shapes.keys():
                missing, unknown = sorted(shapes.keys() - theirs), sorted(theirs - shapes.keys())
                raise TrainingError(
                    f"not a head of this shape and layout; it lacks {_some(missing)} and has {_some(unknown)} in addition. "
                    "Give the options it was made with."
                )
            tensors = {key: checkpoint.tensor(key) for key in shapes}
        except CheckpointError as error:
            raise TrainingError(str(error)) from None
        for key, tensor in tensors.items():
            if tensor.shape != shapes[key]:
                raise TrainingError(f"{key} is {tuple(tensor.shape)} there and {tuple(shapes[key])} by these options.")
        self.take_over(tensors)

    def take_over(self, tensors: dict[str, torch.Tensor]) -> None:
        """Initialise with the tensors of an exported head in the first of `formats`. Names and shapes have been checked. Raises
        TrainingError: a tensor that is not trained (a draft vocabulary, a copy of the target's embeddings) differs.
        """
        trained = {parameter.untyped_storage().data_ptr() for parameter in self.head.parameters()}
        for name, tensor in self.exported(self.formats[0]).tensors.items():
            given = tensors[name].to(tensor.device)
            if tensor.untyped_storage().data_ptr() in trained:
                tensor.copy_(given)
            elif not torch.equal(tensor.to(given.dtype), given):
                raise TrainingError(f"{name} differs here: the head is for another target or draft vocabulary.")

    def speculators_config(self, architecture: str, layers: dict[str, Any], kind: str | None = None) -> dict[str, Any]:
        """What every config.json in speculators' format has: its `kind` (None: the method), the length of a draft, the target, the
        layers' keys."""
        kind = kind or self.method
        model = self.target.model
        proposal = {"proposal_type": "greedy", "verifier_accept_k": 1, "accept_tolerance": 0.0}
        architectures = getattr(model.config, "architectures", None) or [type(model).__name__]
        speculation = {
            "algorithm": kind,
            "default_proposal_method": "greedy",
            "proposal_methods": [{**proposal, "speculative_tokens": self.num_guesses}],
            "verifier": {"name_or_path": self.target.name, "architectures": architectures},
        }
        return {
            "architectures": [architecture],
            "speculators_model_type": kind,
            "speculators_config": speculation,
            "transformer_layer_config": layers,
            "tie_word_embeddings": False,
        }


_TRAINERS: dict[str, type[HeadTrainer]] = {}


def register(options_class: type[TrainingOptions]):
    """Class decorator: `@register(MedusaOptions)` on a `HeadTrainer` makes `hf-specdec train medusa` work."""

    def decorate(trainer: type[HeadTrainer]) -> type[HeadTrainer]:
        method = options_class.method
        taken = _TRAINERS.get(method, trainer)
        if taken.__qualname__ != trainer.__qualname__:
            raise ValueError(f"A trainer for {method!r} is already registered: {taken}.")
        trainer.options_class, trainer.method, _TRAINERS[method] = options_class, method, trainer
        return trainer

    return decorate


def available_trainers() -> dict[str, type[HeadTrainer]]:
    """The trainers by method."""
    package = importlib.import_module(__name__.rpartition(".")[0])
    for module in pkgutil.iter_modules(package.__path__):
        importlib.import_module(f"{package.__name__}.{module.name}")
    return dict(sorted(_TRAINERS.items()))


def trainer_class(method: str) -> type[HeadTrainer]:
    """The trainer of a method. Raises TrainingError: the method has no trainer; the message lists those that have one."""
    trainers = available_trainers()
    if method not in trainers:
        raise TrainingError(
            f"There is no trainer for {method!r}{nearest_hint(method, trainers)}. Trainers: {', '.join(trainers)}."
        )
    return trainers[method]


def _some(names: list[str]) -> str:
    return "nothing" if not names else ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
