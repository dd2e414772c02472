"""Exact stopping: every criterion sees the same texts as in plain decoding, token by token."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from transformers.generation.stopping_criteria import (
    EosTokenCriteria,
    MaxLengthCriteria,
    StoppingCriteriaList,
    StopStringCriteria,
)

from ..core.sequence import Sequence

# Sequences check these themselves. A subclass may do anything, so it is called.
KNOWN_CRITERIA = (MaxLengthCriteria, EosTokenCriteria)


class LockstepObserver:
    """Shows the batch to stopping criteria and streamers as plain decoding would: one token per row and step.

    Rows of a speculative batch advance at different speeds. A step is shown once every unfinished row has reached it.

    Args:
        prompt_ids: int64 [B, S], padded as the caller passed it.
        pad_token_id: what finished rows show.
        scores: function from a step (counted from 0) to the scores [B, V] that criteria are given; None: scores are not kept.
    """

    def __init__(
        self,
        prompt_ids: torch.LongTensor,
        sequences: list[Sequence],
        criteria: StoppingCriteriaList,
        streamer,
        pad_token_id: int | None,
        scores: Callable[[int], torch.Tensor] | None,
    ):
        self.sequences, self.streamer, self.score_step = sequences, streamer, scores
        # Without an end-of-sequence criterion, transformers continues rows that have stopped until all rows have.
        self.rows_can_stop = any(hasattr(criterion, "eos_token_id") for criterion in criteria)
        kinds = (StopStringCriteria,) if self.rows_can_stop else ()
        self.row_criteria = [criterion for criterion in criteria if type(criterion) in kinds]
        # Any: transformers' annotations allow the scores of one step only
        self.others: Any = StoppingCriteriaList(
            criterion for criterion in criteria if type(criterion) not in KNOWN_CRITERIA + kinds
        )
        self.width = prompt_ids.shape[1]
        self.num_steps = 0
        self.scores: tuple[torch.Tensor, ...] | None = None if scores is None else ()
        self.stopped: list[int | None] = [None] * len(sequences)  # number of new tokens at which each row stopped
        self.pad_token_id = 0 if pad_token_id is None else pad_token_id
        self._ids = prompt_ids
        self._unwritten: list[list[int]] = []  # tokens [B] of each step that is shown but not in `_ids` yet

    def row_advanced(self, seq: Sequence, num_new: int) -> None:
        """Check the criteria that depend on this row alone, for each new prefix."""
        if not self.row_criteria:
            return
        prefix = torch.tensor([seq.shown_tokens], device=self._ids.device)
        for length in range(prefix.shape[1] - num_new + 1, prefix.shape[1] + 1):
            if any(bool(criterion(prefix[:, :length], None).all()) for criterion in self.row_criteria):
                self._stop(seq, length - self.width)
                return

    def _stop(self, seq: Sequence, num_generated: int) -> None:
        del seq.tokens[seq.prompt_length + num_generated :]
        seq.finished = True

    def advance(self) -> bool:
        """Show every step that all unfinished rows have reached. True if the whole batch is done."""
        while not self.done:
            step = self.num_steps + 1
            alive = [i for i, at in enumerate(self.stopped) if at is None or not self.rows_can_stop]
            if any(self.sequences[i].num_generated < step for i in alive):
                return False
            self._show(step, alive)
        return True

    def _show(self, step: int, alive: list[int]) -> None:
        self.num_steps = step
        shown = [self.pad_token_id] * len(self.sequences)
        for i in alive:
            seq = self.sequences[i]
            shown[i] = seq.tokens[seq.prompt_length + step - 1]
        self._unwritten.append(shown)
        if self.score_step is not None and self.scores is not None:
            self.scores += (self.score_step(step - 1),)
        hit = self.others(self.output_ids(), self.scores) if self.others else None
        for i in alive:
            seq = self.sequences[i]
            ended = seq.finished and seq.num_generated == step
            if self.stopped[i] is None and (ended or (hit is not None and bool(hit[i]))):
                self.stopped[i] = step
                if self.rows_can_stop:
                    self._stop(seq, step)
        if self.streamer is not None:
            self.streamer.put(torch.tensor(shown))  # on the host, where streamers expect it

    @property
    def done(self) -> bool:
        """Whether every row has stopped."""
        return all(at is not None for at in self.stopped)

    @property
    def device(self) -> torch.device:
        """Where `output_ids` are."""
        return self._ids.device

    def output_ids(self) -> torch.Tensor:
        """int64 [B, S + steps shown]."""
        end = self.width + self.num_steps
        if self._unwritten:
            if end > self._ids.shape[1]:  # with spare columns, so that criteria do not copy the text every step
                room = self._ids.new_empty(self._ids.shape[0], max(self.num_steps, 64))
                self._ids = torch.cat([self._ids, room], dim=1)
            self._ids[:, end - len(self._unwritten) : end] = torch.tensor(self._unwritten, device=self.device).T
            self._unwritten = []
        return self._ids[:, :end]
