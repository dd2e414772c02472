"""Engine: continuous batching. Requests join and leave between the steps of one SpeculativeDecoder."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch

from ...cache import OutOfBlocks
from ...candidate_generators.base import save_tables
from ...core.errors import is_failure
from ...core.ranks import RankError
from ...core.sequence import end_ids
from ...decoding.decoder import SpeculativeDecoder, StepResult
from ...decoding.outputs import RowStatistics
from ...sampling.grammar import Reasoning
from ..transfer import Transfers
from .adapters import Adapters
from .control import Control
from .corpora import EngineCorpora
from .encoder import EncoderInput, EncoderSide
from .params import SamplingParams
from .request import Admission, Request, RequestChoice, logprobs_of
from .scheduler import Scheduler
from .structured import GrammarCompiler
from .text import find_stop, token_text

logger = logging.getLogger(__name__)


class Engine:
    """Continuous batching: a scheduler around a SpeculativeDecoder. One thread at a time may use it.

    Args:
        decoder: must have no running sequences; the engine owns it until `close`.
        tokenizer: from transformers; None: no text is made of the new tokens.
        num_blocks: number of KV blocks of the pool, which lives as long as the engine.
        max_model_len: maximum number of tokens of a prompt and its answer together.
        seed: seed of the random numbers for requests that have no seed of their own; None: a random one.
        encoder: of an encoder-decoder model.
        num_image_blocks: as of a `Source`, for the keys of images, if these stand beside those of text.
    """

    def __init__(
        self, decoder: SpeculativeDecoder, tokenizer: Any, num_blocks: int, max_model_len: int,
        max_num_seqs: int = 256, max_num_batched_tokens: int | None = None, seed: int | None = None,
        make_transfers: Callable[[SpeculativeDecoder], Transfers] | None = None, encoder: EncoderSide | None = None,
        num_image_blocks: int = 0
    ):  # fmt: skip
        self.decoder, self.tokenizer, self.max_model_len = decoder, tokenizer, max_model_len
        self._num_blocks, self._max_num_seqs = num_blocks, max_num_seqs
        self.allocate()
        self.scheduler = Scheduler(decoder, max_num_seqs, max_num_batched_tokens)
        self.num_ended = 0  # requests
        self._choices: dict[int, RequestChoice] = {}  # choices that have not ended, by id of their sequence
        self.transfers = None if make_transfers is None else make_transfers(decoder)
        self._isolated: list[list[RequestChoice]] = []  # groups of rows that run alone, see `_after_failure`
        model: Any = decoder.target.model
        ends = getattr(getattr(model, "generation_config", None), "eos_token_id", None)
        ends = getattr(model.config.get_text_config(decoder=True), "eos_token_id", None) if ends is None else ends
        self.eos_token_ids = end_ids(ends)
        self.grammars = GrammarCompiler(tokenizer, decoder.target.vocab_size, self.eos_token_ids)
        self.adapters = Adapters(decoder.generator)
        self.corpora = EngineCorpora(decoder.generator)
        limits = decoder, tokenizer, max_model_len
        self.admission = Admission(*limits, self.grammars, self.adapters, seed, encoder, num_image_blocks)
        self.control = Control(decoder, self.scheduler, self.allocate, self.transfers is not None)

    def allocate(self) -> None:
        """Make the KV pools, which hold nothing."""
        decoder, most_nodes = self.decoder, self.decoder.generator.max_draft_nodes
        decoder.target.choose_states(self._max_num_seqs, most_nodes)
        decoder.allocate(self._num_blocks * decoder.config.block_size, 0)
        if decoder.cache.states is not None:
            decoder.cache.states.reserve(self._max_num_seqs, most_nodes)

    def add(
        self, request_id: str, prompt: str | None, prompt_token_ids: list[int], params: SamplingParams,
        reasoning: Reasoning | None = None, encoder: EncoderInput | None = None
    ) -> Request:  # fmt: skip
        """Add a request; its choices wait until the scheduler lets them run. For arguments and errors see `Admission.request`."""
        request = self.admission.request(request_id, prompt, prompt_token_ids, params, reasoning, encoder)
        moved = params.kv_transfer_params or {}
        if self.transfers is None and (moved.get("do_remote_prefill") or moved.get("do_remote_decode")):
            raise ValueError("kv_transfer_params need a server that was started with kv_transfer_config.")
        is_pulled = bool(moved.get("do_remote_prefill"))
        if is_pulled and (params.n > 1 or params.prompt_logprobs is not None):
            raise ValueError("kv_transfer_params serve one choice (n = 1) without prompt_logprobs.")
        for choice in request.choices:
            if is_pulled and self.transfers is not None:
                self.transfers.consumer.expect(choice, moved)
            else:
                self.scheduler.add(choice)
            self._choices[choice.sequence.id] = choice
        return request

    def abort(self, request: Request, error: BaseException | None = None, reason: str = "abort") -> None:
        """End a request with what has been generated; an `error` is its reason. Its KV blocks are free before the next step."""
        request.error = error
        for choice in request.choices:
            if not choice.output.finished():
                self._end(choice, reason if error is None else "error")

    @property
    def has_work(self) -> bool:
        """True while a request that may run waits, runs, or pulls its prompt's KV."""
        if self.control.obstacle is not None:
            return False
        return self.scheduler.has_rows or bool(self.transfers is not None and self.transfers.consumer.pulling)

    @property
    def wants_pause(self) -> bool:
        """Whether a driver that stays inside `decoder.active()` should leave it once, and call `free_adapters`."""
        return self.decoder.wants_pause or bool(self.adapters.unused(self._adapters_in_use()))

    def _adapters_in_use(self) -> Iterator[str | None]:
        return (choice.sequence.adapter for choice in self._choices.values())

    def free_adapters(self) -> None:
        """Free adapters that were unloaded and that no row uses any more."""
        self.adapters.free(list(self._adapters_in_use()))

    def step(self, on_schedule: Callable[[], None] = lambda: None) -> list[Request]:
        """Run one step of the decoder. Call inside `decoder.active()`. Returns the requests that got tokens or ended. `on_schedule` is
        called once the rows are chosen. Raises RankError: another rank has failed, and the ranks cannot go on.
        """
        return self._poll_transfers() + self._decode(on_schedule)

    def _poll_transfers(self) -> list[Request]:
        """Schedule the requests whose blocks have arrived. End those that no decode server waits for any more, and return them."""
        if self.transfers is None:
            return []
        for choice in self.transfers.poll():
            self.scheduler.add(choice)
        unwanted, self.transfers.producer.unwanted = self.transfers.producer.unwanted, []
        requests = [choice.request for choice in unwanted if not choice.output.finished()]
        for request in requests:
            self.abort(request)
        return requests

    def _decode(self, on_schedule: Callable[[], None]) -> list[Request]:
        groups = ([choice for choice in group if not choice.output.finished()] for group in self._isolated)
        self._isolated = [group for group in groups if group]
        group = self._isolated[0] if self._isolated else None
        rows, counts = self.scheduler.schedule(group)
        on_schedule()
        if not rows:
            if self.transfers is not None and self.transfers.is_busy:
                time.sleep(0.001)
            return []
        try:
            results = self.decoder.step([choice.sequence for choice in rows], counts)
        except OutOfBlocks as error:
            if not self.scheduler.make_room(rows):
                self.abort(rows[0].request, error)
                return [rows[0].request]
            return []
        except BaseException as error:
            if not is_failure(error) or (isinstance(error, RankError) and error.is_final):
                raise
            return self._after_failure(rows, error)
        if group is not None and len(results) == len(group) and all(result.new_tokens for result in results):
            self._isolated.pop(0)  # what raises may do so only once the texts are read again
        touched = {request.number: request for request in self._read_prompt_logits()}
        written = [len(result.new_tokens) for result in results if result.new_tokens]
        self.control.acceptance.note(len(written), sum(written))
        for result in results:
            # None if the request has ended in this loop, by another choice or by its prompt's log-probabilities
            choice = self._choices.get(result.sequence.id)
            if choice is not None and result.new_tokens:
                touched[choice.request.number] = choice.request
                if not (choice.is_watched or result.sequence.finished):
                    choice.output.token_ids += result.new_tokens
                    continue
                try:  # as in `boundary`, which would take longer than what is inside it
                    self._accept(choice, result)
                except BaseException as error:
                    self._fail(choice.request, error)
        announced = [] if self.transfers is None else self.transfers.producer.has_read(rows)
        touched |= {choice.request.number: choice.request for choice in announced}
        if len(results) < len(rows):  # too few blocks were free for the last rows
            self.scheduler.make_room(rows[len(results) :])
        return list(touched.values())

    @contextlib.contextmanager
    def boundary(self, request: Request) -> Iterator[None]:
        """End the request alone if the block raises: tokenizer, grammar and log-probabilities are the request's."""
        try:
            yield
        except BaseException as error:
            self._fail(request, error)

    def _fail(self, request: Request, error: BaseException) -> None:
        if not is_failure(error):
            raise error
        logger.error("Request %s ends, because its processing raised.", request.id, exc_info=error)
        self.abort(request, request.error or error)

    def run(self, on_step: Callable[[list[Request]], object] = lambda requests: None) -> None:
        """Run steps until every request has ended. `Request.error` tells which of them failed. `on_step` is called after each step with the
        requests that got tokens or ended. Raises RankError: another rank has failed; the requests end with "abort".
        """
        try:
            while self.has_work:
                with self.decoder.active():
                    while self.has_work and not self.wants_pause:
                        on_step(self.step())
                self.free_adapters()
        except BaseException:
            self._drop_all()
            raise

    def _after_failure(self, rows: list[RequestChoice], error: BaseException) -> list[Request]:
        """Handle a step that raised. If it had one row, end that row's request; else let each half of the rows run alone.

        Halving is repeated until the row is found that makes a step raise. The step may have written wrong KV. So its rows are
        preempted, which makes them read their texts again, and all cached prefixes are dropped.
        """
        logger.error("A step of %d rows raised %s: %s", len(rows), type(error).__name__, error, exc_info=error)
        if self._isolated:
            self._isolated.pop(0)
        for choice in rows:
            seq = choice.sequence
            del seq.tokens[seq.prompt_length + len(choice.output.token_ids) :]
            seq.finished = False
            self.scheduler.preempt(choice)
        self.decoder.forget_prefixes()
        if len(rows) > 1:
            middle = len(rows) // 2
            self._isolated[:0] = [rows[:middle], rows[middle:]]
            return []
        # The model cannot read what was made of its images.
        rows[0].request.is_refused = self.scheduler.was_alone and isinstance(error, ValueError)
        self.abort(rows[0].request, error)
        return [rows[0].request]

    def _drop_all(self) -> None:
        self._isolated.clear()
        choices = list(self._choices.values())
        for choice in choices:
            choice.output.finish_reason = "abort"
        self._choices.clear()
        self.scheduler.waiting.clear()
        self.scheduler.running.clear()
        if self.transfers is not None:
            self.transfers.close()
        self.decoder.abort([choice.sequence for choice in choices if choice.is_added])

    def close(self) -> None:
        """Abort all requests and free the KV pools."""
        for choice in list(self._choices.values()):
            self.abort(choice.request)
        save_tables(self.decoder.generator)
        self.grammars.close()
        self.corpora.close()
        self.adapters.close()
        if self.transfers is not None:
            self.transfers.close()
        self.decoder.release()

    def _accept(self, choice: RequestChoice, result: StepResult) -> None:
        """Append a step's tokens to a choice, up to the first that ends it."""
        output, params, seq = choice.output, choice.request.params, choice.sequence
        logprobs = None
        if params.logprobs is not None and self.decoder.last is not None:
            logits = self.decoder.last.output.logits
            logits = logits[torch.tensor(result.nodes, device=logits.device)]
            text_of = partial(token_text, self.tokenizer)
            logprobs = logprobs_of(logits, result.new_tokens, params.logprobs, text_of)
        for i, token in enumerate(result.new_tokens):
            if choice.grammar is not None and not choice.grammar.accept(token):
                choice.request.is_refused = True
                self.abort(choice.request, ValueError(choice.grammar.error))
                return
            output.token_ids.append(token)
            if logprobs is not None and output.logprobs is not None:
                output.logprobs.append(logprobs[i])
                output.cumulative_logprob = (output.cumulative_logprob or 0.0) + logprobs[i][token].logprob
            if token in seq.eos_token_ids:
                output.stop_reason = None if token in self.eos_token_ids and not params.ignore_eos else token
                choice.hides_end = not params.include_stop_str_in_output
                self._end(choice, "stop")
                return
            if params.stop and self._stops(choice):  # else the text is made when it is wanted
                self._end(choice, "stop", text_is_whole=True)
                return
            if choice.grammar is not None and choice.grammar.finished:
                self._end(choice, "stop")
                return
        if seq.finished:
            self._end(choice, "length")

    def _stops(self, choice: RequestChoice) -> bool:
        """True if the last token completes a stop text, which is then cut off the output's (unless it is to be included)."""
        output, params, text, piece = choice.output, choice.request.params, choice.text, choice.make_text()
        if text is None or len(output.token_ids) <= params.min_tokens:
            return False
        whole = text.text + text.tail
        match = find_stop(whole, len(piece) + len(text.tail), params.stop)
        if match is None:
            return False
        start, output.stop_reason = match
        output.text = whole[: start + (len(match[1]) if params.include_stop_str_in_output else 0)]
        return True

    def _end(self, choice: RequestChoice, reason: str, text_is_whole: bool = False) -> None:
        """End a choice; its KV blocks are free, or cached, at once."""
        if choice.text is not None and not text_is_whole:
            with self.boundary(choice.request):
                choice.finish_text()
            if choice.output.finished():  # its text has raised, which ended it
                return
        choice.output.finish_reason = reason
        del self._choices[choice.sequence.id]
        if self.transfers is None or not self.transfers.consumer.cancel(choice):
            self.scheduler.remove(choice)
            if choice.is_added:
                statistics = self._remove_row(choice, reason)
                statistics.keep(len(choice.output.token_ids))
                choice.request.num_cached_tokens = max(choice.request.num_cached_tokens, statistics.num_cached_tokens)
                choice.request.statistics.append(statistics)
        self.num_ended += choice.request.finished
        self._align(choice, reason)

    def _align(self, choice: RequestChoice, reason: str) -> None:
        """Note when the tokens of a choice that has ended are spoken, if its request wants to know."""
        request, side, ids = choice.request, self.admission.encoder, choice.output.token_ids
        if side is None or request.encoder is None or not (request.encoder.num_frames and ids) or reason == "abort":
            return
        with self.boundary(request):
            source: Any = choice.sequence.source
            request.token_times = side.times(request.encoder, source, request.prompt_token_ids, ids)

    def _remove_row(self, choice: RequestChoice, reason: str) -> RowStatistics:
        """Remove a row from the decoder, or keep its KV for another engine. Returns its statistics."""
        params = choice.request.params.kv_transfer_params or {}
        if params.get("do_remote_decode") and self.transfers is not None:
            if reason != "abort":
                statistics = self.decoder.statistics[choice.sequence.id]
                choice.request.kv_transfer_params = self.transfers.producer.hold(choice)
                return statistics
            self.transfers.producer.forget(choice)
        return self.decoder.remove(choice.sequence)

    def _read_prompt_logits(self) -> list[Request]:
        """Append the log-probabilities of the prompt tokens that the last step has read. Returns the requests that this ended."""
        last = self.decoder.last
        assert last is not None
        requests = [self._choices[seq_id].request for seq_id in last.prompt_logits]
        for request, (start, logits) in zip(requests, last.prompt_logits.values(), strict=True):
            with self.boundary(request):
                scored, count = request.prompt_logprobs, request.params.prompt_logprobs or 0
                assert scored is not None
                # The logits at prompt[i] predict prompt[i + 1]. After a preemption, tokens are read for a second time: skip those.
                following = request.prompt_token_ids[len(scored) : start + 1 + len(logits)]
                if following:
                    rows = logits[len(scored) - (start + 1) :][: len(following)]
                    scored += logprobs_of(rows, following, count, partial(token_text, self.tokenizer))
        return [request for request in requests if request.finished]
