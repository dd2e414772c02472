"""NodeProcessors: a LogitsProcessorList applied to the nodes of draft trees."""

from __future__ import annotations

import copy
import logging
import math
from collections.abc import Callable, Hashable, Iterable
from typing import Any

import torch
from transformers.generation import logits_process as hf
from transformers.generation.logits_process import LogitsProcessorList

from ..core.sequence import Sequence
from .grammar import GrammarLogitsProcessor
from .kept_state import KeptState
from .parameters import SamplingParameters
from .warpers import (
    BeginningLogitsProcessor,
    FusedSamplingLogitsWarper,
    OutputPenaltyLogitsProcessor,
    TokenBiasLogitsProcessor,
)

logger = logging.getLogger(__name__)


# These depend only on the scores: run once over all nodes.
_STATELESS = (
    hf.TemperatureLogitsWarper, hf.TopKLogitsWarper, hf.TopPLogitsWarper, hf.MinPLogitsWarper, hf.TopHLogitsWarper,
    hf.TypicalLogitsWarper, hf.EpsilonLogitsWarper, hf.EtaLogitsWarper, hf.LogitNormalization, hf.InfNanRemoveLogitsProcessor,
    hf.SuppressTokensLogitsProcessor, TokenBiasLogitsProcessor,
)  # fmt: skip
# These depend on a row's own prefix: run together over nodes of equal length.
_ROW_WISE = (
    hf.RepetitionPenaltyLogitsProcessor, hf.NoRepeatNGramLogitsProcessor, hf.NoBadWordsLogitsProcessor,
    hf.SequenceBiasLogitsProcessor, hf.ForcedBOSTokenLogitsProcessor, hf.ForcedEOSTokenLogitsProcessor,
    hf.ExponentialDecayLengthPenalty, hf.SuppressTokensAtBeginLogitsProcessor, hf.WatermarkLogitsProcessor,
    hf.WhisperTimeStampLogitsProcessor, OutputPenaltyLogitsProcessor, BeginningLogitsProcessor,
)  # fmt: skip
# It looks at the whole batch when its texts begin, `begin_index` tokens long, and changes no score.
_AT_BEGINNING = hf.WhisperNoSpeechDetection
# These act the same on every prefix shorter than a length, and not on longer ones. The values return this length.
_SHORT_PREFIXES: dict[type, Callable[..., int]] = {
    hf.MinLengthLogitsProcessor: lambda processor: processor.min_length,
    hf.MinNewTokensLengthLogitsProcessor: lambda processor: processor.prompt_length_to_skip + processor.min_new_tokens,
}
# These keep state that cannot be followed, so they are refused.
_STATEFUL = (hf.SynthIDTextWatermarkLogitsProcessor, hf.UnbatchedClassifierFreeGuidanceLogitsProcessor)


_KNOWN = {
    *_STATELESS,
    *_ROW_WISE,
    _AT_BEGINNING,
    *_SHORT_PREFIXES,
    *_STATEFUL,
    FusedSamplingLogitsWarper,
    GrammarLogitsProcessor,
}

_SAMPLING = {  # in the order of transformers
    hf.TemperatureLogitsWarper: "temperature",
    hf.TopKLogitsWarper: "top_k",
    hf.TopPLogitsWarper: "top_p",
    hf.MinPLogitsWarper: "min_p",
}


def split_sampling(processors: list[Any]) -> tuple[list[Any], SamplingParameters | None]:
    """Split a list into the processors before its final sampling parameters, and these parameters (None: it does not end with any)."""
    if processors and isinstance(processors[-1], FusedSamplingLogitsWarper):
        last = processors[-1]
        return processors[:-1], SamplingParameters(last.temperature, last.top_k, last.top_p, last.min_p)
    names = list(_SAMPLING.values())
    arguments: dict[str, Any] = {}
    first = len(processors)
    while first and (name := _SAMPLING.get(type(processors[first - 1]))):
        processor = processors[first - 1]
        least = min(map(names.index, arguments), default=len(names))
        is_plain = getattr(processor, "filter_value", -math.inf) == -math.inf
        if names.index(name) >= least or not is_plain or getattr(processor, "min_tokens_to_keep", 1) != 1:
            break
        arguments[name] = getattr(processor, name)
        first -= 1
    return processors[:first], SamplingParameters(**arguments) if arguments else None


class NodeProcessors:
    """A LogitsProcessorList applied to tree nodes. Each node gets the scores that plain decoding would give its prefix.

    Args:
        processors: the list that `generate()` prepared for a batch.
        prompt_ids: int64 [B, S], the caller's padded batch. Processors see rows as transformers shows them, including padding.
            Unknown processors get whole batches of B rows, because they may tell rows apart by index.
        pad_token_id: fills rows without a node in such a batch.

    Attributes:
        sampling: the temperature, top-k, top-p and min-p that the list ends with; `apply` can leave them out.
        only_sampling: the list holds nothing else.
        grammar: the grammar that the only row of the batch follows, or None.
        needs_prefix: some processor looks at the prefix.
        in_step: the list holds processors that see batches, so all rows of the batch must begin together.
        calls_in_order: nothing may be drafted, because a processor keeps state from call to call, or may do so and has not been
            called yet. It is called once per token, in order, as plain decoding calls it.

    What the user wrote is called for prefixes that plain decoding may reach: for a node only if its parent's scores allow its token, and
    not after an end-of-sequence token. If it raises for a drafted prefix, plain decoding may still never come there.

    Unknown processors, and the function of `prefix_allowed_tokens_fn`, are watched (kept_state.py). They keep state if a call changes
    their contents, or if they have an attribute `keeps_state` that is true; if it is False they are not watched. Changes by calls for
    drafted nodes are undone, and `calls_in_order` is set.

    Raises:
        ValueError: a processor keeps state that cannot be followed (watermarking and guidance of transformers).
    """

    def __init__(self, processors: LogitsProcessorList, prompt_ids: torch.LongTensor, pad_token_id: int | None):
        for processor in processors:
            if isinstance(processor, _STATEFUL):
                raise ValueError(
                    f"{type(processor).__name__} keeps state from token to token and cannot be used with speculative_config."
                )
        self.processors, self.prompt_ids, self.pad_token_id = list(processors), prompt_ids, pad_token_id or 0
        self.needs_prefix = any(not self._is_stateless(p) for p in self.processors)
        codes = [code for code in map(_code_of_user, self.processors) if code is not None]
        self._watched = [KeptState(code) for code in codes if getattr(code, "keeps_state", None) is not False]
        self.in_step = bool(self._watched) or any(type(processor) is _AT_BEGINNING for processor in self.processors)
        self._keeps_state = False
        self.calls_in_order = bool(self._watched)
        for state in self._watched:
            if state.opaque or getattr(state.owner, "keeps_state", False):
                self._note_state(state.owner)
        self._first, self.sampling = split_sampling(self.processors)
        self.only_sampling = not self._first
        self.grammar = next(
            (processor for processor in self.processors if isinstance(processor, GrammarLogitsProcessor)), None
        )

    @staticmethod
    def _is_stateless(processor) -> bool:
        return type(processor) in _STATELESS or isinstance(processor, FusedSamplingLogitsWarper)

    def apply(
        self,
        sequences: list[Sequence],
        paths: list[torch.Tensor] | None,
        logits: torch.Tensor,
        whole: bool = True,
        drafted: bool = True,
        failed: set[int] | None = None,
    ) -> torch.Tensor:
        """Scores [R, V] of R nodes.

        Args:
            sequences, paths: node r's prefix is `sequences[r]` and the drafted ids `paths[r]` [depth]; None: all paths are empty.
            whole: False: leave out the final temperature, top-k, top-p and min-p, which the caller applies.
            drafted: False: every node is a row's last token, and its scores choose the next one. Changes that such calls make to
                a processor's state are kept.
            failed: receives the drafted nodes for which the user's code raised; they keep their logits.
        """
        processors = self.processors if whole else self._first
        if drafted and self._keeps_state:  # scores for a drafter; its drafts will not be used
            processors = [processor for processor in processors if _code_of_user(processor) is None]
        if paths is not None and any(_code_of_user(processor) is not None for processor in processors):
            scores = self._along_trees(processors, sequences, paths, logits, set() if failed is None else failed)
        else:
            scores = self._applied(processors, sequences, paths, logits)
        if self._watched and not self._keeps_state:
            changed = [state for state in self._watched if state.has_changed()]
            if drafted:
                for state in changed:
                    state.restore()
            for state in changed:
                self._note_state(state.owner)
            self.calls_in_order = self._keeps_state
        return scores

    def _note_state(self, processor: Any) -> None:
        self._keeps_state = True
        logger.warning(
            "%s keeps state from call to call (or holds something opaque), so it is called once per token, in order: "
            "nothing is drafted.",
            getattr(processor, "__name__", type(processor).__name__),
        )

    def _along_trees(self, processors, sequences, paths, logits: torch.Tensor, failed: set[int]) -> torch.Tensor:
        """`_applied`, depth by depth, for the nodes that plain decoding may reach."""
        scores, on_host = logits.clone(), [tuple(path.tolist()) for path in paths]
        places = {(seq.id, path): i for i, (seq, path) in enumerate(zip(sequences, on_host, strict=True))}
        scored: set[int] = set()

        def score(nodes: list[int]) -> None:
            index = torch.tensor(nodes, device=logits.device)
            chosen = [sequences[i] for i in nodes], [paths[i] for i in nodes]
            scores[index] = self._applied(processors, *chosen, logits[index])
            scored.update(nodes)

        def is_possible(node: int) -> bool:
            seq, path = sequences[node], on_host[node]
            parent = places.get((seq.id, path[:-1])) if path else None
            if path and path[-1] in seq.eos_token_ids:
                return False
            if parent is None or parent not in scored:
                return parent is None
            # where every token is forbidden, plain decoding goes on with the first one
            return bool(scores[parent, path[-1]] > -math.inf) or int(scores[parent].argmax()) == path[-1]

        for depth in sorted(set(map(len, on_host))):
            nodes = [i for i, path in enumerate(on_host) if len(path) == depth and is_possible(i)]
            try:
                if nodes:
                    score(nodes)
            except Exception:
                if not depth:
                    raise
                for node in nodes:
                    try:
                        score([node])
                    except Exception:
                        failed.add(node)
        return scores

    def _applied(self, processors, sequences, paths, logits: torch.Tensor) -> torch.Tensor:
        if not processors:
            return logits
        scores = logits.clone()  # processors may work in place
        prefixes: list[torch.Tensor] | None = None
        for processor in processors:
            if self._is_stateless(processor):
                scores = processor(self.prompt_ids[:1], scores)
                continue
            if type(processor) in _SHORT_PREFIXES:
                scores = self._while_short(processor, sequences, paths, scores)
                continue
            if isinstance(processor, GrammarLogitsProcessor):
                scores = processor.along(sequences[0].shown_tokens, paths, scores)
                continue
            if prefixes is None:
                prefixes = self._prefixes(sequences, paths, logits.device)
            if type(processor) is _AT_BEGINNING and all(len(prefix) != processor.begin_index for prefix in prefixes):
                continue
            if type(processor) in _ROW_WISE and getattr(processor, "prompt_ignore_length", None) is None:
                scores = self._by_length(processor, prefixes, scores)
            elif type(processor) in _PER_ROW and not (self._keeps_state and _code_of_user(processor) is not None):
                scores = self._by_row(processor, sequences, prefixes, scores)
            else:
                scores = self._in_batches(processor, sequences, prefixes, scores)
        return scores

    def _prefixes(self, sequences, paths, device) -> list[torch.Tensor]:
        rows = {seq.id: seq for seq in sequences}
        rows = {key: torch.tensor(seq.shown_tokens, device=device) for key, seq in rows.items()}
        if paths is None:
            return [rows[seq.id] for seq in sequences]
        pairs = zip(sequences, paths, strict=True)
        return [torch.cat([rows[seq.id], path.to(device)]) if len(path) else rows[seq.id] for seq, path in pairs]

    @staticmethod
    def _while_short(processor, sequences, paths, scores: torch.Tensor) -> torch.Tensor:
        limit = _SHORT_PREFIXES[type(processor)](processor)
        shown = {seq.id: len(seq.shown_tokens) for seq in sequences}
        lengths = [shown[seq.id] + (0 if paths is None else len(paths[i])) for i, seq in enumerate(sequences)]
        short = [i for i, length in enumerate(lengths) if length < limit]
        if not short:
            return scores
        ids = torch.zeros(1, 1, dtype=torch.long, device=scores.device).expand(len(short), limit - 1)
        if len(short) == len(lengths):
            return processor(ids, scores)
        index = torch.tensor(short, device=scores.device)
        return scores.index_copy(0, index, processor(ids, scores[index]))

    @staticmethod
    def _by_length(processor: Callable, prefixes: list[torch.Tensor], scores: torch.Tensor) -> torch.Tensor:
        out = torch.empty_like(scores)
        for members in _grouped(map(len, prefixes)).values():
            index = torch.tensor(members, device=scores.device)
            out[index] = processor(torch.stack([prefixes[i] for i in members]), scores[index])
        return out

    def _by_row(self, processor, sequences, prefixes, scores):
        out = torch.empty_like(scores)
        for row, members in _grouped(seq.row for seq in sequences).items():
            alone = _PER_ROW[type(processor)](processor, row, self.prompt_ids.shape[0])
            for i in members:
                out[i] = alone(prefixes[i][None], scores[i : i + 1])[0]
        return out

    def _in_batches(self, processor, sequences, prefixes, scores):
        """Call an unknown processor with batches shaped like the caller's: one node per row, all of the same length."""
        out = torch.empty_like(scores)
        waves: dict[tuple[int, int], dict[int, int]] = {}
        taken: dict[tuple[int, int], int] = {}
        for i, seq in enumerate(sequences):
            length = len(prefixes[i])
            wave = taken.get((seq.row, length), 0)
            taken[(seq.row, length)] = wave + 1
            waves.setdefault((length, wave), {})[seq.row] = i
        if self._keeps_state and len(waves) > 1:
            raise ValueError(
                f"{type(processor).__name__} keeps state from call to call, so all rows of a batch must be decoded in step. They are "
                "not: its state began to change after tokens had been drafted, or the rows do not fit the KV cache together. Set "
                "keeps_state = True on the processor, raise num_blocks, or pass one row at a time."
            )
        texts = {seq.row: (len(seq.shown_tokens), prefix) for seq, prefix in zip(sequences, prefixes, strict=True)}
        for (length, _), members in waves.items():
            size, width = self.prompt_ids.shape
            ids = self.prompt_ids.new_full((size, length), self.pad_token_id)
            ids[:, : min(width, length)] = self.prompt_ids[:, :length]
            for row, (count, prefix) in texts.items():
                if count >= length:  # the row has come by there
                    ids[row] = prefix[:length]
            batch = scores.new_zeros(ids.shape[0], scores.shape[1])
            for row, i in members.items():
                ids[row], batch[row] = prefixes[i], scores[i]
            result = processor(ids, batch)
            for row, i in members.items():
                out[i] = result[row]
        return out


def _grouped(keys: Iterable[Hashable]) -> dict[Any, list[int]]:
    """Key → the indices that have it."""
    groups: dict[Any, list[int]] = {}
    for i, key in enumerate(keys):
        groups.setdefault(key, []).append(i)
    return groups


def _code_of_user(processor: Any) -> Any | None:
    """What the user wrote of a processor and may keep state: all of it, or its function; None if transformers or we wrote it all."""
    if type(processor) is hf.PrefixConstrainedLogitsProcessor:
        return processor._prefix_allowed_tokens_fn
    return None if type(processor) in _KNOWN else processor


def _prefix_constrained_row(processor, row: int, batch: int):
    allowed = processor._prefix_allowed_tokens_fn
    return hf.PrefixConstrainedLogitsProcessor(lambda _, ids: allowed(row, ids), 1)


def _encoder_row(processor, row: int, batch: int):
    alone = copy.copy(processor)
    for name in ("encoder_input_ids", "generated_ngrams"):
        of_prompts = getattr(processor, name, None)
        if of_prompts is not None:  # rows from num_return_sequences share their prompt
            prompt = row * len(of_prompts) // batch
            setattr(alone, name, of_prompts[prompt : prompt + 1])
    if hasattr(processor, "batch_size"):
        alone.batch_size = 1
    return alone


# These tell rows of the batch apart. The values build a processor for one row.
_PER_ROW: dict[type, Callable] = {
    hf.PrefixConstrainedLogitsProcessor: _prefix_constrained_row,
    hf.EncoderRepetitionPenaltyLogitsProcessor: _encoder_row,
    hf.EncoderNoRepeatNGramLogitsProcessor: _encoder_row,
}
_KNOWN |= set(_PER_ROW)
