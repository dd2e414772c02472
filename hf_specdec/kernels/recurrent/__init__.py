"""Layers with a state over drafts: recurrences along chains and trees, where a token's state comes from its parent's, and the short
convolution before them."""

from __future__ import annotations

from ..dispatch import operation
from . import reference
from .reference import Walk

__all__ = ["Walk", "convolution", "gated_delta", "mamba2"]

gated_delta = operation(reference.gated_delta)
mamba2 = operation(reference.mamba2)
convolution = operation(reference.convolution)
