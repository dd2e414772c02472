"""LastHiddenGenerator: base of drafters that read only the target's last hidden state and keep no KV (Medusa, Hydra, MLPs)."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn

from ...core.outcome import StepOutcome
from ...core.output import Taps
from ...core.sequence import Sequence
from ...kernels.transfer import upload
from ...model.options.prepacked import prepack
from ...model.options.replaced_linears import few_row_linears, native_linears
from ...model.packed_model import PackedModel
from ..base import CandidateGenerator, RunsModel
from ..checkpoints.config import HeadConfig
from ..checkpoints.target_parts import DraftVocabulary, device_and_dtype
from .grower import GrowsDrafts


@dataclass
class LastHiddenConfig(HeadConfig):
    """Keys of methods whose checkpoints have one head per depth; by default drafts use all heads."""

    default_num_speculative_tokens = 8  # an upper bound: published checkpoints have 3 to 7 heads


class LastHiddenGenerator(GrowsDrafts, CandidateGenerator, RunsModel):
    """Drafts from each sequence's newest token and the target's final hidden state before it.

    One row [H] is kept per sequence: the target's hidden state (after the last norm, as its language-model head reads it, or after
    the layer in `taps`) that produced the sequence's newest token. A sequence without one, because its prompt is still being read or it was
    evicted, gets no draft.

    A subclass implements

    * `begin(hidden, tokens)`: logits [R, Vd] of the token after each text, from the target's last hidden states [R, H] and
      the newest tokens int64 [R]. It sets `state` [R, 1, S] to the state that nodes below need;
    * `expand(level)`: logits [R, F, Vd] of the token after each node, or [R, 1, Vd] if the nodes of a row share them.
      `carried(level)` is the state [R, F, S] of the nodes' parents; the nodes' own state [R, F, S] is assigned to
      `state`. Heads that read only the root's state set it to `remaining(level)`, which drops the rows that
      have ended.

    Head number `level.depth` predicts the token after a node; head 0 the token after the text.

    Args:
        heads: the drafter's weights, already on their device.
        num_heads: bounds the depth of drafts.

    Raises:
        SpeculativeConfigError: the configuration asks for deeper drafts.
    """

    taps = Taps(last_hidden=True, newest_only=True)

    def __init__(
        self, config: LastHiddenConfig, target: PackedModel, heads: nn.Module, num_heads: int, has_loop: bool = True
    ):
        super().__init__(config, target)
        self.device, self.dtype = device_and_dtype(target)
        self.grow_as(config.shape_within(num_heads), has_loop)
        self.config = config.bounded(self.shape.depth)
        self.vocabulary = DraftVocabulary(target.vocab_size)
        self.hidden: dict[int, torch.Tensor] = {}  # per sequence, the state [H] that its newest token was chosen from
        self._use(heads)

    def _use(self, heads: nn.Module) -> None:
        self._heads = heads
        graphs, packed = self.target.graphs is not None, self.config.prepack_weights
        natively = not (graphs or packed or self.config.native is False)
        self._linears = (
            native_linears(heads) if natively else few_row_linears(heads) if graphs else prepack(heads, packed)
        )

    def use_heads(self, name: str, lm_heads: Iterable[nn.Module]) -> Any:
        """Draft with a copy of the drafter's weights whose list of this name holds these language-model heads. Returns the copy."""
        heads = copy.copy(self._heads)
        heads.__dict__["_modules"] = {**heads._modules, name: nn.ModuleList(lm_heads)}
        self._use(heads)
        return heads

    def modules(self) -> list[nn.Module]:
        return [self._heads, *super().modules()]

    # ---- the round --------------------------------------------------------------------------------------------------

    def reach(self, seq: Sequence, limit: int) -> int:
        """The limit; 0 if its hidden state is not known."""
        return limit if seq.id in self.hidden else 0

    def roots(self, sequences: list[Sequence], limits: list[int]) -> tuple[torch.Tensor, ...]:
        """Hidden states [R, H] and newest tokens int64 [R], for `begin`."""
        hidden = torch.stack([self.hidden[seq.id] for seq in sequences])
        return hidden, upload([seq.tokens[-1] for seq in sequences], self.device)

    def observe(self, outcome: StepOutcome) -> None:
        """Keep the hidden state that produced each verified sequence's newest token."""
        assert outcome.output is not None
        going = {seq.id for seq in outcome.sequences if not seq.finished}
        read, rows, counts = outcome.read_rows()
        last = rows[np.cumsum(counts) - 1].tolist()
        kept = {seq.id: row for seq, row in zip(read, last, strict=True) if seq.id in going}
        if kept:
            states = outcome.output.layers[self.taps.layers[0]] if self.taps.layers else outcome.output.last_hidden
            assert states is not None
            states = states.index_select(0, upload(list(kept.values()), states.device)).to(self.device, self.dtype)
            self.hidden.update(zip(kept, states.unbind(), strict=True))

    # ---- memory and membership --------------------------------------------------------------------------------------

    def active(self) -> contextlib.AbstractContextManager:
        return contextlib.nullcontext() if self._linears is None else self._linears.active()

    def release(self) -> None:
        self.hidden.clear()
        self.state = None

    def evict(self, seq: Sequence) -> None:
        """Forget the hidden state; the target will read the text again."""
        self.hidden.pop(seq.id, None)

    def stop(self, seq: Sequence) -> None:
        self.hidden.pop(seq.id, None)
