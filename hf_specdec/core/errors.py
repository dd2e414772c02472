"""Errors that several packages raise."""

from __future__ import annotations


class UnsupportedModel(ValueError):
    """This library cannot run the model correctly; the message says why."""
