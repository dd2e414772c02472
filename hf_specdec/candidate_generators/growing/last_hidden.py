"""LastHiddenGenerator: base of drafters that read only the target's last hidden state and keep no KV (Medusa, Hydra, MLPs)."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass

import numpy as np
import torch
from torch import nn

from ...core.outcome import StepOutcome
from ...core.output import Taps
from ...core.sequence import Sequence
from ...kernels.transfer import upload
from ...model.options.prepacked import prepack
from ...model.options.replaced_linears import few_row_linears
from ...model.packed_model import PackedModel
from ..base import CandidateGenerator, RunsModel
from ..checkpoints.config import HeadConfig
from ..checkpoints.target_parts import device_and_dtype
from .grower import Grower, GrowsDrafts


@dataclass
class LastHiddenConfig(HeadConfig):
    """Keys of methods whose checkpoints have one head per depth; by default drafts use all heads."""

    default_num_speculative_tokens = 8  # an upper bound: published checkpoints have 3 to 7 heads


class LastHiddenGenerator(GrowsDrafts, CandidateGenerator, RunsModel):
    """Drafts from each sequence's newest token and the target's final hidden state before it.

    One row [H] is kept per sequence: the target's hidden state (after the last norm, as its language-model head reads it)
    that produced the sequence's newest token. A sequence without one, because its prompt is still being read or it was
    evicted, gets no draft.

    A subclass sets `vocabulary` in its `__init__`, and implements

    * `begin(hidden, tokens)`: logits [R, Vd] of the token after each text, from the target's last hidden states [R, H] and
      the newest tokens int64 [R]. It sets `grower.state` [R, 1, S] to the state that nodes below need;
    * `expand(level)`: logits [R, F, Vd] of the token after each node, or [R, 1, Vd] if the nodes of a row share them.
      `grower.carried(level)` is the state [R, F, S] of the nodes' parents; the nodes' own state [R, F, S] is assigned to
      `grower.state`. Heads that read only the root's state set it to `grower.remaining(level)`, which drops the rows that
      have ended.

    Head number `level.depth` predicts the token after a node; head 0 the token after the text.

    Args:
        heads: the drafter's weights, already on their device.
        num_heads: bounds the depth of drafts.

    Raises:
        SpeculativeConfigError: the configuration asks for deeper drafts.
    """

    taps = Taps(last_hidden=True, newest_only=True)

    def __init__(self, config: LastHiddenConfig, target: PackedModel, heads: nn.Module, num_heads: int):
        super().__init__(config, target)
        self.device, self.dtype = device_and_dtype(target)
        self.grower = Grower(self, config.shape_within(num_heads))
        self.config = config.bounded(self.grower.shape.depth)
        self.slots: dict[int, int] = {}  # sequence id → its row of `hidden`
        self.known: set[int] = set()  # ids of the sequences whose row is filled
        self.hidden: torch.Tensor | None = None  # [slots, H]
        self._free: list[int] = []
        self._num_expected = 1
        self._heads = heads
        graphs = target.graphs is not None
        self._linears = few_row_linears(heads) if graphs else prepack(heads, config.prepack_weights)

    def modules(self) -> list[nn.Module]:
        return self.and_shared(self._heads)

    # ---- the round --------------------------------------------------------------------------------------------------

    def ready(self, sequences: list[Sequence], limits: list[int]) -> list[int]:
        """The limits; 0 for rows whose hidden state is not known."""
        return [limit if seq.id in self.known else 0 for seq, limit in zip(sequences, limits, strict=True)]

    def roots(self, sequences: list[Sequence], limits: list[int]) -> tuple[torch.Tensor, ...]:
        """Hidden states [R, H] and newest tokens int64 [R], for `begin`."""
        assert self.hidden is not None
        index = upload([[self.slots[seq.id], seq.tokens[-1]] for seq in sequences], self.device)
        return self.hidden.index_select(0, index[:, 0]), index[:, 1]

    def observe(self, outcome: StepOutcome) -> None:
        """Keep the hidden state that produced each verified sequence's newest token."""
        assert outcome.output is not None and outcome.output.last_hidden is not None
        going = {seq.id for seq in outcome.sequences if not seq.finished}
        read, rows, counts = outcome.read_rows()
        last = rows[np.cumsum(counts) - 1].tolist()
        pairs = [(self.slots[seq.id], row) for seq, row in zip(read, last, strict=True) if seq.id in going]
        if not pairs:
            return
        taken = outcome.output.last_hidden
        buffer = self._buffer(taken.shape[1])
        slots, index = upload(pairs, taken.device).unbind(1)
        buffer.index_copy_(0, slots.to(buffer.device), taken.index_select(0, index).to(buffer))
        self.known |= going

    # ---- memory and membership --------------------------------------------------------------------------------------

    def _buffer(self, width: int) -> torch.Tensor:
        """`hidden`, grown to a row per slot."""
        needed = max(len(self.slots) + len(self._free), self._num_expected)
        have = 0 if self.hidden is None else len(self.hidden)
        if self.hidden is None or have < needed:
            grown = torch.zeros(max(needed, 2 * have), width, dtype=self.dtype, device=self.device)
            if self.hidden is not None:
                grown[:have] = self.hidden
            self.hidden = grown
        return self.hidden

    def active(self) -> contextlib.AbstractContextManager:
        return contextlib.nullcontext() if self._linears is None else self._linears.active()

    def allocate(self, num_tokens: int, num_sequences: int, block_size: int) -> None:
        """Note how many rows are needed; they are allocated with the first hidden state."""
        self._num_expected = num_sequences

    def release(self) -> None:
        self.hidden = self.grower.state = None

    def start(self, seq: Sequence) -> None:
        self.slots[seq.id] = self._free.pop() if self._free else len(self.slots)

    def evict(self, seq: Sequence) -> None:
        """Forget the hidden state; the target will read the text again."""
        self.known.discard(seq.id)

    def stop(self, seq: Sequence) -> None:
        self._free.append(self.slots.pop(seq.id))
        self.known.discard(seq.id)
