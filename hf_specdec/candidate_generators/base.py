"""The contract between the loop and a drafter."""

from __future__ import annotations

import contextlib
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, ClassVar

import torch
from transformers import PreTrainedModel
from transformers.generation.candidate_generator import CandidateGenerator as TransformersCandidateGenerator

from ..config import SpeculativeConfig
from ..core.draft_trees import DraftTrees
from ..core.outcome import StepOutcome
from ..core.output import PackedOutput, Taps
from ..core.sequence import Sequence
from ..model.packed_model import PackedModel


class DrafterContext:
    """What `generate()` was given besides the configuration, for drafters that need it. Drafters outlive the call, and hold
    these objects weakly: they are the caller's.

    Attributes:
        used: the names of those that were asked for.
    """

    def __init__(
        self, assistant_model: PreTrainedModel | None = None, tokenizer: Any = None, assistant_tokenizer: Any = None
    ):
        self.given = {
            "assistant_model": assistant_model,
            "tokenizer": tokenizer,
            "assistant_tokenizer": assistant_tokenizer,
        }
        self.used: set[str] = set()

    def _use(self, name: str) -> Any:
        self.used.add(name)
        return self.given[name]

    @property
    def assistant_model(self) -> PreTrainedModel | None:
        """The drafter."""
        return self._use("assistant_model")

    @property
    def tokenizer(self) -> Any:
        """The target's."""
        return self._use("tokenizer")

    @property
    def assistant_tokenizer(self) -> Any:
        """The drafter's."""
        return self._use("assistant_tokenizer")


def held_weakly(thing: Any, gone: Callable[[Any], None] | None = None) -> Callable[[], Any]:
    """A call that gives `thing` as long as somebody else keeps it, and None afterwards. What cannot be referred to weakly (a class
    with slots) is kept.

    Args:
        gone: called when it goes.
    """
    try:
        return weakref.ref(thing, gone)
    except TypeError:
        return lambda: thing


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
    can_be_combined: ClassVar[bool] = True  # whether it may be part of a hybrid
    continues_drafts: ClassVar[bool] = False  # whether `continue_drafts` is there
    taps: Taps = Taps()
    taps_whole_text: bool = True  # if it taps: whether it needs features of every token, not only of the newest

    def __init__(self, config: SpeculativeConfig, target: PackedModel, context: DrafterContext | None = None):
        self.config = config
        self.target = target
        self.tapped: dict[Any, torch.Tensor] = {}  # in transformers' own loop: its last forward's features, by hooks
        self._assisted: Sequence | None = None
        self._assisted_trees: DraftTrees | None = None
        self._assisted_fed = (0, 0)  # tokens of the text, and candidates, in its last forward

    def settled(self, config: SpeculativeConfig) -> SpeculativeConfig:
        """A call's configuration, where it leaves to the drafter's files what they decide (a draft length)."""
        return config

    @classmethod
    def create(
        cls, config: SpeculativeConfig, target: PackedModel, context: DrafterContext | None = None
    ) -> CandidateGenerator:
        """The generator for a configuration; a method whose checkpoints differ in kind chooses its class here."""
        return cls(config, target, context)

    @property
    def needs_all_features(self) -> bool:
        """Whether the target must read every token itself, so that cached prefixes are of no use."""
        return self.taps_whole_text and bool(self.taps.last_hidden or self.taps.layers)

    @property
    def max_draft_nodes(self) -> int:
        """Most nodes a row's tree can have."""
        return self.config.longest_draft

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

    def draft_scores(self, trees: DraftTrees) -> list[float]:
        """How many tokens of each row's draft, just proposed, are expected to be accepted; by default all of its longest path."""
        return [float(trees.depths[i, :n].max()) if n else 0.0 for i, n in enumerate(trees.lengths)]

    def continue_drafts(self, sequences: list[Sequence], drafts: list[list[int]], limits: list[int]) -> list[list[int]]:
        """Go on from another method's drafts.

        Args:
            drafts: per row, ids drafted behind the sequence's tokens.
            limits: most tokens to add, per row; nothing is wanted where it is not positive.

        Returns: the ids to add, per row.
        """
        raise TypeError(f"{type(self).__name__} does not continue drafts.")

    def continued(self, trees: DraftTrees, sequences: list[Sequence], limits: list[int]) -> DraftTrees:
        """Another method's chains, those shorter than their row's limit continued by this one."""
        drafts = trees.chains()
        room = [limit - len(draft) for limit, draft in zip(limits, drafts, strict=True)]
        return trees.extended(self.continue_drafts(sequences, drafts, room))

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
            trees = self.propose([self._assisted], [self.config.longest_draft])
        chain = _first_path(trees)
        nodes = torch.tensor(chain, dtype=torch.long, device=trees.tokens.device)
        tokens = trees.tokens[0, nodes]
        self._assisted_trees = trees
        self._assisted_fed = len(self._assisted.tokens), len(chain)
        return torch.cat([input_ids, tokens[None].to(input_ids.device)], dim=1), None

    def update_candidate_strategy(self, input_ids: torch.LongTensor, scores: torch.Tensor, num_matches: int) -> None:
        """Learn what the last forward made of the candidates.

        Args:
            scores: the target's processed scores [1, K + 1, V] after the text and after each candidate.
        """
        self._follow(input_ids, scores[0])

    def end_assisted(self) -> None:
        """Forget the text followed in transformers' assisted decoding."""
        if self._assisted is not None:
            self.stop(self._assisted)
            self.release()
        self._assisted = self._assisted_trees = None
        self.tapped.clear()

    def _follow(self, input_ids: torch.LongTensor, scores: torch.Tensor | None = None) -> None:
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
            outcome = StepOutcome([seq], self._assisted_trees, [chain[:matched]], [new])
            self._add_features(outcome, scores, matched)
            with self.active():
                self.observe(outcome)
            self._assisted_trees = None

    def _add_features(self, outcome: StepOutcome, scores: torch.Tensor | None, matched: int) -> None:
        """What transformers' forward gave: the text's tokens and the chain behind them, in one row."""
        seq, (end, num_drafted) = outcome.sequences[0], self._assisted_fed
        found = self.tapped
        num_fed = next((len(h) for h in found.values()), num_drafted + 1)
        outcome.output = PackedOutput(
            logits=scores if scores is not None else torch.empty(0),
            last_hidden=found.get("last_hidden"),
            layers={index: found[index] for index in self.taps.layers if index in found},
        )
        outcome.starts, outcome.chunks, outcome.num_own = [0], [(seq, end)], [num_fed - num_drafted]
        outcome.fed_at = [list(range(matched))]


def _first_path(trees: DraftTrees) -> list[int]:
    """The nodes of row 0 reached by always taking the first child."""
    parents, path = trees.parent_index[0, : trees.lengths[0]].tolist(), []
    while (path[-1] if path else -1) in parents:
        path.append(parents.index(path[-1] if path else -1))
    return path
