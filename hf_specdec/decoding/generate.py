"""decode(): the loop of `model.generate(speculative_config=...)`: a static batch, with transformers' inputs and outputs."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedModel
from transformers.cache_utils import Cache, DynamicCache
from transformers.generation.stopping_criteria import EosTokenCriteria, MaxLengthCriteria, StoppingCriteriaList

from ..cache import OutOfBlocks
from ..core.errors import UnsupportedModel
from ..core.sequence import Sequence, stream_seeds
from ..model.architectures import check_length, is_multimodal
from ..model.prompt import ReadPrompt, read_prompt, row_of
from ..sampling.processors import NodeProcessors
from .decoder import PendingStep, SpeculativeDecoder, StepResult
from .kept_states import fill_states, load_states, read_states, stateful_layers
from .outputs import (
    RowStatistics,
    RowTensors,
    SpeculativeDecoderOnlyOutput,
    at_step,
    fill_dynamic_cache,
    hidden_per_step,
    summarize,
)
from .stopping import LockstepObserver

logger = logging.getLogger(__name__)


@dataclass
class Returns:
    """The tensors that the caller asked for."""

    as_dict: bool
    scores: bool
    logits: bool
    hidden: bool
    layers: list[int] | None = None  # only these hidden states; None: all

    @classmethod
    def of(cls, generation_config) -> Returns:
        """From a prepared GenerationConfig. Without return_dict_in_generate transformers ignores all of them."""
        as_dict, wanted = bool(generation_config.return_dict_in_generate), generation_config.output_hidden_states
        hidden = wanted is not None and wanted is not False
        layers = None if not hidden or wanted is True else [wanted] if isinstance(wanted, int) else list(wanted)
        scores, logits = bool(generation_config.output_scores), bool(generation_config.output_logits)
        return cls(as_dict, as_dict and scores, as_dict and logits, as_dict and hidden, layers)


@torch.inference_mode(
    False
)  # tensors kept for later calls must not be inference tensors: only inference mode may change those
@torch.no_grad()
def decode(
    decoder: SpeculativeDecoder,
    input_ids: torch.LongTensor,
    attention_mask: torch.Tensor | None,
    logits_processor,
    stopping_criteria: StoppingCriteriaList,
    generation_config,
    seed: int,
    streamer=None,
    synced_gpus: bool = False,
    past_key_values: Cache | None = None,
    prompt_inputs: dict[str, Any] | None = None,
):
    """Decode a static batch to its end.

    Args:
        decoder: built for this model and configuration; no sequence may be running on it.
        input_ids, attention_mask: int64 [B, S]. Masked tokens may stand anywhere but at the end of a row. The mask may be wider
            than `input_ids` by the length of `past_key_values`; then `input_ids` hold only what follows the cache.
        logits_processor, stopping_criteria, generation_config: as `generate()` prepared them.
        seed: the rows' random streams derive from it (if the config samples).
        past_key_values: KV of a prefix of the prompts to start from; the KV of the result is written back to it.
        prompt_inputs: the arguments of the model's forward, as `generate()` prepared them, with which the model itself reads the
            prompts (see `model.prompt`), because they are more than ids; None: they are read as ids.

    Returns: int64 [B, S + n], or SpeculativeDecoderOnlyOutput.

    Raises:
        ValueError: the inputs cannot be decoded, or the drafter needs ids that only `past_key_values` stands for.
    """
    model, returns = decoder.target.model, Returns.of(generation_config)
    pad_token = generation_config._pad_token_tensor
    pad_token = 0 if pad_token is None else int(pad_token)
    unseen = text_length(input_ids, attention_mask, generation_config) - input_ids.shape[1]
    num_cached = 0 if past_key_values is None else int(past_key_values.get_seq_length())
    # Whether the ids say everything. Those that stand for something else are not read by the target, but drafters look at them.
    is_text = not (unseen or prompt_inputs is not None or (num_cached and is_multimodal(model)))
    whole = torch.nn.functional.pad(input_ids, (unseen, 0), value=pad_token)
    if not is_text:
        whole = whole.where(whole < decoder.target.vocab_size, pad_token)
        _check_methods(decoder, num_cached, prompt_inputs)
    columns = prompt_columns(whole, attention_mask)
    sequences = _sequences(whole, unseen, columns, logits_processor, stopping_criteria, generation_config, seed)
    for seq in sequences:
        check_length(model, seq.prompt_length, seq.max_length)
        seq.is_text = is_text
    if prompt_inputs is None:
        num_cached = min(num_cached, whole.shape[1] - 1)
    has_states = decoder.target.recurrent is not None
    if num_cached and has_states:
        _check_states(decoder, past_key_values, unseen, num_cached)
    if is_text and decoder.generator.needs_all_features:
        num_cached = 0  # the drafter needs features of the whole text, so it is read again
    tensors = [RowTensors() for _ in sequences]
    observer = LockstepObserver(
        input_ids, sequences, stopping_criteria, streamer, pad_token,
        (lambda step: at_step([t.scores for t in tensors], step)) if returns.scores else None,
    )  # fmt: skip
    decoder.all_hidden_states, decoder.rows_have_places = returns.hidden, True
    decoder.policy.begin_batch()
    lookahead = decoder.generator.max_draft_nodes
    keep_cache = returns.as_dict or getattr(past_key_values, "_is_user_defined", False)
    export = past_key_values if keep_cache and isinstance(past_key_values, DynamicCache) else None
    can_preempt = not (num_cached and has_states)  # a state that the caller passed is not kept
    run = BatchRun(decoder, sequences, observer, tensors, returns, export is not None, can_preempt)
    try:
        decoder.allocate(sum(seq.max_length + lookahead for seq in sequences), len(sequences))
        if prompt_inputs is not None:
            inputs = {**prompt_inputs, "attention_mask": attention_mask, "past_key_values": past_key_values}
            run.prompt = read_prompt(
                decoder.target, input_ids, inputs, generation_config, whole, columns, returns.hidden
            )
            for seq, offset in zip(sequences, run.prompt.offsets, strict=True):
                seq.position_offset = offset
        with decoder.active():
            for seq in sequences:
                decoder.add(seq)
            if num_cached and prompt_inputs is None:
                _load_cache(decoder, sequences, past_key_values, columns, num_cached)
            run.until_done(model, synced_gpus)
            if export is not None and decoder.cache.states is not None:
                run.settle_states()
    except BaseException:
        decoder.abort(sequences)
        raise
    finally:
        decoder.release()
    if streamer is not None:
        streamer.end()
    return _result(run, returns, columns, whole.shape[1] - num_cached, export, unseen)


class BatchRun:
    """Runs a batch whose rows start together. Rows leave as they finish.

    Args:
        can_preempt: whether a row's blocks may be given to another row for a while.

    Attributes:
        prompt: what the model itself has read and the rows have not begun with; None: rows read their own ids.
    """

    def __init__(
        self, decoder: SpeculativeDecoder, sequences, observer: LockstepObserver, tensors, returns: Returns, keep_cache,
        can_preempt: bool,
    ):  # fmt: skip
        self.decoder, self.sequences, self.observer = decoder, sequences, observer
        self.can_preempt = can_preempt
        self.prompt: ReadPrompt | None = None
        self.tensors, self.returns, self.keep_cache = tensors, returns, keep_cache
        self.running: list[Sequence] = list(sequences)
        self.statistics: dict[int, RowStatistics] = {}  # by row, after the row has left
        self.kv_cache_bytes = 0

    def until_done(self, model: PreTrainedModel, synced_gpus: bool) -> None:
        """Step until every row has stopped; with `synced_gpus`, until the rows of all processes have."""
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
        """True if the next step may begin before this one is shown: nothing of this one's forward is returned to the caller."""
        wanted, returns = self.decoder.config.async_scheduling, self.returns
        wanted = self.decoder.target.device.type == "cuda" if wanted is None else wanted
        return wanted and not (returns.scores or returns.logits or returns.hidden or self.keep_cache)

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
        """Call `act`, which needs blocks, and preempt the last row as long as too few are free.

        Raises:
            OutOfBlocks: no other row holds blocks.
        """
        while True:
            try:
                return act()
            except OutOfBlocks as error:
                first, *others = self.running
                waiting = [seq for seq in others if not seq.finished]
                holders = [seq for seq in waiting if self.decoder.cache.tables[seq.id].blocks]
                if not self.can_preempt:
                    raise
                if holders:
                    self.decoder.preempt(holders[-1])
                elif not first.finished and any(seq.num_generated < first.num_generated for seq in waiting):
                    # It is ahead because the others waited. A criterion may end the whole batch once they catch up.
                    self.decoder.preempt(first)
                    self.running = [*others, first]
                else:
                    raise OutOfBlocks(
                        f"A text of {len(first.tokens)} tokens does not fit the KV pool, though it has all of it: {error} Raise "
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
        """How many of the row's tokens a cache for the output stands for, when the batch has stopped."""
        return min(len(seq.tokens), seq.prompt_length + self.observer.num_steps - 1)

    def _may_be_needed(self, seq: Sequence) -> list[int]:
        """Numbers of tokens after which a leaving row's states may belong to the output, which can end where the row does, one token
        later, or, by a criterion, at the step that is shown now."""
        return sorted({len(seq.tokens) - 1, len(seq.tokens), self.num_fed(seq)})

    def settle_states(self) -> None:
        """Rows that were ahead of the batch when it stopped: read their texts again, up to where the states are needed."""
        cache = self.decoder.cache
        for seq in self.sequences:
            needed = self.num_fed(seq)
            if needed not in self.tensors[seq.row].states:
                cache.add(seq.id)
                try:
                    self.decoder.read_again(seq, needed)
                    self.tensors[seq.row].states = read_states(cache, seq, [needed])
                finally:
                    cache.remove(seq.id)

    def _let_go(self, leaving: list[Sequence], everything: bool = False) -> None:
        """Rows leave; with `keep_cache`, after their KV were copied. A row that was ahead may have been preempted since."""
        preempted = [seq for seq in leaving if self.keep_cache and self.decoder.lacks_text(seq)]
        present = [seq for seq in leaving if seq not in preempted]
        if present and self.keep_cache and not everything:  # transformers feeds the end token while other rows continue
            self._making_room(lambda: self.decoder.read_last(present))
        for seq in present:
            self._remove(seq)
        for seq in preempted:
            self._read_again(seq)
            if not everything:
                self._making_room(lambda seq=seq: self.decoder.read_last([seq]))
            self._remove(seq)

    def _read_again(self, seq: Sequence) -> None:
        """Read a preempted row's text into the cache, in place of other rows where blocks are few."""
        while True:
            try:
                return self.decoder.read_again(seq, len(seq.tokens) - 1)
            except OutOfBlocks:
                tables = self.decoder.cache.tables
                holders = [each for each in self.running if each is not seq and tables[each.id].blocks]
                if not holders:
                    raise
                self.decoder.preempt(holders[-1])

    def _remove(self, seq: Sequence) -> None:
        self.running.remove(seq)
        if self.keep_cache:
            self.tensors[seq.row].cache = self.decoder.read_cache(seq)
            self.tensors[seq.row].states = read_states(self.decoder.cache, seq, self._may_be_needed(seq))
        self.statistics[seq.row] = self.decoder.remove(seq)


def text_length(input_ids: torch.Tensor, attention_mask: torch.Tensor | None, generation_config) -> int:
    """Columns of the whole text. More than `input_ids` [B, S] has if the caller passed only what follows a cache."""
    if attention_mask is not None:
        return attention_mask.shape[1]
    return getattr(
        generation_config, "_mask_length", input_ids.shape[1]
    )  # generate() drops a mask of ones but keeps its length


def prompt_columns(input_ids: torch.Tensor, attention_mask: torch.Tensor | None) -> list[np.ndarray]:
    """Per row, the columns of the batch [B, S] that hold its prompt. Masked tokens are never attended to and have no position,
    so they are left out.

    Raises:
        ValueError: an empty batch, an empty row, or one whose last token is masked.
    """
    if input_ids.shape[0] == 0 or input_ids.shape[1] == 0:
        raise ValueError(
            f"input_ids of shape {list(input_ids.shape)} hold no prompt: pass at least one token, or inputs_embeds."
        )
    if attention_mask is None:
        return [np.arange(input_ids.shape[1])] * input_ids.shape[0]
    columns = [np.flatnonzero(row) for row in (attention_mask != 0).cpu().numpy()]
    for i, own in enumerate(columns):
        if len(own) == 0:
            raise ValueError(f"attention_mask masks all of row {i}: there is no prompt to continue.")
        if own[-1] != input_ids.shape[1] - 1:
            raise ValueError(
                f"attention_mask masks the end of row {i}, where the text goes on: pad on the left "
                "(tokenizer.padding_side = 'left')."
            )
    return columns


def _check_methods(decoder: SpeculativeDecoder, num_cached: int, prompt_inputs: dict[str, Any] | None) -> None:
    """Raise ValueError if a drafter or an option needs that the target reads the whole prompt as ids."""
    if num_cached and decoder.generator.needs_all_features:
        raise ValueError(
            f"Method {decoder.config.method!r} reads hidden states of the whole text, and past_key_values may hold an image, or text "
            "that input_ids leave out: pass the whole prompt without past_key_values, or use a method that reads no hidden "
            "states of it, like 'ngram'."
        )
    if prompt_inputs is not None and decoder.target.recurrent is not None:
        raise UnsupportedModel(
            f"{type(decoder.target.model).__name__} has layers with a state, which is not taken over from a prompt that the model reads in "
            "its own way: images, embeddings or other positions. Call generate() without speculative_config."
        )
    if prompt_inputs is not None and decoder.target.deterministic:
        raise ValueError(
            "'deterministic' does not cover prompts with images or embeddings, which the model reads in its own way: leave one of "
            "the two out."
        )


def _sequences(
    whole, unseen: int, columns, logits_processor, stopping_criteria, generation_config, seed: int
) -> list[Sequence]:
    """The rows of a batch.

    Args:
        whole: int64 [B, S], the texts.
        unseen: number of leading columns that the caller did not pass. Processors, criteria and lengths do not count them.
    """
    input_ids = whole[:, unseen:]
    # Criteria are checked after each new token, so a criterion that is already met still lets one token through.
    limits = [
        max(each.max_length, input_ids.shape[1] + 1) for each in stopping_criteria if type(each) is MaxLengthCriteria
    ]
    max_length = unseen + min([generation_config.max_length, *limits])
    eos = {int(token) for each in stopping_criteria if type(each) is EosTokenCriteria for token in each.eos_token_id}
    pad = generation_config._pad_token_tensor
    processors = (
        NodeProcessors(logits_processor, input_ids, None if pad is None else int(pad)) if logits_processor else None
    )
    rows = whole.cpu().numpy()
    prompts = [row[own].tolist() for row, own in zip(rows, columns, strict=True)]
    seeds = stream_seeds(seed, prompts)
    return [
        Sequence(
            tokens=prompt,
            max_length=max_length - (len(row) - len(prompt)),
            eos_token_ids=frozenset(eos),
            do_sample=bool(generation_config.do_sample),
            seed=seeds[i],
            processors=processors,
            row=i,
            shown_prompt=row[unseen:].tolist(),
        )
        for i, (row, prompt) in enumerate(zip(rows, prompts, strict=True))
    ]


def _load_cache(decoder: SpeculativeDecoder, sequences, cache: Any, columns: list[np.ndarray], length: int) -> None:
    """Start the rows with the KV of the prompts' first tokens from transformers' cache."""
    for i, seq in enumerate(sequences):
        own = columns[i][columns[i] < length]
        if not len(own):
            continue
        decoder.keep_outside(seq, row_of(cache, i, own))
        load_states(decoder.cache, seq, cache, i, len(own))
        if len(own) == seq.prompt_length - 1:  # generate() reads one token after a state by the one-token rule
            seq.chunked_length = len(own)


def _check_states(decoder: SpeculativeDecoder, cache: Cache, unseen: int, num_cached: int) -> None:
    """Raise ValueError unless rows can start from the states in transformers' cache, which cannot be cut."""
    family, wrong = decoder.target.recurrent.family, None
    if unseen:
        wrong = "input_ids are only what follows past_key_values"
    elif num_cached < int(cache.get_seq_length()):
        wrong = "past_key_values holds the whole text, so the recurrent state is one token too far"
    elif len(stateful_layers(cache)) != len(decoder.target.recurrent.mixers):
        wrong = "past_key_values lacks recurrent states"
    elif family.two_rules or decoder.generator.needs_all_features:
        wrong = "this model and method would have to read again what past_key_values stands for, by another rule"
    if wrong:
        raise ValueError(
            f"{type(decoder.target.model).__name__} has recurrent layers, and {wrong}: pass the whole text as input_ids, without "
            "past_key_values."
        )


def _result(run: BatchRun, returns: Returns, columns, num_fed: int, export: DynamicCache | None, unseen: int):
    """What `generate()` returns.

    Args:
        num_fed: columns of the prompt that were fed, because no cache held them.
        unseen: columns of the text that the caller did not pass.
    """
    observer, tensors = run.observer, run.tensors
    ids, steps = observer.output_ids(), observer.num_steps
    if export is not None:
        fill_dynamic_cache(export, tensors, columns, unseen + ids.shape[1] - 1)
        if run.decoder.target.recurrent is not None:
            fill_states(export, [tensors[seq.row].states[run.num_fed(seq)] for seq in run.sequences])
    if not returns.as_dict:
        return ids
    for seq in run.sequences:
        run.statistics[seq.row].keep(observer.num_shown(seq))
    return SpeculativeDecoderOnlyOutput(
        sequences=ids,
        scores=tuple(at_step([t.scores for t in tensors], step) for step in range(steps)) if returns.scores else None,
        logits=tuple(at_step([t.logits for t in tensors], step) for step in range(steps)) if returns.logits else None,
        hidden_states=hidden_per_step(tensors, columns, num_fed, steps, returns.layers) if returns.hidden else None,
        past_key_values=export,
        speculation=summarize([run.statistics[seq.row] for seq in run.sequences], run.kv_cache_bytes),
    )
