"""CandidateGenerator: the contract between the decoding loop and a drafter, and what only some drafters can do."""

from __future__ import annotations

import contextlib
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, ClassVar

from transformers import PreTrainedModel

from ..cache import PagedStaticCache
from ..config import SpeculativeConfig
from ..core.draft_trees import DraftTrees
from ..core.outcome import StepOutcome
from ..core.output import PackedOutput, Taps
from ..core.rows import RowInput
from ..core.sequence import Sequence
from ..model.packed_model import PackedModel
from .corpora import Corpora
from .lookup_cache import LookupCache


@dataclass(eq=False)
class DrafterContext:
    """Other arguments of `generate()` that drafters may need. Drafters outlive the call and hold these objects weakly, since
    they belong to the caller.

    Attributes:
        assistant_model: `generate(assistant_model=)`.
        tokenizer: the target's.
        assistant_tokenizer: the drafter's.
        chains_only: only the first path of a tree is verified, so other nodes cost time and bring nothing.
        used: the names of the arguments that the drafter has read.
    """

    assistant_model: PreTrainedModel | None = None
    tokenizer: Any = None
    assistant_tokenizer: Any = None
    chains_only: bool = False
    used: set[str] = field(default_factory=set)

    def __getattribute__(self, name: str) -> Any:
        if name in ("assistant_model", "tokenizer", "assistant_tokenizer"):
            self.used.add(name)
        return super().__getattribute__(name)


def held_weakly(thing: Any, gone: Callable[[Any], None] | None = None) -> Callable[[], Any]:
    """A callable that returns `thing` as long as other code holds it, then None. Objects that do not support weak references are held
    strongly.
    """
    try:
        return weakref.ref(thing, gone)
    except TypeError:
        return lambda: thing


class CandidateGenerator(ABC):
    """Proposes draft trees for a batch of sequences and learns from what the target made of them.

    The loop calls `start` once per sequence, `propose` and `observe` once per step for the whole batch, and `stop` when a
    sequence leaves. Sequences join and leave between steps. A generator may propose fewer tokens than it is allowed, or
    none, for any row: proposals affect only speed. What only some drafters can do is a class of its own below.

    Attributes:
        config: its configuration; a length that the user did not give is the checkpoint's. A call may change its PER_CALL_KEYS.
        taps: what it reads of the target's forward.
    """

    config_class: ClassVar[type[SpeculativeConfig]]
    taps: Taps = Taps()

    def __init__(self, config: SpeculativeConfig, target: PackedModel, context: DrafterContext | None = None):
        self.config = config
        self.target = target

    @property
    def max_draft_nodes(self) -> int:
        """The most nodes in one row's tree."""
        return self.config.longest_draft

    def allocate(self, num_tokens: int, num_sequences: int, block_size: int) -> None:
        """Make room for that many tokens in all, in that many sequences (0: texts come one after another, and later ones may share
        prefixes with those that have ended). A cache is better made when it is first needed."""

    def release(self) -> None:
        """Free what `allocate` reserved; all sequences have been stopped."""

    def start(self, seq: Sequence) -> None:
        """Called when a sequence joins; its prompt is in `seq.tokens`."""

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

    def evict(self, seq: Sequence) -> None:
        """Called when a sequence is paused: free what can be recomputed from its tokens."""

    def stop(self, seq: Sequence) -> None:
        """Called when a sequence leaves, finished or cancelled."""


# ---- what only some drafters can do: the loop, or a combined drafter, asks for it by type ------------------------------


class RunsModel(ABC):
    """Runs a model or a head."""

    @abstractmethod
    def active(self) -> contextlib.AbstractContextManager:
        """A context for all other calls, in which the model reads our pages and its layers use their fastest kernels."""


class KeepsPrefixes(ABC):
    """Keeps what it computed from a text, and uses it for other texts with the same beginning."""

    @abstractmethod
    def forget_prefixes(self) -> None:
        """Called when the target's weights have changed or a step has raised an error: drop what is kept of earlier texts."""


class SharesPrefixes(KeepsPrefixes):
    """Keeps what it computed from a text's features, so that the target must not compute them again."""

    @abstractmethod
    def known_prefix(self, seq: Sequence) -> int:
        """Number of leading tokens of a started sequence whose features are not needed, because what an earlier text made of them is
        kept."""

    @abstractmethod
    def share_prefix(self, seq: Sequence, num_tokens: int) -> None:
        """Called when the target skips the first `num_tokens` tokens, which are at most `known_prefix` and fill whole blocks: use what
        is kept of them."""


class Transferable(ABC):
    """Keeps what it computed from a prompt's features in caches that another process can fill."""

    @abstractmethod
    def moved_caches(self) -> list[PagedStaticCache] | None:
        """The caches whose first rows another process can fill, instead of `observe`; None if they cannot be moved after all."""

    @abstractmethod
    def read_features(self, seq: Sequence, count: int) -> None:
        """Compute the first `count` rows of `moved_caches` from the features of a prompt that the target has read."""

    @abstractmethod
    def warm_up(self, row: RowInput, output: PackedOutput) -> None:
        """Allocate the pools of `moved_caches` by reading a row of one token, given the target's output for it. The row's slot is
        reserved."""


class KeepsTables:
    """Learns tables from texts. `kept`: the file that they go to; None: they end with the process."""

    kept: LookupCache | None = None

    def save_tables(self) -> None:
        """Write the tables to their file. Called when an engine ends, or decoders are dropped."""
        if self.kept is not None:
            self.kept.save()


class ReadsCorpora:
    """Drafts from corpora, too. `corpora`: those that it has been given."""

    corpora: Corpora


class ScoresDrafts(ABC):
    """Knows how good its drafts are."""

    @abstractmethod
    def draft_scores(self, trees: DraftTrees) -> list[float]:
        """Per row, how many tokens of the draft just proposed are expected to be accepted."""


class ContinuesDrafts(ABC):
    """Can continue another method's drafts."""

    @abstractmethod
    def continue_drafts(self, sequences: list[Sequence], drafts: list[list[int]], limits: list[int]) -> list[list[int]]:
        """The ids to add, per row.

        Args:
            drafts: per row, ids drafted after the sequence's tokens.
            limits: per row, the most tokens to add; none if not positive.
        """

    def continued(self, trees: DraftTrees, sequences: list[Sequence], limits: list[int]) -> DraftTrees:
        """Another method's chains, continued up to each row's limit."""
        drafts = trees.chains()
        room = [limit - len(draft) for limit, draft in zip(limits, drafts, strict=True)]
        return trees.extended(self.continue_drafts(sequences, drafts, room))


class MayMissSteps:
    """Learns at most less if `observe` is skipped after a step in which it was not asked, and is otherwise as good."""


class MayRest(ABC):
    """Does not follow every step."""

    @property
    @abstractmethod
    def rests(self) -> bool:
        """True if it reads none of its taps in the next step, and need not observe it if it drafts nothing."""


class HasDrafters:
    """Has several drafters, among which a sequence chooses by name. `drafters`: the names that `Sequence.drafter` may have."""

    drafters: list[str]

    def drafter_of(self, seq: Sequence) -> str | None:
        """The name of the drafter of the sequence's last draft; None if it is not told apart."""
        return None


class HasHead:
    """Has a head that can go on learning, `head_module`."""

    head_module: Any  # an nn.Module


def active_drafter(generator: CandidateGenerator) -> contextlib.AbstractContextManager:
    """The context in which a drafter is called."""
    return generator.active() if isinstance(generator, RunsModel) else contextlib.nullcontext()


def save_tables(generator: CandidateGenerator) -> None:
    """Write what a drafter has learnt from texts, if it keeps that in a file."""
    if isinstance(generator, KeepsTables):
        generator.save_tables()


def known_prefix(generator: CandidateGenerator, seq: Sequence) -> int:
    """Number of leading tokens of a started sequence whose features a drafter does not need."""
    if isinstance(generator, SharesPrefixes):
        return generator.known_prefix(seq)
    return 0 if generator.taps.whole_text else len(seq.tokens)


def moved_caches(generator: CandidateGenerator) -> list[PagedStaticCache] | None:
    """The caches that hold what a drafter keeps of a prompt's features; None if that cannot be moved to another process."""
    if isinstance(generator, Transferable):
        return generator.moved_caches()
    return None if generator.taps.whole_text else []
