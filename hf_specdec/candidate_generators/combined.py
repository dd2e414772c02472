"""CombinedGenerator: base of drafters that are made of other drafters."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterable, Iterator
from typing import Any, TypeVar

from ..cache import PagedStaticCache
from ..config import PER_CALL_KEYS, SpeculativeConfig
from ..core.draft_trees import DraftTrees
from ..core.outcome import StepOutcome
from ..core.output import PackedOutput
from ..core.rows import RowInput
from ..core.sequence import Sequence
from .base import (
    CandidateGenerator,
    DrafterContext,
    KeepsPrefixes,
    KeepsTables,
    ReadsCorpora,
    RunsModel,
    SharesPrefixes,
    Transferable,
    known_prefix,
    moved_caches,
)  # fmt: skip
from .corpora import Corpora
from .lookup_cache import LookupCacheConfig
from .parsing import parse_config
from .registry import available_methods, make_generator

Ability = TypeVar("Ability")
# Keys of the combined method that its parts inherit unless they set their own values.
_COMMON = (
    "draft_sample_method", "block_size", "prefill_chunk_size", "prepack_weights", "cuda_graphs", "compile",
    "native", "deterministic",
)  # fmt: skip
# Keys that act on the target or on whole steps, so that a part has no use for them.
_OF_THE_WHOLE = (
    *PER_CALL_KEYS, "deterministic", "target_quantization", "recurrent_states", "kv_cache_dtype", "num_blocks", "max_model_len",
    "disable_by_batch_size", "num_speculative_tokens_per_batch_size", "lookup_corpus", "lookup_corpus_tokens",
)  # fmt: skip


def checked_part(whole: SpeculativeConfig, key: str, part: Any) -> dict[str, Any]:
    """The configuration of one part, checked, as a dict. Raises SpeculativeConfigError: the configuration is wrong, its method itself
    has parts, or it has a key that a part cannot have."""
    config = parse_config(part)
    if config.has_parts:
        raise whole.fail(
            key, f"is {config.method!r}, which has parts itself: only drafters without parts can be combined."
        )
    given = config.to_dict()
    for name in _OF_THE_WHOLE:
        if name in given:
            raise whole.fail(key, f"has {name!r}, which is a key of the {whole.method!r} itself: move it there.")
    if given.get("learn"):
        raise whole.fail(
            key, "has 'learn', but only a head that drafts without other drafters can learn: leave it out."
        )
    return given


def with_common_keys(part: dict[str, Any], whole: SpeculativeConfig) -> SpeculativeConfig:
    """The configuration of a part, with common keys taken from the whole."""
    shared = {name: getattr(whole, name) for name in _COMMON} | {"rejection_sample_method": _rule_of_parts(whole)}
    learns = issubclass(available_methods()[part["method"]], LookupCacheConfig)
    if learns and isinstance(whole, LookupCacheConfig) and whole.lookup_cache is not None:
        shared |= {"lookup_cache": whole.lookup_cache, "lookup_cache_mb": whole.lookup_cache_mb}
    return parse_config({**{key: value for key, value in shared.items() if value is not None}, **part})


def _rule_of_parts(whole: SpeculativeConfig) -> str | None:
    """The verification rule that parts draft for. Drafts for "synthetic", which needs keys of its own, are those for the default rule."""
    return None if whole.rejection_sample_method == "synthetic" else whole.rejection_sample_method


def configure(generator: CandidateGenerator, config: SpeculativeConfig) -> None:
    """Let a drafter draft for a call whose configuration differs from its own in PER_CALL_KEYS only."""
    if all(getattr(config, key) == getattr(generator.config, key) for key in PER_CALL_KEYS):
        return
    generator.config = copy.copy(generator.config)
    vars(generator.config).update({key: getattr(config, key) for key in PER_CALL_KEYS})
    for part in generator.parts if isinstance(generator, CombinedGenerator) else ():
        part.config = copy.copy(part.config)
        part.config.rejection_sample_method = _rule_of_parts(config)


def corpora_of(generator: CandidateGenerator) -> list[Corpora]:
    """The corpora of a drafter, or of the parts of a combined one."""
    parts = generator.parts if isinstance(generator, CombinedGenerator) else [generator]
    return [part.corpora for part in parts if isinstance(part, ReadsCorpora)]


def check_drafter(seq: Sequence, names: Iterable[str]) -> None:
    """Raise ValueError if a sequence names a drafter that is not among `names`."""
    if seq.drafter is not None and seq.drafter not in names:
        raise ValueError(f"There is no drafter {seq.drafter!r}: choose one of {', '.join(names)}.")


class CombinedGenerator(CandidateGenerator, RunsModel, SharesPrefixes, Transferable, KeepsTables):
    """Drafters that run side by side. A subclass makes them with `made`, passes them to `combine`, and decides which of them draft. In
    each step only one part's draft of a row is verified.

    Attributes:
        longest: per part, the most tokens on a path of its drafts.
        proposed: per part, sequence id → its trees of this step and the row in them.
    """

    parts: list[CandidateGenerator]
    longest: list[int]
    proposed: list[dict[int, tuple[DraftTrees, int]]]

    def made(self, key: str, config: SpeculativeConfig, context: DrafterContext | None) -> CandidateGenerator:
        """The drafter of one part. Raises SpeculativeConfigError: its method cannot be a part."""
        if not config.can_be_combined:
            raise self.config.fail(key, f"cannot be {config.method!r}: this method cannot be combined with others.")
        return make_generator(config, self.target, context)

    def combine(self, parts: list[CandidateGenerator]) -> None:
        """Set the parts, and tap the features that any of them needs."""
        self.parts, self.proposed = parts, [{} for _ in parts]
        self.longest = [min(part.config.longest_draft, part.max_draft_nodes) for part in parts]
        for part in parts:
            self.taps = self.taps | part.taps

    @property
    def max_draft_nodes(self) -> int:
        """The nodes of the largest tree."""
        return max((part.max_draft_nodes for part in self.parts), default=0)

    def parts_of(self, seq: Sequence) -> list[CandidateGenerator]:
        """The parts that follow a sequence."""
        return self.parts

    # ---- memory -----------------------------------------------------------------------------------------------------

    def allocate(self, num_tokens: int, num_sequences: int, block_size: int) -> None:
        for part in self.parts:
            part.allocate(num_tokens, num_sequences, block_size)

    def release(self) -> None:
        for part in self.parts:
            part.release()

    def known_prefix(self, seq: Sequence) -> int:
        return min((known_prefix(part, seq) for part in self.parts_of(seq)), default=len(seq.tokens))

    def share_prefix(self, seq: Sequence, num_tokens: int) -> None:
        for part in _able(self.parts_of(seq), SharesPrefixes):
            part.share_prefix(seq, num_tokens)

    def forget_prefixes(self) -> None:
        for part in _able(self.parts, KeepsPrefixes):
            part.forget_prefixes()

    def moved_caches(self) -> list[PagedStaticCache] | None:
        caches = [moved_caches(part) for part in self.parts]
        return None if None in caches else [cache for moved in caches for cache in moved or []]

    def read_features(self, seq: Sequence, count: int) -> None:
        for part in _able(self.parts_of(seq), Transferable):
            part.read_features(seq, count)

    def warm_up(self, row: RowInput, output: PackedOutput) -> None:
        for part in _able(self.parts, Transferable):
            part.warm_up(row, output)

    def save_tables(self) -> None:
        for part in _able(self.parts, KeepsTables):
            part.save_tables()

    @contextlib.contextmanager
    def active(self):
        with contextlib.ExitStack() as stack:
            for part in _able(self.parts, RunsModel):
                stack.enter_context(part.active())
            yield

    # ---- membership -------------------------------------------------------------------------------------------------

    def start(self, seq: Sequence) -> None:
        """Start the sequence in its parts. If one of them raises an error, the sequence is stopped in the others again."""
        started: list[CandidateGenerator] = []
        try:
            for part in self.parts_of(seq):
                part.start(seq)
                started.append(part)
        except BaseException:
            for part in started:
                part.stop(seq)
            raise

    def evict(self, seq: Sequence) -> None:
        self._forget_proposals(seq)
        for part in self.parts_of(seq):
            part.evict(seq)

    def stop(self, seq: Sequence) -> None:
        self._forget_proposals(seq)
        for part in self.parts_of(seq):
            part.stop(seq)

    def _forget_proposals(self, seq: Sequence) -> None:
        for proposed in self.proposed:
            proposed.pop(seq.id, None)

    # ---- what became of drafts --------------------------------------------------------------------------------------

    def note(self, index: int, sequences: list[Sequence], trees: DraftTrees) -> None:
        """Note the trees that a part proposes in this step."""
        self.proposed[index] = {seq.id: (trees, i) for i, seq in enumerate(sequences) if trees.lengths[i]}

    def as_seen_by(self, index: int, outcome: StepOutcome) -> StepOutcome:
        """The outcome as a part sees it: proposed tokens that became text count as accepted, whichever part's draft was verified."""
        accepted = []
        for seq, new in zip(outcome.sequences, outcome.new_tokens, strict=True):
            trees, row = self.proposed[index].get(seq.id, (None, 0))
            accepted.append([] if trees is None else trees.matching_path(row, new[:-1]))  # the last one was not fed
        return outcome.for_proposal(accepted)

    def observe(self, outcome: StepOutcome) -> None:
        """Report to each part which tokens of its own proposal became text."""
        for index, part in enumerate(self.parts):
            part.observe(self.as_seen_by(index, outcome))
            self.proposed[index].clear()


def _able(parts: list[CandidateGenerator], ability: type[Ability]) -> Iterator[Ability]:
    return (part for part in parts if isinstance(part, ability))
