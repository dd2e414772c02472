"""PackedBatch: the ragged rows of one forward, packed into one line of tokens, with what attention needs to know."""

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
    RowDescription,
    attention_for,
    attention_inputs,
)
from ..kernels.cache import writer_for
from ..kernels.transfer import upload
from .options.invariant_ops import InvariantOps

# Keys and values of one row and layer that are copied in the time of one more product on a CPU, measured.
_PADDED_BYTES = 256 << 10


@dataclass
class _OnDevice:
    """Slots on one device, and the operations that serve it: chosen once per step, since choosing costs more than a small view."""

    write_slots: torch.Tensor
    read_slots: torch.Tensor | None
    write: Callable[..., Any]
    attend: Callable[..., torch.Tensor]


@dataclass
class PackedBatch:
    """T tokens of B rows, in row order, nothing padded.

    Attributes:
        input_ids, position_ids: int64 [1, T].
        inputs: the rows this was packed from.
        starts: numpy [B + 1], where each row begins among the T tokens.
        logit_index: int64 [R], which of the T tokens need logits, in order.
        gather: whether layers return every row's whole context (see PagedLayer.update).
        invariant: what the forward runs in, if it must not depend on the batch.
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
    _on_device: dict = field(default_factory=dict)
    _inputs: dict = field(default_factory=dict)
    _rows: dict = field(default_factory=dict)
    _masks: dict = field(default_factory=dict)

    captured = False  # as part of a CUDA graph

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
        """The rows as the Triton kernel reads them; made once per step, not per layer."""
        if device not in self._inputs:
            if self.invariant is None:
                rows, block_size = describe(self.inputs, self.cache), self.cache.block_size
            else:
                rows, block_size = describe_lines(self.inputs, self.cache), 1
            self._inputs[device] = attention_inputs(rows, block_size, device)
        return self._inputs[device]

    def lines(self, device: torch.device) -> list[LinearRow]:
        """What `attention.invariant.paged_attention` reads."""
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
        """Where each row's queries and keys are."""
        if device not in self._rows:
            self._rows[device] = [
                self.cache.row(row.seq_id, int(start), int(end), row.start + row.num_tokens, device)
                for row, start, end in zip(self.inputs, self.starts[:-1], self.starts[1:], strict=True)
            ]
        return self._rows[device]

    def masks(
        self, window: int | None, group: int, dtype: torch.dtype, device: torch.device
    ) -> list[torch.Tensor | None]:
        """Per row, the additive mask [group * t, S] of `attention.reference.paged_attention`; made once per step, not per layer."""
        key = (window, group, dtype, device)
        if key not in self._masks:
            shared: dict[tuple[int, int], torch.Tensor | None] = {}
            masks = []
            for row in self.inputs:
                shape = (row.num_tokens, row.start)
                if row.visibility is not None:
                    masks.append(_additive(visible(row, window), group, dtype, device))
                    continue
                if shape not in shared:
                    shared[shape] = _additive(visible(row, window), group, dtype, device)
                masks.append(shared[shape])
            self._masks[key] = masks
        return self._masks[key]

    def padded(
        self, window: int | None, slot_bytes: int, dtype: torch.dtype, device: torch.device
    ) -> PaddedRows | None:
        """The rows with keys padded to one length, where copying them costs less than attending row by row.

        Args:
            slot_bytes: of a slot's keys and values in one layer.
        """
        key = ("padded", window, slot_bytes, dtype, device)
        if key not in self._masks:
            # Not measured in bfloat16, whose single queries have a path of their own (`attention.reference._attention_query_by_query`).
            pays = dtype == torch.float32 and self._is_worth_padding(slot_bytes)
            self._masks[key] = self._padded(window, dtype, device) if pays else None
        return self._masks[key]

    def _is_worth_padding(self, slot_bytes: int) -> bool:
        rows = self.inputs
        if len(rows) == 1 or any(row.num_tokens > 1 or row.visibility is not None for row in rows):
            return False
        return (1 + max(row.start for row in rows)) * slot_bytes <= _PADDED_BYTES

    def _padded(self, window: int | None, dtype: torch.dtype, device: torch.device) -> PaddedRows:
        lengths = np.array([row.start + 1 for row in self.inputs])
        size = int(lengths.max())
        slots = np.empty((len(lengths), size), dtype=np.int64)
        for own, row, length in zip(slots, self.inputs, lengths, strict=True):
            table = self.cache.tables[row.seq_id].slots
            own[:length], own[length:] = table[:length], table[0]
        keys = np.arange(size)
        seen = keys < lengths[:, None]
        if window is not None:
            seen &= lengths[:, None] - 1 - keys < window
        mask = None
        if not seen.all():
            mask = torch.zeros(seen.shape, dtype=dtype).masked_fill_(torch.from_numpy(~seen), float("-inf"))
            mask = mask[:, None, None].to(device)
        return PaddedRows(upload(slots.ravel(), device), mask)

    def dense_mask(self, window: int | None, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """One additive mask [1, 1, T, S_total] for the gather path: rows see their own keys only."""
        key = ("dense", window, dtype, device)
        if key not in self._masks:
            mask = torch.full((len(self.slots), self.num_keys), torch.finfo(dtype).min, dtype=dtype)
            first_key = 0
            for row, start, end in zip(self.inputs, self.starts[:-1], self.starts[1:], strict=True):
                length = row.start + row.num_tokens
                allowed = visible(row, window)
                block = mask[start:end, first_key : first_key + length]
                block.masked_fill_(
                    torch.ones_like(block, dtype=torch.bool) if allowed is None else torch.from_numpy(allowed), 0
                )
                first_key += length
            self._masks[key] = mask[None, None].to(device)
        return self._masks[key]

    def key_positions(self) -> np.ndarray:
        """Positions of the S_total keys of the gather path."""
        positions = []
        for row in self.inputs:
            own = np.arange(row.start + row.num_tokens)
            if row.region_positions is not None:
                own[len(own) - len(row.region_positions) :] = row.region_positions
            positions.append(own)
        return np.concatenate(positions)


def write_ids(rows: list[RowInput], ids: np.ndarray) -> list[tuple[int, torch.Tensor]]:
    """Write the rows' ids that are on the host into `ids` [T]. Returns the others, and where each of them begins."""
    pieces, first = [], 0
    for row in rows:
        for tokens in (row.tokens, row.behind):
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
    """Copy what `write_ids` returned into `ids` [T]."""
    if not pieces:
        return
    tokens = (pieces[0][1] if len(pieces) == 1 else torch.cat([each for _, each in pieces])).to(ids.device)
    first, count = pieces[0][0], tokens.shape[0]
    if pieces[-1][0] + pieces[-1][1].shape[0] - first == count:  # without gaps
        ids[first : first + count].copy_(tokens)
        return
    places = np.concatenate([np.arange(start, start + each.shape[0]) for start, each in pieces])
    ids.index_copy_(0, upload(places, ids.device), tokens)


def describe(rows: list[RowInput], cache: PagedStaticCache) -> list[RowDescription]:
    """The rows as the attention kernel's inputs are built from."""
    described = []
    for row in rows:
        length = row.start + row.num_tokens
        blocks = cache.tables[row.seq_id].blocks[: -(-length // cache.block_size)]
        positions = (
            row.positions if row.window_positions is None else row.window_positions
        )  # windows alone ask for them
        described.append(
            RowDescription(blocks, row.num_tokens, length, row.visibility, positions, row.region_positions)
        )
    return described


def describe_lines(rows: list[RowInput], cache: PagedStaticCache) -> list[RowDescription]:
    """The rows with blocks of one slot, and every node of a tree as a row of its own, behind the slots of its path.

    So a node's keys stand where they would in a text without the tree, and are summed in the same order.

    Raises:
        ValueError: a token's position is not the number of tokens it sees before it.
    """
    lines = []
    for row in rows:
        slots, count = cache.tables[row.seq_id].slots, row.num_tokens
        positions = np.arange(row.start, row.start + count) if row.positions is None else row.positions
        length = row.start + count
        paths = []
        if row.visibility is not None:
            region = length - row.visibility.shape[1]
            paths = [region + np.flatnonzero(seen) for seen in row.visibility]
            paths = [np.concatenate([np.arange(region), path]) for path in paths]
        # A chain in front, of tokens of the row's own or a tree's first branch, stays together.
        causal = 0
        while causal < len(paths) and np.array_equal(paths[causal], np.arange(row.start + causal + 1)):
            causal += 1
        causal = causal if paths else count
        if causal:
            lines.append(
                RowDescription(slots[: row.start + causal], causal, row.start + causal, positions=positions[:causal])
            )
        for token in range(causal, count):
            lines.append(
                RowDescription(slots[paths[token]], 1, len(paths[token]), positions=positions[token : token + 1])
            )
    for line in lines:
        if line.positions[-1] != line.key_length - 1 or line.positions[0] != line.key_length - line.query_length:
            raise ValueError(
                f"Tokens at positions {line.positions} see {line.key_length} tokens; deterministic rows count them."
            )
    return lines


def visible(row: RowInput, window: int | None) -> np.ndarray | None:
    """bool [t, S]: which keys each new token sees; None when all see everything."""
    count = row.num_tokens
    length = row.start + count
    keys = np.arange(length)
    queries = np.arange(row.start, length) if row.positions is None else row.positions
    queries = queries if row.window_positions is None else row.window_positions
    if row.visibility is None:
        if count == 1 and (window is None or int(queries[0]) < window):
            return None
        allowed = keys[None, :] <= np.arange(row.start, length)[:, None]
    else:
        region = row.visibility.shape[1]
        allowed = np.ones((count, length), dtype=bool)
        allowed[:, length - region :] = row.visibility
        if row.region_positions is not None:
            keys[length - region :] = row.region_positions
    if window is not None:
        allowed = allowed & (queries[:, None] - keys[None, :] < window)
    return allowed


def _additive(allowed: np.ndarray | None, group: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor | None:
    if allowed is None:
        return None
    mask = torch.zeros(allowed.shape, dtype=dtype).masked_fill_(torch.from_numpy(~allowed), float("-inf"))
    return mask.repeat(group, 1).to(device)
