"""Operations on the pools of a paged cache: write new keys and values, and move the slots of accepted tree nodes."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from ..dispatch import operation, uses_triton
from ..transfer import upload
from . import reference
from .reference import dequantized as dequantized

write_keys_values = operation(reference.write_keys_values)
rotate_and_write = operation(reference.rotate_and_write)


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
            source, target = upload(
                np.stack([np.concatenate(slots) for slots in zip(*moves, strict=True)]), self.device
            )
            for pool in self.pools:
                reference.move_slots(pool, source, target)
            return
        from .triton import move_slots

        padded = np.full((2, len(moves), max(len(sources) for sources, _ in moves)), -1, dtype=np.int64)
        for row, pair in enumerate(moves):
            padded[:, row, : len(pair[0])] = pair
        source, target = upload(padded, self.device)
        move_slots(self._table, source, target)
