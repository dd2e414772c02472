"""Cache operations in Triton: write new keys and values to their slots, and move the slots of accepted tree nodes."""

# pyright: reportCallIssue=false
from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from . import reference

LEAST = tl.constexpr(reference.LEAST)
TO_WHOLE = tl.constexpr(12582912.0)  # 1.5 * 2^23: adding it rounds to a whole number


@triton.jit
def _rotated(source, cos, sin, columns, token, heads, ROTARY: tl.constexpr, WIDTH: tl.constexpr):
    """Load rows from `source` (pointers [heads, 1]) as float32, with the first ROTARY elements rotated by the token's angles."""
    inside = heads & (columns < WIDTH)[None, :]
    x = tl.load(source + columns[None, :], mask=inside, other=0.0).to(tl.float32)
    turned = columns < ROTARY
    partner = tl.where(columns < ROTARY // 2, columns + ROTARY // 2, columns - ROTARY // 2)
    other = tl.load(source + partner[None, :], mask=heads & turned[None, :], other=0.0).to(tl.float32)
    other = tl.where((columns < ROTARY // 2)[None, :], -other, other)
    c = tl.load(cos + token * ROTARY + columns, mask=turned, other=1.0).to(tl.float32)
    s = tl.load(sin + token * ROTARY + columns, mask=turned, other=0.0).to(tl.float32)
    return x * c[None, :] + other * s[None, :]


@triton.jit
def _store(pool, there, x, scales, slot, heads, inside, HEADS: tl.constexpr):
    """Store rows `x` [heads, columns] at `there`, in 8 bits if there are scales (see `reference.quantized`)."""
    if scales is not None:
        x = x.to(tl.float32)
        scale = tl.maximum(tl.max(tl.abs(x), axis=1), LEAST) / 127.0
        tl.store(scales + slot * HEADS + heads, scale, mask=heads < HEADS)
        x = tl.div_rn(x, tl.broadcast_to(scale[:, None], x.shape)) + TO_WHOLE - TO_WHOLE
    tl.store(there, x.to(pool.dtype.element_ty), mask=inside)


@triton.jit
def write_kernel(
    query_out, query, keys, values, key_pool, value_pool, key_scales, value_scales, slots, cos, sin,
    out_token, out_head, query_token, query_head, key_token, key_head, value_token, value_head,
    key_slot, key_pool_head, value_slot, value_pool_head,
    QUERY_HEADS: tl.constexpr, KEY_HEADS: tl.constexpr, VALUE_HEADS: tl.constexpr,
    WIDTH: tl.constexpr, VALUE_WIDTH: tl.constexpr, ROTARY: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr, BLOCK_H: tl.constexpr,
):  # fmt: skip
    """One program: BLOCK_H heads of one token's queries (if rotated), keys or values."""
    token = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    query_parts: tl.constexpr = (QUERY_HEADS + BLOCK_H - 1) // BLOCK_H
    key_parts: tl.constexpr = (KEY_HEADS + BLOCK_H - 1) // BLOCK_H
    if part < query_parts:
        if QUERY_HEADS > 0:
            heads = part * BLOCK_H + tl.arange(0, BLOCK_H)
            columns = tl.arange(0, BLOCK_D)
            exist = (heads < QUERY_HEADS)[:, None]
            rows = query + token * query_token + (heads * query_head)[:, None]
            x = _rotated(rows, cos, sin, columns, token, exist, ROTARY, WIDTH)
            there = query_out + token * out_token + (heads * out_head)[:, None] + columns[None, :]
            tl.store(there, x.to(query_out.dtype.element_ty), mask=exist & (columns < WIDTH)[None, :])
        return
    slot = tl.load(slots + token).to(tl.int64)
    if slot < 0:
        return
    if part < query_parts + key_parts:
        heads = (part - query_parts) * BLOCK_H + tl.arange(0, BLOCK_H)
        columns = tl.arange(0, BLOCK_D)
        exist = (heads < KEY_HEADS)[:, None]
        rows = keys + token * key_token + (heads * key_head)[:, None]
        inside = exist & (columns < WIDTH)[None, :]
        there = key_pool + slot * key_slot + (heads * key_pool_head)[:, None] + columns[None, :]
        if ROTARY > 0:
            x = _rotated(rows, cos, sin, columns, token, exist, ROTARY, WIDTH).to(keys.dtype.element_ty)
        else:
            x = tl.load(rows + columns[None, :], mask=inside, other=0.0)
        _store(key_pool, there, x, key_scales, slot, heads, inside, KEY_HEADS)
    else:
        lines = (part - query_parts - key_parts) * BLOCK_H + tl.arange(0, BLOCK_H)
        places = tl.arange(0, BLOCK_DV)
        within = (lines < VALUE_HEADS)[:, None] & (places < VALUE_WIDTH)[None, :]
        v = tl.load(
            values + token * value_token + (lines * value_head)[:, None] + places[None, :], mask=within, other=0.0
        )
        target = value_pool + slot * value_slot + (lines * value_pool_head)[:, None] + places[None, :]
        _store(value_pool, target, v, value_scales, slot, lines, within, VALUE_HEADS)


def write_keys_values(
    keys: torch.Tensor,
    values: torch.Tensor,
    key_pool: torch.Tensor,
    value_pool: torch.Tensor,
    slots: torch.Tensor,
    *,
    query: torch.Tensor | None = None,
    cos: torch.Tensor | None = None,
    sin: torch.Tensor | None = None,
    scales: reference.Scales | None = None,
) -> torch.Tensor | None:
    """Write the keys and values of T new tokens to their slots in one launch. With `query`, `cos` and `sin`, first rotate keys and queries.

    Rotary embedding as in Llama and GPT-NeoX (Su et al. 2021): the first R elements of each head become
    `x * cos + concat(-x[R/2:R], x[:R/2]) * sin`, computed in float32 and rounded once; the others are unchanged.

    Memory traffic: T * (Hkv * D + Hv * Dv) elements read and written; with rotation also 2 * T * H * D for the queries and 2 * T * R
    for the angles.

    Args:
        keys, values: [T, Hkv, D], [T, Hv, Dv]; any strides of tokens and heads.
        key_pool, value_pool: [slots, Hkv, D], [slots, Hv, Dv].
        slots: int64 [T], all different. Tokens with a negative slot are not written.
        query: [T, H, D], rotated like the keys.
        cos, sin: [T, R] contiguous, any float dtype, R even and at most D.
        scales: of pools in int8, contiguous.

    Returns: the rotated queries [T, H, D], or None without `query`.

    Raises:
        ValueError: the pools do not hold keys and values of these sizes and dtypes, or a last dimension is not contiguous.
    """
    num_tokens, key_heads, width = keys.shape
    value_heads, value_width = values.shape[1:]
    for states, pool in ((keys, key_pool), (values, value_pool)):
        if (
            states.shape[1:] != pool.shape[1:]
            or (states.dtype if scales is None else torch.int8) != pool.dtype
            or not states.stride(2) == pool.stride(2) == 1
        ):
            raise ValueError(
                f"A pool {tuple(pool.shape)} of {pool.dtype} does not hold keys or values {tuple(states.shape)} of {states.dtype}."
            )
    query_out = None if query is None else query.new_empty(query.shape)
    if num_tokens == 0:
        return query_out
    block_d, block_dv = triton.next_power_of_2(width), triton.next_power_of_2(value_width)
    block_h = max(min(2048 // max(block_d, block_dv), 16), 1)
    query_heads = 0 if query is None else query.shape[1]
    parts = sum(triton.cdiv(heads, block_h) for heads in (query_heads, key_heads, value_heads))
    tensors = (query_out, query, keys, values, key_pool, value_pool)
    strides = [stride for tensor in tensors for stride in ((0, 0) if tensor is None else tensor.stride()[:2])]
    with torch.cuda.device_of(keys):
        write_kernel[num_tokens, parts](
            *tensors, *(scales or (None, None)), slots, cos, sin, *strides, QUERY_HEADS=query_heads, KEY_HEADS=key_heads,
            VALUE_HEADS=value_heads, WIDTH=width, VALUE_WIDTH=value_width, ROTARY=0 if cos is None else cos.shape[1], BLOCK_D=block_d,
            BLOCK_DV=block_dv, BLOCK_H=block_h, num_warps=4,
        )  # fmt: skip
    return query_out


def rotate_and_write(query, keys, values, key_pool, value_pool, slots, cos, sin, scales=None) -> torch.Tensor | None:
    """See `reference.rotate_and_write`."""
    more = {"query": query, "cos": cos.contiguous(), "sin": sin.contiguous(), "scales": scales}
    return write_keys_values(keys, values, key_pool, value_pool, slots, **more)


# ---- moves ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class PoolTable:
    """The pools of all layers, in the form that one kernel launch reads.

    Attributes:
        addresses: int64 [P], the address of each pool.
        row_words: int32 [P], words per slot of each pool.
        max_row_words: the largest of `row_words`.
        word_bytes: 4, 2 or 1, the largest word size that divides all slots.
        pools: the pools themselves, to keep their memory alive.
    """

    addresses: torch.Tensor
    row_words: torch.Tensor
    max_row_words: int
    word_bytes: int
    pools: tuple[torch.Tensor, ...]

    @classmethod
    def of(cls, pools: Sequence[torch.Tensor]) -> PoolTable:
        """The table of contiguous pools [slots, heads, width]: keys and values of all layers on one device, of any widths and dtypes.

        Build it once per allocation: it copies addresses to the device.
        """
        device = pools[0].device
        row_bytes = [pool.stride(0) * pool.element_size() for pool in pools]
        word_bytes = math.gcd(4, *row_bytes, *(pool.data_ptr() for pool in pools))
        words = [row_byte // word_bytes for row_byte in row_bytes]
        addresses = torch.tensor([pool.data_ptr() for pool in pools], dtype=torch.int64, device=device)
        row_words = torch.tensor(words, dtype=torch.int32, device=device)
        return cls(addresses, row_words, max(words), word_bytes, tuple(pools))


@triton.jit(do_not_specialize=["num_moves"])
def move_kernel(
    addresses, row_words, source, target, num_moves,
    WORD_BYTES: tl.constexpr, ALIGNED: tl.constexpr, BLOCK: tl.constexpr, MOVES: tl.constexpr,
):  # fmt: skip
    """One program: BLOCK words of each moved slot, for one row of moves in one pool."""
    row = tl.program_id(1).to(tl.int64)
    pool = tl.program_id(2)
    words = tl.load(row_words + pool)
    columns = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = (columns < words)[None, :]
    address = tl.load(addresses + pool)
    if ALIGNED:
        words = tl.multiple_of(words, 16 // WORD_BYTES)
    if WORD_BYTES == 4:
        data = address.to(tl.pointer_type(tl.int32))
    elif WORD_BYTES == 2:
        data = address.to(tl.pointer_type(tl.int16))
    else:
        data = address.to(tl.pointer_type(tl.int8))
    for first in range(0, num_moves, MOVES):
        moves = first + tl.arange(0, MOVES)
        sources = tl.load(source + row * num_moves + moves, mask=moves < num_moves, other=-1)
        if tl.max(sources, axis=0) >= 0:
            targets = tl.load(target + row * num_moves + moves, mask=moves < num_moves, other=-1)
            mask = ((sources >= 0) & (targets >= 0))[:, None] & inside
            read = data + sources[:, None] * words + columns[None, :]
            write = data + targets[:, None] * words + columns[None, :]
            if ALIGNED:  # slots are multiples of 16 bytes; the compiler cannot see it through the table
                read = tl.multiple_of(read, (1, 16))
                write = tl.multiple_of(write, (1, 16))
            x = tl.load(read, mask=mask)
            # A source may be the target of a later move, never of an earlier one. So all threads read a tile before any writes
            # it, and tiles follow in order.
            tl.debug_barrier()
            tl.store(write, x, mask=mask)
            tl.debug_barrier()


def move_slots(table: PoolTable, source: torch.Tensor, target: torch.Tensor) -> None:
    """Copy slots to other slots in all pools of a table, in one launch.

    Memory traffic: the moved slots in all pools, read once and written once.

    Args:
        table: the pools.
        source, target: int64 [B, N], contiguous; entries with a negative source or target are skipped. Rows
            must be independent: no target of one row is a source or target of another. Within a row, moves may overlap if
            sources and targets both ascend in the order of the sequence and each target comes before its source. No target
            may occur twice.
    """
    if source.numel() == 0:
        return
    num_rows, num_moves = source.shape
    aligned = all(pool.data_ptr() % 16 == 0 and pool.stride(0) * pool.element_size() % 16 == 0 for pool in table.pools)
    block = min(triton.next_power_of_2(table.max_row_words), 128 * 16 // table.word_bytes)
    moves = min(triton.next_power_of_2(num_moves), 8)
    with torch.cuda.device_of(table.addresses):
        move_kernel[triton.cdiv(table.max_row_words, block), num_rows, len(table.pools)](
            table.addresses, table.row_words, source, target, num_moves,
            WORD_BYTES=table.word_bytes, ALIGNED=aligned, BLOCK=block, MOVES=moves, num_warps=4,
        )  # fmt: skip
