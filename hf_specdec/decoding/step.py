"""What one step of the loop holds: while its verdict is on the way, and what came of it."""

from __future__ import annotations

import contextlib
import functools
from dataclasses import dataclass, field

import numpy as np
import torch

from ..core.draft_trees import DraftTrees
from ..core.output import PackedOutput
from ..core.sequence import UNKNOWN, Sequence
from ..sampling.fused import FusedSampling
from ..verification.verify import PendingVerdict


@dataclass
class StepResult:
    """What one step did for one sequence.

    Attributes:
        sequence: the row; its `tokens` and `finished` are up to date.
        new_tokens: ids appended, in order; empty while a prompt is still being read.
        nodes: where the logits that chose each new token are among the step's R rows (see `SpeculativeDecoder.last`).
    """

    sequence: Sequence
    new_tokens: list[int] = field(default_factory=list)
    nodes: list[int] = field(default_factory=list)


@dataclass
class StepTensors:
    """The tensors of the last step, for callers that return scores or hidden states.

    Attributes:
        output: the target's forward, valid until its next.
        processed: its logits [R, V] through all processors but `sampling`, which verification applied itself.
        logit_rows: for each of the R rows, which packed token it belongs to.
        starts: sequence id → where its row begins among the packed tokens.
    """

    output: PackedOutput
    processed: torch.Tensor
    sampling: FusedSampling | None
    logit_rows: np.ndarray
    starts: dict[int, int]

    @functools.cached_property
    def scores(self) -> torch.Tensor:
        """Processed logits [R, V]."""
        return self.processed if self.sampling is None else self.sampling.applied_to(self.processed)


@dataclass
class PendingStep:
    """A step whose verdict the host does not know yet.

    Attributes:
        rows: (sequence, end) of every row in the forward: its own tokens were fed up to `end`.
        num_own: how many of its own tokens each fed.
        decoding: those of the rows that read no prompt any more, with what the policy allowed each and the tree it got.
        tensors: of the forward.
        verdict: on the trees; None if no row is decoding.
    """

    rows: list[tuple[Sequence, int]]
    num_own: list[int]
    decoding: list[Sequence]
    limits: list[int]
    trees: DraftTrees
    tensors: StepTensors
    verdict: PendingVerdict | None

    @property
    def is_plain(self) -> bool:
        """Whether each decoding row gets exactly one token."""
        return not any(self.trees.lengths)

    @functools.cached_property
    def next_tokens(self) -> dict[int, torch.Tensor]:
        """Sequence id → the token [1] that a plain step chose, on the device."""
        if self.verdict is None:
            return {}
        return dict(zip([seq.id for seq in self.decoding], self.verdict.next_tokens.split(1), strict=True))

    @contextlib.contextmanager
    def foreseen(self):
        """Inside, the rows are as a plain step will leave them, but that nobody knows their last token."""
        for seq in self.decoding:
            seq.tokens.append(UNKNOWN)
            seq.num_steps += 1
        try:
            yield
        finally:
            for seq in self.decoding:
                seq.tokens.pop()
                seq.num_steps -= 1
