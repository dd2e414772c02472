"""Heads that go on learning while they serve: from the target's own hidden states and choices, between steps."""

from .folder import LEARNERS, begin_learning, located
from .learner import Learner

__all__ = ["LEARNERS", "Learner", "begin_learning", "located"]
