"""Decoding with a model whose shards are on several ranks: every rank takes the same steps, and rank 0 decides what they are.

In each step rank 0 decides the draft lengths, the drafts and the verdict, and whether a criterion ends a row. Drafters are whole on
every rank and draft without collectives; rank 0's drafts replace those of the other ranks.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

from ..cache import OutOfBlocks
from ..candidate_generators import CandidateGenerator
from ..candidate_generators.auto.generator import AgreedChoice, ChoosingGenerator, RestingHead
from ..config import SpeculativeConfig
from ..core.draft_trees import DraftTrees
from ..core.ranks import Ranks, digest
from ..core.sequence import Sequence
from ..policy import DraftLengthPolicy
from .decoder import SpeculativeDecoder, brings_drafts
from .step import StepResult
from .stopping import LockstepObserver

_READS_PROBS = ("rejection", "block")  # rules that need the distributions that drafts were drawn from


def decoder_of(generator: CandidateGenerator) -> SpeculativeDecoder:
    """The decoder for a drafter and its target, whole or sharded."""
    generator, ranks = RestingHead.of(generator), generator.target.ranks
    return SpeculativeDecoder(generator) if ranks is None else RankedDecoder(generator, ranks)


@contextlib.contextmanager
def agreed_call(
    ranks: Ranks, seed: int, config: SpeculativeConfig, generation_config: Any, input_ids: torch.Tensor, mask: Any
) -> Iterator[int]:
    """A call of `generate()` that the ranks make together. Yields rank 0's seed. Raises RankError: the ranks were given different
    arguments, or another rank has failed."""
    settings = {
        name: getattr(generation_config, name, None)
        for name in ("max_length", "do_sample", "temperature", "top_k", "top_p", "min_p", "repetition_penalty", "return_dict_in_generate")
    }  # fmt: skip
    call = json.dumps({**config.to_dict(), "token": None}, sort_keys=True, default=str)
    with ranks.watched(), ranks.agreed():
        in_common = digest(
            call, sorted(settings.items()), tuple(input_ids.shape), input_ids, *([] if mask is None else [mask])
        )
        (seed,) = ranks.same([seed], in_common)
        yield seed


class _Followed(DraftLengthPolicy):
    """The policy of the other ranks: draft lengths come from rank 0, which measures."""

    needs_observations = True

    def wants_plain_time(self) -> bool:
        """No: rank 0 measures."""
        return False


class RankedDecoder(SpeculativeDecoder):
    """A SpeculativeDecoder for sharded targets. Every rank runs one, and all take the same steps."""

    def __init__(self, generator: CandidateGenerator, ranks: Ranks):
        super().__init__(generator)
        self.ranks = ranks
        self.agree_on_verdict = ranks.same_tensor
        self._measures = self._most_nodes > 0 and self.policy.needs_observations
        if self._measures and not ranks.leads:
            self.policy = _Followed()
        chooser = generator.chooser if isinstance(generator, ChoosingGenerator) else None
        self._choice = chooser if isinstance(chooser, AgreedChoice) else None

    # ---- the loop ---------------------------------------------------------------------------------------------------

    def step(self, sequences: list[Sequence], num_tokens: list[int] | None = None) -> list[StepResult]:
        """See the base. An exception on one rank makes all ranks raise in this step."""
        with self.ranks.agreed(OutOfBlocks):
            return super().step(sequences, num_tokens)

    def _draft_limits(self, sequences: list[Sequence]) -> list[int]:
        limits = super()._draft_limits(sequences)
        if not self._measures:
            return limits
        if self._choice is not None:
            self._choice.agree(sequences)
        return self.ranks.same(limits)

    def _propose(self, sequences: list[Sequence], limits: list[int]) -> tuple[DraftTrees, DraftTrees, list[int]]:
        """Rank 0's drafts; the rest is this rank's, see the base. The limits are the same on all ranks, so a row drafts on all ranks or on
        none."""
        in_common = digest(
            limits, [(len(seq.tokens), seq.tokens[-4:], self.cache.tables[seq.id].length) for seq in sequences]
        )
        if not any(limits) and not any(map(brings_drafts, sequences)):
            self.ranks.same((), in_common)
            return super()._propose(sequences, limits)
        trees, proposed, num_drafted = self._drafted(sequences, limits)
        return self._with_slots(sequences, self._same_trees(trees, in_common)), proposed, num_drafted

    def _same_trees(self, trees: DraftTrees, in_common: int) -> DraftTrees:
        """Rank 0's trees."""
        tokens, probs, leads, batch = trees.tokens, trees.probs, self.ranks.leads, len(trees.lengths)
        device = self.target.device
        on_host = device.type == "cpu"
        sizes = (0, 0) if probs is None or self.config.verification_rule not in _READS_PROBS else probs.shape[1:]
        numbers = [tokens.shape[1], trees.is_chain, trees.prob_index is not None, *sizes, *trees.lengths]
        for table in (tokens if on_host else None, trees.parents, trees.prob_index) if leads else ():
            numbers += [] if table is None else table.flatten().tolist()
        width, is_chain, is_indexed, count, vocab, *rest = self.ranks.same(list(map(int, numbers)), in_common)
        if not leads:
            are_sent = on_host, not is_chain, bool(is_indexed)
            tables = iter(np.asarray(rest[batch:], dtype=np.int64).reshape(sum(are_sent), batch, width))
            ids, parents, index = (next(tables) if is_sent else None for is_sent in are_sent)
            tokens = torch.empty(batch, width, dtype=torch.int64) if ids is None else torch.from_numpy(ids)
            trees = DraftTrees(tokens.to(device), rest[:batch], parents, None, index)
        if not on_host and width:
            trees.tokens = self.ranks.same_tensor(trees.tokens)
        if vocab:
            values = probs if leads and probs is not None else torch.empty(batch, count, vocab, device=device)
            trees.probs = self.ranks.same_tensor(values)
        return trees


# ---- stopping -------------------------------------------------------------------------------------------------------


def observer_for(decoder: SpeculativeDecoder, *args: Any) -> LockstepObserver:
    """A LockstepObserver for the decoder's batch. `args`: its arguments."""
    if not isinstance(decoder, RankedDecoder):
        return LockstepObserver(*args)
    return (_LeadingObserver if decoder.ranks.leads else _FollowingObserver)(decoder.ranks, *args)


class _LeadingObserver(LockstepObserver):
    """Asks the criteria, and tells the other ranks what ended."""

    def __init__(self, ranks: Ranks, *args: Any):
        super().__init__(*args)
        self.ranks = ranks

    def advance(self) -> bool:
        """See the base."""
        done = super().advance()
        stopped = [-1 if at is None else at for at in self.stopped]
        lengths, finished = zip(*((len(seq.tokens), seq.finished) for seq in self.sequences), strict=True)
        self.ranks.same([self.num_steps, *stopped, *lengths, *finished])
        return done


class _FollowingObserver(LockstepObserver):
    """Shows what rank 0 shows. It asks no criteria, because a criterion with a clock or random numbers could answer differently here."""

    def __init__(self, ranks: Ranks, *args: Any):
        super().__init__(*args)
        self.ranks = ranks

    def row_advanced(self, seq: Sequence, num_new: int) -> None:
        """Check nothing: rank 0 checks the row."""

    def advance(self) -> bool:
        """See the base."""
        count, (num_steps, *rows) = len(self.sequences), self.ranks.same()
        stopped, lengths, finished = rows[:count], rows[count : 2 * count], rows[2 * count :]
        for step in range(self.num_steps + 1, num_steps + 1):
            shown = [self.pad_token_id] * count
            for i, seq in enumerate(self.sequences):
                if not self.rows_can_stop or stopped[i] < 0 or stopped[i] >= step:
                    shown[i] = seq.tokens[seq.prompt_length + step - 1]
            self._unwritten.append(shown)
            self.num_steps = step
            if self.streamer is not None:
                self.streamer.put(torch.tensor(shown))
        self.stopped = [None if at < 0 else at for at in stopped]
        for seq, length, is_finished in zip(self.sequences, lengths, finished, strict=True):
            del seq.tokens[length:]
            seq.finished = bool(is_finished)
        return self.done
