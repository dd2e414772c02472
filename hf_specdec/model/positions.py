"""Tables of positions that count from the length of the cache, whatever it holds: packed rows give them their tokens' positions."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

from torch import nn

from . import architectures

_COUNTS = {"cache_length", "past_key_values_length"}  # what tables call the length, in newer and in older transformers


def counting_tables(model: nn.Module) -> list[nn.Module]:
    """The tables of a model whose forward takes no positions, so that they count: those of the decoders of BART, Marian, RoFormer, .."""
    if "position_ids" in inspect.signature(type(model).forward).parameters:
        return []
    return [module for module in architectures.all_modules(model) if _can_be_told(type(module))]


@functools.cache
def _can_be_told(kind: type[nn.Module]) -> bool:
    names = set(inspect.signature(kind.forward).parameters)
    return "position_ids" in names and bool(names & _COUNTS) and issubclass(kind, nn.Embedding)


def at_positions(batch: Any, original: Callable, *args: Any, **kwargs: Any) -> Any:
    """The table's rows [1, T, H] or [T, H] at the positions of a packed batch."""
    return original(*args, **{**kwargs, "position_ids": batch.position_ids[0]})
