"""Writing and moving keys and values in plain torch: the definition, and the CPU path."""

from __future__ import annotations

import torch


def write_keys_values(
    keys: torch.Tensor, values: torch.Tensor, key_pool: torch.Tensor, value_pool: torch.Tensor, slots: torch.Tensor
) -> None:
    """Write the keys and values of T new tokens to their slots: [T, heads, width] each, `slots` int64 [T]."""
    key_pool.index_copy_(0, slots, keys)
    value_pool.index_copy_(0, slots, values)


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
) -> torch.Tensor:
    """As `write_keys_values`, but first rotate keys and queries [T, H, D] by angles [T, D]. Returns the rotated queries."""
    query, keys = (rotate(states.transpose(0, 1), cos, sin).transpose(0, 1) for states in (query, keys))
    write_keys_values(keys, values, key_pool, value_pool, slots)
    return query


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotary embedding of x [.., T, D] by angles [T, D], computed in float32 (Su et al. 2021, halves as in GPT-NeoX)."""
    first, second = x.float().chunk(2, dim=-1)
    return (x.float() * cos.float() + torch.cat((-second, first), dim=-1) * sin.float()).to(x.dtype)
