"""EngineCorpora: the corpora that clients give an engine. A thread of its own makes the tables, while steps go on."""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np

from ...candidate_generators.base import CandidateGenerator
from ...candidate_generators.combined import corpora_of
from ...candidate_generators.corpora import CorpusConfig

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

    def start(self, space: str, name: str, ids: np.ndarray | None) -> Future:
        """Begin to add a corpus, int32 [n], or to remove it (None), after what was asked for before. The future's error is ValueError if no
        drafter looks into corpora, or see `Corpora.add`."""
        return self._thread.submit(self._change, space, name, ids)

    def _change(self, space: str, name: str, ids: np.ndarray | None) -> None:
        if not self._corpora:
            raise ValueError("No drafter looks into corpora: start the server with method auto, suffix or ngram.")
        try:
            for corpora in self._corpora:
                if ids is None:
                    corpora.remove(space, name)
                else:
                    corpora.add(space, name, ids, self._most, _REST)
        except MemoryError:  # some have it, and some have not
            for corpora in self._corpora:
                corpora.remove(space, name)
            raise

    def close(self) -> None:
        """Begin nothing more."""
        self._thread.shutdown(wait=False, cancel_futures=True)
