"""Greedy and coupled verification: the target chooses a token after every node, and drafts are accepted as far as they match."""

from __future__ import annotations

from ..dispatch import operation
from . import reference
from .reference import target_choices

__all__ = ["follow_choices", "greedy_tokens", "target_choices"]

follow_choices = operation(reference.follow_choices)
greedy_tokens = operation(reference.greedy_tokens, native=True)
