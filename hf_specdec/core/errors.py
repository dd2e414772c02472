"""Errors that several packages raise."""

from __future__ import annotations


class UnsupportedModel(ValueError):
    """This library cannot run the model correctly; the message says why."""


def is_failure(error: BaseException) -> bool:
    """True for an exception, and for a panic of a library in Rust (tokenizers, llguidance), which Python does not count as one."""
    return isinstance(error, Exception) or type(error).__name__ == "PanicException"
