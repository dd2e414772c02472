"""Attention over a paged cache, for ragged batches with trees.

`attention_for` chooses the implementation once per step; layers then call what it returned.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch

from ..dispatch import uses_triton
from . import invariant as _invariant
from . import reference
from .inputs import (
    AttentionInputs,
    InputSizes,
    RowDescription,
    attention_inputs,
    fill_inputs,
    pack_visibility,
    sizes_of,
    visibility_words,
)
from .invariant import LinearRow
from .reference import AttentionRow, PaddedRows

__all__ = [
    "AttentionBatch",
    "AttentionInputs",
    "AttentionRow",
    "InputSizes",
    "LinearRow",
    "PaddedRows",
    "RowDescription",
    "attention_for",
    "attention_inputs",
    "fill_inputs",
    "pack_visibility",
    "sizes_of",
    "visibility_words",
]


class AttentionBatch(Protocol):
    """A batch that can describe itself to every implementation. It builds each description when first asked, and keeps it."""

    def attention_inputs(self, device: torch.device) -> AttentionInputs:
        """The rows as the Triton kernel reads them."""
        ...

    def rows(self, device: torch.device) -> list[AttentionRow]:
        """The rows as the definition reads them."""
        ...

    def masks(
        self, window: int | None, group: int, dtype: torch.dtype, device: torch.device
    ) -> list[torch.Tensor | None]:
        """One additive mask per row (see `reference.paged_attention`)."""
        ...

    def padded(
        self, window: int | None, slot_bytes: int, dtype: torch.dtype, device: torch.device
    ) -> PaddedRows | None:
        """The rows with keys padded to one length, if that is faster; `slot_bytes`: keys and values of one slot."""
        ...

    def lines(self, device: torch.device) -> list[LinearRow]:
        """The rows as invariant attention reads them: every path of a tree is a row of its own."""
        ...


# (query [T, H, D], key_pool, value_pool, batch, scaling, *, window, softcap, sinks) -> [T, H, Dv]
Attend = Callable[..., torch.Tensor]


def attention_for(device: torch.device, invariant: bool = False) -> Attend:
    """The implementation for a device. Ask once per step: asking costs more than a small layer's views.

    Args:
        invariant: each query's result must not depend, bit for bit, on the rest of the batch.
    """
    if uses_triton(device):
        return _attend_invariant_by_kernel if invariant else _attend_by_kernel
    return _attend_query_by_query if invariant else _attend_by_definition


def _attend_by_kernel(query, key_pool, value_pool, batch: AttentionBatch, scaling, *, window, softcap, sinks):
    from ..flash_attention import flash_attention_for
    from .triton import paged_attention

    inputs = batch.attention_inputs(query.device)
    attend = flash_attention_for(query, key_pool, value_pool, inputs, sinks) or paged_attention
    return attend(query, key_pool, value_pool, inputs, scaling, window=window, softcap=softcap, sinks=sinks)


def _attend_invariant_by_kernel(query, key_pool, value_pool, batch: AttentionBatch, scaling, *, window, softcap, sinks):
    from .triton import paged_attention

    inputs = batch.attention_inputs(query.device)
    return paged_attention(
        query, key_pool, value_pool, inputs, scaling, window=window, softcap=softcap, sinks=sinks, invariant=True
    )


def _attend_by_definition(query, key_pool, value_pool, batch: AttentionBatch, scaling, *, window, softcap, sinks):
    group = query.shape[1] // key_pool.shape[1]
    masks = batch.masks(window, group, query.dtype, query.device)
    slot_bytes = (key_pool.stride(0) + value_pool.stride(0)) * query.element_size()
    padded = batch.padded(window, slot_bytes, query.dtype, query.device)
    rows = batch.rows(query.device)
    return reference.paged_attention(query, key_pool, value_pool, rows, masks, scaling, softcap, sinks, padded)


def _attend_query_by_query(query, key_pool, value_pool, batch: AttentionBatch, scaling, *, window, softcap, sinks):
    lines = batch.lines(query.device)
    return _invariant.paged_attention(query, key_pool, value_pool, lines, scaling, window, softcap, sinks)
