"""Describes the rows of a forward to attention: which slots hold their keys, and which keys their tokens see.

The Triton kernels and the native library read descriptions; attention without them reads masks.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from ..cache import PagedStaticCache
from ..core.rows import Chunks, RowInput
from ..kernels.attention.inputs import RowDescription, Window


def describe(rows: list[RowInput], cache: PagedStaticCache, by_slots: bool = False) -> list[RowDescription]:
    """The rows with the cache's blocks, or `by_slots` with blocks of one slot, one description each."""
    described = []
    for row in rows:
        table, length = cache.tables[row.seq_id], row.start + row.num_tokens
        blocks = table.slots if by_slots else table.blocks[: -(-length // cache.block_size)]
        # Only sliding windows and biases read these positions.
        positions = row.positions if row.window_positions is None else row.window_positions
        described.append(
            RowDescription(
                blocks, row.num_tokens, length, row.visibility, positions, row.region_positions, table.slots_at if by_slots else 0,
            )
        )  # fmt: skip
    return described


def describe_lines(rows: list[RowInput], cache: PagedStaticCache) -> list[RowDescription]:
    """The rows as causal lines of text, with blocks of one slot: each tree node is a row of its own, over its path's slots.

    So a node's keys are summed in the same order as in a text without the tree. Tokens that form a causal chain at the
    beginning of a row (its own tokens and a tree's first branch) stay together in one line.

    Raises:
        ValueError: a token's position differs from the number of tokens before it that it sees.
    """
    lines = []
    for row in rows:
        slots, count = cache.tables[row.seq_id].slots, row.num_tokens
        positions = np.arange(row.start, row.start + count) if row.positions is None else row.positions
        region = 0 if row.visibility is None else row.start + count - row.visibility.shape[1]
        # For each new token, the logical indices of the slots that it sees; a causal row needs none.
        seen = () if row.visibility is None else row.visibility
        paths = [np.concatenate([np.arange(region), region + np.flatnonzero(visible)]) for visible in seen]
        num_causal = 0 if paths else count
        while num_causal < len(paths) and np.array_equal(paths[num_causal], np.arange(row.start + num_causal + 1)):
            num_causal += 1
        if num_causal:
            length = row.start + num_causal
            lines.append(RowDescription(slots[:length], num_causal, length, positions=positions[:num_causal]))
        for token, path in enumerate(paths[num_causal:], num_causal):
            lines.append(RowDescription(slots[path], 1, len(path), positions=positions[token : token + 1]))
    for line in lines:
        if line.positions[-1] != line.key_length - 1 or line.positions[0] != line.key_length - line.query_length:
            raise ValueError(
                f"Tokens at positions {line.positions} see {line.key_length} tokens; with 'deterministic', a token's position "
                "must be the number of tokens before it."
            )
    return lines


# ---- masks ----


def key_positions(row: RowInput) -> np.ndarray:
    """The positions [S] of a row's keys."""
    positions = np.arange(row.start + row.num_tokens)
    if row.region_positions is not None:
        positions[len(positions) - len(row.region_positions) :] = row.region_positions
    return positions


def visible(row: RowInput, window: int | Window | Chunks | None) -> np.ndarray | None:
    """bool [t, S]: which of the row's S keys each of its t new tokens sees; None if all see all keys."""
    size = window if isinstance(window, int) else window and window.size
    count = row.num_tokens
    length = row.start + count
    keys = np.arange(length)
    queries = np.arange(row.start, length) if row.positions is None else row.positions
    queries = queries if row.window_positions is None else row.window_positions
    if row.visibility is None:
        if count == 1 and (size is None or int(queries[0]) < size):
            return None
        allowed = keys[None, :] <= np.arange(row.start, length)[:, None]
    else:
        region = row.visibility.shape[1]
        allowed = np.ones((count, length), dtype=bool)
        allowed[:, length - region :] = row.visibility
        keys = key_positions(row)
    if isinstance(window, Chunks):
        allowed = allowed & (queries[:, None] // window.size == keys[None, :] // window.size)
    elif size is not None:
        near = queries[:, None] - keys[None, :] < size
        allowed = allowed & (near | (keys < window.kept) if isinstance(window, Window) else near)
    return allowed


def additive_masks(
    rows: Sequence[RowInput], window: int | Window | None, group: int, dtype: torch.dtype, device: torch.device
) -> list[torch.Tensor | None]:
    """Per row, the additive mask [group * t, S] of `reference.paged_attention`; None: all tokens see all keys.

    Args:
        group: query heads per key head.
    """
    known: dict[Any, torch.Tensor | None] = {}  # causal rows of one shape share a mask
    masks = []
    for i, row in enumerate(rows):
        key = (row.num_tokens, row.start) if row.visibility is None else i
        if key not in known:
            seen = visible(row, window)
            known[key] = None if seen is None else additive_mask(seen, dtype, device, group)
        masks.append(known[key])
    return masks


def additive_mask(allowed: np.ndarray, dtype: torch.dtype, device: torch.device, group: int = 1) -> torch.Tensor:
    """0 where bool [t, S] is true, otherwise -inf; repeated for the query heads of a key head: [group * t, S]."""
    mask = torch.zeros(allowed.shape, dtype=dtype).masked_fill_(torch.from_numpy(~allowed), float("-inf"))
    return mask.repeat(group, 1).to(device)


def block_diagonal_mask(
    rows: Sequence[RowInput], window: int | Window | Chunks | None, dtype: torch.dtype
) -> torch.Tensor:
    """One additive mask [T, S_total] over the gathered keys of all rows: a token sees keys of its own row only."""
    num_tokens, num_keys = sum(row.num_tokens for row in rows), sum(row.start + row.num_tokens for row in rows)
    mask = torch.full((num_tokens, num_keys), torch.finfo(dtype).min, dtype=dtype)
    first_token = first_key = 0
    for row in rows:
        length = row.start + row.num_tokens
        allowed = visible(row, window)
        block = mask[first_token : first_token + row.num_tokens, first_key : first_key + length]
        if allowed is None:
            block.fill_(0)
        else:
            block.masked_fill_(torch.from_numpy(allowed), 0)
        first_token, first_key = first_token + row.num_tokens, first_key + length
    return mask
