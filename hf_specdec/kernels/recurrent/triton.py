"""Recurrences and short convolutions over drafts in Triton.

A program of a recurrence holds one tile of one head's state, in float32, while it reads a line from left to right. A token that
follows the one read last starts from the tile as it is; others load their parent's, which the same program has saved.
"""

# pyright: reportCallIssue=false
from __future__ import annotations

import torch
import triton
import triton.language as tl

from ..dispatch import ceil_div, next_power_of_two
from . import Walk


@triton.jit
def _rounded(x, dtype: tl.constexpr):
    return x.to(dtype).to(tl.float32)


@triton.jit
def _softplus(x):
    """log(1 + e^x); x above 20, as in torch. The factor makes up for the digits that 1 + e^x loses."""
    small = tl.exp(tl.minimum(x, 20.0))
    one_more = 1.0 + small
    exact = tl.log(one_more) * (small / tl.where(one_more == 1.0, 1.0, one_more - 1.0))
    return tl.where(x > 20.0, x, tl.where(one_more == 1.0, small, exact))


@triton.jit
def _state_after(parent, before, saved_states, saved, line, tokens, size, tile, inside):
    """The tile of the state after a token of the line, which this program has saved; after -1: as the line begins."""
    if parent == -1:
        state = tl.load(before + line * size + tile, mask=inside, other=0.0)
    else:
        place = tl.load(saved + line * tokens + parent).to(tl.int64)
        state = tl.load(saved_states + place * size + tile, mask=inside, other=0.0)
    return state


@triton.jit
def _keep_state(state, at, into, pool, saved, saved_states, size, tile, inside, SAVES: tl.constexpr):
    """Write the tile of the state after packed token `at` where it is kept: to the pool, and for later tokens of the line."""
    place = tl.load(into + at).to(tl.int64)
    if place >= 0:
        tl.store(pool + place * size + tile, state, mask=inside)
    if SAVES:
        place = tl.load(saved + at).to(tl.int64)
        if place >= 0:
            tl.store(saved_states + place * size + tile, state, mask=inside)
            tl.debug_barrier()  # threads may load other elements than they stored


@triton.jit
def gated_delta_kernel(
    out, query, key, value, decay, rate, before, pool, saved_states, parents, into, saved, tokens, scale,
    KEY_HEADS: tl.constexpr, HEADS: tl.constexpr, WIDTH: tl.constexpr, VALUE_WIDTH: tl.constexpr, PER_CHANNEL: tl.constexpr,
    SAVES: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    """`gated_delta` along the lines. A program is a line, a head and BLOCK_V columns of its state [dk, dv]."""
    line = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    columns = tl.program_id(2) * BLOCK_V + tl.arange(0, BLOCK_V)
    channels = tl.arange(0, BLOCK_K)
    in_width, in_value = channels < WIDTH, columns < VALUE_WIDTH
    inside = in_width[:, None] & in_value[None, :]
    tile = head * (WIDTH * VALUE_WIDTH) + channels[:, None] * VALUE_WIDTH + columns[None, :]
    size = HEADS * WIDTH * VALUE_WIDTH
    key_head = head // (HEADS // KEY_HEADS)
    state = tl.load(before + line * size + tile, mask=inside, other=0.0)
    last = -1
    for column in range(tokens):
        at = line * tokens + column
        parent = tl.load(parents + at)
        if parent >= -1:
            if parent != last:
                state = _state_after(parent, before, saved_states, saved, line, tokens, size, tile, inside)
            from_key = (at * KEY_HEADS + key_head) * WIDTH + channels
            q = tl.load(query + from_key, mask=in_width, other=0.0).to(tl.float32)
            k = tl.load(key + from_key, mask=in_width, other=0.0).to(tl.float32)
            q = q * tl.rsqrt(tl.sum(q * q, 0) + 1e-6) * scale
            k = k * tl.rsqrt(tl.sum(k * k, 0) + 1e-6)
            from_value = (at * HEADS + head) * VALUE_WIDTH + columns
            v = tl.load(value + from_value, mask=in_value, other=0.0).to(tl.float32)
            beta = tl.load(rate + at * HEADS + head).to(tl.float32)
            if PER_CHANNEL:
                g = tl.load(decay + (at * HEADS + head) * WIDTH + channels, mask=in_width, other=0.0).to(tl.float32)
                state = state * tl.exp(g)[:, None]
            else:
                state = state * tl.exp(tl.load(decay + at * HEADS + head).to(tl.float32))
            known = tl.sum(state * k[:, None], 0)
            state = state + k[:, None] * ((v - known) * beta)[None, :]
            read = tl.sum(state * q[:, None], 0)
            tl.store(out + from_value, read.to(out.dtype.element_ty), mask=in_value)
            _keep_state(state, at, into, pool, saved, saved_states, size, tile, inside, SAVES)
            last = column


@triton.jit
def mamba2_kernel(
    out, x, steps, into_state, out_of_state, rate, skip, bias, before, pool, saved_states, parents, into, saved, tokens,
    HEADS: tl.constexpr, GROUPS: tl.constexpr, WIDTH: tl.constexpr, SIZE: tl.constexpr, ROUNDS_SKIP: tl.constexpr,
    SAVES: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """`mamba2` along the lines. A program is a line, a head and BLOCK_P rows of its state [p, N]."""
    line = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    rows = tl.program_id(2) * BLOCK_P + tl.arange(0, BLOCK_P)
    columns = tl.arange(0, BLOCK_N)
    in_width, in_size = rows < WIDTH, columns < SIZE
    inside = in_width[:, None] & in_size[None, :]
    tile = head * (WIDTH * SIZE) + rows[:, None] * SIZE + columns[None, :]
    size = HEADS * WIDTH * SIZE
    group = head // (HEADS // GROUPS)
    dtype: tl.constexpr = x.dtype.element_ty
    a = tl.load(rate + head).to(tl.float32)
    d = tl.load(skip + head).to(tl.float32)
    offset = _rounded(tl.load(bias + head), steps.dtype.element_ty)
    state = tl.load(before + line * size + tile, mask=inside, other=0.0)
    last = -1
    for column in range(tokens):
        at = line * tokens + column
        parent = tl.load(parents + at)
        if parent >= -1:
            if parent != last:
                state = _state_after(parent, before, saved_states, saved, line, tokens, size, tile, inside)
            step = _rounded(tl.load(steps + at * HEADS + head).to(tl.float32) + offset, steps.dtype.element_ty)
            step = _rounded(_softplus(step), steps.dtype.element_ty)
            from_x = (at * HEADS + head) * WIDTH + rows
            from_group = (at * GROUPS + group) * SIZE + columns
            newest = tl.load(x + from_x, mask=in_width, other=0.0).to(tl.float32)
            b = tl.load(into_state + from_group, mask=in_size, other=0.0).to(tl.float32)
            c = tl.load(out_of_state + from_group, mask=in_size, other=0.0).to(tl.float32)
            new = _rounded(_rounded(step * b, dtype)[None, :] * newest[:, None], dtype)
            state = state * tl.exp(step * a) + new
            read = _rounded(tl.sum(_rounded(state, dtype) * c[None, :], 1), dtype)
            skipped = newest * d
            if ROUNDS_SKIP:
                skipped = _rounded(skipped, dtype)
            tl.store(out + from_x, (read + skipped).to(dtype), mask=in_width)
            _keep_state(state, at, into, pool, saved, saved_states, size, tile, inside, SAVES)
            last = column


@triton.jit
def convolution_kernel(
    out, x, windows, weight, bias, into, pool, tokens, channels, length, SIZE: tl.constexpr, HAS_BIAS: tl.constexpr,
    SILU: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """`convolution` for one token and BLOCK channels. A program is a token of a line."""
    at = tl.program_id(0).to(tl.int64)
    line = at // tokens
    lanes = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = lanes < channels
    place = tl.load(into + at).to(tl.int64)
    total = tl.zeros([BLOCK], tl.float32)
    for tap in range(SIZE):
        column = tl.load(windows + at * SIZE + tap)
        read = tl.load(x + (line * channels + lanes) * length + column, mask=inside, other=0.0)
        factor = tl.load(weight + lanes * SIZE + tap, mask=inside, other=0.0)
        total += _rounded(read, weight.dtype.element_ty) * factor.to(tl.float32)
        if place >= 0:
            tl.store(pool + (place * channels + lanes) * SIZE + tap, read, mask=inside)
    if HAS_BIAS:
        total += tl.load(bias + lanes, mask=inside, other=0.0).to(tl.float32)
    total = _rounded(total, weight.dtype.element_ty)
    if SILU:
        total = _rounded(total / (1.0 + tl.exp(-total)), weight.dtype.element_ty)
    to = out + (line * channels + lanes) * tokens + at % tokens
    tl.store(to, total.to(out.dtype.element_ty), mask=inside)


# ---- launches ----

_TILE = 4096  # elements of a state that a program holds: 32 registers of each of its 128 threads
_CHANNELS = 256  # of a convolution's program


def gated_delta(inputs: tuple[torch.Tensor, ...], before: torch.Tensor, walk: Walk, pool: torch.Tensor) -> torch.Tensor:
    """The gated delta rule (https://arxiv.org/abs/2412.06464), or Kimi's with a decay per channel, over lines.

    S' = e^g S + k (beta (v - k e^g S)) and the output q S' / sqrt(dk), with q and k of length 1: all in float32.

    Args:
        inputs: query and key [n, T, Hk, dk], value [n, T, H, dv], log of the decay g [n, T, H] or [n, T, H, dk], and the rate
            beta [n, T, H]. Each key head serves H / Hk value heads in turn.
        before: S [n, H, dk, dv] float32, the states before the lines.
        pool: [.., H, dk, dv] float32; the states that `walk.into` names are written.

    Returns: outputs [n, T, H, dv] in the query's dtype; zeros where there is no token.

    Memory traffic: each line's state is read once and each kept state is written once; the inputs are small beside them.
    """
    query, key, value, decay, rate = (tensor.contiguous() for tensor in inputs)
    (num_lines, tokens, key_heads, width), (heads, value_width) = key.shape, value.shape[2:]
    out = torch.zeros(value.shape, dtype=query.dtype, device=value.device)
    block_k, block_v = tile_of(width, value_width)
    saved = before.new_empty(max(walk.num_saved, 1), *before.shape[1:])
    with torch.cuda.device_of(before):
        gated_delta_kernel[(num_lines, heads, ceil_div(value_width, block_v))](
            out, query, key, value, decay, rate, _checked(before, before), _checked(pool, before), saved,
            walk.parents, walk.into, walk.saved, tokens, width**-0.5, KEY_HEADS=key_heads, HEADS=heads, WIDTH=width,
            VALUE_WIDTH=value_width, PER_CHANNEL=decay.dim() == 4, SAVES=walk.num_saved > 0, BLOCK_K=block_k,
            BLOCK_V=block_v, num_warps=4,
        )  # fmt: skip
    return out


def mamba2(
    inputs: tuple[torch.Tensor, ...],
    constants: tuple[torch.Tensor, ...],
    before: torch.Tensor,
    walk: Walk,
    pool: torch.Tensor,
) -> torch.Tensor:
    """Mamba-2's recurrence (https://arxiv.org/abs/2405.21060) over lines, rounded as transformers' one-token function rounds.

    S' = e^(dt A) S + (dt B) x and the output C S' + D x; products of B, x and C are rounded to their dtypes.
    Memory traffic: as `gated_delta`.

    Args:
        inputs: x [n, T, H, p], the time step dt before its bias and softplus [n, T, H], B and C [n, T, groups, N].
        constants: A (negative), D and the time step's bias, each [H].
        before: S [n, H, p, N] float32, the states before the lines.
        pool: [.., H, p, N] float32; the states that `walk.into` names are written.

    Returns: outputs [n, T, H, p] in x's dtype; zeros where there is no token.
    """
    x, steps, into_state, out_of_state = (tensor.contiguous() for tensor in inputs)
    rate, skip, bias = (constant.contiguous() for constant in constants)
    num_lines, tokens, heads, width = x.shape
    groups, size = into_state.shape[2:]
    out = torch.zeros_like(x)
    block_n, block_p = tile_of(size, width)
    saved = before.new_empty(max(walk.num_saved, 1), *before.shape[1:])
    with torch.cuda.device_of(before):
        mamba2_kernel[(num_lines, heads, ceil_div(width, block_p))](
            out, x, steps, into_state, out_of_state, rate, skip, bias, _checked(before, before), _checked(pool, before),
            saved, walk.parents, walk.into, walk.saved, tokens, HEADS=heads, GROUPS=groups, WIDTH=width,
            SIZE=size, ROUNDS_SKIP=skip.dtype == x.dtype, SAVES=walk.num_saved > 0, BLOCK_P=block_p, BLOCK_N=block_n,
            num_warps=4,
        )  # fmt: skip
    return out


def tile_of(whole: int, parted: int) -> tuple[int, int]:
    """The tile of a program in the dimension that it holds whole, because it sums over it, and in the one that programs share."""
    block = next_power_of_two(whole)
    return block, min(next_power_of_two(parted), max(_TILE // block, 1))


def _checked(states: torch.Tensor, before: torch.Tensor) -> torch.Tensor:
    """States as the kernels index them; raises ValueError unless they are contiguous float32 states of the same shape."""
    if states.dtype != torch.float32 or not states.is_contiguous() or states.shape[1:] != before.shape[1:]:
        raise ValueError(
            f"States {tuple(states.shape)} of {states.dtype} for lines with states {tuple(before.shape)}: the kernels need "
            "contiguous float32 states of one shape."
        )
    return states


def convolution(x, windows, weight, bias, silu, into, pool) -> torch.Tensor:
    """A depthwise convolution whose k inputs at each token are given, and those inputs kept as the state after the token.

    Args:
        x: [n, C, k + T], the inputs before the lines, then the lines' own.
        windows: int32 [n, T, k], the columns of each token's inputs, oldest first.
        weight, bias: [C, k] and [C].
        silu: whether SiLU follows.
        into: int32 [n, T], the place in the pool for the inputs at each token; -1: they are not kept.
        pool: [.., C, k]; those places are written.

    Returns: [n, C, T] in x's dtype; sums are in float32, rounded to the weight's dtype before and after SiLU.

    Raises:
        ValueError: the pool is not contiguous, or not of x's dtype and channels.
    """
    (num_lines, channels, length), (tokens, size) = x.shape, windows.shape[1:]
    if pool.shape[1:] != (channels, size) or pool.dtype != x.dtype or not pool.is_contiguous():
        raise ValueError(
            f"A pool {tuple(pool.shape)} of {pool.dtype} cannot keep inputs {(channels, size)} of {x.dtype}."
        )
    out = torch.empty(num_lines, channels, tokens, dtype=x.dtype, device=x.device)
    block = min(next_power_of_two(channels), _CHANNELS)
    with torch.cuda.device_of(x):
        convolution_kernel[(num_lines * tokens, ceil_div(channels, block))](
            out, x.contiguous(), windows, weight.contiguous(), bias, into, pool, tokens, channels, length, SIZE=size,
            HAS_BIAS=bias is not None, SILU=silu, BLOCK=block, num_warps=4,
        )  # fmt: skip
    return out
