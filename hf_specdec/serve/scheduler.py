"""Scheduler: which rows take part in the next step, and how many tokens of its text each feeds."""

from __future__ import annotations

from bisect import insort
from collections.abc import Collection

from ..decoding.decoder import SpeculativeDecoder
from .request import Choice


def _order(choice: Choice) -> tuple[int, int, int]:
    return choice.order


class Scheduler:
    """Running rows first, then waiting ones, within one budget of tokens a step.

    Rows that decode feed one token and their drafts; rows that read a prompt feed a chunk of it in the same forward. A waiting row
    is admitted only if its whole prompt fits the free blocks. When blocks run out, the last row by priority and arrival is preempted: it
    waits, and reads its text again.

    Args:
        max_num_seqs: rows that run at once, at most.
        max_num_batched_tokens: tokens of a step, at most; decoding rows are never left out, their drafts are shortened.

    Attributes:
        waiting, running: both sorted, the first to run first.
    """

    def __init__(self, decoder: SpeculativeDecoder, max_num_seqs: int, max_num_batched_tokens: int):
        self.decoder = decoder
        self.max_num_seqs, self.max_num_batched_tokens = max_num_seqs, max_num_batched_tokens
        self.waiting: list[Choice] = []
        self.running: list[Choice] = []
        self.num_preemptions = 0

    def add(self, choice: Choice) -> None:
        """A choice waits to run."""
        insort(self.waiting, choice, key=_order)

    def remove(self, choice: Choice) -> None:
        """A choice has ended, or was cancelled."""
        (self.running if choice in self.running else self.waiting).remove(choice)

    def preempt(self, choice: Choice) -> None:
        """Take a running choice's blocks; it waits."""
        self.decoder.preempt(choice.sequence)
        self.running.remove(choice)
        self.add(choice)
        self.num_preemptions += 1

    def schedule(self, only: Collection[Choice] | None = None) -> tuple[list[Choice], list[int]]:
        """(rows of the next step, tokens of its own text that each feeds at most).

        Args:
            only: rows that may take part; None: all.
        """
        running = [choice for choice in self.running if only is None or choice in only]
        pending = [self._pending(choice) for choice in running]
        decoding = sum(count == 1 for count in pending)
        self._limit_drafts(decoding)
        left = self.max_num_batched_tokens - sum(
            1 + self._num_drafts(choice) for choice, count in zip(running, pending, strict=True) if count == 1
        )
        rows, counts = [], []
        for choice, count in zip(running, pending, strict=True):
            chunk = 1 if count == 1 else min(count, left)
            if chunk < 1:
                if any(each > 1 for each in counts):
                    continue
                chunk = min(count, self.decoder.config.block_size)  # a prompt never waits for ever
            left -= 0 if count == 1 else chunk
            rows.append(choice)
            counts.append(chunk)
        waiting = self.waiting if only is None else [choice for choice in self.waiting if choice in only]
        while waiting and left > 0 and len(self.running) < self.max_num_seqs and self._fits(waiting[0]):
            choice = waiting.pop(0)
            if only is not None:
                self.waiting.remove(choice)
            if not choice.is_added:
                self.decoder.add(choice.sequence)
                choice.is_added = True
            insort(self.running, choice, key=_order)
            chunk = min(self._pending(choice), left)
            left -= chunk
            rows.append(choice)
            counts.append(chunk)
        return rows, counts

    def make_room(self, wanting: list[Choice]) -> bool:
        """Preempt the last running row that holds blocks, for rows that found none. False if there is no other row."""
        cache = self.decoder.cache
        holders = [each for each in self.running if cache.tables[each.sequence.id].blocks]
        if not holders or (len(self.running) == 1 and holders == wanting[:1]):
            return False
        self.preempt(holders[-1])
        return True

    def _pending(self, choice: Choice) -> int:
        seq = choice.sequence
        return len(seq.tokens) - self.decoder.cache.tables[seq.id].length

    def _num_drafts(self, choice: Choice) -> int:
        most = self.decoder.generator.max_draft_nodes
        own = choice.sequence.num_speculative_tokens
        return most if own is None else min(own, most)

    def _limit_drafts(self, decoding: int) -> None:
        """Shorten drafts where all of them together would not fit the budget."""
        most = self.decoder.generator.max_draft_nodes
        if not most or not decoding:
            return
        allowed = max(0, self.max_num_batched_tokens // decoding - 1)
        for choice in self.running:
            wanted = choice.request.params.num_speculative_tokens
            limit = None if wanted is None and allowed >= most else min(allowed, most if wanted is None else wanted)
            choice.sequence.num_speculative_tokens = limit

    def _fits(self, choice: Choice) -> bool:
        if not self.running:
            return True
        cache = self.decoder.cache
        needed = -(-(len(choice.sequence.tokens) + 1) // cache.block_size)
        # One block for each running row to grow into, so that what is admitted is not preempted at once.
        return needed + len(self.running) <= cache.most_blocks - cache.pool.num_used
