"""RowInput: one sequence's part of a forward."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import numpy as np
import torch


@dataclass(frozen=True)
class Chunks:
    """Attention within chunks of `size` positions (Llama 4), instead of a sliding window: a token sees no key before its own chunk."""

    size: int


@dataclass
class RowInput:
    """The t new tokens of one sequence, `drafts` included.

    Attributes:
        seq_id: id of the sequence in the cache.
        tokens: int64 ids [t - n], as numpy on the host or as a tensor that is already on the device.
        start: logical index of the first new token.
        positions: numpy [t]; None: `start`, `start + 1`, ..
        visibility: bool numpy [t, m]: which of the row's last m slots each new token sees; the new tokens' own slots come
            last. Every token sees all slots before these. None: causal. Trees need it.
        region_positions: numpy [m], positions of those m slots; sliding windows need them with `visibility`.
        window_positions: numpy [t], positions of the new tokens for sliding windows only; None: `positions`.
        logits: how many of the last tokens need logits.
        drafts: ids [n] of the draft tokens that follow `tokens`, on the device; None: no drafts.
        offset: added to the positions that the model is given; windows and masks go by `positions`. Several: one per axis of
            the positions (M-RoPE).
        prompt: how many of the first tokens belong to a prompt: layers with a recurrent state read these in their chunk form, as
            plain generate() does, and all others token by token.
        adapter: name of the row's adapter (see `Sequence.adapter`).
        num_tokens: t. Whoever changes `tokens` or `drafts` changes it too.
    """

    seq_id: int
    tokens: np.ndarray | torch.Tensor
    start: int
    positions: np.ndarray | None = None
    visibility: np.ndarray | None = None
    region_positions: np.ndarray | None = None
    window_positions: np.ndarray | None = None
    logits: int = 1
    drafts: torch.Tensor | None = None
    offset: int | tuple[int, ...] = 0
    prompt: int = 0
    adapter: str | None = None
    num_tokens: int = field(init=False)

    def __post_init__(self) -> None:
        self.num_tokens = self.tokens.shape[0] + (0 if self.drafts is None else self.drafts.shape[0])

    def part(self, first: int, end: int) -> RowInput:
        """The tokens from `first` up to `end` of a causal row without drafts."""
        count = end - first
        logits, prompt = self.logits - (self.num_tokens - end), self.prompt - first
        return replace(
            self, tokens=self.tokens[first:end], start=self.start + first, logits=min(max(logits, 0), count),
            prompt=min(max(prompt, 0), count),
        )  # fmt: skip


def groups_of(rows: list[RowInput], most: int) -> list[list[RowInput]] | None:
    """The rows in groups of at most `most` tokens, in order; none without rows. Long texts are divided; None if a longer row cannot be."""
    if sum([row.num_tokens for row in rows]) <= most:
        return [rows] if rows else []
    groups: list[list[RowInput]] = [[]]
    room = most
    for row in rows:
        is_whole = not (row.visibility is None and row.positions is None and row.drafts is None)
        if is_whole and row.num_tokens > most:
            return None
        first, count = 0, row.num_tokens
        while first < count:
            if room < (count if is_whole else 1):
                groups.append([])
                room = most
            end = min(first + room, count)
            groups[-1].append(row if end - first == count else row.part(first, end))
            room -= end - first
            first = end
    return groups
