"""The data of one step: while it is pending, and its result."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from dataclasses import dataclass, field

import numpy as np
import torch

from ..config import SpeculativeConfig
from ..core.draft_trees import DraftTrees
from ..core.output import PackedOutput
from ..core.sequence import UNKNOWN, Sequence
from ..kernels.transfer import upload
from ..sampling.parameters import FusedSampling, fused_sampling, fuses_sampling
from ..sampling.logits import needs_prefix, process_logits
from ..verification.verify import PendingVerdict


@dataclass
class StepResult:
    """What one step did for one sequence.

    Attributes:
        sequence: the row; its `tokens` and `finished` are up to date.
        new_tokens: the ids appended, in order; empty while the prompt is still being read.
        nodes: per new token, the row of the step's logits [R, V] that chose it (see `SpeculativeDecoder.last`).
    """

    sequence: Sequence
    new_tokens: list[int] = field(default_factory=list)
    nodes: list[int] = field(default_factory=list)


@dataclass
class StepTensors:
    """Tensors of a step, for callers that return scores or hidden states.

    Attributes:
        output: the target's forward; valid until its next forward.
        processed: logits [R, V] after all processors except `sampling`, which verification applied itself.
        logit_rows: for each of the R rows, the packed token it belongs to.
        starts: sequence id → index of its first packed token.
        prompt_logits: sequence id → (index of the first prompt token that this step fed, logits [n, V] after each of the n tokens fed),
            for sequences that want them.
        failed: rows of the R that have no scores, because code of the user's raised for a drafted prefix.
    """

    output: PackedOutput
    processed: torch.Tensor
    sampling: FusedSampling | None
    logit_rows: np.ndarray
    starts: dict[int, int]
    prompt_logits: dict[int, tuple[int, torch.Tensor]] = field(default_factory=dict)
    failed: set[int] = field(default_factory=set)

    @functools.cached_property
    def scores(self) -> torch.Tensor:
        """Processed logits [R, V]."""
        return self.processed if self.sampling is None else self.sampling.applied_to(self.processed)

    def without_drafts(self, trees: DraftTrees) -> tuple[DraftTrees, StepTensors]:
        """The trees and the unprocessed tensors reduced to each row's root, as if nothing had been drafted."""
        if not any(trees.lengths):
            return trees, self
        counts = np.asarray(trees.lengths, dtype=np.int64) + 1
        root_rows = np.cumsum(counts) - counts
        logits = self.output.logits[upload(root_rows, self.output.logits.device)]
        output, logit_rows = dataclasses.replace(self.output, logits=logits), self.logit_rows[root_rows]
        tensors = dataclasses.replace(self, output=output, processed=logits, sampling=None, logit_rows=logit_rows)
        return dataclasses.replace(trees, lengths=[0] * len(trees.lengths)), tensors


@dataclass
class PendingStep:
    """A step whose result has not reached the host.

    Attributes:
        rows: every row of the forward, as (sequence, end): the sequence's tokens were fed up to `end`.
        num_own: per row, how many of its own tokens were fed.
        decoding: the rows that have read their whole prompt.
        limits: per decoding row, the draft depth that the policy allowed.
        trees: the drafts of the decoding rows.
        proposed: what of them the drafter itself proposed; other nodes come from predictions and grammars.
        num_drafted: per decoding row, how many of the draft's first nodes are the drafter's or the prediction's; the grammar's follow.
        tensors: results of the forward.
        verdict: which drafts are accepted; None if no row is decoding.
        unseen: the drafter need not be told what became of the step.
        is_held: the policy did not choose anew for it, and does not need its time.
    """

    rows: list[tuple[Sequence, int]]
    num_own: list[int]
    decoding: list[Sequence]
    limits: list[int]
    trees: DraftTrees
    proposed: DraftTrees
    num_drafted: list[int]
    tensors: StepTensors
    verdict: PendingVerdict | None
    unseen: bool = False
    is_held: bool = False

    @property
    def is_plain(self) -> bool:
        """True if every decoding row gets exactly one token."""
        return not any(self.trees.lengths)

    @functools.cached_property
    def next_tokens(self) -> dict[int, torch.Tensor]:
        """Sequence id → the token [1] that a step without drafts chose, on the device."""
        if self.verdict is None:
            return {}
        return dict(zip([seq.id for seq in self.decoding], self.verdict.next_tokens.split(1), strict=True))

    @contextlib.contextmanager
    def as_if_finished(self):
        """Inside the context, the rows look as this plain step will leave them; UNKNOWN stands for their last token."""
        for seq in self.decoding:
            seq.tokens.append(UNKNOWN)
            seq.num_steps += 1
        try:
            yield
        finally:
            for seq in self.decoding:
                seq.tokens.pop()
                seq.num_steps -= 1


def node_scores(
    sequences: list[Sequence],
    trees: DraftTrees,
    logits: torch.Tensor,
    config: SpeculativeConfig,
    failed: set[int] | None = None,
) -> tuple[torch.Tensor, FusedSampling | None]:
    """Logits [R, V] of every root and node after its row's processors, which see the node's own prefix; and the sampling parameters
    that the verification kernels apply themselves (None: they are applied already).

    Args:
        failed: receives the rows of nodes that have no scores, because code of the user's raised for their prefix.
    """
    if all(seq.processors is None for seq in sequences):
        return logits, None
    owners = [seq for seq, count in zip(sequences, trees.lengths, strict=True) for _ in range(count + 1)]
    paths = _drafted_paths(trees) if needs_prefix(sequences) else None
    if not fuses_sampling(sequences, config, logits.device):
        return process_logits(owners, paths, logits, drafted=any(trees.lengths), failed=failed), None
    scores = process_logits(owners, paths, logits, whole=False, drafted=any(trees.lengths), failed=failed)
    return scores, fused_sampling(trees, scores, sequences)


def _drafted_paths(trees: DraftTrees) -> list[torch.Tensor]:
    """For each row's root and each of its nodes, the drafted ids on the path from the row's text to it."""
    paths = []
    for i, count in enumerate(trees.lengths):
        paths.append(trees.tokens[i, :0])
        for node in range(count):
            nodes = np.flatnonzero(trees.ancestors[i, node + 1, 1:]) if not trees.is_chain else np.arange(node + 1)
            paths.append(trees.tokens[i, upload(nodes, trees.tokens.device)])
    return paths
