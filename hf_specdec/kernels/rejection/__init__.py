"""Rejection verification: speculative sampling, token by token over trees or by blocks over chains."""

from __future__ import annotations

from ..dispatch import operation
from . import reference
from .reference import verify_block

__all__ = ["verify_block", "verify_tokens"]

verify_tokens = operation(reference.verify_tokens)
