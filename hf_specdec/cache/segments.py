"""Layers that also attend to compressed segments of their text (DeepSeek-V4): each closed segment has one more key, its entry.

transformers keeps the inputs of the open segment in its cache, and the entries of the closed ones. A rejected draft would leave its marks
there. In pages, each token keeps its inputs in its slot, and the token that closes a segment the segment's entry, too: a token sees exactly
the entries of the tokens that it sees, in texts and in draft trees.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch


class SegmentSize(NamedTuple):
    """How a layer compresses: segments of `rate` tokens; an entry is made of the last `span` segments."""

    rate: int
    span: int


@dataclass
class ClosedSegments:
    """The n segments that the tokens of a forward close.

    Attributes:
        slots: int64 [n], of the tokens that close them.
        inputs: int64 [n, span * rate], the slots of the tokens whose inputs make each entry.
        missing: bool [n, span * rate], tokens before the text's beginning; None: there are none.
        shifts: int64 [n * span], what transformers adds to `rate` times the index of a segment to get its first token's position.
    """

    slots: torch.Tensor
    inputs: torch.Tensor
    missing: torch.Tensor | None
    shifts: torch.Tensor


class WithSegments:
    """The methods by which transformers' compressors call their layer of the cache. They return no entries: attention reads the pages.

    Attributes:
        segment: how the layer compresses; None: it does not.
        score: the indexer's scores [t, C] of the entries in this forward, for a part of its rows (see `model.segments.Part`).
    """

    segment: SegmentSize | None = None
    score: Callable[[Any], torch.Tensor]

    def _closed(self: Any, device: torch.device) -> ClosedSegments:
        return self.owner.batch.closed_segments(self.segment, device)

    def store_compression_weights(
        self: Any, name: str, kv: torch.Tensor, gate: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Keep the inputs [1, T, width] of new tokens. Returns those of the segments that they close, span by span, and their shifts."""
        self.write_further(name, self.owner.batch.on(kv.device).write_slots, torch.cat([kv, gate], dim=-1)[0][:, None])
        closed = self._closed(kv.device)
        values, gates = self.further[name][closed.inputs, 0].chunk(2, dim=-1)
        if closed.missing is not None:
            missing = closed.missing[:, :, None]
            values, gates = values.masked_fill(missing, 0), gates.masked_fill(missing, float("-inf"))
        return values.flatten(0, 1)[None], gates.flatten(0, 1)[None], closed.shifts

    def update_overlap_state(self, *_: Any) -> tuple[None, None]:
        """Nothing: the segment before each one stands beside it."""
        return None, None

    def update_compressor_states(self: Any, name: str, compressed: torch.Tensor) -> torch.Tensor:
        """Keep the entries [1, n * span, width] of closed segments, each the last one of its span."""
        span = self.segment.span
        entries = compressed[0, span - 1 :: span]
        self.write_further(entries_of(name), self._closed(compressed.device).slots, entries[:, None])
        none: Any = compressed[:, :0]
        none.layer = self  # for the indexer, which is given nothing else
        return none


def entries_of(name: str) -> str:
    """The name of the pool with the entries of a compressor."""
    return f"{name} entries"


def layer_of(entries: torch.Tensor) -> Any:
    """The layer whose entries were asked for; None: transformers' own cache gave these."""
    return getattr(entries, "layer", None)
