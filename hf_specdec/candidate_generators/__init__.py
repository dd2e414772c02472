"""Drafters. One method = one file, or one folder with its parts: its configuration dataclass and its CandidateGenerator."""

from ..core.outcome import StepOutcome
from .base import CandidateGenerator
from .registry import available_methods, generator_class, make_generator, parse_config, register

__all__ = [
    "CandidateGenerator",
    "StepOutcome",
    "available_methods",
    "generator_class",
    "make_generator",
    "parse_config",
    "register",
]
