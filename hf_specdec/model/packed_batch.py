"""PackedBatch: the ragged rows of one forward, packed into one line of tokens, with the inputs of attention."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from ..cache import PagedStaticCache
from ..core.rows import RowInput
from ..kernels.attention import (
    AttentionInputs,
    AttentionRow,
    LinearRow,
    PaddedRows,
    attention_for,
    attention_inputs,
)
from ..kernels.cache import writer_for
from ..kernels.transfer import upload
from .attention_masks import additive_masks, block_diagonal_mask, is_worth_padding, padded_rows
from .options.invariant_ops import InvariantOps
from .recurrent.plan import StatePlan
from .row_descriptions import describe, describe_lines


@dataclass
class _OnDevice:
    """Slots on one device, and the operations that serve it: chosen once per step, since choosing costs more than a small view."""

    write_slots: torch.Tensor
    read_slots: torch.Tensor | None
    write: Callable[..., Any]
    attend: Callable[..., torch.Tensor]


@dataclass
class PackedBatch:
    """T tokens of B rows, in row order, without padding.

    Attributes:
        input_ids, position_ids: int64 [1, T].
        inputs: the B rows.
        starts: numpy [B + 1], index of each row's first token among the T tokens.
        logit_index: int64 [R], indices of the tokens that need logits, in order.
        gather: layers return the keys and values of every row's whole context (see PagedLayer.update).
        slots: int64 numpy [T], where each token's keys and values are written.
        num_keys: number of keys of all rows together (S_total).
        attention_calls: how often our attention has been called in this forward.
        states: how layers with a recurrent state read the rows; None: there are none.
        invariant: the mode the forward runs in if its results must not depend on the batch; None: no such mode.
    """

    input_ids: torch.Tensor
    position_ids: torch.Tensor
    inputs: list[RowInput]
    starts: np.ndarray
    logit_index: torch.Tensor
    cache: PagedStaticCache
    gather: bool
    slots: np.ndarray
    num_keys: int
    attention_calls: int = 0
    invariant: InvariantOps | None = None
    states: StatePlan | None = None
    _on_device: dict = field(default_factory=dict)
    _inputs: dict = field(default_factory=dict)
    _rows: dict = field(default_factory=dict)
    _masks: dict = field(default_factory=dict)

    captured = False  # the forward is not part of a CUDA graph

    @classmethod
    def pack(cls, inputs: list[RowInput], cache: PagedStaticCache, device: torch.device, gather: bool) -> PackedBatch:
        """Pack rows whose slots are already reserved."""
        counts = np.array([row.num_tokens for row in inputs])
        starts = np.concatenate([[0], np.cumsum(counts)])
        slots = np.concatenate(
            [cache.tables[row.seq_id].slots[row.start : row.start + row.num_tokens] for row in inputs]
        )
        positions = np.concatenate(
            [
                np.arange(row.start, row.start + row.num_tokens) if row.positions is None else row.positions
                for row in inputs
            ]
        )
        on_host = np.zeros(starts[-1], dtype=np.int64)
        pieces = write_ids(inputs, on_host)
        ids = upload(on_host, device)
        copy_ids(pieces, ids)
        wanted = np.concatenate([np.arange(end - row.logits, end) for row, end in zip(inputs, starts[1:], strict=True)])
        return cls(
            input_ids=ids[None],
            position_ids=upload(positions, device)[None],
            inputs=inputs,
            starts=starts,
            logit_index=upload(wanted, device),
            cache=cache,
            gather=gather,
            slots=slots,
            num_keys=sum(row.start + row.num_tokens for row in inputs),
        )

    def on(self, device: torch.device) -> _OnDevice:
        """Slots and operations on a layer's device (a model may be spread over several)."""
        if device not in self._on_device:
            read = None
            if self.gather:
                tables = self.cache.tables
                read = np.concatenate([tables[r.seq_id].slots[: r.start + r.num_tokens] for r in self.inputs])
                read = upload(read, device)
            self._on_device[device] = _OnDevice(
                upload(self.slots, device), read, writer_for(device), attention_for(device, self.invariant is not None)
            )
        return self._on_device[device]

    def attention_inputs(self, device: torch.device) -> AttentionInputs:
        """The rows as the Triton kernels read them; made once per step, not per layer."""
        if device not in self._inputs:
            if self.invariant is None:
                rows, block_size = describe(self.inputs, self.cache), self.cache.block_size
            else:
                rows, block_size = describe_lines(self.inputs, self.cache), 1
            self._inputs[device] = attention_inputs(rows, block_size, device)
        return self._inputs[device]

    def lines(self, device: torch.device) -> list[LinearRow]:
        """The rows as `attention.invariant.paged_attention` reads them; made once per step, not per layer."""
        key = ("lines", device)
        if key not in self._rows:
            lines, start = [], 0
            for line in describe_lines(self.inputs, self.cache):
                slots = upload(np.asarray(line.blocks), device)
                lines.append(LinearRow(start, start + line.query_length, slots))
                start += line.query_length
            self._rows[key] = lines
        return self._rows[key]

    def rows(self, device: torch.device) -> list[AttentionRow]:
        """The rows as `reference.paged_attention` reads them; made once per step, not per layer."""
        if device not in self._rows:
            self._rows[device] = [
                self.cache.row(row.seq_id, int(start), int(end), row.start + row.num_tokens, device)
                for row, start, end in zip(self.inputs, self.starts[:-1], self.starts[1:], strict=True)
            ]
        return self._rows[device]

    def masks(
        self, window: int | None, group: int, dtype: torch.dtype, device: torch.device
    ) -> list[torch.Tensor | None]:
        """See `additive_masks`; made once per step, not per layer."""
        key = (window, group, dtype, device)
        if key not in self._masks:
            self._masks[key] = additive_masks(self.inputs, window, group, dtype, device)
        return self._masks[key]

    def padded(
        self, window: int | None, slot_bytes: int, dtype: torch.dtype, device: torch.device
    ) -> PaddedRows | None:
        """The rows with keys padded to one length; None if attending row by row is faster (see `is_worth_padding`)."""
        key = ("padded", window, slot_bytes, dtype, device)
        if key not in self._masks:
            # Not measured in bfloat16: its single queries have their own path (`attention.reference._attention_query_by_query`).
            pays = dtype == torch.float32 and is_worth_padding(self.inputs, slot_bytes)
            self._masks[key] = padded_rows(self.inputs, self.cache, window, dtype, device) if pays else None
        return self._masks[key]

    def dense_mask(self, window: int | None, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """The additive mask [1, 1, T, S_total] of models that attend to gathered keys."""
        key = ("dense", window, dtype, device)
        if key not in self._masks:
            self._masks[key] = block_diagonal_mask(self.inputs, window, dtype)[None, None].to(device)
        return self._masks[key]

    def key_positions(self) -> np.ndarray:
        """Positions of the S_total gathered keys, numpy."""
        positions = []
        for row in self.inputs:
            own = np.arange(row.start + row.num_tokens)
            if row.region_positions is not None:
                own[len(own) - len(row.region_positions) :] = row.region_positions
            positions.append(own)
        return np.concatenate(positions)


def write_ids(rows: list[RowInput], ids: np.ndarray) -> list[tuple[int, torch.Tensor]]:
    """Write the rows' ids that are on the host into `ids` [T].

    Returns: (index in `ids`, ids) for each piece that is on the device; see `copy_ids`.
    """
    pieces, first = [], 0
    for row in rows:
        for tokens in (row.tokens, row.drafts):
            if tokens is None:
                continue
            end = first + tokens.shape[0]
            if isinstance(tokens, torch.Tensor) and tokens.device.type != "cpu":
                pieces.append((first, tokens))
            else:
                ids[first:end] = tokens
            first = end
    return pieces


def copy_ids(pieces: list[tuple[int, torch.Tensor]], ids: torch.Tensor) -> None:
    """Copy the pieces that `write_ids` returned into `ids` [T] on the device."""
    if not pieces:
        return
    tokens = (pieces[0][1] if len(pieces) == 1 else torch.cat([each for _, each in pieces])).to(ids.device)
    first, count = pieces[0][0], tokens.shape[0]
    if pieces[-1][0] + pieces[-1][1].shape[0] - first == count:  # no gaps between the pieces
        ids[first : first + count].copy_(tokens)
        return
    places = np.concatenate([np.arange(start, start + each.shape[0]) for start, each in pieces])
    ids.index_copy_(0, upload(places, ids.device), tokens)
