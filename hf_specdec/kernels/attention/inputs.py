"""A ragged batch as the implementations of attention read it: AttentionInputs for the kernel, built from row descriptions, and others."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch


@dataclass(frozen=True)
class AttentionInputs:
    """B rows of a packed batch of T tokens. All tensors are int32, on the device of the pools.

    A row has `query_starts[b + 1] - query_starts[b]` new tokens, which are the last of its `key_lengths[b]` keys. Key j of
    row b is in slot `block_tables[b, j // block_size] * block_size + j % block_size`. Rows that only pad a graph bucket have no
    tokens. Tokens from `query_starts[B]` on belong to no row, and their outputs are not written.

    Attributes:
        block_tables: [B, max_blocks]; entries after a row's last key are never read.
        block_size: slots per block.
        query_starts: [B + 1], the first packed token of each row, in ascending order.
        key_lengths: [B], keys of each row, including the new ones.
        max_query_length: the most new tokens of a row (on the host: it sets the launch).
        visibility: [T, W] or None: bit r % 32 of word r // 32 says if a token sees key r of its row's region, which is the
            last `region_lengths[b]` keys. All tokens see the keys before the region. None: no row has a region.
        region_lengths: [B], at most 32 * W; 0 for a causal row, whose visibility is not read.
        positions: [T], positions of the tokens; needed only for sliding windows.
        region_positions: [B, 32 * W], positions of the region's keys, used for windows and ALiBi; None: a key's position is
            its index in the row.
    """

    block_tables: torch.Tensor
    block_size: int
    query_starts: torch.Tensor
    key_lengths: torch.Tensor
    max_query_length: int
    visibility: torch.Tensor | None = None
    region_lengths: torch.Tensor | None = None
    positions: torch.Tensor | None = None
    region_positions: torch.Tensor | None = None

    @property
    def max_key_length(self) -> int:
        """The most keys of a row for which the block tables have room."""
        return self.block_tables.shape[1] * self.block_size


class RowDescription(NamedTuple):
    """One row, described on the host.

    Attributes:
        blocks: its blocks in order; for the native library its slots, int64.
        query_length: new tokens t.
        key_length: number of keys S, including the new ones.
        visibility: bool [t, m] over the last m keys (m >= t), or None: causal.
        positions: [t], read by windows and biases; None: S - t, S - t + 1, ..
        region_positions: [m], read by windows and biases; None: S - m, S - m + 1, ..
        blocks_at: address of `blocks` if the caller knows it, and they are contiguous int64.
    """

    blocks: Sequence[int] | np.ndarray
    query_length: int
    key_length: int
    visibility: np.ndarray | None = None
    positions: np.ndarray | None = None
    region_positions: np.ndarray | None = None
    blocks_at: int = 0


def pack_visibility(visibility: np.ndarray, num_words: int) -> np.ndarray:
    """bool [t, m] → int32 [t, num_words]: column r becomes bit r % 32 of word r // 32; unused bits are 0."""
    padded = np.zeros((visibility.shape[0], 32 * num_words), dtype=bool)
    padded[:, : visibility.shape[1]] = visibility
    return np.packbits(padded, axis=1, bitorder="little").view("<i4").astype(np.int32, copy=False)


def visibility_words(visibility: torch.Tensor, num_words: int) -> torch.Tensor:
    """`pack_visibility` for a tensor on its device: bool [t, m] → int32 [t, num_words]."""
    padded = torch.nn.functional.pad(visibility, (0, 32 * num_words - visibility.shape[1]))
    bits = torch.arange(32, dtype=torch.int32, device=visibility.device)
    return (padded.view(-1, num_words, 32).to(torch.int32) << bits).sum(2, dtype=torch.int32)


@dataclass(frozen=True)
class InputSizes:
    """Sizes of the tensors of AttentionInputs, and their places in one flat int32 tensor, so that one copy uploads all.

    Attributes:
        num_rows, num_tokens: B and T, including padding of a bucket.
        max_query_length: see AttentionInputs.
        max_blocks: columns of the block tables.
        num_words: W; 0: no row has a region.
    """

    num_rows: int
    num_tokens: int
    max_query_length: int
    max_blocks: int
    num_words: int

    @cached_property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Shapes by name; the three tensors of regions are left out if `num_words` is 0."""
        rows, words = self.num_rows, self.num_words
        shapes: dict[str, tuple[int, ...]] = {
            "block_tables": (rows, self.max_blocks),
            "query_starts": (rows + 1,),
            "key_lengths": (rows,),
            "positions": (self.num_tokens,),
        }
        if words:
            shapes |= {
                "visibility": (self.num_tokens, words),
                "region_lengths": (rows,),
                "region_positions": (rows, 32 * words),
            }
        return shapes

    @cached_property
    def starts(self) -> dict[str, int]:
        """The start of each part: at multiples of 16 bytes, as the compiled kernels assume."""
        sizes = [math.prod(shape) for shape in self.shapes.values()]
        ends = np.cumsum([-(-size // 4) * 4 for size in sizes]).tolist()
        return dict(zip(self.shapes, [0, *ends[:-1]], strict=True)) | {"end": ends[-1]}

    def views(self, flat: Any) -> dict[str, Any]:
        """Views of the parts of a flat tensor or array [`starts["end"]`]."""
        views = {}
        for name, shape in self.shapes.items():
            start = self.starts[name]
            views[name] = flat[start : start + math.prod(shape)].reshape(shape)
        return views

    def inputs(self, flat: torch.Tensor, block_size: int) -> AttentionInputs:
        """AttentionInputs whose tensors are views of `flat`."""
        return AttentionInputs(block_size=block_size, max_query_length=self.max_query_length, **self.views(flat))


def attention_inputs(
    rows: Sequence[RowDescription],
    block_size: int,
    device: torch.device | str = "cpu",
    sizes: InputSizes | None = None,
) -> AttentionInputs:
    """Build AttentionInputs for `rows` on the host, and copy them to `device` at once.

    Args:
        sizes: those of a bucket that the rows fit into; None: what the rows need.
    """
    sizes = sizes_of(rows) if sizes is None else sizes
    flat = np.zeros(sizes.starts["end"], dtype=np.int32)
    fill_inputs(sizes.views(flat), rows, block_size, sizes)
    return sizes.inputs(torch.from_numpy(flat).to(device), block_size)


def sizes_of(rows: Sequence[RowDescription]) -> InputSizes:
    """The smallest sizes that hold these rows."""
    counts = [row.query_length for row in rows]
    regions = [row.visibility.shape[1] for row in rows if row.visibility is not None]
    return InputSizes(
        num_rows=len(rows),
        num_tokens=sum(counts),
        max_query_length=max(counts, default=0),
        max_blocks=max((len(row.blocks) for row in rows), default=1) or 1,
        num_words=-(-max(regions, default=0) // 32),
    )


def fill_inputs(
    parts: dict[str, np.ndarray], rows: Sequence[RowDescription], block_size: int, sizes: InputSizes
) -> None:
    """Write rows into arrays of zeros (`sizes.views(..)`); the rows and tokens after them stay empty."""
    counts = np.array([row.query_length for row in rows])
    key_lengths = np.array([row.key_length for row in rows])
    ends = counts.cumsum()
    num_tokens = int(counts.sum())
    parts["query_starts"][1 : len(rows) + 1] = ends
    parts["query_starts"][len(rows) + 1 :] = num_tokens
    parts["key_lengths"][: len(rows)] = key_lengths
    # Packed token t of a row that ends at `end` and has `length` keys is key t + length - end.
    parts["positions"][:num_tokens] = np.arange(num_tokens) + np.repeat(key_lengths - ends, counts)
    for i, row in enumerate(rows):
        tokens = slice(ends[i] - row.query_length, ends[i])
        parts["block_tables"][i, : len(row.blocks)] = row.blocks
        if row.positions is not None:
            parts["positions"][tokens] = row.positions
        if row.visibility is not None:
            region = row.visibility.shape[1]
            places = (
                np.arange(row.key_length - region, row.key_length)
                if row.region_positions is None
                else row.region_positions
            )
            parts["region_lengths"][i] = region
            parts["visibility"][tokens] = pack_visibility(row.visibility, sizes.num_words)
            parts["region_positions"][i, :region] = places


# ---- for the other implementations ----


class Window(NamedTuple):
    """A sliding window beside which the first keys stay visible: a query at position p sees keys at positions above p - size, and those
    below `kept`. A plain window is an integer."""

    size: int
    kept: int


def window_parts(window: int | Window | None) -> tuple[int, int]:
    """Size and first keys of a window; 0: there is none."""
    return window if isinstance(window, Window) else (window or 0, 0)


class AttentionRow(NamedTuple):
    """One row of a ragged batch, as the definitions read it.

    `start:end` are its queries among the packed tokens, whose keys are its last ones. Its keys are in the slots `slots` [length], or,
    if that is None, in the contiguous run from `first_slot` on, which is read without a copy.
    """

    start: int
    end: int
    length: int
    first_slot: int
    slots: torch.Tensor | None


_NO_LINES = np.zeros((0, 8), dtype=np.int64)


@dataclass
class NativeRows:
    """The rows as the library reads them: int64 [B, 8], and the arrays that it points to."""

    table: np.ndarray
    most_queries: int
    kept: list[Any] = field(default_factory=list)

    @classmethod
    def of(cls, rows: list[RowDescription], before: np.ndarray = _NO_LINES) -> NativeRows:
        """Consecutive rows, whose blocks are slots; `before`: lines of a table of rows of one token before them."""
        lines, kept, most, start = [], list[Any](rows), min(1, len(before)), len(before)

        def address(array: Any, dtype: Any) -> int:
            contiguous = np.ascontiguousarray(array, dtype=dtype)
            kept.append(contiguous)
            return contiguous.__array_interface__["data"][0]

        for row in rows:
            end, line = start + row.query_length, [0, 0, 0, 0]
            if not (row.visibility is None and row.region_positions is None and row.positions is None):
                line = [
                    0 if row.visibility is None else address(row.visibility, np.uint8),
                    0 if row.visibility is None else row.visibility.shape[1],
                    0 if row.region_positions is None else address(row.region_positions, np.int64),
                    0 if row.positions is None else address(row.positions, np.int64),
                ]
            lines.append((start, end, row.key_length, row.blocks_at or address(row.blocks, np.int64), *line))
            start, most = end, max(most, row.query_length)
        table = np.array(lines, dtype=np.int64).reshape(-1, 8)
        return cls(before if not rows else np.concatenate([before, table]) if len(before) else table, most, kept)


# What is added to scaled scores, by how far a key is before its query: [n, H] for the distances below n (T5's relative positions).
Biases = Callable[[int], torch.Tensor]


class AttentionBatch(Protocol):
    """A batch that can describe itself to every implementation. It builds each description when first asked, and keeps it."""

    def attention_inputs(self, device: torch.device) -> AttentionInputs:
        """As the Triton kernel reads it."""
        ...

    def native_rows(self) -> NativeRows:
        """As the native library reads it."""
        ...

    def plan(
        self, window: int | Window | None, query: torch.Tensor, key_pool: torch.Tensor
    ) -> tuple[list[AttentionRow], list[torch.Tensor | None]]:
        """Rows and masks as the definition reads them, for layers with this window, these keys and queries [T, H, D]. A mask [G * t, S] is
        an additive float one for the row's t queries, repeated for the G = H / Hkv heads of a group; None: every query sees every key."""
        ...

    def distances(self) -> list[torch.Tensor]:
        """Of every row, int64 [t, S]: the positions of its queries less those of its keys, at least 0."""
        ...

    def lines(self, device: torch.device) -> list[AttentionRow]:
        """As invariant attention reads it: every path of a tree is a row of its own, and a query sees the keys up to its own."""
        ...
