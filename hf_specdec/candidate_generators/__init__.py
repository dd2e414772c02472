"""Drafters. A method is one file, or a folder with head.py (its network), checkpoint.py and generator.py."""

from ..core.outcome import StepOutcome
from .base import CandidateGenerator
from .parsing import parse_config
from .registry import available_methods, generator_class, make_generator, register

__all__ = [
    "CandidateGenerator",
    "StepOutcome",
    "available_methods",
    "generator_class",
    "make_generator",
    "parse_config",
    "register",
]
