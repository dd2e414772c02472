"""A ragged batch as the implementations of attention read it: AttentionInputs for the kernel, built from row descriptions, and others."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
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

    def __post_init__(self) -> None:
        num_rows = self.block_tables.shape[0]
        if (self.visibility is None) != (self.region_lengths is None):
            raise ValueError("`visibility` and `region_lengths` come together.")
        if self.region_positions is not None and self.visibility is None:
            raise ValueError("`region_positions` needs `visibility`.")
        shapes: dict[str, tuple[int, ...]] = {
            "query_starts": (num_rows + 1,),
            "key_lengths": (num_rows,),
            "region_lengths": (num_rows,),
        }
        if self.visibility is not None:
            shapes["region_positions"] = (num_rows, 32 * self.visibility.shape[1])
        for name in ("block_tables", "query_starts", "key_lengths", *_OPTIONAL):
            tensor = getattr(self, name)
            if tensor is None:
                continue
            if tensor.dtype != torch.int32 or not tensor.is_contiguous():
                raise ValueError(
                    f"`{name}` must be contiguous int32, not {tensor.dtype} with strides {tensor.stride()}."
                )
            if name in shapes and tuple(tensor.shape) != shapes[name]:
                raise ValueError(f"`{name}` must have shape {shapes[name]}, not {tuple(tensor.shape)}.")

    @property
    def max_key_length(self) -> int:
        """The most keys of a row for which the block tables have room."""
        return self.block_tables.shape[1] * self.block_size


_OPTIONAL = ("visibility", "region_lengths", "positions", "region_positions")


@dataclass(frozen=True)
class RowDescription:
    """One row, described on the host.

    Attributes:
        blocks: its blocks in order.
        query_length: new tokens t.
        key_length: number of keys S, including the new ones.
        visibility: bool [t, m] over the last m keys (m >= t), or None: causal.
        positions: [t]; None: S - t, S - t + 1, ..
        region_positions: [m]; None: S - m, S - m + 1, ..
    """

    blocks: Sequence[int] | np.ndarray
    query_length: int
    key_length: int
    visibility: np.ndarray | None = None
    positions: np.ndarray | None = None
    region_positions: np.ndarray | None = None


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
        found = {}
        for name, shape in self.shapes.items():
            start = self.starts[name]
            found[name] = flat[start : start + math.prod(shape)].reshape(shape)
        return found

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
        sizes: those of a bucket; None: what the rows need.

    Raises:
        ValueError: a row does not fit a bucket, has fewer blocks than its keys need, or a region shorter than its tokens
            or longer than its keys.
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
    """Write rows into arrays of zeros (`sizes.views(..)`); the rows and tokens after them stay empty.

    Raises:
        ValueError: see `attention_inputs`.
    """
    needed = sizes_of(rows)
    if needed.num_tokens > sizes.num_tokens or needed.max_query_length > sizes.max_query_length:
        raise ValueError(f"{needed.num_tokens} tokens, {needed.max_query_length} in a row, do not fit the bucket.")
    if needed.num_rows > sizes.num_rows:
        raise ValueError(f"{needed.num_rows} rows do not fit the bucket.")
    if needed.max_blocks > sizes.max_blocks or needed.num_words > sizes.num_words:
        raise ValueError(f"{needed.max_blocks} blocks or {needed.num_words} words of visibility do not fit the bucket.")
    block_tables, query_starts = parts["block_tables"], parts["query_starts"]
    counts = np.array([row.query_length for row in rows])
    key_lengths = np.array([row.key_length for row in rows])
    ends = counts.cumsum()
    query_starts[1 : len(rows) + 1] = ends
    query_starts[len(rows) + 1 :] = needed.num_tokens
    parts["key_lengths"][: len(rows)] = key_lengths
    # Packed token t of a row that ends at `end` and has `length` keys is key t + length - end.
    parts["positions"][: needed.num_tokens] = np.arange(needed.num_tokens) + np.repeat(key_lengths - ends, counts)
    for i, row in enumerate(rows):
        if len(row.blocks) * block_size < row.key_length:
            raise ValueError(f"Row {i} has {row.key_length} keys in {len(row.blocks)} blocks of {block_size} slots.")
        block_tables[i, : len(row.blocks)] = row.blocks
        if row.positions is not None:
            parts["positions"][ends[i] - row.query_length : ends[i]] = row.positions
        if row.visibility is not None:
            _fill_region(parts, i, int(ends[i]), row, sizes)


def _fill_region(parts: dict[str, np.ndarray], index: int, end: int, row: RowDescription, sizes: InputSizes) -> None:
    """Write which of a row's last keys its tokens see; `end`: the end of the row among the packed tokens."""
    assert row.visibility is not None
    region = row.visibility.shape[1]
    if not row.query_length <= region <= row.key_length:
        raise ValueError(f"Row {index} has a region of {region} of its {row.key_length} keys.")
    parts["region_lengths"][index] = region
    parts["visibility"][end - row.query_length : end] = pack_visibility(row.visibility, sizes.num_words)
    own = np.arange(row.key_length - region, row.key_length)
    parts["region_positions"][index, :region] = own if row.region_positions is None else row.region_positions


# ---- for the other implementations ----


class AttentionRow(NamedTuple):
    """One row of a ragged batch, as the definition reads it.

    `start:end` are its queries among the packed tokens. Its keys are in the slots `slots` [length], or, if that is None, in the
    contiguous run from `first_slot` on, which is read without a copy.
    """

    start: int
    end: int
    length: int
    first_slot: int
    slots: torch.Tensor | None


class PaddedRows(NamedTuple):
    """B rows with one query each, with keys padded to one length S.

    `slots` int64 [B * S] are the rows' slots; shorter rows are padded with any slot that has been written. `mask` is additive,
    float [B, 1, 1, S], or None if every row has S keys and sees all of them.
    """

    slots: torch.Tensor
    mask: torch.Tensor | None


class AttentionPlan(NamedTuple):
    """A batch as the definition reads it. Layers with the same window and sizes share one.

    Attributes:
        rows, masks: per row, the places of its queries and keys, and an additive float mask [G * t, S] for its t queries,
            repeated for the G = H / Hkv heads of a group (None: every query sees every key).
        padded: the same rows padded, if they are short and have one query each: one product is then faster than one per row.
    """

    rows: list[AttentionRow]
    masks: list[torch.Tensor | None]
    padded: PaddedRows | None = None


class LinearRow(NamedTuple):
    """One line of text: a row of a batch, or one path of its draft tree.

    `start:end` are its queries among the packed tokens. Its keys are in `slots` [S], in the order of the text; the last ones are
    those of the queries. A query sees the keys up to its own.
    """

    start: int
    end: int
    slots: torch.Tensor


class NativeRow(NamedTuple):
    """One row of a ragged batch.

    `start:end` are its queries among the packed tokens, and its keys are in the first `length` of `slots` (int64). `visibility` bool
    [end - start, m] says which of the last m keys a query sees (None: causal). Windows read `region_positions` [m] and `positions`
    [end - start], int64; None: a key's position is its index.
    """

    start: int
    end: int
    length: int
    slots: np.ndarray
    visibility: np.ndarray | None = None
    region_positions: np.ndarray | None = None
    positions: np.ndarray | None = None


@dataclass
class NativeRows:
    """The rows as the library reads them: int64 [B, 8], and the arrays that it points to."""

    table: np.ndarray
    most_queries: int
    kept: list[Any] = field(default_factory=list)

    @classmethod
    def of(cls, rows: Iterable[NativeRow]) -> NativeRows:
        """Describe the rows."""
        lines, kept, most = [], [], 0
        for row in rows:
            region = 0 if row.visibility is None else row.visibility.shape[1]
            line = [row.start, row.end, row.length, 0, 0, region, 0, 0]
            for place, array, dtype in (
                (3, row.slots, np.int64),
                (4, row.visibility, np.uint8),
                (6, row.region_positions, np.int64),
                (7, row.positions, np.int64),
            ):
                if array is not None:
                    own = np.ascontiguousarray(array, dtype=dtype)
                    kept.append(own)
                    line[place] = own.__array_interface__["data"][0]  # `.ctypes` takes several times as long
            lines.append(line)
            most = max(most, row.end - row.start)
        return cls(np.array(lines, dtype=np.int64).reshape(-1, 8), most, kept)


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
