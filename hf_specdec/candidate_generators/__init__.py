"""Drafters. A method is one file, or a folder with head.py (its network), checkpoint.py and generator.py."""

from typing import TYPE_CHECKING

from ..lazy_names import lazy_names

if TYPE_CHECKING:
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

# The HTTP side of a server reads corpora and predictions, and loads no drafter.
__getattr__ = lazy_names(
    __name__,
    {
        "..core.outcome": ["StepOutcome"],
        ".base": ["CandidateGenerator"],
        ".parsing": ["parse_config"],
        ".registry": ["available_methods", "generator_class", "make_generator", "register"],
    },
)
