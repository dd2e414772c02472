"""Corpora: texts that look-ups draft from as if they stood in every prompt, such as code, templates or answers to common questions."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

import numpy as np

from ..config import SpeculativeConfig, config_key
from ..core.sequence import Sequence
from ..jsonl import read_rows

Table = TypeVar("Table")
MOST_CORPORA = 16  # of a space: a draft looks into all of them
_AT_ONCE = 512  # tokens that a table reads while it holds the interpreter's lock, about 2 ms


@dataclass
class CorpusConfig(SpeculativeConfig):
    """Keys of methods that look into corpora, and of those that may have such a method as a part."""

    lookup_corpus: Any = config_key(
        None,
        'files that look-ups draft from, too: a list, or {name: file}; text, or .jsonl with "text"; generate() needs a tokenizer',
    )
    lookup_corpus_tokens: int = config_key(
        200_000, "most tokens of these files, and of an API key's uploads; about 0.5 kB each", minimum=1
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        given = self.lookup_corpus
        if given is None:
            return
        if isinstance(given, (str, list, tuple)):
            files = [given] if isinstance(given, str) else list(given)
            given = {Path(file).stem: file for file in files if isinstance(file, str)}
            if len(given) < len(files):
                raise self.fail("lookup_corpus", "must be files with different names, or {name: file}.")
        if not isinstance(given, dict) or not all(
            isinstance(part, str) and part for pair in given.items() for part in pair
        ):
            raise self.fail("lookup_corpus", f"must be a list of files, or {{name: file}}, not {given!r}.")
        self.lookup_corpus = given

    def load_corpora(self, corpora: list[Corpora], tokenizer: Any) -> None:
        """Add the files to the corpora of the drafters, for all texts.

        Raises:
            SpeculativeConfigError: no drafter looks into corpora, a file cannot be read, or there is no tokenizer.
        """
        if not corpora:
            raise self.fail("lookup_corpus", "is read by suffix and ngram, and there is no such drafter: add one.")
        if tokenizer is None:
            raise self.fail("lookup_corpus", "is text: pass generate(..., tokenizer=...).")
        for name, file in self.lookup_corpus.items():
            try:
                rows = read_rows(Path(file).expanduser(), "text")
                for row in rows:
                    if not isinstance(row.get("text"), str):
                        raise ValueError(f'{row["_where"]}: the row has no "text".')
                    row["text"].encode()  # raises for half a character, as JSON may hold, which tokenizers cannot read
                ids = ids_of([row["text"] for row in rows], tokenizer)
                for tables in corpora:
                    tables.add(None, name, ids, self.lookup_corpus_tokens)
            except (OSError, ValueError) as error:
                raise self.fail("lookup_corpus", f"cannot be used: {error}") from None


def ids_of(texts: list[str], tokenizer: Any) -> np.ndarray:
    """The token ids of texts, one after another: int32 [n]."""
    options = {"add_special_tokens": False, "return_attention_mask": False, "verbose": False}
    rows = [tokenizer(text, **options)["input_ids"] for text in texts]
    return np.concatenate([np.asarray(row, dtype=np.int32) for row in [[], *rows]])


class Corpora(Generic[Table]):
    """The corpora of a drafter: tables by space and name. Those without a space (None) are for all texts.

    Any thread may add and remove them while another one drafts.

    Args:
        begin: returns an empty table.
        extend: called with a table and the next ids of its corpus, int32 [n].
        vocab_size: number of the ids that the model has.
    """

    def __init__(self, begin: Callable[[], Table], extend: Callable[[Table, np.ndarray], object], vocab_size: int):
        self.begin, self.extend, self.vocab_size = begin, extend, vocab_size
        # space → name → table and number of tokens; replaced, never changed
        self._spaces: dict[str | None, dict[str, tuple[Table, int]]] = {}

    def of(self, seq: Sequence) -> list[Table]:
        """The tables for a sequence."""
        if not self._spaces:
            return []
        space = seq.space.partition(" ")[0]  # the name of an adapter may follow
        return [table for key in (None, space) for table, _ in self._spaces.get(key, {}).values()]

    def sizes(self, space: str | None) -> dict[str, int]:
        """Numbers of tokens by name."""
        return {name: size for name, (_, size) in self._spaces.get(space, {}).items()}

    def add(self, space: str | None, name: str, ids: np.ndarray, most: int, rest: float = 0.0) -> None:
        """Add a corpus, or replace the one of this name.

        Args:
            ids: int32 [n].
            most: maximum number of tokens of the space.
            rest: time to leave to other threads, as a multiple of the time that reading takes.

        Raises:
            ValueError: the corpus is empty or holds an id that the model lacks, or the space would have too many corpora or tokens.
                Nothing has changed.
        """
        others = {other: size for other, size in self.sizes(space).items() if other != name}
        if not len(ids):
            raise ValueError(f"The corpus {name!r} is empty.")
        if (highest := int(ids.max())) >= self.vocab_size:
            raise ValueError(
                f"The corpus {name!r} holds the id {highest}; the model has ids 0 to {self.vocab_size - 1}."
            )
        if len(others) >= MOST_CORPORA:
            raise ValueError(f"There are {MOST_CORPORA} corpora already, the maximum: delete one.")
        if (total := sum(others.values()) + len(ids)) > most:
            raise ValueError(
                f"With {name!r} the corpora have {total} tokens; lookup_corpus_tokens allows {most}: delete others, or shorten it."
            )
        table = self.begin()
        for start in range(0, len(ids), _AT_ONCE):
            began = time.perf_counter()
            self.extend(table, ids[start : start + _AT_ONCE])
            time.sleep(rest * (time.perf_counter() - began))
        self._replace(space, name, {name: (table, len(ids))})

    def remove(self, space: str | None, name: str) -> None:
        """Forget a corpus, if there is one of this name."""
        self._replace(space, name, {})

    def _replace(self, space: str | None, name: str, new: dict[str, tuple[Table, int]]) -> None:
        kept = {other: entry for other, entry in self._spaces.get(space, {}).items() if other != name} | new
        spaces = {**self._spaces, space: kept}
        self._spaces = {space: entries for space, entries in spaces.items() if entries}
