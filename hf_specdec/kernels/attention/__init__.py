"""Attention over a paged cache, for ragged batches with trees.

`attention_for` chooses the implementation once per step; layers then call what it returned.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from ..dispatch import operation
from . import reference

# (query [T, H, D], key_pool, value_pool, batch, scaling, *, window, softcap, sinks, biases) -> [T, H, Dv]
attend = operation(reference.attend, native=True)
attend_invariant = operation(reference.attend_invariant)


def attention_for(
    device: torch.device, invariant: bool = False, with_native: bool = True
) -> Callable[..., torch.Tensor]:
    """The implementation for a device. Ask once per step, not per layer: the choice takes longer than the views of a small layer.

    Args:
        with_native: the native library may be used.
        invariant: each query's result must not depend, bit for bit, on the rest of the batch.
    """
    return (attend_invariant if invariant else attend).on(device, with_native)
