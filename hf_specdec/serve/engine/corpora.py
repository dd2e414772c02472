"""EngineCorpora: the corpora that clients give an engine. A thread of its own makes the tables, while steps go on."""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING

from ...candidate_generators.base import CandidateGenerator
from ...candidate_generators.combined import corpora_of
from ...candidate_generators.corpora import CorpusConfig

if TYPE_CHECKING:
    from ..ipc.messages import ChangeCorpus

_REST = 3.0  # the thread works a quarter of the time: steps need the interpreter, too


class EngineCorpora:
    """The corpora of an engine's drafters. Any thread may call its methods."""

    def __init__(self, generator: CandidateGenerator):
        self._corpora = corpora_of(generator)
        config = generator.config
        self._most = config.lookup_corpus_tokens if isinstance(config, CorpusConfig) else 0
        self._thread = ThreadPoolExecutor(1, "hf-specdec-corpora")  # starts with the first task

    @property
    def sizes(self) -> dict[str, int]:
        """Numbers of tokens of the corpora for all texts, by name."""
        return self._corpora[0].sizes(None) if self._corpora else {}

    def start(self, wish: ChangeCorpus) -> Future:
        """Begin to add a corpus or to remove it, after those that were asked for before. The future's error is ValueError if no drafter
        looks into corpora, or see `Corpora.add`."""
        return self._thread.submit(self._change, wish)

    def _change(self, wish: ChangeCorpus) -> None:
        if not self._corpora:
            raise ValueError("No drafter looks into corpora: start the server with method auto, suffix or ngram.")
        if wish.ids is None:
            self._remove(wish)
            return
        try:
            for corpora in self._corpora:
                corpora.add(wish.space, wish.name, wish.ids, self._most, _REST)
        except MemoryError:
            self._remove(wish)
            raise

    def _remove(self, wish: ChangeCorpus) -> None:
        for corpora in self._corpora:
            corpora.remove(wish.space, wish.name)

    def close(self) -> None:
        """Begin nothing more."""
        self._thread.shutdown(wait=False, cancel_futures=True)
