"""StepOutcome: what one step did, as drafters see it."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from .draft_trees import DraftTrees
from .output import PackedOutput
from .sequence import Sequence


@dataclass
class StepOutcome:
    """What one step did, as drafters see it.

    Attributes:
        sequences: the rows that were verified; `tokens` already hold what was accepted.
        trees: what was verified for them (the proposal, or a prefix of its nodes).
        accepted: per row, the indices of the accepted nodes, root to leaf.
        new_tokens: per row, the ids appended: accepted nodes and the token after them, cut where the sequence stopped.
        output: the target's forward with the features asked for by `taps`, valid until `observe` returns; None inside
            transformers' own loop.
        starts: where each forwarded row begins in `output` (its pending tokens first, then its nodes).
        chunks: (sequence, end) of every forwarded row, prompt chunks included, in `starts`' order: its tokens up to `end`
            have been fed.
        num_own: how many of them were fed in this step, per forwarded row.
        fed_at: per row of `sequences`, where the accepted nodes stand among its fed nodes; None: all nodes were fed.
        root_rows: per row of `sequences`, the row of `output`'s logits after its root; None: rows follow one another.
    """

    sequences: list[Sequence]
    trees: DraftTrees
    accepted: list[list[int]]
    new_tokens: list[list[int]]
    output: PackedOutput | None = None
    starts: list[int] | None = None
    chunks: list[tuple[Sequence, int]] | None = None
    num_own: list[int] | None = None
    fed_at: list[list[int]] | None = None
    root_rows: list[int] | None = None

    def read_rows(self) -> tuple[list[Sequence], np.ndarray, list[int]]:
        """Which of the T packed tokens of `output` became part of their texts: fed tokens, then accepted nodes.

        Returns: the sequences; the packed indices, int64 numpy [sum of counts], row after row in text order; counts per row.
            A row's last `counts[i]` tokens but its newest (which was not fed yet) are the ones meant.
        """
        assert self.starts is not None and self.chunks is not None and self.num_own is not None
        fed_at = self.accepted if self.fed_at is None else self.fed_at
        accepted = {seq.id: path for seq, path in zip(self.sequences, fed_at, strict=True)}
        sequences, indices, counts = [], [], []
        for (seq, _), start, own in zip(self.chunks, self.starts, self.num_own, strict=True):
            indices.append(np.arange(start, start + own))
            path = accepted.get(seq.id, [])
            if path:
                indices.append(start + own + np.asarray(path))
            sequences.append(seq)
            counts.append(own + len(path))
        return sequences, np.concatenate(indices), counts
