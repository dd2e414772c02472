"""RunningSequences: which sequences a decoder runs, and the memory that they hold."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

from ..cache import BlockTable, OutOfBlocks
from ..candidate_generators import CandidateGenerator
from ..candidate_generators.base import HasDrafters, KeepsPrefixes, SharesPrefixes, active_drafter, known_prefix
from ..candidate_generators.combined import configure
from ..config import SpeculativeConfig
from ..core.outcome import StepOutcome
from ..core.rows import RowInput
from ..core.sequence import UNKNOWN, Sequence
from ..model.onward_rows import OnwardRows
from ..model.prompt import KeysValues
from ..policy import DraftLengthPolicy
from .outputs import PLAIN, RowStatistics, read_cache
from .step import PendingStep, StepResult, StepTensors


class RunningSequences:
    """The sequences that a decoder runs: they join and leave between steps, and lose their memory for a while.

    Args:
        generator: the drafter.
        policy: is told which sequences have left.
    """

    def __init__(self, generator: CandidateGenerator, policy: DraftLengthPolicy):
        self.target, self.generator, self.config = generator.target, generator, generator.config
        self.target.taps = self.target.taps | generator.taps
        self.policy = policy
        self._sharer = generator if isinstance(generator, SharesPrefixes) else None
        self._keeper = generator if isinstance(generator, KeepsPrefixes) else None
        self._with_drafters = generator if isinstance(generator, HasDrafters) and generator.drafters else None
        self.cache = self.target.new_cache(1, self.config.block_size)
        self._onward = OnwardRows()  # the rows that feed what they have written in the last step
        self.statistics: dict[int, RowStatistics] = {}
        self.outside: dict[int, KeysValues] = {}  # per sequence: keys and values that wait for blocks
        self.last: StepTensors | None = None
        # Rows for which the policy is not asked in some steps: in so many more, and in so many until now.
        self._still, self._num_still, self._num_passed = list[Sequence](), 0, 0
        self.learner: Any = None  # a `learning.Learner`, if the drafter's head learns
        self._num_sequences = 1
        self._all_hidden_states, self._rows_have_places = False, False  # see `allocate`

    def configure(self, config: SpeculativeConfig) -> None:
        """Decode by a call's configuration, which differs from the present one in PER_CALL_KEYS only."""
        configure(self.generator, config)
        self.config = self.generator.config

    def learn(self, learner: Any) -> None:
        """Let a `learning.Learner` teach the drafter's head between steps. No sequence may be running."""
        self.learner = learner
        self.target.taps = self.target.taps | learner.taps

    @property
    def wants_pause(self) -> bool:
        """Whether a driver that stays inside `active()` should leave it once, so that learnt weights are put in place."""
        return self.learner is not None and self.learner.has_swap

    def allocate(
        self, num_tokens: int, num_sequences: int, all_hidden_states: bool = False, rows_have_places: bool = False
    ) -> None:
        """Size the KV pools for a run. No sequence may be running. Memory is taken as it is used.

        Args:
            num_tokens: in all texts, drafts included. If `config.num_blocks` is set, it is the limit instead.
            num_sequences: 0: not known yet; texts come one after another.
            all_hidden_states: forwards return the hidden states of all layers.
            rows_have_places: each row's slots are contiguous, so attention reads them without a copy: for static batches.
        """
        if self.statistics:
            raise RuntimeError("The KV pool cannot be replaced while sequences are running.")
        self._all_hidden_states, self._rows_have_places = all_hidden_states, rows_have_places
        size, bound = self.config.block_size, self.config.num_blocks
        num_blocks = bound or -(-num_tokens // size) + num_sequences
        kept = self.target.graphs is not None and self.cache.can_serve(size)
        if kept and (bound is None or self.cache.pool.num_blocks <= bound):
            self.cache.grow_up_to(num_blocks)
        else:
            if num_sequences:
                self.target.choose_states(num_sequences, self.generator.max_draft_nodes)
            self.cache = self.target.new_cache(num_blocks, size, grows=True)
            if self.cache.states is not None:
                self.cache.states.reserve(num_sequences, self.generator.max_draft_nodes)
        self.cache.share_prefixes = not all_hidden_states
        if not num_sequences:  # texts that come one after another
            self.target.keep_prefix_states(self.cache)
        self._num_sequences = num_sequences
        self.generator.allocate(num_blocks * size, num_sequences, size)

    @contextlib.contextmanager
    def memory_for(self, sequences: list[Sequence], **how: bool) -> Iterator[None]:
        """Inside the context there is memory for a static batch of these sequences. An error removes them. `how`: see `allocate`."""
        try:
            most_nodes = self.generator.max_draft_nodes
            self.allocate(sum(seq.max_length + most_nodes for seq in sequences), len(sequences), **how)
            yield
        except BaseException:
            self.abort(sequences)
            raise
        finally:
            self.release()

    def release(self, keeps_pools: bool = True) -> None:
        """Free the pools. With `keeps_pools`, those that CUDA graphs read are kept, so that the next call need not capture again."""
        if keeps_pools and self.target.graphs is not None and self.cache.is_allocated:
            self.cache.clear()
        else:
            self.cache = self.target.new_cache(1, self.config.block_size)
        self.last = None
        self.generator.release()

    def add(self, seq: Sequence) -> None:
        """Let a sequence join. Raises ValueError: the prompt and one token do not fit the pool, even with no other sequence in it."""
        if -(-(len(seq.tokens) + 1) // self.config.block_size) > self.cache.most_blocks:
            raise ValueError(
                f"A prompt of {len(seq.tokens)} tokens does not fit the KV pool of "
                f"{self.cache.most_blocks * self.config.block_size} tokens ({self.cache.most_blocks} blocks of "
                f"{self.config.block_size}): raise num_blocks, or shorten the prompt."
            )
        whole = seq.max_length + self.generator.max_draft_nodes if self._rows_have_places else 0
        self.cache.add(seq.id, self.cache.slots_each(whole, self._num_sequences), seq.adapter)
        try:
            self.generator.start(seq)
        except BaseException:
            self.cache.remove(seq.id)
            raise
        self.statistics[seq.id] = RowStatistics(several=self._with_drafters is not None)

    def remove(self, seq: Sequence) -> RowStatistics:
        """Remove a sequence, finished or not: free its blocks and return its statistics."""
        self.cache.remove(seq.id)
        self.outside.pop(seq.id, None)
        self.generator.stop(seq)
        self.policy.forget(seq)
        self._still, self._num_still = [], 0
        if self.learner is not None:
            self.learner.ended(seq)
        return self.statistics.pop(seq.id)

    def preempt(self, seq: Sequence) -> None:
        """Free a running sequence's blocks. Its tokens are read again when it is next scheduled; a prompt that cannot be read
        again leaves its keys and values in host memory, and its recurrent states where they are."""
        can_be_read = seq.is_text or seq.image_prompt is not None
        if can_be_read:
            self.outside.pop(seq.id, None)
            self.cache.evict(seq.id)
        elif seq.id not in self.outside:
            layers = read_cache(self.cache, seq)
            self.cache.evict(seq.id, keep_states=True)
            self.keep_outside(
                seq, [None if states is None else tuple(tensor.cpu() for tensor in states) for states in layers]
            )
        if can_be_read or not self.generator.taps.whole_text:  # else the target would not compute its features again
            self.generator.evict(seq)

    def keep_outside(self, seq: Sequence, layers: KeysValues) -> None:
        """Keep keys and values of a sequence's first tokens outside the pool until the sequence gets blocks. It holds no blocks now."""
        self.outside[seq.id] = layers
        self.cache.tables[seq.id].length = next(pair[0].shape[0] for pair in layers if pair is not None)

    def read_cache(self, seq: Sequence) -> KeysValues:
        """Per layer, keys and values [n, heads, width] of the tokens that were fed; None for a layer that reads another layer's."""
        layers = self.outside[seq.id] if seq.id in self.outside else read_cache(self.cache, seq)
        stored = zip(self.cache.layers, layers, strict=True)
        return [None if states is None else layer.dequantized(states) for layer, states in stored]

    @property
    def drafters(self) -> list[str]:
        """The names that `Sequence.drafter` may have; empty where there is one drafter."""
        return [] if self._with_drafters is None else self._with_drafters.drafters

    def drafter_of(self, seq: Sequence) -> str | None:
        """The name of the drafter of the sequence's last draft, where there are several."""
        return None if self._with_drafters is None else self._with_drafters.drafter_of(seq)

    def forget_prefixes(self) -> None:
        """Drop what is kept of texts that have ended, because the model has changed or a step has raised."""
        self.cache.forget_prefixes()
        if self._keeper is not None:
            self._keeper.forget_prefixes()

    def abort(self, sequences: list[Sequence]) -> None:
        """After an error: remove the sequences and drop everything that is cached."""
        for seq in sequences:
            if seq.id in self.statistics:
                with contextlib.suppress(ValueError, KeyError):  # the drafter may have failed before it knew the row
                    self.remove(seq)
                self.statistics.pop(seq.id, None)
        self.cache.clear()

    @contextlib.contextmanager
    def active(self):
        """A context in which `step` may run, without gradients. Inside, the models read our pages; on exit they are restored."""
        if self.learner is not None and self.learner.swap() and self._keeper is not None:
            self._keeper.forget_prefixes()
        with torch.no_grad(), contextlib.ExitStack() as self._models:
            self._activate()
            yield self

    def _activate(self) -> None:
        self._models.enter_context(self.target.active())
        self._models.enter_context(active_drafter(self.generator))

    def lacks_text(self, seq: Sequence) -> bool:
        """True if the cache lacks the KV of some token before the last one, because the sequence was preempted."""
        return seq.id not in self.outside and self.cache.tables[seq.id].length < len(seq.tokens) - 1

    def read_again(self, seq: Sequence, length: int) -> None:
        """Feed the sequence's text up to `length` tokens, in chunks, without decoding. Call inside `active()`. Raises OutOfBlocks: a
        chunk does not fit. Those before it stay fed."""
        while self.cache.tables[seq.id].length < length:
            start = self.cache.tables[seq.id].length
            end = min(start + self.config.prefill_chunk_size, length)
            if end < seq.prompt_length and self.target.recurrent is not None:
                end = self.target.recurrent.cut(start, end)
            self._reserve(seq, end)
            tokens = np.asarray(seq.tokens[start:end], dtype=np.int64)
            row = RowInput(seq.id, tokens, start, offset=seq.position_offset, adapter=seq.adapter)
            row.prompt = seq.num_chunked(start, end)
            self.target.forward([row], self.cache)
            self.cache.tables[seq.id].length = end

    def read_last(self, sequences: list[Sequence]) -> None:
        """Feed each finished sequence's last token too, so that generation can continue from its KV. Call inside `active()`. Raises
        OutOfBlocks: one of the tokens does not fit; nothing was fed."""
        for seq in sequences:
            self._reserve(seq, len(seq.tokens))
        rows = []
        for seq in sequences:
            last = np.asarray(seq.tokens[-1:], dtype=np.int64)
            rows.append(RowInput(seq.id, last, len(seq.tokens) - 1, offset=seq.position_offset, adapter=seq.adapter))
        self.target.forward(rows, self.cache)
        for seq in sequences:
            self.cache.tables[seq.id].length = len(seq.tokens)

    def share_prefix(self, seq: Sequence) -> int:
        """Use the KV of earlier texts, as far as the target and the drafter both have them. Returns the number of tokens covered."""
        known = min(self.cache.known_prefix(seq.id, seq.tokens), known_prefix(self.generator, seq))
        if self.target.recurrent is not None:  # kept states were computed in chunk form, which is only for prompts
            known = min(known, seq.num_chunked(0, len(seq.tokens)))
        matched = self.cache.match_prefix(seq.id, seq.tokens, known)
        if matched and self._sharer is not None:
            self._sharer.share_prefix(seq, matched)
        return matched

    def _reserve(self, seq: Sequence, end: int) -> None:
        """Give the sequence slots for its first `end` tokens; read its source, and load what waited outside the pool."""
        self.target.read_source(self.cache, seq.id, seq.source)
        self.cache.reserve(seq.id, end)
        if seq.id in self.outside:
            self.cache.load_all(seq.id, self.outside.pop(seq.id))

    def _ready(self, seq: Sequence, table: BlockTable, end: int) -> None:
        """Reserve slots for the sequence's first `end` tokens, and declare the blocks that they fill. Raises OutOfBlocks."""
        if end > len(table.slots) or seq.id in self.outside:
            self._reserve(seq, end)
        # In one forward every layer writes all keys before it attends, so later rows can share these blocks at once.
        if seq.is_text and end // self.cache.block_size > len(table.hashes):
            known = end - (seq.tokens[end - 1] == UNKNOWN)
            if self.target.recurrent is not None:  # prompts are read in chunk form, later tokens one by one
                known = seq.num_chunked(0, known)
            self.cache.register_prefix(seq.id, seq.tokens, known)

    def _go_on(self, sequences: list[Sequence]) -> list[tuple[Sequence, int]]:
        """The first rows of a step as `_admit` gives them: those that feed one token, which they have written. `_onward` is then what they
        feed. None of them, if there are no blocks for one."""
        if self.outside or len(sequences) == 1:  # arrays of one row take longer than the row
            return []
        rows, tables = self._onward, [self.cache.tables[seq.id] for seq in sequences]
        ends, expected = [len(seq.tokens) for seq in sequences], [table.length + 1 for table in tables]
        if ends != expected:
            count = next(i for i, end in enumerate(ends) if end != expected[i])
            sequences, tables, ends = sequences[:count], tables[:count], ends[:count]
        if not ends:
            return []
        if tables != rows.tables:
            known = set(map(id, rows.tables))
            joining = [i for i, table in enumerate(tables) if id(table) not in known]
            count = next((i for i in joining if not _has_read(sequences[i], ends[i])), len(ends))
            sequences, tables, ends = sequences[:count], tables[:count], ends[:count]
            rows.exchange(tables, self.cache.block_size, lambda i: _input_of(sequences[i]))
        starts = np.array(ends, dtype=np.int64) - 1
        # Only at the ends of blocks is there something to do, but for rows that were not in the step before.
        is_due = ((starts + 1) % rows.block_size < 2) | (starts != rows.starts + 1)
        try:
            for i in np.flatnonzero(is_due).tolist():
                self._ready(sequences[i], tables[i], ends[i])
        except OutOfBlocks:
            return []
        rows.go_on(starts, [seq.tokens[-1] for seq in sequences])
        return list(zip(sequences, ends, strict=True))

    def _appended(self, pending: PendingStep) -> tuple[list[StepResult], StepOutcome] | None:
        """What a step in which nothing was drafted did for each of its rows, and for the drafter: texts get one token, of which all others
        were fed. None: there were drafts or are states of recurrent layers, or a row has ended or left; nothing was done."""
        if not pending.is_plain or pending.verdict is None or self.cache.states is not None:
            return None
        tables, statistics, results = self.cache.tables, self.statistics, []
        present = [seq for seq, _ in pending.rows if not seq.finished and seq.id in statistics]
        if len(present) < len(pending.rows):
            return None
        tokens = pending.verdict.wait().next_tokens.tolist()
        for i, (seq, token) in enumerate(zip(pending.decoding, tokens, strict=True)):
            text = seq.tokens
            tables[seq.id].length = length = len(text)
            text.append(token)
            seq.num_steps += 1
            if token in seq.eos_token_ids or length + 1 >= seq.max_length:
                seq.finished = True
            statistics[seq.id].steps.append(PLAIN)
            results.append(StepResult(seq, [token], [i]))
        new, starts = [result.new_tokens for result in results], list(pending.tensors.starts.values())
        if len(results) < len(present):
            decoding = {result.sequence.id: result for result in results}
            self.cache.commit([(seq.id, end, []) for seq, end in pending.rows if seq.id not in decoding])
            results = [decoding.get(seq.id) or StepResult(seq) for seq in present]
        return results, StepOutcome(
            pending.decoding, pending.trees, [[]] * len(new), new, None, starts, pending.rows, pending.num_own, list(range(len(new))),
        )  # fmt: skip


def _has_read(seq: Sequence, end: int) -> bool:
    """True if the token before `end` comes after all that prompts are."""
    return end > seq.prompt_length and not seq.num_chunked(end - 1, end) and isinstance(seq.position_offset, int)


def _input_of(seq: Sequence) -> RowInput:
    """One token of the sequence, which is not known yet."""
    return RowInput(seq.id, np.zeros(1, dtype=np.int64), 0, offset=seq.position_offset, adapter=seq.adapter)
