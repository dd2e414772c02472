"""Drafters among which measurements choose, for each row in each step: those of method "auto", and single heads that may rest."""

from __future__ import annotations

import dataclasses
import logging
from typing import Any

import numpy as np

from ...cache import PagedStaticCache
from ...core.clock import clock_for
from ...core.draft_trees import DraftTrees
from ...core.outcome import StepOutcome
from ...core.output import Taps
from ...core.ranks import Ranks
from ...core.sequence import Sequence
from ...model.packed_model import PackedModel
from ...policy import Choice, Drafter, Fastest
from ..base import CandidateGenerator, DrafterContext, HasDrafters, MayMissSteps, MayRest, ScoresDrafts
from ..combined import CombinedGenerator, check_drafter, with_common_keys
from ..registry import register
from .config import AutoConfig
from .discovery import Search, find_drafters
from .memory import AutoMemory

logger = logging.getLogger(__name__)


class AgreedChoice:
    """Answers as rank 0's chooser does. `chooser`: rank 0's; on the other ranks it is not asked."""

    def __init__(self, ranks: Ranks, chooser: Fastest):
        self.ranks, self.chooser = ranks, chooser
        self._following: dict[int | None, bool] = {None: True}

    def agree(self, sequences: list[Sequence]) -> None:
        """A step begins: agree on which texts heads follow, so that they rest on all ranks or on none. None: texts that begin."""
        rows = [*sequences, None]
        flags = self.ranks.same([self.chooser.heads_follow(seq) for seq in rows] if self.ranks.leads else [])
        self._following = dict(zip([None if seq is None else seq.id for seq in rows], map(bool, flags), strict=True))

    def heads_follow(self, seq: Sequence | None) -> bool:
        """What rank 0 said when this step began."""
        return self._following.get(None if seq is None else seq.id, True)

    def followed(self, seconds: float, num_rows: int) -> None:
        """Rank 0's times count."""
        if self.ranks.leads:
            self.chooser.followed(seconds, num_rows)

    def is_awake(self, index: int) -> bool:
        """Rank 0's look-ups rest; the others ask all of theirs, because they learn from being asked."""
        return not self.ranks.leads or self.chooser.is_awake(index)

    def choose(
        self, sequences: list[Sequence], limits: list[int], offers: list[DraftTrees], seconds: list[float],
        scores: list[list[float] | None], able: np.ndarray | None = None,
    ) -> Choice:  # fmt: skip
        """Rank 0's choice. On rank 0 it is the chooser's object, in which the drafters that requests name are noted."""
        if self.ranks.leads:
            choice = self.chooser.choose(sequences, limits, offers, seconds, scores, able)
            self.ranks.same([*choice.drafter.tolist(), *choice.depth.tolist()])
            return choice
        agreed = np.asarray(self.ranks.same(), dtype=np.int64)
        return Choice(agreed[: len(limits)], agreed[len(limits) :])


class ChoosingGenerator(CombinedGenerator, HasDrafters, MayRest):
    """Asks the look-ups first, except those that rest because they did not pay. Then `chooser` picks a drafter and a depth for each
    row. A subclass makes the drafters, and calls `choose_among` in its `__init__`.

    Attributes:
        drafters: the names of the parts; look-ups come first.
        memory: keeps what the policy learns from process to process; None: it is not kept.
    """

    config: Any

    def choose_among(
        self, made: dict[str, CandidateGenerator], memory: AutoMemory | None = None, chooser: Any = None
    ) -> None:
        """Take these drafters as parts, by name, look-ups first. `chooser`: in place of the policy."""
        config, target = self.config, self.target
        self.clock = clock_for(target.device)
        self.by_name, self.drafters, self.memory = made, list(made), memory
        self.combine(list(self.by_name.values()))
        self.num_lookups = sum(not part.config.has_weights for part in self.parts)
        longest = max(self.longest, default=0)  # drafts are no longer than the longest that a part can make
        if 0 < longest < config.longest_draft:
            self.config = dataclasses.replace(config, num_speculative_tokens=longest)
        known = [
            Drafter(
                name, longest, not part.config.has_weights, part.taps.whole_text, 0.6 if part.config.has_weights else 0.4,
                part.max_draft_nodes,
            )
            for (name, part), longest in zip(self.by_name.items(), self.longest, strict=True)
        ]  # fmt: skip
        self.policy = Fastest(known, self.config.longest_draft or 1, self.clock, self.memory and self.memory.keep)
        if self.memory is not None:
            self.memory.restore(self.policy)
        ranks = target.ranks
        self.chooser: Fastest | AgreedChoice = chooser or (
            self.policy if ranks is None else AgreedChoice(ranks, self.policy)
        )
        self._heads = [part for part in self.parts if part.taps.whole_text]
        self._others = [part for part in self.parts if part not in self._heads]
        self._is_other = np.array([[part in self._others] for part in self.parts])
        self._scorers = [part if isinstance(part, ScoresDrafts) else None for part in self.parts]
        self._others_tap = any(part.taps != Taps() for part in self._others)
        learning = [i for i, part in enumerate(self.parts) if type(part).observe is not CandidateGenerator.observe]
        # Indices of the parts that learn: heads, parts that may miss steps, and the others, which see every step.
        self._learning_heads = [i for i in learning if self.parts[i] in self._heads]
        self._may_miss = [i for i in learning if isinstance(self.parts[i], MayMissSteps)]
        self._always = [i for i in learning if i not in self._learning_heads and i not in self._may_miss]
        self.asked = [False] * len(self.parts)  # parts that were asked in this step
        # seconds that each part took to learn from the last step, if it may rest
        self.observing = [0.0] * len(self.parts)
        self.chosen: dict[int, str] = {}  # sequence id → name of the drafter of its last draft
        self._followed: set[int] = set()  # ids of the sequences that heads follow
        self._heads_may_rest = True

    # ---- who follows which text -------------------------------------------------------------------------------------

    def parts_of(self, seq: Sequence) -> list[CandidateGenerator]:
        """All parts, or all but the heads if those do not follow the sequence."""
        return self.parts if seq.id in self._followed else self._others

    def moved_caches(self) -> list[PagedStaticCache] | None:
        """As in the base. From now on heads follow every text, since their caches are moved with it."""
        self._heads_may_rest = False
        return super().moved_caches()

    def start(self, seq: Sequence) -> None:
        """Start the sequence in its parts: without the heads while they rest, unless it names its drafter. Raises ValueError: no drafter
        has the name that the sequence gives."""
        check_drafter(seq, self.drafters)
        if self._heads and not self._rests(seq, begins=True):
            self._followed.add(seq.id)
        try:
            super().start(seq)
        except BaseException:
            self._followed.discard(seq.id)
            raise

    def stop(self, seq: Sequence) -> None:
        """Stop the sequence in the parts that follow it."""
        self.chosen.pop(seq.id, None)
        super().stop(seq)
        self._followed.discard(seq.id)

    def _rests(self, seq: Sequence, begins: bool = False) -> bool:
        """Whether heads do not follow a sequence that `begins`, or that they have followed until now."""
        known = None if begins else seq
        return self._heads_may_rest and seq.drafter is None and not self.chooser.heads_follow(known)

    def _let_heads_rest(self, sequences: list[Sequence]) -> None:
        """Heads stop following these texts, for good: the hidden states that they would miss are not computed again."""
        for seq in sequences:
            if seq.id in self._followed and self._rests(seq):
                for head in self._heads:
                    head.stop(seq)
                self._followed.discard(seq.id)

    def follows(self, index: int, seq: Sequence) -> bool:
        """Whether a part can draft for a sequence."""
        return self.parts[index] in self.parts_of(seq)

    @property
    def rests(self) -> bool:
        """See MayRest: while heads follow no text, and no other part reads its taps or sees every step."""
        return not (self._followed or self._always or self._others_tap)

    def able(self, sequences: list[Sequence]) -> np.ndarray | None:
        """bool [D, B]: which parts follow which rows; None if all parts follow all rows."""
        if not self._heads or all(seq.id in self._followed for seq in sequences):
            return None
        return self._is_other | np.array([seq.id in self._followed for seq in sequences])

    # ---- drafting ---------------------------------------------------------------------------------------------------

    def propose(self, sequences: list[Sequence], limits: list[int]) -> DraftTrees:
        """The drafts of the chosen drafters."""
        nothing = DraftTrees.empty(len(sequences), self.target.device)
        offers, seconds, scores = [], [], []
        clock = self.clock if not self.policy.holds else float  # whose times nobody reads
        for index, (part, longest) in enumerate(zip(self.parts[: self.num_lookups], self.longest, strict=False)):
            began = clock()
            self.asked[index] = self.chooser.is_awake(index)
            limited = [min(limit, longest) for limit in limits]
            offers.append(part.propose(sequences, limited) if self.asked[index] else nothing)
            scorer = self._scorers[index]
            scores.append(None if scorer is None else scorer.draft_scores(offers[-1]))
            seconds.append(clock() - began + self.observing[index] if self.asked[index] else 0.0)
        choice = self.chooser.choose(sequences, limits, offers, seconds, scores, self.able(sequences))
        for i, seq in enumerate(sequences):
            if seq.drafter is not None:
                choice.drafter[i], choice.depth[i] = self.drafters.index(seq.drafter), limits[i]
        trees = nothing
        for index in np.unique(choice.drafter[choice.depth > 0]).tolist():
            chosen = (choice.drafter == index) & (choice.depth > 0)
            depths = np.where(chosen, np.minimum(choice.depth, self.longest[index]), 0)
            self.asked[index] = True
            drafts = self._drafts_of(index, sequences, depths, offers[index] if index < self.num_lookups else None)
            self.note(index, sequences, drafts)
            self.chosen.update(
                (seq.id, self.drafters[index]) for seq, mine in zip(sequences, chosen, strict=True) if mine
            )
            trees = drafts if chosen.all() else DraftTrees.choose(trees, drafts, chosen.tolist())
        return trees

    def _drafts_of(
        self, index: int, sequences: list[Sequence], depths: np.ndarray, offer: DraftTrees | None
    ) -> DraftTrees:
        """One part's trees for the rows whose depth is not 0."""
        if offer is not None and offer.is_chain:
            lengths = np.minimum(offer.lengths, depths).tolist()
            return offer if lengths == offer.lengths else dataclasses.replace(offer, lengths=lengths)
        rows = [row for row in np.flatnonzero(depths).tolist() if self.follows(index, sequences[row])]
        if not rows:
            return DraftTrees.empty(len(sequences), self.target.device)
        drafts = self.parts[index].propose([sequences[i] for i in rows], depths[rows].tolist())
        return drafts if len(rows) == len(sequences) else drafts.spread(rows, len(sequences))

    # ---- learning ---------------------------------------------------------------------------------------------------

    def observe(self, outcome: StepOutcome) -> None:
        """As in the base, but only parts that learn are told, and of those not the look-ups that rest. The time that learning takes is
        kept for the choice."""
        for index in self._always:
            self._tell(index, outcome)
        drafted = any(self.asked)
        for index in [index for index in self._may_miss if self.asked[index]] if drafted else ():
            self.observing[index] = self._seconds_of(index, outcome, self.observing[index])
        if self._heads and any(seq.id in self._followed for seq, _ in outcome.chunks or []):
            self._tell_heads(outcome)
        if drafted:
            self.asked = [False] * len(self.parts)
            for proposed in self.proposed:
                proposed.clear()

    def _seconds_of(self, index: int, outcome: StepOutcome, usual: float) -> float:
        """Tell a part. Returns the seconds that it took, or the usual ones after a draft that the policy knew without choosing."""
        if self.policy.holds and any(self.asked):
            self._tell(index, outcome)
            return usual
        began = self.clock()
        self._tell(index, outcome)
        return self.clock() - began

    def _tell(self, index: int, outcome: StepOutcome) -> None:
        self.parts[index].observe(self.as_seen_by(index, outcome) if any(self.proposed) else outcome)

    def _tell_heads(self, outcome: StepOutcome) -> None:
        """Tell the heads about the texts that they follow. They let go of those for which that is too much."""
        seen = outcome.of(lambda seq: seq.id in self._followed)
        seconds = sum([self._seconds_of(index, seen, 0.0) for index in self._learning_heads])
        fed = outcome.num_own or []
        if sum(fed) == len(fed):  # a step that reads prompts takes longer
            if not (self.policy.holds and any(self.asked)):
                self.chooser.followed(seconds, len(fed))
            self._let_heads_rest([seq for seq, _ in outcome.chunks or [] if not seq.finished])

    def drafter_of(self, seq: Sequence) -> str | None:
        """The name of the drafter of the sequence's last draft."""
        return self.chosen.get(seq.id)


@register(AutoConfig)
class AutoGenerator(ChoosingGenerator):
    """Has the drafters that it is given, or that it discovers.

    Args:
        chooser: in place of the policy.
    """

    config: AutoConfig

    def __init__(
        self, config: AutoConfig, target: PackedModel, context: DrafterContext | None = None, chooser: Any = None
    ):  # fmt: skip
        super().__init__(config, target, context)
        self.search = find_drafters(config, target, context)
        made = self._make_parts(self.search, context)
        made = dict(sorted(made.items(), key=lambda item: item[1].config.has_weights))
        self.choose_among(made, AutoMemory.of(config, target, made), chooser)
        logger.info("%s", self.search)

    def _make_parts(self, search: Search, context: DrafterContext | None) -> dict[str, CandidateGenerator]:
        """The drafters by name. One that was found but cannot be made is noted; one that was asked for raises."""
        made: dict[str, CandidateGenerator] = {}
        for candidate in list(search.taken):
            config = with_common_keys(candidate.config.to_dict(), self.config)
            try:
                part = self.made("methods", config, context)
            except (ValueError, ImportError, OSError, RuntimeError) as error:
                if candidate.is_given:
                    raise
                search.drop(candidate, str(error))
                continue
            name, number = config.method, 2
            while name in made:
                name, number = f"{config.method}-{number}", number + 1
            made[name] = part
        return made


class RestingHead(ChoosingGenerator):
    """A single head of automatic draft length, which rests where it does not pay."""

    def __init__(self, head: CandidateGenerator):
        super().__init__(head.config, head.target)
        self.choose_among({head.config.method: head})

    @staticmethod
    def of(generator: CandidateGenerator) -> CandidateGenerator:
        """The drafter, or in its place a head that rests, if its configuration lets it."""
        config = generator.config
        is_head = generator.taps.whole_text and not isinstance(generator, CombinedGenerator)
        rests = is_head and config.draft_length == "auto" and not getattr(config, "learn", False)
        return RestingHead(generator) if rests else generator
