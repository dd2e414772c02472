"""The learning rate and the random seed of a step."""

from __future__ import annotations

import math

import numpy as np
import torch

from .options import TrainingOptions


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
