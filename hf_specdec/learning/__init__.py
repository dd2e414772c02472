"""Heads that keep learning while they serve: between steps, from the target's own hidden states and choices."""

from .folder import LEARNERS, begin_learning, located
from .learner import Learner

__all__ = ["LEARNERS", "Learner", "begin_learning", "located"]
