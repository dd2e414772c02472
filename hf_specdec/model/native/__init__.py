"""Small forward passes of models and draft heads as one call of the native library for CPUs."""

from .bind import NativeRunner, can_try, natively
from .chain import draft_chains

__all__ = ["NativeRunner", "can_try", "draft_chains", "natively"]
