"""Tied weights: tensors that a checkpoint stores several times, and modules that can share one copy."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

from .files import Checkpoint


def one_copy(checkpoint: Checkpoint, canonical: Callable[[str], str]) -> Callable[[str], str | None]:
    """A renaming for `Plan` in which all tensors with one canonical name are the same tensor: one copy of it is loaded.

    Raises:
        CheckpointError: (when the renaming is called) two copies differ.
    """
    first: dict[str, str] = {}

    def rename(name: str) -> str | None:
        target = canonical(name)
        kept = first.setdefault(target, name)
        if kept == name:
            return target
        if checkpoint.shape(kept) != checkpoint.shape(name) or not torch.equal(
            checkpoint.tensor(kept), checkpoint.tensor(name)
        ):
            raise checkpoint.error(f"ties its weights, but {kept} and {name} differ.")
        return None

    return rename


def share_equal(module: nn.Module) -> None:
    """Replace each block by the one before it if their weights are equal.

    The original Medusa and Hydra code repeats one block, and its files hold a copy for every place.
    """
    for blocks in [each for each in module.modules() if isinstance(each, (nn.ModuleList, nn.Sequential))]:
        for i in range(1, len(blocks)):
            own, before = blocks[i].state_dict(), blocks[i - 1].state_dict()
            if own.keys() == before.keys() and all(torch.equal(own[name], before[name]) for name in own):
                blocks[i] = blocks[i - 1]
