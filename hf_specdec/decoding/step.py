"""The data of one step: what its rows feed, the scores of its nodes, what is pending, and its result."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
from dataclasses import dataclass, field

import numpy as np
import torch

from ..config import SpeculativeConfig
from ..core.draft_trees import DraftTrees
from ..core.output import PackedOutput
from ..core.rows import RowInput
from ..core.sequence import UNKNOWN, Sequence
from ..kernels.transfer import upload
from ..model.onward_rows import OnwardRows, StepRows
from ..sampling.logits import needs_prefix, process_logits
from ..sampling.parameters import FusedSampling, fused_sampling, fuses_sampling
from ..verification.verify import PendingVerdict


@dataclass(slots=True)
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
        is_still: the policy was not asked. Later it is told how many such steps there were.
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
    is_still: bool = False

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


@dataclass
class FedRows:
    """The rows of one forward.

    Attributes:
        inputs: per row, its own tokens, followed by its tree if it is decoding.
        starts: sequence id → index of its first packed token.
        logit_rows: int64 numpy [R], the packed token that each row of the logits [R, V] follows.
        chosen: int64 numpy, which of the R rows belong to roots and nodes. The others are for `prompts`; without those it is empty.
        prompts: sequence id → (index of the first prompt token that this step feeds, the prompt's rows among the R), for sequences that
            want the logits of their prompts.
    """

    inputs: list[RowInput]
    starts: dict[int, int]
    logit_rows: np.ndarray
    chosen: np.ndarray
    prompts: dict[int, tuple[int, np.ndarray]] = field(default_factory=dict)

    @classmethod
    def of(
        cls,
        rows: list[tuple[Sequence, int]],
        fed: list[int],
        trees: DraftTrees,
        next_tokens: dict[int, torch.Tensor],
        onward: OnwardRows,
    ) -> FedRows:
        """The rows as the target reads them.

        Args:
            rows: (sequence, end): the sequence's tokens up to `end` are fed. If that is all of them, its tree follows. Those that go on
                are left out.
            fed: per row, how many of its tokens were fed before.
            trees: the drafts of the rows that are fed whole, in order.
            next_tokens: sequence id → its last token [1], on the device, where the host does not know it yet.
            onward: the rows before them, which go on without drafts.
        """
        inputs, starts, prompts = StepRows(onward), dict(onward.places), {}
        packed = drafted = len(inputs)
        if not rows:
            return cls(inputs, starts, np.arange(packed), np.zeros(0, dtype=np.int64))
        logit_rows, num_wanted = list(range(packed)), [1] * packed
        for (seq, end), start in zip(rows, fed, strict=True):
            tokens = next_tokens[seq.id] if seq.id in next_tokens else np.array(seq.tokens[start:end], dtype=np.int64)
            row = RowInput(
                seq.id, tokens, start, logits=0, offset=seq.position_offset, prompt=seq.num_chunked(start, end),
                adapter=seq.adapter,
            )  # fmt: skip
            if end == len(seq.tokens):
                if trees.lengths[drafted]:
                    _append_tree(row, trees, drafted)
                row.logits = 1 + trees.lengths[drafted]
                drafted += 1
            num_wanted.append(row.logits)
            if seq.wants_prompt_logits and start < seq.prompt_length:
                row.logits = row.num_tokens
                first = len(logit_rows)
                prompts[seq.id] = start, np.arange(first, first + min(end, seq.prompt_length) - start)
            starts[seq.id] = packed
            inputs.append(row)
            packed += row.num_tokens
            logit_rows += range(packed - row.logits, packed)
        chosen = []
        if prompts:
            ends = itertools.accumulate([row.logits for row in inputs])
            chosen = [i for end, count in zip(ends, num_wanted, strict=True) for i in range(end - count, end)]
        return cls(inputs, starts, np.array(logit_rows, dtype=np.int64), np.array(chosen, dtype=np.int64), prompts)

    def results(self, output: PackedOutput) -> StepTensors:
        """The step's tensors after the target's forward. Nothing is processed yet."""
        if not self.prompts:
            return StepTensors(output, output.logits, None, self.logit_rows, self.starts)
        logits, device = output.logits, output.logits.device
        prompts = {seq_id: (start, logits[upload(index, device)]) for seq_id, (start, index) in self.prompts.items()}
        output = dataclasses.replace(output, logits=logits[upload(self.chosen, device)])
        return StepTensors(output, output.logits, None, self.logit_rows[self.chosen], self.starts, prompts)


def _append_tree(row: RowInput, trees: DraftTrees, index: int) -> None:
    """Let one of the trees follow a row's own tokens (which are causal)."""
    count, num_own, nodes = trees.lengths[index], row.num_tokens, trees.tokens[index]
    row.drafts = nodes if count == nodes.shape[0] else nodes[:count]
    row.num_tokens += count
    if trees.is_chain:
        return
    positions = row.start + np.arange(num_own + count)
    positions[num_own:] = positions[num_own - 1] + trees.depths[index, :count]
    visibility = np.tri(num_own + count, dtype=bool)
    visibility[num_own:, num_own:] = trees.ancestors[index, 1 : count + 1, 1 : count + 1]
    row.positions, row.visibility, row.region_positions = positions, visibility, positions
