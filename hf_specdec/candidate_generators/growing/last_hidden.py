"""LastHiddenGenerator: base of drafters that read only the target's last hidden state and keep no KV (Medusa, Hydra, MLPs)."""

from __future__ import annotations

import contextlib
import dataclasses
from abc import abstractmethod
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
import torch
from torch import nn

from ...core.outcome import StepOutcome
from ...core.output import Taps
from ...core.sequence import Sequence
from ...kernels.transfer import upload
from ...model.options.joined_linears import JoinedLinears, few_row_linears
from ...model.options.prepacked import prepack
from ...model.packed_model import PackedModel
from ..base import DrafterContext
from ..checkpoints.config import ProposedLengthConfig
from ..checkpoints.target_parts import device_and_dtype
from .grower import GrowingGenerator
from .tree_shapes import DynamicTree, TreeShape, TreeTemplate

LastHidden = TypeVar("LastHidden", bound="LastHiddenConfig")


@dataclass
class LastHiddenConfig(ProposedLengthConfig):
    """Keys of methods whose checkpoints have one head per depth; by default drafts use all heads."""

    default_num_speculative_tokens = 8  # an upper bound: published checkpoints have 3 to 7 heads

    def bounded(self: LastHidden, depth: int) -> LastHidden:
        """This configuration with `depth` as its number of draft tokens."""
        if self.num_speculative_tokens == depth:
            return self
        return dataclasses.replace(self, num_speculative_tokens=depth)


def bounded_shape(config: LastHiddenConfig, shape: TreeShape, num_heads: int) -> TreeShape:
    """The configured shape, cut to the number of heads unless the user asked for more.

    Raises:
        SpeculativeConfigError: the configuration asks for deeper drafts.
    """
    if shape.depth <= num_heads:
        return shape
    is_bound = not config.length_given or (config.draft_length == "auto" and config.depth is None)
    if isinstance(shape, DynamicTree) and is_bound:
        return dataclasses.replace(shape, depth=num_heads)
    if shape.is_chain and is_bound:
        return TreeTemplate.from_widths([1] * num_heads)
    asked = max(shape.depth, config.num_speculative_tokens or 0)  # the shape's depth is bounded
    raise config.fail(
        "num_speculative_tokens",
        f"(or the tree) asks for drafts of {asked} tokens, but {config.model!r} has heads for {num_heads}: use at most {num_heads}, "
        "or leave it out.",
    )


class LastHiddenGenerator(GrowingGenerator):
    """Drafts from each sequence's newest token and the target's final hidden state before it.

    One row [H] is kept per sequence: the target's hidden state (after the last norm, as its language-model head reads it)
    that produced the sequence's newest token. A sequence without one, because its prompt is still being read or it was
    evicted, gets no draft.

    A subclass sets `vocabulary` and calls `set_heads` in its `__init__`, and implements

    * `begin(hidden, tokens)`: logits [R, Vd] of the token after each text, from the target's last hidden states [R, H] and
      the newest tokens int64 [R]. It sets `self.state` [R, 1, S] to the state that nodes below need;
    * `expand(level)`: logits [R, F, Vd] of the token after each node, or [R, 1, Vd] if the nodes of a row share them.
      `self.carried(level)` is the state [R, F, S] of the nodes' parents; the nodes' own state [R, F, S] is assigned to
      `self.state`. Heads that read only the root's state set `self.state = self.remaining(level)`, which drops the rows that
      have ended.

    Head number `level.depth` predicts the token after a node; head 0 the token after the text.
    """

    has_loop = True
    config: LastHiddenConfig
    taps = Taps(last_hidden=True)
    taps_whole_text = False

    def __init__(self, config: LastHiddenConfig, target: PackedModel, context: DrafterContext | None = None):
        super().__init__(config, target, context)
        self.device, self.dtype = device_and_dtype(target)
        self.slots: dict[int, int] = {}  # sequence id → its row of `hidden`
        self.known: set[int] = set()  # ids of the sequences whose row is filled
        self.hidden: torch.Tensor | None = None  # [slots, H]
        self._free: list[int] = []
        self._num_expected = 1
        self._linears: JoinedLinears | None = None

    def set_heads(self, heads: nn.Module, num_heads: int) -> None:
        """Set the drafter's weights, already on their device, and the number of heads, which bounds the depth of drafts.

        Raises:
            SpeculativeConfigError: the configuration asks for deeper drafts.
        """
        self._heads = heads
        graphs = self.target.graphs is not None
        self._linears = few_row_linears(heads) if graphs else prepack(heads, self.config.prepack_weights)
        self.shape = bounded_shape(self.config, self.shape, num_heads)
        self.config = self.with_checkpoint_defaults(self.config)

    def modules(self) -> list[nn.Module]:
        """The heads, and what they may share with the target."""
        model = self.target.model
        shared = (model.get_input_embeddings(), model.get_output_embeddings())
        return [self._heads, *(each for each in shared if each is not None)]

    def with_checkpoint_defaults(self, config: LastHiddenConfig) -> LastHiddenConfig:
        """The configuration with the draft length bounded by the number of heads."""
        return config.bounded(self.shape.depth)

    @abstractmethod
    def begin(self, *roots: torch.Tensor) -> torch.Tensor:
        """Logits [R, Vd] of the token after each text, from (hidden, tokens)."""

    # ---- the round --------------------------------------------------------------------------------------------------

    def ready(self, sequences: list[Sequence], limits: list[int]) -> list[int]:
        """The limits; 0 for rows whose hidden state is not known."""
        return [limit if seq.id in self.known else 0 for seq, limit in zip(sequences, limits, strict=True)]

    def roots(self, sequences: list[Sequence]) -> tuple[torch.Tensor, ...]:
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
        """A context in which the heads' linear layers use their fastest kernels."""
        return contextlib.nullcontext() if self._linears is None else self._linears.active()

    def allocate(self, num_tokens: int, num_sequences: int, block_size: int) -> None:
        """Note how many rows are needed; they are allocated with the first hidden state."""
        self._num_expected = num_sequences

    def release(self) -> None:
        """Drop the hidden states."""
        self.hidden = self.state = None

    def start(self, seq: Sequence) -> None:
        """Take a slot; its hidden state is not known yet."""
        self.slots[seq.id] = self._free.pop() if self._free else len(self.slots)

    def evict(self, seq: Sequence) -> None:
        """Forget the hidden state; the target will read the text again."""
        self.known.discard(seq.id)

    def stop(self, seq: Sequence) -> None:
        """Give the slot back."""
        self._free.append(self.slots.pop(seq.id))
        self.known.discard(seq.id)
