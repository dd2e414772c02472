"""The contract between the loop and a drafter."""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from transformers import PreTrainedModel
from transformers.generation.candidate_generator import CandidateGenerator as TransformersCandidateGenerator

from ..config import SpeculativeConfig
from ..runtime import DraftTrees, PackedModel, PackedOutput, Sequence, Taps


@dataclass
class StepOutcome:
    """What one step did, as drafters see it.

    Attributes:
        sequences: the rows that were verified; `tokens` already hold what was accepted.
        trees: what was verified for them (the proposal, or a prefix of its nodes).
        accepted: per row, the indices of the accepted nodes, root to leaf.
        new_tokens: per row, the ids appended: accepted nodes and the token after them, cut where the sequence stopped.
        output: the target's forward with the features asked for by `taps`; None inside transformers' own loop.
        starts: where each forwarded row begins in `output` (its pending tokens first, then its nodes).
        chunks: (sequence, number of tokens) of every forwarded row, prompt chunks included, in `starts`' order.
    """

    sequences: list[Sequence]
    trees: DraftTrees
    accepted: list[list[int]]
    new_tokens: list[list[int]]
    output: PackedOutput | None = None
    starts: list[int] | None = None
    chunks: list[tuple[Sequence, int]] | None = None


@dataclass
class DrafterContext:
    """What `generate()` was given besides the configuration, for drafters that need it."""

    assistant_model: PreTrainedModel | None = None
    tokenizer: Any = None
    assistant_tokenizer: Any = None


class CandidateGenerator(TransformersCandidateGenerator, ABC):
    """Proposes draft trees for a batch of sequences and learns from what the target made of them.

    The loop calls `start` once per sequence, then `propose` and `observe` once per step, and `stop` at the end. All of
    them are batched; sequences join and leave between steps. A generator may propose fewer tokens than it is allowed,
    or none, for any row: only speed depends on it.

    The same object works in transformers' own assisted decoding (batch 1, chains) through the inherited
    `get_candidates` and `update_candidate_strategy`.
    """

    config_class: ClassVar[type[SpeculativeConfig]]
    uses_assistant_model: ClassVar[bool] = False  # whether generate(assistant_model=) means something to this method
    taps: Taps = Taps()

    def __init__(self, config: SpeculativeConfig, target: PackedModel, context: DrafterContext | None = None):
        self.config = config
        self.target = target
        self._assisted: Sequence | None = None
        self._assisted_trees: DraftTrees | None = None

    @property
    def max_draft_nodes(self) -> int:
        """Most nodes a row's tree can have."""
        return self.config.num_speculative_tokens or 0

    def allocate(self, num_tokens: int, num_sequences: int, block_size: int) -> None:
        """Make room for that many tokens in so many sequences. Drafters with KV of their own size their cache here."""

    def release(self) -> None:
        """Give back what `allocate` took; sequences have been stopped."""

    def active(self) -> contextlib.AbstractContextManager:
        """A context in which `propose` and `observe` may run: drafters that are models switch them to our attention."""
        return contextlib.nullcontext()

    def start(self, seq: Sequence) -> None:
        """A sequence joins; its prompt is in `seq.tokens`."""

    @abstractmethod
    def propose(self, sequences: list[Sequence], limits: list[int]) -> DraftTrees:
        """Draft for each sequence.

        Args:
            sequences: B started sequences.
            limits: most draft tokens in a path, per row (0: none is wanted).

        Returns: trees of B rows, none deeper than its limit.
        """

    def observe(self, outcome: StepOutcome) -> None:
        """Learn from a verified step."""

    def evict(self, seq: Sequence) -> None:
        """The sequence is paused: give up what can be recomputed from its tokens."""

    def stop(self, seq: Sequence) -> None:
        """A sequence leaves, finished or cancelled."""

    # ---- transformers' own assisted decoding ------------------------------------------------------------------------

    def get_candidates(self, input_ids: torch.LongTensor, **kwargs) -> tuple[torch.Tensor, None]:
        """The prompt with one chain of drafted tokens behind it: int64 [1, S + K]; drafts are points, so no logits."""
        self._follow(input_ids)
        assert self._assisted is not None
        with self.active():
            trees = self.propose([self._assisted], [self.config.num_speculative_tokens or 0])
        chain = _first_path(trees)
        nodes = torch.tensor(chain, dtype=torch.long, device=trees.tokens.device)
        tokens = trees.tokens[0, nodes]
        self._assisted_trees = trees
        return torch.cat([input_ids, tokens[None].to(input_ids.device)], dim=1), None

    def update_candidate_strategy(self, input_ids: torch.LongTensor, scores: torch.Tensor, num_matches: int) -> None:
        """Learn how many of the last candidates were accepted."""
        self._follow(input_ids)

    def end_assisted(self) -> None:
        """Forget the text followed in transformers' assisted decoding."""
        if self._assisted is not None:
            self.stop(self._assisted)
            self.release()
        self._assisted = self._assisted_trees = None

    def _follow(self, input_ids: torch.LongTensor) -> None:
        if input_ids.shape[0] != 1:
            raise ValueError(
                "transformers' assisted decoding works on one sequence; use speculative_config for batches."
            )
        tokens = input_ids[0].tolist()
        seq = self._assisted
        if seq is None or tokens[: len(seq.tokens)] != seq.tokens or len(tokens) > seq.max_length:
            self.end_assisted()
            # How long the text will be is not known here: room for twice as much, and again when that is used up.
            self._assisted = seq = Sequence(tokens, max_length=2 * len(tokens) + 256)
            self.allocate(seq.max_length + self.max_draft_nodes, 1, self.config.block_size)
            self.start(seq)
            return
        new = tokens[len(seq.tokens) :]
        if not new:
            return
        seq.tokens = tokens
        if self._assisted_trees is not None:
            chain, drafted = _first_path(self._assisted_trees), self._assisted_trees.tokens[0].tolist()
            matched = 0
            while matched < min(len(chain), len(new) - 1) and drafted[chain[matched]] == new[matched]:
                matched += 1
            self.observe(StepOutcome([seq], self._assisted_trees, [chain[:matched]], [new]))
            self._assisted_trees = None


def _first_path(trees: DraftTrees) -> list[int]:
    """The nodes of row 0 reached by always taking the first child."""
    parents, path = trees.parent_index[0, : trees.lengths[0]].tolist(), []
    while (path[-1] if path else -1) in parents:
        path.append(parents.index(path[-1] if path else -1))
    return path
