"""The registry of trainers: a new one is one file in this package that calls `register`."""

from __future__ import annotations

import importlib
import pkgutil

from ..config import nearest_hint
from .base import HeadTrainer
from .errors import TrainingError
from .options import TrainingOptions

_TRAINERS: dict[str, type[HeadTrainer]] = {}


def register(options_class: type[TrainingOptions]):
    """Class decorator: `@register(MedusaOptions)` on a `HeadTrainer` makes `hf-specdec train medusa` work."""

    def decorate(trainer: type[HeadTrainer]) -> type[HeadTrainer]:
        taken = _TRAINERS.get(trainer.method)
        if taken is not None and taken.__qualname__ != trainer.__qualname__:
            raise ValueError(f"A trainer for {trainer.method!r} is already registered: {taken}.")
        trainer.options_class = options_class
        _TRAINERS[trainer.method] = trainer
        return trainer

    return decorate


def available_trainers() -> dict[str, type[HeadTrainer]]:
    """Every registered trainer, by method."""
    package = importlib.import_module(__name__.rpartition(".")[0])
    for module in pkgutil.iter_modules(package.__path__):
        importlib.import_module(f"{package.__name__}.{module.name}")
    return dict(sorted(_TRAINERS.items()))


def trainer_class(method: str) -> type[HeadTrainer]:
    """The trainer of a method.

    Raises:
        TrainingError: the method has no trainer; the message lists those that have one.
    """
    trainers = available_trainers()
    if method not in trainers:
        raise TrainingError(
            f"There is no trainer for {method!r}{nearest_hint(method, trainers)}. Trainers: {', '.join(trainers)}."
        )
    return trainers[method]
