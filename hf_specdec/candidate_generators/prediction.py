"""Predicted outputs: a request says what will be written, mostly (OpenAI's `prediction`). One look-up per row, beside any method."""

from __future__ import annotations

from typing import Any

import numpy as np

from ..config import SpeculativeConfig
from ..core.sequence import Sequence

SHORTEST, LONGEST = 16, 64  # tokens of a draft: as many as have agreed, within these
CONTEXT = 2  # tokens before an edit that tell where else to make it
AHEAD = 1024  # tokens of the prediction that are edited as the text was
BAND = 4096  # tokens of the prediction that are compared after a difference


class Prediction:
    """What is expected to follow a row's prompt, aligned with what does.

    While both agree, drafts are read from the prediction. After a difference, a table is kept with a line for each new token: the
    smallest edit scripts (insertions and deletions) that turn the beginnings of what was predicted into what was written since. The
    likeliest place to go on at is one where many tokens agree at the end of a small script. Once more tokens agree than the script
    changes, the table is dropped. So a token costs one comparison, or one line of at most `BAND` entries. The next tokens of the
    prediction are then edited alike: a variable that got another name has it there, too.

    Args:
        ids: the predicted token ids.
    """

    def __init__(self, ids: list[int]):
        self.given = ids
        self._begin()

    def _begin(self) -> None:
        self.ids = list(self.given)  # with the edits of the text so far
        self._num_read = 0  # tokens of the row's text
        self._at: int | None = 0  # the predicted token that is expected next; None: nobody knows
        self._agreed = 0  # tokens that agree since the last difference
        self._origin = 0  # with a table: the place in the prediction at which it begins
        self._window = np.zeros(0, dtype=np.int64)  # [m], the prediction from there
        self._since: list[int] = []  # the text since it began
        # int32 [m + 1], sizes of the scripts for the first 0, 1, .. m tokens from there, less these numbers; None: no table
        self._edits: np.ndarray | None = None
        self._runs = np.zeros(1, dtype=np.int32)  # int32 [m + 1], how many tokens agree at their ends

    def continuation(self, seq: Sequence, most: int = LONGEST) -> list[int]:
        """Up to `most` ids expected after the row's text; none where the text does not follow the prediction."""
        if seq.num_generated < self._num_read:  # the last tokens were taken back
            self._begin()
        for token in seq.tokens[seq.prompt_length + self._num_read :]:
            self._read(token)
        self._num_read = seq.num_generated
        if self._at is None:
            return []
        return self.ids[self._at : self._at + min(most, LONGEST, max(SHORTEST, self._agreed))]

    def _read(self, token: int) -> None:
        """Follow one more token of the text."""
        if self._edits is None:
            assert self._at is not None
            if self._at < len(self.ids) and self.ids[self._at] == token:
                self._at, self._agreed = self._at + 1, self._agreed + 1
                return
            self._origin, self._since = self._at, []
            self._window = np.asarray(self.ids[self._at : self._at + BAND], dtype=np.int64)
            self._edits, self._runs = np.zeros((2, len(self._window) + 1), dtype=np.int32)  # all deleted
        self._since.append(token)
        ends = np.flatnonzero(self._window == token) + 1
        edits, runs = self._edits + 1, np.zeros_like(self._runs)  # the token is inserted
        edits[ends], runs[ends] = self._edits[ends - 1] - 1, self._runs[ends - 1] + 1  # or agrees
        edits = np.minimum.accumulate(edits)  # and what is predicted next may be deleted
        self._edits, self._runs, self._at, self._agreed = edits, runs, None, 0
        if not len(ends):
            return
        # an agreement by chance is rare, and a small script likely
        evidence = 2 * runs[ends] - np.log2(1 + edits[ends] + ends)
        best = int(ends[evidence.argmax()])
        self._agreed, size = int(runs[best]), int(edits[best]) + best
        if evidence.max() > 0:
            self._at = self._origin + best
        if self._at is not None and self._agreed > size:
            self._edits = None
            self._edit_alike()

    def _edit_alike(self) -> None:
        """Apply the edit that has just been found to the next tokens of the prediction, after the same tokens as here. A large edit is
        none that comes again."""
        assert self._at is not None
        before = self.ids[max(self._origin - CONTEXT, 0) : self._origin]
        removed = self.ids[self._origin : self._at - self._agreed]
        written = self._since[: len(self._since) - self._agreed]
        is_small = max(len(removed), len(written)) <= SHORTEST and len(self.ids) <= 2 * len(self.given)
        if is_small and len(before) == CONTEXT:
            ahead = slice(self._at, self._at + AHEAD)
            self.ids[ahead] = _replaced(self.ids[ahead], before + removed, before + written)


def _replaced(ids: list[int], old: list[int], new: list[int]) -> list[int]:
    """The ids with all occurrences of `old` replaced."""
    out, start = [], 0
    while start < len(ids):
        is_old = ids[start] == old[0] and ids[start : start + len(old)] == old
        out += new if is_old else ids[start : start + 1]
        start += len(old) if is_old else 1
    return out


def predictions_of(config: SpeculativeConfig, num_rows: int, tokenizer: Any, vocab_size: int) -> list[list[int]] | None:
    """The predicted ids of each row of a batch, from the key `prediction`; None: it is not given.

    Raises:
        SpeculativeConfigError: it does not fit the rows or the vocabulary, or there is text and no tokenizer.
    """
    given: Any = config.prediction
    if given is None:
        return None
    rows = [given] if isinstance(given, str) or are_ids(given) else given
    if not isinstance(rows, (list, tuple)) or not all(
        row is None or isinstance(row, str) or are_ids(row) for row in rows
    ):
        raise config.fail(
            "prediction", "must be a text, a list of token ids, or a list with one of them, or None, for each row."
        )
    if num_rows % len(rows):
        raise config.fail("prediction", f"has {len(rows)} entries for a batch of {num_rows} rows: give one for each.")
    predictions = []
    for row in rows:
        if isinstance(row, str) and tokenizer is None:
            raise config.fail("prediction", "is text: pass generate(..., tokenizer=...), or give token ids.")
        predictions.append(
            tokenizer(row, add_special_tokens=False)["input_ids"] if isinstance(row, str) else list(row or ())
        )
    wrong = [token for ids in predictions for token in ids if not 0 <= token < vocab_size]
    if wrong:
        raise config.fail("prediction", f"holds the id {wrong[0]}; the model has ids 0 to {vocab_size - 1}.")
    return [predictions[row * len(rows) // num_rows] for row in range(num_rows)]


def are_ids(value: Any) -> bool:
    """True if it is a list of integers, or a tuple of them."""
    return isinstance(value, (list, tuple)) and all(type(token) is int for token in value)
