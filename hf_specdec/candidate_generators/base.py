"""CandidateGenerator: the contract between the decoding loop and a drafter."""

from __future__ import annotations

import contextlib
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, ClassVar

from torch import nn
from transformers import PreTrainedModel

from ..cache import PagedStaticCache
from ..config import SpeculativeConfig
from ..core.draft_trees import DraftTrees
from ..core.outcome import StepOutcome
from ..core.output import PackedOutput, Taps
from ..core.rows import RowInput
from ..core.sequence import Sequence
from ..model.packed_model import PackedModel
from .lookup_cache import LookupCache


class DrafterContext:
    """Other arguments of `generate()` that drafters may need. Drafters outlive the call and hold these objects weakly, since
    they belong to the caller.

    Attributes:
        used: the names of the arguments that the drafter has read.
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
        """`generate(assistant_model=)`."""
        return self._use("assistant_model")

    @property
    def tokenizer(self) -> Any:
        """The target's tokenizer."""
        return self._use("tokenizer")

    @property
    def assistant_tokenizer(self) -> Any:
        """The drafter's tokenizer."""
        return self._use("assistant_tokenizer")


def held_weakly(thing: Any, gone: Callable[[Any], None] | None = None) -> Callable[[], Any]:
    """A callable that returns `thing` as long as other code holds it, then None. Objects that do not support weak references are held
    strongly.

    Args:
        gone: called when the object is deleted.
    """
    try:
        return weakref.ref(thing, gone)
    except TypeError:
        return lambda: thing


class CandidateGenerator(ABC):
    """Proposes draft trees for a batch of sequences and learns from what the target made of them.

    The loop calls `start` once per sequence, `propose` and `observe` once per step for the whole batch, and `stop` when a
    sequence leaves. Sequences join and leave between steps. A generator may propose fewer tokens than it is allowed, or
    none, for any row: proposals affect only speed.
    """

    config_class: ClassVar[type[SpeculativeConfig]]
    uses_assistant_model: ClassVar[bool] = False  # whether the method uses generate(assistant_model=)
    can_be_combined: ClassVar[bool] = True  # whether it may be part of a hybrid
    continues_drafts: ClassVar[bool] = False  # whether `continue_drafts` is implemented
    taps: Taps = Taps()
    may_miss_steps: ClassVar[bool] = False  # whether `observe` may be skipped: the drafter then only learns less
    verifies_chains_only: bool = False  # see `verify_chains_only`
    outlives_texts: bool = False  # see `outlive_texts`
    kept: LookupCache | None = None  # the file that keeps what was learnt from texts
    taps_whole_text: bool = True  # whether tapped features of every token are needed, not only the newest

    def __init__(self, config: SpeculativeConfig, target: PackedModel, context: DrafterContext | None = None):
        self.config = config
        self.target = target

    def with_checkpoint_defaults(self, config: SpeculativeConfig) -> SpeculativeConfig:
        """A call's configuration, with defaults that come from the drafter's checkpoint (such as its draft length)."""
        return config

    def use(self, config: SpeculativeConfig) -> None:
        """Called before each call of `generate()`: its configuration may differ from the last one's in PER_CALL_KEYS."""
        self.config = config

    @classmethod
    def create(
        cls, config: SpeculativeConfig, target: PackedModel, context: DrafterContext | None = None
    ) -> CandidateGenerator:
        """The generator for a configuration. A method with several kinds of checkpoints chooses the class here."""
        return cls(config, target, context)

    @property
    def needs_all_features(self) -> bool:
        """Whether the drafter reads the target's features of every token, except of those that `known_prefix` covers."""
        return self.taps_whole_text and bool(self.taps.last_hidden or self.taps.layers)

    @property
    def head_module(self) -> nn.Module:
        """The head's parameters, for drafters whose head can go on learning."""
        raise TypeError(f"{type(self).__name__} has no head that could learn.")

    @property
    def drafters(self) -> list[str]:
        """The names that `Sequence.drafter` may have, if sequences choose among drafters."""
        return []

    def drafter_of(self, seq: Sequence) -> str | None:
        """The name of the drafter of the sequence's last draft, if there are several."""
        return None

    @property
    def max_draft_nodes(self) -> int:
        """The most nodes in one row's tree."""
        return self.config.longest_draft

    def allocate(self, num_tokens: int, num_sequences: int, block_size: int) -> None:
        """Make room for that many tokens in all, in that many sequences. Drafters with a KV cache size it here."""

    def release(self) -> None:
        """Free what `allocate` reserved; all sequences have been stopped."""

    def active(self) -> contextlib.AbstractContextManager:
        """A context for `propose` and `observe`. Drafters that are models switch to our attention in it."""
        return contextlib.nullcontext()

    def start(self, seq: Sequence) -> None:
        """Called when a sequence joins; its prompt is in `seq.tokens`."""

    def known_prefix(self, seq: Sequence) -> int:
        """Number of leading tokens of a started sequence whose features the drafter does not need, because it keeps what it computed
        from them in an earlier text. Drafters that read no features return the length of the text."""
        return 0 if self.needs_all_features else len(seq.tokens)

    def share_prefix(self, seq: Sequence, num_tokens: int) -> None:
        """Called when the target skips the first `num_tokens` tokens, which are at most `known_prefix` and fill whole blocks: use what
        is kept of them."""

    def moved_caches(self) -> list[PagedStaticCache] | None:
        """The caches that keep what the drafter computed from a prompt's features. Another process can fill their first rows, instead of
        `observe`. Empty if the drafter needs no features of the prompt; None if what it keeps of them cannot be moved."""
        return None if self.needs_all_features else []

    def read_features(self, seq: Sequence, count: int) -> None:
        """Compute the first `count` rows of `moved_caches` from the features of a prompt that the target has read."""

    def warm_up(self, row: RowInput, output: PackedOutput) -> None:
        """Allocate the pools of `moved_caches` by reading a row of one token, given the target's output for it. The row's slot is
        reserved."""

    def verify_chains_only(self) -> None:
        """Called once: the loop verifies only the first path of a tree, so other nodes cost time and bring nothing."""
        self.verifies_chains_only = True

    def outlive_texts(self) -> None:
        """Called once: from now on, keep the prefixes of texts that have ended, because later texts may share them."""
        self.outlives_texts = True

    def forget_prefixes(self) -> None:
        """Called when the target's weights have changed or a step has raised an error: drop what is kept of earlier texts."""

    @abstractmethod
    def propose(self, sequences: list[Sequence], limits: list[int]) -> DraftTrees:
        """Draft for each sequence.

        Args:
            sequences: B started sequences.
            limits: per row, the most tokens on a path (0: no draft).

        Returns: trees of B rows, none deeper than its limit.
        """

    def observe(self, outcome: StepOutcome) -> None:
        """Learn from a verified step."""

    def draft_scores(self, trees: DraftTrees) -> list[float]:
        """Per row, how many tokens of the draft just proposed are expected to be accepted; by default its longest path."""
        return [float(trees.depths[i, :n].max()) if n else 0.0 for i, n in enumerate(trees.lengths)]

    def continue_drafts(self, sequences: list[Sequence], drafts: list[list[int]], limits: list[int]) -> list[list[int]]:
        """Continue another method's drafts.

        Args:
            drafts: per row, ids drafted after the sequence's tokens.
            limits: per row, the most tokens to add; none if not positive.

        Returns: the ids to add, per row.
        """
        raise TypeError(f"{type(self).__name__} does not continue drafts.")

    def continued(self, trees: DraftTrees, sequences: list[Sequence], limits: list[int]) -> DraftTrees:
        """Another method's chains, continued by this method up to each row's limit."""
        drafts = trees.chains()
        room = [limit - len(draft) for limit, draft in zip(limits, drafts, strict=True)]
        return trees.extended(self.continue_drafts(sequences, drafts, room))

    def evict(self, seq: Sequence) -> None:
        """Called when a sequence is paused: free what can be recomputed from its tokens."""

    def stop(self, seq: Sequence) -> None:
        """Called when a sequence leaves, finished or cancelled."""

    def save_tables(self) -> None:
        """Write what was learnt from texts to its file, if it has one. Called when an engine ends, or decoders are dropped."""
        if self.kept is not None:
            self.kept.save()
