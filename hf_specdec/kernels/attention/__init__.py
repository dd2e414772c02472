"""Attention over a paged cache, for ragged batches with trees.

`attention_for` chooses the implementation once per step; layers then call what it returned.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch

from ..dispatch import uses_native, uses_triton
from . import invariant as _invariant
from . import native, reference
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
from .native import NativeRow, NativeRows
from .reference import AttentionPlan, AttentionRow, PaddedRows

__all__ = [
    "AttentionBatch",
    "AttentionInputs",
    "AttentionPlan",
    "AttentionRow",
    "InputSizes",
    "LinearRow",
    "NativeRow",
    "NativeRows",
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

    def plan(
        self, window: int | None, query: torch.Tensor, key_pool: torch.Tensor, value_pool: torch.Tensor
    ) -> AttentionPlan:
        """The rows and masks as the definition reads them, for layers with this window, these pools and queries [T, H, D]."""
        ...

    def native_rows(self) -> NativeRows:
        """The rows as the native library reads them."""
        ...

    def lines(self, device: torch.device) -> list[LinearRow]:
        """The rows as invariant attention reads them: every path of a tree is a row of its own."""
        ...


# (query [T, H, D], key_pool, value_pool, batch, scaling, *, window, softcap, sinks) -> [T, H, Dv]
Attend = Callable[..., torch.Tensor]


def attention_for(device: torch.device, invariant: bool = False, with_native: bool = True) -> Attend:
    """The implementation for a device. Ask once per step, not per layer: the choice takes longer than the views of a small layer.

    Args:
        with_native: the native library may be used.
        invariant: each query's result must not depend, bit for bit, on the rest of the batch.
    """
    if uses_triton(device):
        return _attend_invariant_by_kernel if invariant else _attend_by_kernel
    if invariant:
        return _attend_query_by_query
    return _attend_natively if with_native and uses_native(device) else _attend_by_definition


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
    plan = batch.plan(window, query, key_pool, value_pool)
    return reference.paged_attention(
        query, key_pool, value_pool, plan.rows, plan.masks, scaling, softcap, sinks, plan.padded
    )


def _attend_natively(query, key_pool, value_pool, batch: AttentionBatch, scaling, *, window, softcap, sinks):
    rows = batch.native_rows()
    if not native.serves(query, key_pool, value_pool, rows):
        return _attend_by_definition(
            query, key_pool, value_pool, batch, scaling, window=window, softcap=softcap, sinks=sinks
        )
    return native.paged_attention(query, key_pool, value_pool, rows, scaling, window, softcap, sinks)


def _attend_query_by_query(query, key_pool, value_pool, batch: AttentionBatch, scaling, *, window, softcap, sinks):
    lines = batch.lines(query.device)
    return _invariant.paged_attention(query, key_pool, value_pool, lines, scaling, window, softcap, sinks)
