"""StepOutcome: the result of one decoding step, as drafters see it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from .draft_trees import DraftTrees
from .output import PackedOutput
from .sequence import Sequence


@dataclass
class StepOutcome:
    """The result of one decoding step, as drafters see it.

    "Forwarded rows" are all rows that the target's forward read, prompt chunks included; `sequences` are those of them whose
    drafts were verified.

    Attributes:
        sequences: the rows that were verified; their `tokens` already include the accepted ones.
        trees: the drafts that were verified (the proposal, or a prefix of its nodes).
        accepted: per row, the indices of the accepted nodes, root to leaf.
        new_tokens: per row, the ids appended: accepted nodes and the token after them, cut where the sequence stopped.
        output: the target's output with the features that `taps` asked for, valid until `observe` returns.
        starts: index in `output` at which each forwarded row begins (its pending tokens first, then its nodes).
        chunks: (sequence, end) of each forwarded row, in the order of `starts`: its tokens before `end` have been fed.
        num_own: per forwarded row, how many of those tokens this step fed.
        root_rows: per row of `sequences`, the index in `output.logits` of its root's logits; None: logits are contiguous.
        cache: the target's PagedStaticCache; None: the step's forward is not the target's own.
        verified: the step itself, if `accepted` are nodes of a drafter's own proposal (see `for_proposal`).
    """

    sequences: list[Sequence]
    trees: DraftTrees
    accepted: list[list[int]]
    new_tokens: list[list[int]]
    output: PackedOutput | None = None
    starts: list[int] | None = None
    chunks: list[tuple[Sequence, int]] | None = None
    num_own: list[int] | None = None
    root_rows: list[int] | None = None
    cache: Any = None
    verified: StepOutcome | None = None

    def for_proposal(self, accepted: list[list[int]]) -> StepOutcome:
        """The same step for a drafter whose own proposal is not what was verified.

        Args:
            accepted: per row, the accepted nodes of its own proposal, root to leaf.
        """
        real = self.verified or self
        return replace(real, accepted=accepted, verified=real)

    def of(self, belongs: Callable[[Sequence], bool]) -> StepOutcome:
        """The same step, as if it had only the sequences for which `belongs` is true."""
        verified = [i for i, seq in enumerate(self.sequences) if belongs(seq)]
        forwarded = [i for i, (seq, _) in enumerate(self.chunks or []) if belongs(seq)]
        counts = np.asarray(self.trees.lengths, dtype=np.int64) + 1
        root_rows = (np.cumsum(counts) - counts).tolist() if self.root_rows is None else self.root_rows

        def picked(values: list | None, rows: list[int]) -> list | None:
            return None if values is None else [values[i] for i in rows]

        return StepOutcome(
            [self.sequences[i] for i in verified], self.trees.select(verified), [self.accepted[i] for i in verified],
            [self.new_tokens[i] for i in verified], self.output, picked(self.starts, forwarded), picked(self.chunks, forwarded),
            picked(self.num_own, forwarded), picked(root_rows, verified), self.cache,
        )  # fmt: skip

    def read_rows(self) -> tuple[list[Sequence], np.ndarray, list[int]]:
        """The packed tokens of `output` that are now part of a text: each row's fed tokens, then its accepted nodes.

        Returns:
            The forwarded sequences; the packed indices, int64 numpy [sum of counts], row after row in text order; and the
            count of each row. A row's newest token has not been fed yet, so its indices stand for the `counts[i]` tokens
            before that one.
        """
        assert self.starts is not None and self.chunks is not None and self.num_own is not None
        real = self.verified or self
        accepted = {seq.id: path for seq, path in zip(real.sequences, real.accepted, strict=True)}
        sequences, indices, counts = [], [], []
        for (seq, _), start, num_own in zip(self.chunks, self.starts, self.num_own, strict=True):
            indices.append(np.arange(start, start + num_own))
            path = accepted.get(seq.id, [])
            if path:
                indices.append(start + num_own + np.asarray(path))
            sequences.append(seq)
            counts.append(num_own + len(path))
        return sequences, np.concatenate(indices), counts
