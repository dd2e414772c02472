"""The target drafts for itself over a window of its keys (TriForce, Sun et al. 2024; MagicDec, Chen et al. 2024); method `self_window`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

from ..config import config_key
from ..core.draft_trees import DraftTrees
from ..core.rows import RowInput
from ..core.sequence import Sequence
from ..kernels.attention.inputs import window_parts
from ..model.architectures import layer_windows
from ..model.native import DraftRound
from ..model.packed_model import PackedModel
from .base import DrafterContext, MayMissSteps
from .checkpoints.target_parts import DraftVocabulary
from .growing.model_drafter import ModelDrafter
from .growing.target_keys import ReadsTargetKeys
from .growing.tree_growth import DraftLevel
from .growing.tree_shapes import TreeDraftingConfig
from .registry import register


@dataclass
class SelfWindowConfig(TreeDraftingConfig):
    """For long texts: the target drafts for itself, attending to its own keys of the first and the last tokens only. Texts that this
    window covers get no drafts."""

    name = "self_window"
    default_num_speculative_tokens = 4

    draft_window: int | None = config_key(512, "drafts attend to so many last tokens", minimum=1)
    draft_sinks: int | None = config_key(4, "and to so many first ones (attention sinks)", minimum=1)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.draft_window is None:
            raise self.fail(
                "draft_window", "must be a number of tokens: without a window, a draft costs what it saves."
            )


@register(SelfWindowConfig)
class SelfWindowGenerator(ReadsTargetKeys, ModelDrafter, MayMissSteps):
    """Drafts with the target, from its keys of the window.

    A round reads the text's last token, which has no keys yet, and then its nodes. Their keys go to the slots where the target's own will
    be: verification writes all of them again, or the text goes on in another way and overwrites them. So nothing of the drafts stays.
    """

    config: SelfWindowConfig

    def __init__(self, config: SelfWindowConfig, target: PackedModel, context: DrafterContext | None = None):
        super().__init__(config, target, context)
        if problem := _problem(target):
            raise config.fail("method", f"cannot draft with {type(target.model).__name__}, {problem}.")
        self.draft_with(target.model)
        self.vocabulary = DraftVocabulary(target.vocab_size)
        self.grow_as(config.shape(), has_loop=self.drafter.graphs is not None)
        self._least = sum(window_parts(config.window)) + 1  # tokens of a text that the window does not cover
        self._round: list[Sequence] = []  # rows of the current round whose last token has been read

    def allocate(self, num_tokens: int, num_sequences: int, block_size: int) -> None:
        """As in the base. An engine that begins, or falls asleep, gets other pools: graphs refer to the old ones."""
        super().allocate(num_tokens, num_sequences, block_size)
        if not num_sequences and self.rounds is not None and self.drafter.graphs is not None:
            self._keys = None
            self.rounds.clear()
            self.drafter.graphs.captures.clear()

    def propose(self, sequences: list[Sequence], limits: list[int]) -> DraftTrees:
        """Grow drafts. Meanwhile the target's cache has the window, and counts the texts' last tokens."""
        if self.cache is None:
            return DraftTrees.empty(len(sequences), self.target.device)
        self.cache.window = self.drafter.window
        try:
            return super().propose(sequences, limits)
        finally:
            self.cache.window = self.target.window
            for seq in self._round:
                self.cache.tables[seq.id].length -= 1
            self._round = []

    def reach(self, seq: Sequence, limit: int) -> int:
        """The limit; 0 if the window covers the text, its keys are not all there, or its draft has no room."""
        self.wake()
        length = len(seq.tokens)
        can_draft = length >= self._least and self.has_keys(seq)
        return limit if can_draft and self.try_reserve(seq, length + self.shape.num_expanded(limit)) else 0

    def roots(self, sequences: list[Sequence], limits: list[int]) -> tuple[torch.Tensor, ...]:
        """Read the last tokens of the texts; logits [R, V] of the tokens after them."""
        rows = [RowInput(seq.id, np.asarray(seq.tokens[-1:]), self.num_read(seq)) for seq in sequences]
        logits = self.drafter.forward(self._as_in_target(rows, sequences), self.cache).logits
        for seq in sequences:
            self.cache.tables[seq.id].length += 1
            self._round.append(seq)
        return (logits,)

    def node_inputs(self, level: DraftLevel, *nodes, **shift) -> list[RowInput]:
        rows = super().node_inputs(level, *nodes, **shift)
        return self._as_in_target(rows, [self.sequences[row] for row in level.rows])

    def _as_in_target(self, rows: list[RowInput], sequences: list[Sequence]) -> list[RowInput]:
        """The rows, at the positions and with the adapters that the target reads these texts with."""
        for row, seq in zip(rows, sequences, strict=True):
            row.offset, row.adapter = seq.position_offset, seq.adapter
        return rows

    def at_once(self, rows: list[int], logits: torch.Tensor, made: Callable[[], DraftRound]) -> DraftRound | None:
        if self.loop is None and any(
            self.sequences[row].position_offset or self.sequences[row].adapter for row in rows
        ):
            return None  # one call of the library knows neither
        return super().at_once(rows, logits, made)


def _problem(target: PackedModel) -> str | None:
    """Why a window saves nothing of this target's work, or would change what it keeps of a text; None: it does neither."""
    windows = layer_windows(target.config)
    kinds = set(getattr(target.config, "layer_types", None) or windows)
    if target.family is not None:
        return "an encoder-decoder model, whose texts are short"
    if target.recurrent is not None:
        return "whose layers with a recurrent state would read drafts into it"
    if target.segments:
        return "whose layers compress segments of the text"
    if target.gather:
        return "which attends to a copy of all keys"
    if "indexed_attention" in kinds or all(windows.get(kind) for kind in kinds):
        return "no layer of which attends to all of the text"
    return None
