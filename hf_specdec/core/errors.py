"""Errors that more than one room raises."""

from __future__ import annotations


class UnsupportedModel(ValueError):
    """A model this library cannot run correctly; the message says why."""
