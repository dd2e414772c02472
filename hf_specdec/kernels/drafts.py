"""Drafts as the verification operations take them, and their upload to a device."""

from __future__ import annotations

from functools import cached_property
from typing import NamedTuple, Protocol

import numpy as np
import torch

from .transfer import upload, upload_together


class Drafts(Protocol):
    """Draft trees of B rows with up to N nodes: drafted ids on a device, everything else on the host (see `core.DraftTrees`)."""

    tokens: torch.Tensor
    lengths: list[int]
    probs: torch.Tensor | None
    prob_index: np.ndarray | None

    @property
    def is_chain(self) -> bool:
        """True if every row is known to be a chain."""
        ...

    @cached_property
    def valid(self) -> np.ndarray:
        """bool [B, N]: which entries are nodes."""
        ...

    @cached_property
    def parent_index(self) -> np.ndarray:
        """int64 [B, N]: each node's parent, -1 for children of the root."""
        ...

    @cached_property
    def ancestors(self) -> np.ndarray:
        """bool [B, N + 1, N + 1] over (root, nodes): `[b, i, j]` is True if j is i or an ancestor of i."""
        ...

    @cached_property
    def depths(self) -> np.ndarray:
        """int64 [B, N]: 1 for the root's children."""
        ...


class RowStreams(NamedTuple):
    """The random streams of B rows, on the host.

    Attributes:
        seeds: int64.
        positions: index of the token after the root.
        steps: verification rounds so far.
        do_sample: True for rows that sample.
    """

    seeds: list[int]
    positions: list[int]
    steps: list[int]
    do_sample: list[bool]


def upload_drafts(
    drafts: Drafts, score_rows: np.ndarray, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Score rows int64 [B, N + 1], tokens int64, valid bool and parents int64 [B, N] (None: chains) on the device."""
    arrays = [score_rows, drafts.valid] if drafts.is_chain else [score_rows, drafts.valid, drafts.parent_index]
    index, valid, *parents = upload_together(arrays, device)
    return index, drafts.tokens.to(device).contiguous(), valid, parents[0] if parents else None


def upload_streams(streams: RowStreams, device: torch.device) -> tuple[torch.Tensor, ...]:
    """Seeds, positions and steps int64 [B] and do_sample bool [B] on the device, in one copy."""
    seeds, positions, steps, do_sample = upload(torch.tensor(streams, dtype=torch.long), device)
    return seeds, positions, steps, do_sample > 0


def prob_index_on(drafts: Drafts, device: torch.device) -> torch.Tensor:
    """Which of `drafts.probs` each node was drawn from, int64 [B, N]."""
    batch, width = drafts.tokens.shape
    if drafts.prob_index is None:
        return torch.arange(width, device=device).expand(batch, -1)
    return upload(drafts.prob_index, device)


def last_node(path: torch.Tensor) -> torch.Tensor:
    """Where each path bool [B, N] ends: the index of its last node + 1, or 0 for the root; int64 [B]."""
    if path.shape[1] == 0:
        return torch.zeros(path.shape[0], dtype=torch.long, device=path.device)
    return (path * torch.arange(1, path.shape[1] + 1, device=path.device)).amax(1)
