"""Prompt lookup: copy what followed the last few tokens where they first occurred (Saxena 2023; vLLM's `ngram`)."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from ..config import config_key
from ..core.draft_trees import DraftTrees
from ..core.sequence import Sequence
from ..model.packed_model import PackedModel
from .base import CandidateGenerator, ContinuesDrafts, DrafterContext, ReadsCorpora
from .corpora import Corpora, CorpusConfig
from .registry import register

LONGEST_NGRAM = 64  # the index has an entry per token and length


@dataclass
class NGramConfig(CorpusConfig):
    """Prompt lookup: the longest n-gram at the text's end, n in [prompt_lookup_min, prompt_lookup_max], is looked up in the text before
    it, and in an encoder's input. The tokens after its earliest occurrence are drafted. Needs no model."""

    name = "ngram"

    prompt_lookup_min: int | None = config_key(
        None, "shortest n-gram looked up (default: prompt_lookup_max, or 5)", minimum=1, maximum=LONGEST_NGRAM
    )
    prompt_lookup_max: int | None = config_key(
        None, "longest n-gram looked up (default: prompt_lookup_min, or 5)", minimum=1, maximum=LONGEST_NGRAM
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.ngram_range[0] > self.ngram_range[1]:
            raise self.fail(
                "prompt_lookup_min",
                f"is {self.prompt_lookup_min}, more than prompt_lookup_max = {self.prompt_lookup_max}.",
            )

    @property
    def ngram_range(self) -> tuple[int, int]:
        """(shortest, longest) n-gram. A missing one equals the other; both default to 5 (vLLM's defaults)."""
        low, high = self.prompt_lookup_min, self.prompt_lookup_max
        return low or high or 5, high or low or 5


class NGramIndex:
    """The end of the first occurrence of each n-gram in a growing text: one dict entry per token and n, one look-up per n."""

    def __init__(self, shortest: int, longest: int):
        self.sizes = range(longest, shortest - 1, -1)
        self.first_end: list[dict[tuple[int, ...], int]] = [{} for _ in self.sizes]
        self.num_indexed = 0

    def extend(self, tokens: list[int]) -> None:
        """Index every n-gram that ends before the last token (so that a match always has a continuation)."""
        for size, first_end in zip(self.sizes, self.first_end, strict=True):
            for end in range(max(self.num_indexed, size), len(tokens)):
                first_end.setdefault(tuple(tokens[end - size : end]), end)
        self.num_indexed = max(self.num_indexed, len(tokens))

    def continuation(
        self, tokens: list[int], length: int, draft: list[int] | None = None, corpora: Iterable[CorpusIndex] = ()
    ) -> list[int]:
        """Up to `length` tokens that followed the earliest occurrence of the longest n-gram ending `tokens`.

        Args:
            draft: tokens that follow `tokens` but are not indexed: continue `tokens + draft`.
            corpora: further texts with the same sizes of n-grams. An n-gram that `tokens` repeats is taken from there.
        """
        draft = draft or []
        tail = tokens[-self.sizes[0] :] + draft
        for place, size in enumerate(self.sizes):
            ngram = tuple(tail[-size:])
            end = self.first_end[place].get(ngram) if len(tokens) + len(draft) > size else None
            if end is not None:
                copied = tokens[end : end + length]
                return copied + draft[: length - len(copied)]
            for corpus in corpora:
                if (end := corpus.index.first_end[place].get(ngram)) is not None:
                    return corpus.text[end : end + length]
        return []


class CorpusIndex:
    """A corpus, and where its n-grams first end. `sizes`: the shortest and the longest n-gram."""

    def __init__(self, sizes: tuple[int, int]):
        self.index, self.text = NGramIndex(*sizes), list[int]()

    def extend(self, ids: np.ndarray) -> None:
        """Append ids, int32 [n]."""
        self.text += ids.tolist()
        self.index.extend(self.text)


@register(NGramConfig)
class NGramGenerator(CandidateGenerator, ContinuesDrafts, ReadsCorpora):
    """Drafts chains from the sequence's own text, from what an encoder has read for it, and from corpora."""

    config: NGramConfig

    def __init__(self, config: NGramConfig, target: PackedModel, context: DrafterContext | None = None):
        super().__init__(config, target, context)
        self.indices: dict[int, NGramIndex] = {}
        self.corpora = Corpora(lambda: CorpusIndex(config.ngram_range), CorpusIndex.extend, target.vocab_size)

    def start(self, seq: Sequence) -> None:
        self.indices[seq.id] = NGramIndex(*self.config.ngram_range)

    def propose(self, sequences: list[Sequence], limits: list[int]) -> DraftTrees:
        drafts = self.continue_drafts(sequences, [[] for _ in sequences], limits)
        return DraftTrees.from_lists(drafts, device=self.target.device)

    def continue_drafts(self, sequences: list[Sequence], drafts: list[list[int]], limits: list[int]) -> list[list[int]]:
        """The tokens that followed an earlier occurrence of each draft's end."""
        added: list[list[int]] = [[] for _ in sequences]
        for i, (seq, draft, limit) in enumerate(zip(sequences, drafts, limits, strict=True)):
            if limit > 0:
                index = self.indices[seq.id]
                # a long text is not copied in every step
                text = seq.read_ids + seq.tokens if seq.read_ids else seq.tokens
                index.extend(text)  # only now: rows that do not draft need no index
                added[i] = index.continuation(text, limit, draft, self.corpora.of(seq))
        return added

    def stop(self, seq: Sequence) -> None:
        del self.indices[seq.id]
