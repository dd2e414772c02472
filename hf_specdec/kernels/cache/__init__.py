"""Operations on the pools of a paged cache: write new keys and values, and move the slots of accepted tree nodes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from ..dispatch import uses_triton
from ..transfer import upload
from . import reference

# (keys [T, Hk, D], values [T, Hv, Dv], key_pool, value_pool, slots [T])
Write = Callable[..., Any]


def writer_for(device: torch.device) -> Write:
    """The implementation of `write_keys_values` for a device. Layers ask once per step: asking costs more than a small write."""
    if uses_triton(device):
        from .triton import write_keys_values

        return write_keys_values
    return reference.write_keys_values


def write_keys_values(
    keys: torch.Tensor, values: torch.Tensor, key_pool: torch.Tensor, value_pool: torch.Tensor, slots: torch.Tensor
) -> None:
    """Write the keys and values of T new tokens to their slots: [T, heads, width] each, `slots` int64 [T]."""
    writer_for(keys.device)(keys, values, key_pool, value_pool, slots)


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
    if uses_triton(keys.device):
        from .triton import write_keys_values

        rotated = write_keys_values(
            keys, values, key_pool, value_pool, slots, query=query, cos=cos.contiguous(), sin=sin.contiguous()
        )
        assert rotated is not None
        return rotated
    query, keys = (reference.rotate(each.transpose(0, 1), cos, sin).transpose(0, 1) for each in (query, keys))
    reference.write_keys_values(keys, values, key_pool, value_pool, slots)
    return query


class SlotMover:
    """Copies slots to other slots in all pools on one device.

    Args:
        pools: keys and values of every layer on the device, each [slots, heads, width]. A mover is valid until they are replaced.
    """

    def __init__(self, pools: list[torch.Tensor]):
        self.pools, self.device = pools, pools[0].device
        self._table: Any = None
        if uses_triton(self.device):
            from .triton import PoolTable

            self._table = PoolTable.of(pools)

    def move(self, moves: list[tuple[np.ndarray, np.ndarray]]) -> None:
        """Copy slots; one pair (sources, targets) of ascending int64 arrays per sequence."""
        if self._table is None:
            source, target = upload(np.stack([np.concatenate(each) for each in zip(*moves, strict=True)]), self.device)
            for pool in self.pools:
                reference.move_slots(pool, source, target)
            return
        from .triton import move_slots

        padded = np.full((2, len(moves), max(len(sources) for sources, _ in moves)), -1, dtype=np.int64)
        for row, pair in enumerate(moves):
            padded[:, row, : len(pair[0])] = pair
        source, target = upload(padded, self.device)
        move_slots(self._table, source, target)
