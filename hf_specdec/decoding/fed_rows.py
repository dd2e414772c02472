"""FedRows: what each row feeds to a step's forward, and what the rows of its logits belong to."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field

import numpy as np
import torch

from ..core.draft_trees import DraftTrees
from ..core.output import PackedOutput
from ..core.rows import RowInput
from ..core.sequence import Sequence
from ..kernels.transfer import upload
from .step import StepTensors


@dataclass
class FedRows:
    """The rows of one forward.

    Attributes:
        inputs: per row, its own tokens, followed by its tree if it is decoding.
        starts: sequence id → index of its first packed token.
        logit_rows: int64 numpy [R], the packed token that each row of the logits [R, V] follows.
        chosen: int64 numpy, those of the R rows that belong to roots and nodes. The others are only for `prompts`.
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
    ) -> FedRows:
        """The rows as the target reads them.

        Args:
            rows: (sequence, end): the sequence's tokens up to `end` are fed. If that is all of them, its tree follows.
            fed: per row, how many of its tokens were fed before.
            trees: the drafts of the rows that are fed whole, in order.
            next_tokens: sequence id → its last token [1], on the device, where the host does not know it yet.
        """
        inputs, starts, prompts = [], {}, {}
        logit_rows, chosen = list[int](), list[int]()
        packed = drafted = 0
        for (seq, end), start in zip(rows, fed, strict=True):
            tokens = next_tokens[seq.id] if seq.id in next_tokens else np.asarray(seq.tokens[start:end], dtype=np.int64)
            row = RowInput(seq.id, tokens, start, logits=0, offset=seq.position_offset, adapter=seq.adapter)
            row.prompt = seq.num_chunked(start, end)
            if end == len(seq.tokens):
                _append_tree(row, trees, drafted)
                row.logits = 1 + trees.lengths[drafted]
                drafted += 1
            wanted = row.logits
            if seq.wants_prompt_logits and start < seq.prompt_length:
                row.logits = row.num_tokens
                first = len(logit_rows)
                prompts[seq.id] = start, np.arange(first, first + min(end, seq.prompt_length) - start)
            starts[seq.id] = packed
            inputs.append(row)
            packed += row.num_tokens
            logit_rows += range(packed - row.logits, packed)
            chosen += range(len(logit_rows) - wanted, len(logit_rows))
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
    if not count:
        return
    row.drafts = nodes if count == nodes.shape[0] else nodes[:count]
    row.num_tokens += count
    if trees.is_chain:
        return
    positions = row.start + np.arange(num_own + count)
    positions[num_own:] = positions[num_own - 1] + trees.depths[index, :count]
    visibility = np.tri(num_own + count, dtype=bool)
    visibility[num_own:, num_own:] = trees.ancestors[index, 1 : count + 1, 1 : count + 1]
    row.positions, row.visibility, row.region_positions = positions, visibility, positions
