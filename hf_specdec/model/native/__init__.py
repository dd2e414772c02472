"""Small forward passes of models and draft heads as one call of the native library for CPUs."""

from .heads import natively
from .runner import NativeRunner, can_try

__all__ = ["NativeRunner", "can_try", "natively"]
