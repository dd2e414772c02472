"""Forward passes of models and draft heads, and rounds of drafts, as calls of the native library for CPUs."""

from .bind import NativeRunner, can_try, natively
from .round import DraftRound, draft_round

__all__ = ["DraftRound", "NativeRunner", "can_try", "draft_round", "natively"]
