"""PackedBatch: the ragged rows of one forward, packed into one line of tokens, with the inputs of attention."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from ..cache import PagedStaticCache
from ..cache.segments import ClosedSegments, SegmentSize
from ..core.rows import Chunks, RowInput
from ..kernels.attention import attention_for
from ..kernels.attention.inputs import AttentionInputs, AttentionRow, NativeRows, Window, attention_inputs, window_parts
from ..kernels.cache import write_keys_values
from ..kernels.transfer import upload
from .functions import kept
from .onward_rows import divided
from .options.invariant_ops import InvariantOps
from .recurrent.plan import StatePlan
from .row_descriptions import additive_masks, block_diagonal_mask, describe, describe_lines, key_positions
from .segments import Part, closed_segments, parts_of


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
        input_ids: int64 [1, T].
        position_ids: int64 [1, T]; [A, 1, T] if the axes of a row's positions differ.
        starts: B + 1 numbers, index of each row's first token among the T tokens.
        logit_index: int64 [R], indices of the tokens that need logits, in order; None: all of them.
        gather: layers return the keys and values of every row's whole context (see PagedLayer.update).
        write_slots: int64 [T], where each token's keys and values are written.
        num_keys: number of keys of all rows together (S_total).
        attention_calls: how often our attention has been called in this forward.
        states: how layers with a recurrent state read the rows; None: the model has no such layers.
        invariant: the mode in which a token's results do not depend on the rest of the batch; None: the forward runs without it.
    """

    input_ids: torch.Tensor
    position_ids: torch.Tensor
    inputs: list[RowInput]
    starts: list[int]
    logit_index: torch.Tensor | None
    cache: PagedStaticCache
    gather: bool
    write_slots: torch.Tensor
    num_keys: int
    attention_calls: int = 0
    invariant: InvariantOps | None = None
    states: StatePlan | None = None
    with_native: bool = True
    _on_device: dict = field(default_factory=dict)

    captured = False  # the forward is not part of a CUDA graph

    @classmethod
    def pack(cls, inputs: list[RowInput], cache: PagedStaticCache, device: torch.device, gather: bool) -> PackedBatch:
        """Pack rows whose slots are already reserved."""
        onward, others = divided(inputs)
        count = len(inputs) - len(others)
        starts = [*range(count), *itertools.accumulate([row.num_tokens for row in others], initial=count)]
        num_axes = max((len(row.offset) for row in others if isinstance(row.offset, tuple)), default=1)
        on_host = np.zeros((2 + num_axes, starts[-1]), dtype=np.int64)
        if count:
            on_host[:2, :count], on_host[2:, :count] = onward.columns[:2], onward.columns[2]
        wanted, pieces, num_keys = list(range(count)), [], int(onward.starts.sum()) if count else 0
        if others:
            slots, ids, positions = on_host[0, count:], on_host[1], on_host[2:]
            wanted += [
                i for row, end in zip(others, starts[count + 1 :], strict=True) for i in range(end - row.logits, end)
            ]
            spans = [(row.start, row.start + row.num_tokens) for row in others]
            tables = [cache.tables[row.seq_id] for row in others]
            np.concatenate([table.slots[slice(*span)] for table, span in zip(tables, spans, strict=True)], out=slots)
            positions[:, count:] = [place for span in spans for place in range(*span)]
            for row, start, end in zip(others, starts[count:-1], starts[count + 1 :], strict=True):
                if row.positions is not None:
                    positions[:, start:end] = row.positions
                if row.offset:
                    positions[:, start:end] += np.array(row.offset)[..., None]
            pieces = write_ids(others, ids, count)
        there = upload(on_host, device)
        copy_ids(pieces, there[1])
        return cls(
            input_ids=there[1:2],
            position_ids=there[2:] if num_axes == 1 else there[2:, None],
            inputs=inputs,
            starts=starts,
            logit_index=None if len(wanted) == starts[-1] else upload(np.array(wanted, dtype=np.int64), device),
            cache=cache,
            gather=gather,
            write_slots=there[0],  # the first, so that kernels find it aligned
            num_keys=num_keys + sum([row.start for row in others]) + starts[-1],
        )

    def on(self, device: torch.device) -> _OnDevice:
        """Slots and operations on a layer's device (a model may be spread over several)."""
        if device not in self._on_device:
            read = None
            if self.gather:
                tables = self.cache.tables
                read = np.concatenate([tables[r.seq_id].slots[: r.start + r.num_tokens] for r in self.inputs])
                read = upload(read, device)
            attend = attention_for(device, self.invariant is not None, self.with_native)
            self._on_device[device] = _OnDevice(self.write_slots.to(device), read, write_keys_values.on(device), attend)
        return self._on_device[device]

    @kept
    def attention_inputs(self, device: torch.device) -> AttentionInputs:
        """The rows as the Triton kernels read them; made once per step, not per layer."""
        if self.invariant is None:
            return attention_inputs(describe(self.inputs, self.cache), self.cache.block_size, device)
        return attention_inputs(describe_lines(self.inputs, self.cache), 1, device)

    @kept
    def native_rows(self) -> NativeRows:
        """The rows as the native library reads them; made once per step."""
        onward, others = divided(self.inputs)
        return NativeRows.of(describe(others, self.cache, by_slots=True), onward.described)

    @kept
    def lines(self, device: torch.device) -> list[AttentionRow]:
        """The rows as invariant attention reads them: every path of a tree is a row of its own; made once per step, not per layer."""
        lines, start = [], 0
        for line in describe_lines(self.inputs, self.cache):
            end, slots = start + line.query_length, upload(np.asarray(line.blocks), device)
            lines.append(AttentionRow(start, end, line.key_length, -1, slots))
            start = end
        return lines

    def plan(
        self, window: int | Window | None, query: torch.Tensor, key_pool: torch.Tensor
    ) -> tuple[list[AttentionRow], list[torch.Tensor | None]]:
        """Rows and masks as `reference.paged_attention` reads them; made once per step and kind of layer, not per layer."""
        return self._plan(window, query.shape[1] // key_pool.shape[1], query.dtype, query.device)

    @kept
    def _plan(self, window: int | Window | None, group: int, dtype: torch.dtype, device: torch.device) -> Any:
        rows = [
            self.cache.row(row.seq_id, int(start), int(end), row.start + row.num_tokens, device)
            for row, start, end in zip(self.inputs, self.starts[:-1], self.starts[1:], strict=True)
        ]
        return rows, additive_masks(self.inputs, window, group, dtype, device)

    @kept
    def dense_mask(self, window: int | Chunks | None, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """The additive mask [1, 1, T, S_total] of models that attend to gathered keys."""
        of_cache = self.cache.window
        windows = {window} if of_cache is None else {window, window_parts(of_cache)[0] if window else of_cache}
        masks = (block_diagonal_mask(self.inputs, window, dtype) for window in windows)
        return functools.reduce(torch.minimum, masks)[None, None].to(device)

    @kept
    def distances(self) -> list[torch.Tensor]:
        """Of every row, int64 [t, S]: the positions of its queries less those of its keys, at least 0; computed once per step."""
        by_row = []
        for row in self.inputs:
            keys = key_positions(row)
            queries = keys[row.start :] if row.positions is None else row.positions
            by_row.append(torch.from_numpy(np.maximum(np.asarray(queries)[:, None] - keys, 0)))
        return by_row

    @kept
    def part(self, rows: tuple[int, ...], device: torch.device) -> tuple[PackedBatch, torch.Tensor]:
        """The batch of some of the rows, and the indices of their tokens; made once per step, not per layer."""
        tokens = np.concatenate([np.arange(self.starts[row], self.starts[row + 1]) for row in rows])
        inputs = [self.inputs[row] for row in rows]
        starts = [0, *itertools.accumulate(row.num_tokens for row in inputs)]
        return dataclasses.replace(self, inputs=inputs, starts=starts), upload(tokens, device)

    @kept
    def closed_segments(self, size: SegmentSize, device: torch.device) -> ClosedSegments:
        """The segments that these tokens close, for layers that compress them; found once per step, not per layer."""
        return closed_segments(self.inputs, self.cache, size, device)

    @kept
    def parts_of(self, rate: int, window: int | Window | None, dtype: torch.dtype, device: torch.device) -> list[Part]:
        """See `segments.parts_of`; made once per step, not per layer."""
        return parts_of(self.inputs, self.starts, self.cache, rate, window, dtype, device)

    @functools.cached_property
    def cross(self) -> PackedBatch:
        """The same tokens before the keys of their rows' sources or images, of which each token sees all of its row. Rows without images
        see one key of another row."""
        pools, rows = self.cache.cross, []
        assert pools is not None
        for row in self.inputs:
            seq_id = row.seq_id if row.seq_id in pools.tables else next(iter(pools.tables))
            start = (pools.tables[seq_id].length if seq_id == row.seq_id else 1) - row.num_tokens
            seen = np.ones((row.num_tokens, 1), dtype=bool)
            rows.append(RowInput(seq_id, row.tokens, start, visibility=seen, drafts=row.drafts))
        num_keys = sum(row.start + row.num_tokens for row in rows)
        return PackedBatch(
            self.input_ids, self.position_ids, rows, self.starts, None, pools, self.gather, self.write_slots, num_keys,
            with_native=self.with_native,
        )  # fmt: skip

    @functools.cached_property
    def offsets(self) -> tuple[torch.Tensor, torch.Tensor]:
        """What makes indices of queries and of gathered keys positions: int64 [T] and [S_total]."""
        queries = [
            np.arange(row.start, row.start + row.num_tokens) if row.positions is None else row.positions
            for row in self.inputs
        ]
        keys, queries = self.key_positions(), np.concatenate(queries)
        device = self.write_slots.device
        return upload(queries - np.arange(len(queries)), device), upload(keys - np.arange(len(keys)), device)

    def key_positions(self) -> np.ndarray:
        """Positions of the S_total gathered keys, numpy."""
        return np.concatenate(list(map(key_positions, self.inputs)))


def write_ids(rows: list[RowInput], ids: np.ndarray, first: int = 0) -> list[tuple[int, torch.Tensor]]:
    """Write the rows' ids that are on the host into `ids` [T], from index `first` on.

    Returns: (index in `ids`, ids) for each piece that is on the device; see `copy_ids`.
    """
    pieces = []
    for row in rows:
        for tokens in (row.tokens, row.drafts):
            if tokens is None:
                continue
            end = first + tokens.shape[0]
            if isinstance(tokens, torch.Tensor) and tokens.device.type != "cpu":
                pieces.append((first, tokens))
            else:
                # numpy 2.2, the last for Python 3.10, warns when it converts a tensor by itself
                ids[first:end] = tokens.numpy() if isinstance(tokens, torch.Tensor) else tokens
            first = end
    return pieces


def copy_ids(pieces: list[tuple[int, torch.Tensor]], ids: torch.Tensor) -> None:
    """Copy the pieces that `write_ids` returned into `ids` [T] on the device."""
    if not pieces:
        return
    tokens = (pieces[0][1] if len(pieces) == 1 else torch.cat([piece for _, piece in pieces])).to(ids.device)
    first, count = pieces[0][0], tokens.shape[0]
    if pieces[-1][0] + pieces[-1][1].shape[0] - first == count:  # no gaps between the pieces
        ids[first : first + count].copy_(tokens)
        return
    places = np.concatenate([np.arange(start, start + piece.shape[0]) for start, piece in pieces])
    ids.index_copy_(0, upload(places, ids.device), tokens)
