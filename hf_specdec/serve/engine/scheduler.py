"""Scheduler: chooses the rows of the next step, and how many tokens of its own text each row feeds."""

from __future__ import annotations

import time
from bisect import insort
from collections.abc import Collection
from operator import attrgetter

from ...core.sequence import Sequence
from ...decoding.decoder import SpeculativeDecoder
from .request import RequestChoice

_order = attrgetter("order")


class Scheduler:
    """Fills each step's token budget with running rows first, then with waiting rows.

    A row that decodes feeds one token and its drafts. A row that reads its prompt feeds a chunk of it in the same forward pass. While
    prompts are to be read, drafts are cut so that they take at most half of what decoding rows leave of the budget: long drafts would
    keep other rows from joining. What an encoder reads counts when its row starts. A waiting row may start only if the free blocks hold
    its whole text. When blocks run out, the last row by priority and arrival is preempted: it gives its blocks back, waits, and later
    reads its text again. A prompt that the model itself reads is a step of its own, between two of which the other rows have one.

    Args:
        max_num_batched_tokens: maximum number of tokens in a step. Rows that decode are never left out; their drafts are shortened instead.
            None: as many as the model runs in one native call, while decoding rows take at most half of them; else `USUAL_TOKENS`.
    """

    USUAL_TOKENS = 2048

    def __init__(self, decoder: SpeculativeDecoder, max_num_seqs: int, max_num_batched_tokens: int | None):
        self.decoder = decoder
        self.max_num_seqs, self.max_num_batched_tokens = max_num_seqs, max_num_batched_tokens
        self.waiting: list[RequestChoice] = []  # sorted by priority, then by arrival; the first runs first
        self.running: list[RequestChoice] = []  # the same
        self.newest: int | None = None  # number of the last request that may run; None: all may
        self.num_preemptions = 0
        # What drafts may take, whether there are any, and rows for which this was last set.
        self._limited: tuple[int, bool, list[RequestChoice]] | None = None
        self.was_alone = False  # the last step was a prompt that the model itself reads

    def add(self, choice: RequestChoice) -> None:
        """Let a choice wait for its first step."""
        insort(self.waiting, choice, key=_order)

    @property
    def has_rows(self) -> bool:
        """True while a row that may run waits or runs."""
        if self.newest is None:
            return bool(self.waiting or self.running)
        return any(choice.request.number <= self.newest for choice in (*self.waiting, *self.running))

    def remove(self, choice: RequestChoice) -> None:
        """Forget a choice, waiting or running."""
        self._limited = None
        (self.running if choice in self.running else self.waiting).remove(choice)

    def preempt(self, choice: RequestChoice) -> None:
        """Take the blocks of a running choice and let it wait."""
        self.decoder.preempt(choice.sequence)
        self.running.remove(choice)
        self.add(choice)
        self.num_preemptions += 1

    def schedule(self, only: Collection[RequestChoice] | None = None) -> tuple[list[RequestChoice], list[int]]:
        """Choose the rows of the next step, among `only` if given; waiting rows among them become running ones. Returns the rows, and for
        each the maximum number of tokens of its own text that it feeds.
        """
        running = [choice for choice in self.running if only is None or choice in only]
        waiting = self.waiting if only is None else [choice for choice in self.waiting if choice in only]
        if self.newest is not None:
            waiting = [choice for choice in waiting if choice.request.number <= self.newest]
        starting = self._starting(waiting)
        read_by_model = [choice for choice in running + starting if choice.sequence.image_prompt is not None]
        unread = [choice for choice in read_by_model if self.decoder.needs_model(choice.sequence)]
        running = [choice for choice in running if choice not in unread] if unread else running
        self.was_alone = bool(unread) and not (self.was_alone and running)
        if self.was_alone:
            if unread == starting:
                self._start(unread[0])
            return unread[:1], [self._pending(unread[0])]
        tables, sequences = self.decoder.cache.tables, [choice.sequence for choice in running]
        pending = [len(seq.tokens) - tables[seq.id].length for seq in sequences]
        decoding = sequences
        if pending.count(1) < len(pending):
            decoding = [seq for seq, count in zip(sequences, pending, strict=True) if count == 1]
        num_decoding = len(decoding)
        budget = self._budget(num_decoding)
        self._limit_drafts(budget, decoding, sum(pending) - num_decoding, waiting)
        if num_decoding == len(running) and not waiting:
            return running, pending
        with_pending = list(zip(running, pending, strict=True))
        left = budget - sum(1 + self._num_drafts(choice) for choice, count in with_pending if count == 1)
        rows, counts = [], []
        for choice, count in with_pending:
            chunk = 1 if count == 1 else min(count, left)
            if chunk < 1:
                if max(counts, default=1) > 1:
                    continue
                chunk = min(count, self.decoder.config.block_size)  # one prompt always advances, even without budget
            left -= 0 if count == 1 else chunk
            rows.append(choice)
            counts.append(chunk)
        reading = [choice for choice, count in with_pending if count > 1]  # they may draft when their prompts end
        num_running = len(rows)
        while left > 0 and self._starting(waiting) and not self.decoder.needs_model(waiting[0].sequence):
            choice = waiting[0]
            self._start(choice)
            if waiting is not self.waiting:
                waiting.remove(choice)
            chunk = min(self._pending(choice), left)
            source = choice.sequence.source
            left -= chunk + (0 if source is None else source.length)  # the encoder reads it first
            rows.append(choice)
            counts.append(chunk)
        reading += rows[num_running:]
        self._limited = self._limited if not reading else None
        for choice in reading:
            room, most = max(0, left) // len(reading), self.decoder.most_nodes(choice.sequence)
            choice.sequence.draft_room = None if room >= most else room
        return rows, counts

    def _starting(self, waiting: list[RequestChoice]) -> list[RequestChoice]:
        """The first of these rows, if it may start now."""
        may_start = waiting and len(self.running) < self.max_num_seqs and self._fits(waiting[0])
        return waiting[:1] if may_start else []

    def _start(self, choice: RequestChoice) -> None:
        """Let a waiting row run."""
        self.waiting.remove(choice)
        if not choice.is_added:
            self.decoder.add(choice.sequence)
            choice.is_added = True
            choice.request.started = choice.request.started or time.monotonic()
        insort(self.running, choice, key=_order)

    def make_room(self, wanting: list[RequestChoice]) -> bool:
        """Preempt the last running row that holds blocks, for rows that need some. False if no other row holds any."""
        cache = self.decoder.cache
        ids = {choice: choice.sequence.id for choice in self.running}
        holders = [choice for choice, id in ids.items() if cache.tables[id].blocks or cache.holds_source(id)]
        if not holders or (len(self.running) == 1 and holders == wanting[:1]):
            return False
        self.preempt(holders[-1])
        return True

    def _budget(self, num_decoding: int) -> int:
        """Maximum number of tokens in a step in which so many rows decode."""
        if self.max_num_batched_tokens is not None:
            return self.max_num_batched_tokens
        most = self.decoder.target.most_tokens_of_one_call
        return most if most and 2 * num_decoding <= most else self.USUAL_TOKENS

    def _pending(self, choice: RequestChoice) -> int:
        """Number of tokens of a row's text whose KV is not in the cache yet; 1 for a row that decodes."""
        seq = choice.sequence
        return len(seq.tokens) - self.decoder.cache.tables[seq.id].length

    def _num_drafts(self, choice: RequestChoice) -> int:
        """Maximum number of draft tokens of a row in a step."""
        seq, most = choice.sequence, self.decoder.most_nodes(choice.sequence)
        depth = seq.num_speculative_tokens  # it bounds the nodes of chains only
        if depth == 0:
            return 0
        if depth is not None and most <= self.decoder.config.longest_draft:
            most = min(depth, most)
        return most if seq.draft_room is None else min(most, seq.draft_room)

    def _limit_drafts(
        self, budget: int, decoding: list[Sequence], num_pending: int, waiting: list[RequestChoice]
    ) -> None:
        """Set the rows' room so that drafts and prompts fit the budget; in a step in which the policy will not draft, only for what rows
        bring themselves."""
        num_decoding = len(decoding)
        if not num_decoding:
            return
        is_plain = self.decoder.is_plain(decoding)
        left = max(0, budget - num_decoding)
        num_free = self.max_num_seqs - len(self.running)
        if waiting and num_free > 0 and self._fits(waiting[0]):
            for choice in waiting[:num_free]:
                if num_pending >= left:
                    break
                num_pending += len(choice.sequence.tokens)
        allowed = (left - min(num_pending, left // 2)) // num_decoding
        limited = allowed, is_plain, list(self.running)
        if limited == self._limited:
            return
        self._limited = limited
        for choice in self.running:
            most = self.decoder.most_nodes(choice.sequence, is_plain)
            choice.sequence.draft_room = None if allowed >= most and not is_plain else min(allowed, most)

    def _fits(self, choice: RequestChoice) -> bool:
        """True if a waiting row may start: the free blocks hold its text, or nothing else is running."""
        if not self.running:
            return True
        cache = self.decoder.cache
        rows = [row.sequence for row in (choice, *self.running)]
        beside = [part for part in (row.source or row.image_prompt for row in rows) if part is not None]
        if beside and sum(-(-part.length // cache.block_size) for part in beside) > beside[0].num_blocks:
            return False
        needed = -(-(len(choice.sequence.tokens) + 1) // cache.block_size)
        # Leave one block for each running row to grow into, so that the new row is not preempted at once.
        return needed + len(self.running) <= cache.most_blocks - cache.pool.num_used
