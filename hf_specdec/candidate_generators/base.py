"""The contract between the loop and a drafter."""

from __future__ import annotations

import contextlib
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, ClassVar

from transformers import PreTrainedModel

from ..config import SpeculativeConfig
from ..core.draft_trees import DraftTrees
from ..core.outcome import StepOutcome
from ..core.output import Taps
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


class CandidateGenerator(ABC):
    """Proposes draft trees for a batch of sequences and learns from what the target made of them.

    The loop calls `start` once per sequence, then `propose` and `observe` once per step, and `stop` at the end. All of
    them are batched; sequences join and leave between steps. A generator may propose fewer tokens than it is allowed,
    or none, for any row: only speed depends on it.
    """

    config_class: ClassVar[type[SpeculativeConfig]]
    uses_assistant_model: ClassVar[bool] = False  # whether generate(assistant_model=) means something to this method
    can_be_combined: ClassVar[bool] = True  # whether it may be part of a hybrid
    continues_drafts: ClassVar[bool] = False  # whether `continue_drafts` is there
    taps: Taps = Taps()
    verifies_chains_only: bool = False  # set by whoever verifies only a tree's first path (transformers' assisted loop)
    taps_whole_text: bool = True  # if it taps: whether it needs features of every token, not only of the newest

    def __init__(self, config: SpeculativeConfig, target: PackedModel, context: DrafterContext | None = None):
        self.config = config
        self.target = target

    def with_checkpoint_defaults(self, config: SpeculativeConfig) -> SpeculativeConfig:
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
