"""Engine: requests join and leave between steps of one SpeculativeDecoder."""

from __future__ import annotations

import itertools
import logging
import random
import time
from typing import Any

import torch

from ..cache import OutOfBlocks
from ..core.ranks import RankError
from ..core.sequence import Sequence, stream_seeds
from ..decoding.decoder import SpeculativeDecoder, StepResult
from ..decoding.outputs import RowStatistics
from ..sampling.grammar import GrammarLogitsProcessor, Reasoning
from .outputs import CompletionOutput, Logprob
from .params import SamplingParams
from .processors import row_processors
from .request import Choice, Request
from .scheduler import Scheduler
from .structured import GrammarCompiler
from .text import Detokenizer, find_stop
from .transfer import Transfers

logger = logging.getLogger(__name__)


class Engine:
    """Continuous batching: a scheduler around a SpeculativeDecoder. One thread at a time may use it.

    Args:
        decoder: no sequence may be running on it; it is the engine's until `close`.
        tokenizer: None: prompts are ids, and no text comes back.
        num_blocks: KV blocks of the pool, which lives as long as the engine.
        max_model_len: tokens of a prompt and its answer together, at most.
        max_num_seqs, max_num_batched_tokens: see Scheduler.
        seed: of the requests that have none.
    """

    def __init__(
        self,
        decoder: SpeculativeDecoder,
        tokenizer: Any,
        num_blocks: int,
        max_model_len: int,
        max_num_seqs: int = 256,
        max_num_batched_tokens: int = 2048,
        seed: int | None = None,
    ):
        self.decoder, self.tokenizer, self.max_model_len = decoder, tokenizer, max_model_len
        self.eos_token_ids = _eos_token_ids(decoder.target.model)
        decoder.target.choose_states(max_num_seqs, decoder.generator.max_draft_nodes)
        decoder.allocate(num_blocks * decoder.config.block_size, 0)
        decoder.generator.outlive_texts()
        self.scheduler = Scheduler(decoder, max_num_seqs, max_num_batched_tokens)
        self._choices: dict[int, Choice] = {}  # by sequence
        self._numbers = itertools.count()
        self._seeds = random.Random(seed)
        self.transfers: Transfers | None = None
        self._apart: list[list[Choice]] = []  # groups that run by themselves, see `_after_failure`
        self.grammars = GrammarCompiler(tokenizer, decoder.target.vocab_size, self.eos_token_ids)

    # ---- requests ---------------------------------------------------------------------------------------------------

    def add(
        self,
        request_id: str,
        prompt: str | None,
        prompt_token_ids: list[int],
        params: SamplingParams,
        on_update=None,
        reasoning: Reasoning | None = None,
    ) -> Request:
        """A request joins.

        Args:
            reasoning: what the model writes before the text that `structured_outputs` describes.

        Raises:
            ValueError: it cannot be served; the message says why.
        """
        length, vocab_size = len(prompt_token_ids), self.decoder.target.vocab_size
        if not length:
            raise ValueError("The prompt is empty: it needs at least one token.")
        if length >= self.max_model_len:
            raise ValueError(
                f"The prompt has {length} tokens; with max_model_len {self.max_model_len} it may have {self.max_model_len - 1}."
            )
        wrong = next((token for token in prompt_token_ids if not 0 <= token < vocab_size), None)
        if wrong is not None:
            raise ValueError(f"The prompt holds the id {wrong}; the model has ids 0 to {vocab_size - 1}.")
        wrong = next((token for token in params.stop_token_ids if not 0 <= token < vocab_size), None)
        if wrong is not None:
            raise ValueError(f"stop_token_ids holds {wrong}; the model has ids 0 to {vocab_size - 1}.")
        pool = self.decoder.cache
        if -(-(length + 1) // pool.block_size) > pool.most_blocks:
            raise ValueError(
                f"The prompt has {length} tokens; the KV cache holds {pool.most_blocks * pool.block_size}. Give it more memory."
            )
        drafters = self.decoder.generator.drafters
        if params.drafter is not None and params.drafter not in drafters:
            known = f"it has {', '.join(drafters)}" if drafters else "it has one method, for every request"
            raise ValueError(
                f"drafter {params.drafter!r} (speculative_config's 'method') is not one of this engine's: {known}."
            )
        self._check_seed(params)
        matcher = self._matcher(params)
        request = Request(request_id, next(self._numbers), prompt, list(prompt_token_ids), params, on_update)
        request.prompt_logprobs = None if params.prompt_logprobs is None else [None]
        seed = self._seeds.getrandbits(62) if params.seed is None else params.seed % 2**63
        room = self.max_model_len - length
        new_tokens = room if params.max_tokens is None else min(params.max_tokens, room)
        ends = set(params.stop_token_ids) | (set() if params.ignore_eos else set(self.eos_token_ids))
        for index, stream in enumerate(stream_seeds(seed, [request.prompt_token_ids] * params.n)):
            grammar = None if matcher is None else GrammarLogitsProcessor(
                matcher.deep_copy(), self.grammars.vocab_size, length, frozenset(ends), reasoning,
                lambda token: self._token_text(token) or "",
            )  # fmt: skip
            sequence = Sequence(
                list(prompt_token_ids), length + new_tokens, frozenset(ends), params.do_sample, stream,
                row_processors(params, request.prompt_token_ids, ends, self.tokenizer, vocab_size, grammar),
                num_speculative_tokens=params.num_speculative_tokens, drafter=params.drafter,
                wants_prompt_logits=params.prompt_logprobs is not None and index == 0,
            )  # fmt: skip
            wants_text = params.detokenize and self.tokenizer is not None
            text = (
                Detokenizer(self.tokenizer, request.prompt_token_ids, params.skip_special_tokens)
                if wants_text
                else None
            )
            output = CompletionOutput(index, logprobs=None if params.logprobs is None else [])
            output.cumulative_logprob = None if params.logprobs is None else 0.0
            choice = Choice(request, output, sequence, text, grammar)
            request.choices.append(choice)
            self._choices[sequence.id] = choice
            if not self._comes(choice):
                self.scheduler.add(choice)
        return request

    def _check_seed(self, params: SamplingParams) -> None:
        """Raise ValueError if a seed could not give the same tokens again: with most rules these depend on where drafts end, and so
        on the load."""
        rule, drafts = self.decoder.config.verification_rule, self.decoder.generator.max_draft_nodes
        drafts = drafts if params.num_speculative_tokens is None else params.num_speculative_tokens
        if params.seed is not None and params.do_sample and drafts and rule != "coupled":
            raise ValueError(
                f"seed: with rejection_sample_method {rule!r} a seed does not give the same tokens every time, because they depend on "
                "the drafts. Leave seed out, switch this request's drafts off (num_speculative_tokens 0), or use 'coupled'."
            )

    def _comes(self, choice: Choice) -> bool:
        """True if the choice waits for keys of another engine."""
        params = choice.request.params.kv_transfer_params or {}
        if not params.get("do_remote_prefill"):
            return False
        try:
            if self.transfers is None:
                raise ValueError("kv_transfer_params need a server that was started with kv_transfer_config.")
            if choice.request.params.n > 1 or choice.request.params.prompt_logprobs is not None:
                raise ValueError("kv_transfer_params serve one choice (n = 1) without prompt_logprobs.")
            self.transfers.expect(choice, params)
        except ValueError:
            del self._choices[choice.sequence.id]
            raise
        return True

    def _matcher(self, params: SamplingParams) -> Any:
        """The request's grammar, which was compiled before if the request came over HTTP; None if it has none."""
        if params.structured_outputs is None:
            return None
        if self.decoder.config.verification_rule == "synthetic":
            raise ValueError(
                "structured_outputs: the rule 'synthetic' accepts drafts whatever they are. Use another rule."
            )
        return self.grammars.matcher(params.structured_outputs)

    def abort(self, request: Request, error: BaseException | None = None, reason: str = "abort") -> None:
        """End a request now, with what it has. Its blocks are free before the next step."""
        request.error = error
        for choice in request.choices:
            if not choice.output.finished():
                self._end(choice, reason)

    @property
    def has_work(self) -> bool:
        """True while a request is waiting or running."""
        return bool(self.scheduler.waiting or self.scheduler.running) or self.is_transferring

    @property
    def is_transferring(self) -> bool:
        """True while keys come from another engine."""
        return self.transfers is not None and bool(self.transfers.coming)

    # ---- the loop ---------------------------------------------------------------------------------------------------

    def step(self) -> list[Request]:
        """One step of the decoder. Call inside `decoder.active()`. Returns the requests that got tokens or ended."""
        if self.transfers is not None:
            for choice in self.transfers.poll():
                self.scheduler.add(choice)
        group = self._next_group()
        rows, counts = self.scheduler.schedule(group)
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
        except Exception as error:
            if isinstance(error, RankError) and error.is_final:
                raise
            return self._after_failure(rows, error)
        if group is not None:
            self._apart.pop(0)
        self._read_prompt_logits()
        touched: dict[int, Request] = {}
        for result in results:
            choice = self._choices.get(result.sequence.id)  # None: another choice of its request has just ended it
            if choice is not None and result.new_tokens:
                self._accept(choice, result)
                touched[choice.request.number] = choice.request
        if len(results) < len(rows):  # blocks ran out for the last rows
            self.scheduler.make_room(rows[len(results) :])
        for request in touched.values():
            if request.on_update is not None:
                request.on_update(request)
        return list(touched.values())

    def run(self) -> None:
        """Step until nothing is left to do.

        Raises:
            Exception: what a step raised for one of the requests. All requests end.
        """
        try:
            while self.has_work:
                with self.decoder.active():
                    while self.has_work and not self.decoder.wants_pause:
                        for request in self.step():
                            if request.error is not None:
                                raise request.error
        except BaseException:
            self._drop_all()
            raise

    def _next_group(self) -> list[Choice] | None:
        """Rows to run by themselves, because one of them made a step raise; None: all rows."""
        while self._apart:
            self._apart[0] = [choice for choice in self._apart[0] if not choice.output.finished()]
            if self._apart[0]:
                return self._apart[0]
            self._apart.pop(0)
        return None

    def _after_failure(self, rows: list[Choice], error: Exception) -> list[Request]:
        """A step raised. One row: its request ends. Several: each half runs by itself next, until the row is found.

        What the step wrote cannot be trusted, so its rows read their texts again, and no prefix is shared from before.
        """
        logger.error("A step of %d rows raised %s: %s", len(rows), type(error).__name__, error, exc_info=error)
        if self._apart:
            self._apart.pop(0)
        for choice in rows:
            seq = choice.sequence
            del seq.tokens[seq.prompt_length + len(choice.output.token_ids) :]
            seq.finished = False
            self.scheduler.preempt(choice)
        self.forget_prefixes()
        if len(rows) > 1:
            middle = len(rows) // 2
            self._apart[:0] = [rows[:middle], rows[middle:]]
            return []
        self.abort(rows[0].request, error)
        return [rows[0].request]

    def _drop_all(self) -> None:
        self._apart.clear()
        choices = list(self._choices.values())
        for choice in choices:
            choice.output.finish_reason = "abort"
        self._choices.clear()
        self.scheduler.waiting.clear()
        self.scheduler.running.clear()
        self.decoder.abort([choice.sequence for choice in choices if choice.is_added])

    def forget_prefixes(self) -> None:
        """Drop the KV of earlier prompts, because the model has changed."""
        self.decoder.forget_prefixes()

    def close(self) -> None:
        """End what is running and give the KV pools back."""
        for choice in list(self._choices.values()):
            self.abort(choice.request)
        self.grammars.close()
        if self.transfers is not None:
            self.transfers.close()
        self.decoder.release()

    # ---- tokens -----------------------------------------------------------------------------------------------------

    def _accept(self, choice: Choice, result: StepResult) -> None:
        """Take a step's tokens up to the first that ends the choice."""
        output, params, seq = choice.output, choice.request.params, choice.sequence
        logprobs = self._logprobs(result, params.logprobs) if params.logprobs is not None else None
        for i, token in enumerate(result.new_tokens):
            if choice.grammar is not None and not choice.grammar.accept(token):
                self.abort(choice.request, ValueError(choice.grammar.error))
                return
            output.token_ids.append(token)
            if logprobs is not None and output.logprobs is not None:
                output.logprobs.append(logprobs[i])
                output.cumulative_logprob = (output.cumulative_logprob or 0.0) + logprobs[i][token].logprob
            if token in seq.eos_token_ids:
                output.stop_reason = None if token in self.eos_token_ids and not params.ignore_eos else token
                choice.hides_end = not params.include_stop_str_in_output
                if choice.text is not None and params.include_stop_str_in_output:
                    choice.text.add(token)
                self._end(choice, "stop")
                return
            if choice.text is not None and self._stops_at(choice, choice.text.add(token)):
                self._end(choice, "stop", text_is_whole=True)
                return
            if choice.grammar is not None and choice.grammar.finished:
                self._end(choice, "stop")
                return
        if seq.finished:
            self._end(choice, "length")

    def _stops_at(self, choice: Choice, piece: str) -> bool:
        """Append new text; True if a stop text is in it, which is cut off then."""
        output, params, text = choice.output, choice.request.params, choice.text
        assert text is not None
        output.text = text.text
        if not piece or not params.stop or len(output.token_ids) <= params.min_tokens:
            return False
        found = find_stop(text.text, len(piece), params.stop)
        if found is None:
            return False
        start, output.stop_reason = found
        output.text = text.text[: start + (len(found[1]) if params.include_stop_str_in_output else 0)]
        return True

    def _end(self, choice: Choice, reason: str, text_is_whole: bool = False) -> None:
        """A choice leaves; its blocks are free (or cached) at once."""
        choice.output.finish_reason = reason
        if choice.text is not None and not text_is_whole:
            choice.text.finish()
            choice.output.text = choice.text.text
        del self._choices[choice.sequence.id]
        if self.transfers is not None and self.transfers.cancel(choice):
            return
        self.scheduler.remove(choice)
        if choice.is_added:
            statistics = self._leave(choice, reason)
            statistics.keep(len(choice.output.token_ids))
            choice.request.num_cached_tokens = max(choice.request.num_cached_tokens, statistics.num_cached_tokens)
            choice.request.statistics.append(statistics)

    def _leave(self, choice: Choice, reason: str) -> RowStatistics:
        """The decoder lets go of the row, or it holds its keys for another engine."""
        params = choice.request.params.kv_transfer_params or {}
        if params.get("do_remote_decode") and reason != "abort" and self.transfers is not None:
            statistics = self.decoder.statistics[choice.sequence.id]
            choice.request.kv_transfer_params = self.transfers.hold(choice)
            return statistics
        return self.decoder.remove(choice.sequence)

    def _read_prompt_logits(self) -> None:
        """Log-probabilities of the prompt tokens that the last step has read."""
        last = self.decoder.last
        assert last is not None
        for seq_id, (start, logits) in last.prompt_logits.items():
            request = self._choices[seq_id].request
            found, prompt = request.prompt_logprobs, request.prompt_token_ids
            assert found is not None
            # The logits after prompt[i] are about prompt[i + 1]. After a preemption tokens are read that were read before.
            known = len(found) - (start + 1)
            following = prompt[len(found) : start + 1 + len(logits)]
            if following:
                found += self._best(
                    logits[known : known + len(following)], following, request.params.prompt_logprobs or 0
                )

    def _logprobs(self, result: StepResult, count: int) -> list[dict[int, Logprob]]:
        """Per new token, the log-probabilities of the best `count` tokens and of itself."""
        last = self.decoder.last
        assert last is not None
        index = torch.tensor(result.nodes, device=last.output.logits.device)
        return self._best(last.output.logits[index], result.new_tokens, count)

    def _best(self, logits: torch.Tensor, tokens: list[int], count: int) -> list[dict[int, Logprob]]:
        """Per row of logits [R, V], the best `count` tokens and the row's own of `tokens` [R]."""
        scores = logits.float().log_softmax(-1)
        own = scores.gather(1, torch.tensor(tokens, device=scores.device)[:, None])
        ranks = (scores > own).sum(1).add(1).tolist()
        best = scores.topk(count, dim=1)
        found = []
        rows = zip(tokens, own[:, 0].tolist(), ranks, best.indices.tolist(), best.values.tolist(), strict=True)
        for token, value, rank, ids, values in rows:
            ranked = enumerate(zip(ids, values, strict=True), 1)
            each = {other: Logprob(v, r, self._token_text(other)) for r, (other, v) in ranked}
            each.setdefault(token, Logprob(value, rank, self._token_text(token)))
            found.append(each)
        return found

    def _token_text(self, token: int) -> str | None:
        return None if self.tokenizer is None else self.tokenizer.decode([token])


def _eos_token_ids(model) -> frozenset[int]:
    found = getattr(model, "generation_config", None)
    ids = None if found is None else found.eos_token_id
    ids = model.config.get_text_config(decoder=True).eos_token_id if ids is None else ids
    return frozenset(() if ids is None else [ids] if isinstance(ids, int) else ids)
