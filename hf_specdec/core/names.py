"""Names that this library shares with transformers."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable

from transformers.modeling_outputs import BaseModelOutputWithPast

ATTENTION_NAME = "hf_specdec"
NEWEST_TRANSFORMERS = (5, 24)  # the newest release with which the test suite has passed

# The KV cache among the arguments of generate() and of transformers' own modules, and in their outputs. transformers 5.24 renamed it.
_CACHE_NAMES = ("cache", "past_key_values", "cache_params")
CACHE = next(
    name for name in _CACHE_NAMES if name in {known.name for known in dataclasses.fields(BaseModelOutputWithPast)}
)


def takes_cache(parameters: Iterable[str]) -> bool:
    """True if one of these parameters of a module's forward is a KV cache."""
    return not set(_CACHE_NAMES).isdisjoint(parameters)


def cache_argument(parameters: Iterable[str]) -> str:
    """The name of the KV cache among the parameters of a module's forward. Code from a model's repository may keep an older name than
    CACHE."""
    taken = set(parameters)
    return next((name for name in (CACHE, *_CACHE_NAMES) if name in taken), CACHE)
