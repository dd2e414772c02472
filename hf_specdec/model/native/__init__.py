"""A model's small forward passes as one call of the native library for CPUs."""

from .runner import NativeRunner, can_try

__all__ = ["NativeRunner", "can_try"]
