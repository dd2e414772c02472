"""Writing and moving keys and values in plain torch: the definition, and the CPU path."""

from __future__ import annotations

import torch

Scales = tuple[torch.Tensor, torch.Tensor]  # of keys and of values in int8: float32 [slots, heads, 1]
LEAST = 1e-30  # magnitude of keys and values from which scales are taken


def write_keys_values(
    keys: torch.Tensor, values: torch.Tensor, key_pool: torch.Tensor, value_pool: torch.Tensor, slots: torch.Tensor,
    scales: Scales | None = None,
) -> None:  # fmt: skip
    """Write the keys and values of T new tokens to their slots: [T, heads, width] each, `slots` int64 [T]. `scales`: of pools in int8."""
    for states, pool, of_pool in zip((keys, values), (key_pool, value_pool), scales or (None, None), strict=True):
        if of_pool is not None:
            states, of_states = quantized(states)
            of_pool.index_copy_(0, slots, of_states)
        pool.index_copy_(0, slots, states)


def quantized(states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys or values [T, heads, width] as int8, with a scale per token and head: float32 [T, heads, 1]. The largest magnitude is 127."""
    states = states.float()
    scales = states.abs().amax(dim=2, keepdim=True).clamp(min=LEAST) / 127
    return (states / scales).round().to(torch.int8), scales


def dequantized(states: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """What `quantized` states stand for."""
    return (states * scales).to(dtype)


def move_slots(pool: torch.Tensor, source: torch.Tensor, target: torch.Tensor) -> None:
    """Copy slots `source` [n] to `target` [n]. The two may overlap: all are read before any is written."""
    pool.index_copy_(0, target, pool.index_select(0, source))


def rotate_and_write(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    key_pool: torch.Tensor,
    value_pool: torch.Tensor,
    slots: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    scales: Scales | None = None,
) -> torch.Tensor:
    """As `write_keys_values`, but first rotate keys and queries [T, H, D] by angles [T, D]. Returns the rotated queries."""
    query, keys = (rotate(states.transpose(0, 1), cos, sin).transpose(0, 1) for states in (query, keys))
    write_keys_values(keys, values, key_pool, value_pool, slots, scales)
    return query


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotary embedding of x [.., T, D] by angles [T, D], computed in float32 (Su et al. 2021, halves as in GPT-NeoX)."""
    first, second = x.float().chunk(2, dim=-1)
    return (x.float() * cos.float() + torch.cat((-second, first), dim=-1) * sin.float()).to(x.dtype)
