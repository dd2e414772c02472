"""BatchRun: a static batch from its first step to its last."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from ..cache import OutOfBlocks
from ..cache.state_pool import KeptStates
from ..core.sequence import Sequence
from ..model.prompt import ReadPrompt
from .decoder import PendingStep, SpeculativeDecoder, StepResult
from .outputs import RowStatistics, RowTensors, read_states
from .stopping import LockstepObserver


@dataclass
class Returns:
    """The tensors that the caller asked for."""

    as_dict: bool
    scores: bool
    logits: bool
    hidden: bool
    layers: list[int] | None = None  # only these hidden states; None: all

    @classmethod
    def of(cls, generation_config: Any) -> Returns:
        """From a prepared GenerationConfig. Without return_dict_in_generate transformers ignores all of them."""
        as_dict, wanted = bool(generation_config.return_dict_in_generate), generation_config.output_hidden_states
        hidden = wanted is not None and wanted is not False
        layers = None
        if not isinstance(wanted, bool | None):
            layers = [wanted] if isinstance(wanted, int) else list(wanted)
        scores, logits = bool(generation_config.output_scores), bool(generation_config.output_logits)
        return cls(as_dict, as_dict and scores, as_dict and logits, as_dict and hidden, layers)


class BatchRun:
    """Runs a batch whose rows start together. Rows leave as they finish.

    Attributes:
        prompt: prompts that the model itself has read and with which the rows will begin; None: rows read their own ids.
        states_of_prompts: per row, the recurrent states after a prompt that the model itself has read; None: no such prompt, or no
            recurrent layers.
    """

    def __init__(
        self, decoder: SpeculativeDecoder, sequences, observer: LockstepObserver, tensors, returns: Returns, keep_cache,
    ):  # fmt: skip
        self.decoder, self.sequences, self.observer = decoder, sequences, observer
        self.prompt: ReadPrompt | None = None
        self.states_of_prompts: list[KeptStates] | None = None
        self.tensors, self.returns, self.keep_cache = tensors, returns, keep_cache
        self.running: list[Sequence] = list(sequences)
        self.statistics: dict[int, RowStatistics] = {}  # by row, after the row has left
        self.kv_cache_bytes = 0

    def begin_with(self, prompt: ReadPrompt) -> None:
        """Let the rows begin with prompts that the model itself has read."""
        self.prompt = prompt
        self.states_of_prompts = prompt.states if self.keep_cache else None
        for seq, offset in zip(self.sequences, prompt.offsets, strict=True):
            seq.position_offset = offset

    def until_done(self, synced_gpus: bool) -> None:
        """Step until every row has stopped; with `synced_gpus`, until the rows of all processes have."""
        model: Any = self.decoder.target.model
        if not synced_gpus and self._overlaps():
            self._until_done_overlapping()
            return
        finished = False
        while model._has_unfinished_sequences(finished, synced_gpus, device=self.observer.device):
            if finished:  # ZeRO-3 and FSDP gather weights in forward, so idle ranks must take part
                model(input_ids=self.observer.output_ids()[:1, :1], use_cache=False)
                continue
            for result in self.decoder.finish(self._begin()):
                self._collect(result)
            finished = self.observer.advance()
            self.kv_cache_bytes = self.decoder.cache.num_bytes
            self._let_go([seq for seq in self.running if seq.finished or finished], finished)

    def _overlaps(self) -> bool:
        """True if the next step may begin before this one is shown: the caller gets neither its tensors nor times of its parts."""
        wanted, returns = self.decoder.config.async_scheduling, self.returns
        wanted = self.decoder.target.device.type == "cuda" if wanted is None else wanted
        return wanted and not (
            self.decoder.tracer or returns.scores or returns.logits or returns.hidden or self.keep_cache
        )

    def _until_done_overlapping(self) -> None:
        """Asynchronous scheduling: criteria and streamers see a step while the device works on the next one.

        If the next step needs nothing from the host, it begins before this step's tokens are known. If a token or a criterion
        then ends a row, the row's pending step is discarded, so the output is the same.
        """
        pending, done = self._begin(), False
        while not done:
            following = self._begin_after(pending) if pending is not None else None
            results = self.decoder.finish(pending) if pending is not None else []
            self.kv_cache_bytes = self.decoder.cache.num_bytes
            self._let_go([seq for seq in self.running if seq.finished])
            if following is None and self.running:
                following = self._begin()
            for result in results:
                self._collect(result)
            done, pending = self.observer.advance(), following
        if pending is not None:
            self.decoder.cancel(pending)
        self._let_go(list(self.running), everything=True)

    def _begin(self) -> PendingStep:
        if self.prompt is not None:
            prompt, self.prompt = self.prompt, None
            return self.decoder.begin_with(self.running, prompt)
        return self._making_room(lambda: self.decoder.begin(self.running, self._chunks()))

    def _begin_after(self, pending: PendingStep) -> PendingStep | None:
        """Begin the step after `pending`; None if `pending` must finish first."""
        unfinished = [seq for seq in self.running if not seq.finished]
        rows = [seq for seq in unfinished if len(seq.tokens) + 1 < seq.max_length]
        if not rows or not self.decoder.can_begin_after(unfinished, pending):
            return None
        try:
            return self.decoder.begin(rows, after=pending)
        except OutOfBlocks:
            return None

    def _making_room(self, act: Callable[[], Any]) -> Any:
        """Call `act`, preempting the last row as long as too few blocks are free; raises OutOfBlocks if no other row holds any."""
        while True:
            try:
                return act()
            except OutOfBlocks as error:
                first, *others = self.running
                waiting = [seq for seq in others if not seq.finished]
                holders = [seq for seq in waiting if self.decoder.cache.tables[seq.id].blocks]
                if holders:
                    self.decoder.preempt(holders[-1])
                elif not first.finished and any(seq.num_generated < first.num_generated for seq in waiting):
                    # This row is ahead because the others waited. A criterion may end the whole batch once they catch up.
                    self.decoder.preempt(first)
                    self.running = [*others, first]
                else:
                    raise OutOfBlocks(
                        f"A text of {len(first.tokens)} tokens does not fit the KV pool, even with nothing else in it: {error} Raise "
                        "num_blocks, or lower max_new_tokens."
                    ) from error

    def _chunks(self) -> list[int]:
        """Tokens that each row may feed: prompts share `prefill_chunk_size`, and the first row always gets some."""
        budget = self.decoder.config.prefill_chunk_size
        # Hidden states of a prompt come from one forward, and some logits processors need all rows to start together.
        in_step = any(seq.processors is not None and seq.processors.in_step for seq in self.running)
        if self.returns.hidden or (in_step and len(self.running) > 1):
            budget = sum(len(seq.tokens) for seq in self.running)
        chunks = []
        for seq in self.running:
            pending = len(seq.tokens) - self.decoder.cache.tables[seq.id].length
            chunks.append(pending if pending == 1 else min(pending, max(budget, 1)))
            budget -= chunks[-1]
        return chunks

    def _collect(self, result: StepResult) -> None:
        seq, step = result.sequence, self.decoder.last
        assert step is not None
        if not result.new_tokens:
            return
        if self.returns.scores or self.returns.logits or self.returns.hidden:
            row = self.tensors[seq.row]
            nodes = torch.tensor(result.nodes, device=step.output.logits.device)
            if self.returns.scores:
                row.scores += step.scores[nodes].unbind()
            if self.returns.logits:
                row.logits += step.output.logits[nodes].unbind()
            if self.returns.hidden:
                self._collect_hidden(row, seq, step, result.nodes)
        self.observer.row_advanced(seq, len(result.new_tokens))

    @staticmethod
    def _collect_hidden(row: RowTensors, seq: Sequence, step, nodes: list[int]) -> None:
        packed = torch.from_numpy(step.logit_rows[nodes])
        if row.prompt_hidden is None:
            fed = slice(step.starts[seq.id], int(packed[0]) + 1)
            row.prompt_hidden = [h[fed].clone() for h in step.output.hidden_states]
            packed = packed[1:]
        row.hidden.append([h[packed.to(h.device)] for h in step.output.hidden_states])

    def num_fed(self, seq: Sequence) -> int:
        """Number of the row's tokens whose KV belong in the returned cache, once the batch has stopped."""
        return min(len(seq.tokens), seq.prompt_length + self.observer.num_steps - 1)

    def settle_states(self) -> None:
        """For rows that were ahead of the batch when it stopped, read the text again up to the token after which the states are
        needed."""
        cache = self.decoder.cache
        for seq in self.sequences:
            needed = self.num_fed(seq)
            if needed not in self.tensors[seq.row].states:
                cache.add(seq.id, adapter=seq.adapter)
                try:
                    if self.states_of_prompts is not None:
                        self._restore_prompt(seq, self.states_of_prompts[seq.row])
                    self.decoder.read_again(seq, needed)
                    self.tensors[seq.row].states = read_states(cache, seq, [needed])
                finally:
                    cache.remove(seq.id)

    def _restore_prompt(self, seq: Sequence, states: KeptStates) -> None:
        """Let a row that has left begin again after its prompt, which the model itself had read."""
        kept = self.tensors[seq.row].cache
        assert kept is not None and self.decoder.cache.states is not None
        length = seq.prompt_length
        self.decoder.keep_outside(
            seq, [None if pair is None else (pair[0][:length], pair[1][:length]) for pair in kept]
        )
        self.decoder.cache.states.load(seq.id, states, length)

    def _let_go(self, leaving: list[Sequence], everything: bool = False) -> None:
        """Remove rows from the decoder; with `keep_cache`, copy their KV first. A preempted row reads its text again for that."""
        preempted = [seq for seq in leaving if self.keep_cache and self.decoder.lacks_text(seq)]
        present = [seq for seq in leaving if seq not in preempted]
        # transformers feeds the end token while other rows continue
        while present and self.keep_cache and not everything:
            try:
                self._making_room(lambda: self.decoder.read_last(present))
                break
            except OutOfBlocks:
                if len(present) == 1:
                    raise
                preempted.insert(0, present.pop())  # it is read again when the others have left
                self.decoder.preempt(preempted[0])
        for seq in present:
            self._remove(seq)
        for seq in preempted:
            self._read_again(seq)
            if not everything:
                self._making_room(lambda seq=seq: self.decoder.read_last([seq]))
            self._remove(seq)

    def _read_again(self, seq: Sequence) -> None:
        """Read a preempted row's text into the cache; preempt other rows if too few blocks are free."""
        while True:
            try:
                return self.decoder.read_again(seq, len(seq.tokens) - 1)
            except OutOfBlocks:
                tables = self.decoder.cache.tables
                holders = [row for row in self.running if row is not seq and tables[row.id].blocks]
                if not holders:
                    raise
                self.decoder.preempt(holders[-1])

    def _remove(self, seq: Sequence) -> None:
        self.running.remove(seq)
        if self.keep_cache:
            self.tensors[seq.row].cache = self.decoder.read_cache(seq)
            # the returned cache may need the states near the row's last token, or at the step shown now
            counts = sorted({len(seq.tokens) - 1, len(seq.tokens), self.num_fed(seq)})
            self.tensors[seq.row].states = read_states(self.decoder.cache, seq, counts)
        self.statistics[seq.row] = self.decoder.remove(seq)
