"""Launchers of the kernels of layers with a state (definition: `reference`)."""

# pyright: reportCallIssue=false
from __future__ import annotations

import torch

from ..launching import ceil_div, next_power_of_two
from .triton_kernels import convolution_kernel, gated_delta_kernel, mamba2_kernel
from .walk import Walk

_TILE = 4096  # elements of a state that a program holds: 32 registers of each of its 128 threads
_CHANNELS = 256  # of a convolution's program


def gated_delta(inputs: tuple[torch.Tensor, ...], before: torch.Tensor, walk: Walk, pool: torch.Tensor) -> torch.Tensor:
    """See `kernels.recurrent.gated_delta`.

    Memory traffic: each line's state is read once and each kept state is written once; the inputs are small beside them.
    """
    query, key, value, decay, rate = (each.contiguous() for each in inputs)
    (num_lines, tokens, key_heads, width), (heads, value_width) = key.shape, value.shape[2:]
    out = torch.zeros(value.shape, dtype=query.dtype, device=value.device)
    block_k, block_v = delta_blocks(width, value_width)
    with torch.cuda.device_of(before):
        gated_delta_kernel[(num_lines, heads, ceil_div(value_width, block_v))](
            out, query, key, value, decay, rate, _checked(before, before), _checked(pool, before), _places(walk, before),
            walk.parents, walk.into, walk.saved, tokens, width**-0.5, KEY_HEADS=key_heads, HEADS=heads, WIDTH=width,
            VALUE_WIDTH=value_width, PER_CHANNEL=decay.dim() == 4, SAVES=walk.num_saved > 0, BLOCK_K=block_k,
            BLOCK_V=block_v, num_warps=4,
        )  # fmt: skip
    return out


def mamba2(
    inputs: tuple[torch.Tensor, ...],
    constants: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    before: torch.Tensor,
    walk: Walk,
    pool: torch.Tensor,
) -> torch.Tensor:
    """See `kernels.recurrent.mamba2`; memory traffic as `gated_delta`."""
    x, steps, into_state, out_of_state = (each.contiguous() for each in inputs)
    rate, skip, bias = (each.contiguous() for each in constants)
    num_lines, tokens, heads, width = x.shape
    groups, size = into_state.shape[2:]
    out = torch.zeros_like(x)
    block_p, block_n = mamba2_blocks(width, size)
    with torch.cuda.device_of(before):
        mamba2_kernel[(num_lines, heads, ceil_div(width, block_p))](
            out, x, steps, into_state, out_of_state, rate, skip, bias, _checked(before, before), _checked(pool, before),
            _places(walk, before), walk.parents, walk.into, walk.saved, tokens, HEADS=heads, GROUPS=groups, WIDTH=width,
            SIZE=size, ROUNDS_SKIP=skip.dtype == x.dtype, SAVES=walk.num_saved > 0, BLOCK_P=block_p, BLOCK_N=block_n,
            num_warps=4,
        )  # fmt: skip
    return out


def delta_blocks(width: int, value_width: int) -> tuple[int, int]:
    """The tile [dk, dv] of a program: whole columns, so that their sums need no other program."""
    block_k = next_power_of_two(width)
    return block_k, min(next_power_of_two(value_width), max(_TILE // block_k, 1))


def mamba2_blocks(width: int, size: int) -> tuple[int, int]:
    """The tile [p, N] of a program: whole rows."""
    block_n = next_power_of_two(size)
    return min(next_power_of_two(width), max(_TILE // block_n, 1)), block_n


def _checked(states: torch.Tensor, before: torch.Tensor) -> torch.Tensor:
    """States as the kernels index them.

    Raises:
        ValueError: they are not contiguous float32 states of the same shape.
    """
    if states.dtype != torch.float32 or not states.is_contiguous() or states.shape[1:] != before.shape[1:]:
        raise ValueError(
            f"States {tuple(states.shape)} of {states.dtype} for lines with states {tuple(before.shape)}: the kernels need "
            "contiguous float32 states of one shape."
        )
    return states


def _places(walk: Walk, before: torch.Tensor) -> torch.Tensor:
    """Memory for the states that a token other than the next one needs again."""
    return before.new_empty(max(walk.num_saved, 1), *before.shape[1:])


def convolution(
    x: torch.Tensor,
    windows: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    silu: bool,
    into: torch.Tensor,
    pool: torch.Tensor,
) -> torch.Tensor:
    """See `kernels.recurrent.convolution`.

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
