"""decode(): the loop of `model.generate(speculative_config=...)`: a static batch, with transformers' inputs and outputs."""

from __future__ import annotations

import logging
from typing import Any

import numpy as np
import torch
from transformers.cache_utils import Cache, DynamicCache
from transformers.generation.stopping_criteria import StoppingCriteriaList

from ..candidate_generators.prediction import Prediction
from ..core.errors import UnsupportedModel
from ..core.names import CACHE
from ..core.sequence import Sequence
from ..model.architectures import check_length, is_multimodal
from ..model.encoder_decoder import position_offsets
from ..model.encoder_decoder.source import Source
from ..model.image_layers import check_cache, reads_images
from ..model.prompt import read_prompt, row_of
from ..model.recurrent.families import attends, stateful_layers, states_of
from ..model.recurrent.families import num_cached as count_cached
from . import outputs
from .batch_run import BatchRun, Returns
from .decoder import SpeculativeDecoder
from .prompts import prompt_columns, sequences_of, text_length
from .ranked import observer_for

logger = logging.getLogger(__name__)


# Tensors kept for later calls must not be inference tensors: only inference mode may change those.
@torch.inference_mode(False)
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
    cache: Cache | None = None,
    prompt_inputs: dict[str, Any] | None = None,
    sources: list[Source] | None = None,
    predictions: list[list[int]] | None = None,
    offsets: list[int] | None = None,
    adapters: list[str] | None = None,
):
    """Decode a static batch to its end.

    Args:
        decoder: built for this model and configuration; no sequence may be running on it.
        input_ids, attention_mask: int64 [B, S]. Masked tokens may stand anywhere but at the end of a row. The mask may be wider
            than `input_ids` by the length of `cache`; then `input_ids` hold only what follows the cache.
        logits_processor, stopping_criteria, generation_config: as `generate()` prepared them.
        seed: the rows' random streams derive from it (if the config samples).
        cache: KV of a prefix of the prompts to start from; the KV of the result is written back to it.
        prompt_inputs: the arguments of the model's forward, as `generate()` prepared them, with which the model itself reads the
            prompts (see `model.prompt`), because they are more than ids; None: they are read as ids.
        sources: what the encoder of an encoder-decoder model has read, by row; None: the model is decoder-only.
        predictions: ids that are expected to be written, by row; None: nothing is expected.
        adapters: by row, see `Sequence.adapter`; None: the active ones compute all rows.
        offsets: by row, position minus index of the tokens after `cache`; None: as the model counts.

    Returns: int64 [B, S + n], or one of the classes in `outputs`.

    Raises:
        ValueError: the inputs cannot be decoded, or the drafter needs the ids of tokens that only `cache` has.
    """
    returns = Returns.of(generation_config)
    pad_token = int(0 if generation_config._pad_token_tensor is None else generation_config._pad_token_tensor)
    unseen = text_length(input_ids, attention_mask, generation_config) - input_ids.shape[1]
    num_cached = 0 if cache is None else count_cached(cache)
    # Whether the ids alone determine the text. The target does not read placeholder ids, but drafters see them.
    is_text = not (unseen or prompt_inputs is not None or (num_cached and is_multimodal(decoder.target.model)))
    whole = torch.nn.functional.pad(input_ids, (unseen, 0), value=pad_token)
    if not is_text:
        whole = whole.where(whole < decoder.target.vocab_size, pad_token)
        check_methods(decoder, num_cached, prompt_inputs)
    check_cache(decoder.target.model, decoder.target.config, cache, prompt_inputs)
    columns = prompt_columns(whole, attention_mask)
    sequences = sequences_of(
        whole, unseen, columns, logits_processor, stopping_criteria, generation_config, seed, sources, adapters
    )
    _place(decoder, sequences, columns, offsets, predictions)
    num_cached = _num_reused(decoder, cache, num_cached, whole.shape[1], unseen, prompt_inputs, is_text)
    tensors = [outputs.RowTensors() for _ in sequences]
    observer = observer_for(
        decoder, input_ids, sequences, stopping_criteria, streamer, pad_token,
        (lambda step: outputs.at_step([t.scores for t in tensors], step)) if returns.scores else None,
    )  # fmt: skip
    export = _cache_to_fill(decoder, cache, returns, prompt_inputs)
    for seq in sequences:  # the recurrent states of the caller's cache cannot be computed again from the ids
        seq.is_text = is_text and not (num_cached and decoder.target.recurrent is not None)
    run = BatchRun(decoder, sequences, observer, tensors, returns, export is not None)
    decoder.begin_batch()
    with decoder.memory_for(sequences, all_hidden_states=returns.hidden, rows_have_places=True):
        if prompt_inputs is not None:
            given = {**prompt_inputs, "attention_mask": attention_mask, CACHE: cache}
            how = generation_config, whole, columns, returns.hidden
            run.begin_with(read_prompt(decoder.target, input_ids, given, *how))
        with decoder.active():
            for seq in sequences:
                decoder.add(seq)
            if num_cached and prompt_inputs is None:
                _load_cache(decoder, sequences, cache, columns, num_cached)
            run.until_done(synced_gpus)
            if export is not None and decoder.cache.states is not None:
                run.settle_states()
    if streamer is not None:
        streamer.end()
    return _result(run, returns, columns, whole.shape[1] - num_cached, export, unseen)


def _place(decoder: SpeculativeDecoder, sequences: list[Sequence], columns, offsets, predictions) -> None:
    """Set the rows' positions and predictions. Raises ValueError: a row is longer than the model allows."""
    model, nothing = decoder.target.model, [None] * len(sequences)
    if decoder.target.tables or (sequences and sequences[0].source is not None):
        offsets = position_offsets(model, columns, [seq.tokens for seq in sequences])
    for seq, offset, ids in zip(sequences, offsets or nothing, predictions or nothing, strict=True):
        seq.position_offset, seq.prediction = offset or 0, None if ids is None else Prediction(ids)
        check_length(model, seq.prompt_length + seq.position_offset, seq.max_length + seq.position_offset)


def _cache_to_fill(
    decoder: SpeculativeDecoder, cache: Cache | None, returns: Returns, prompt_inputs: dict[str, Any] | None
) -> DynamicCache | None:
    """The caller's cache if the KV of the result are to be written to it."""
    if not (returns.as_dict or getattr(cache, "_is_user_defined", False)) or not isinstance(cache, DynamicCache):
        return None
    if decoder.target.segments:
        _leave_out(cache, decoder, "compresses segments of a row's text, and transformers' cache those of padded rows")
        return None
    if reads_images(decoder.target.config, prompt_inputs):
        _leave_out(cache, decoder, "keeps keys of images apart from those of text")
        return None
    return cache


def _num_reused(
    decoder: SpeculativeDecoder,
    cache: Cache | None,
    num_cached: int,
    length: int,
    unseen: int,
    prompt_inputs,
    is_text: bool,
) -> int:
    """Number of the prompts' columns whose keys and values `cache` has; raises ValueError (see `_check_states`)."""
    if prompt_inputs is None:
        num_cached = min(num_cached, length - 1)
    if num_cached and cache is not None and decoder.target.recurrent is not None:
        _check_states(decoder, cache, unseen, num_cached)
    # A drafter that needs features of the whole text reads it again.
    return 0 if is_text and decoder.generator.taps.whole_text else num_cached


def check_methods(decoder: SpeculativeDecoder, num_cached: int, prompt_inputs: dict[str, Any] | None) -> None:
    """Raise ValueError if a drafter or an option requires the target to read the whole prompt as ids."""
    if num_cached and decoder.generator.taps.whole_text:
        raise ValueError(
            f"Method {decoder.config.method!r} reads hidden states of the whole text, and {CACHE} may hold an image, virtual "
            f"tokens, or text that input_ids leave out: pass the whole prompt without {CACHE}, or use a method that reads no hidden "
            "states of it, like 'ngram'."
        )
    if num_cached and prompt_inputs is not None and decoder.target.recurrent is not None:
        raise UnsupportedModel(
            f"{type(decoder.target.model).__name__} has layers with a state, so a prompt with images, embeddings or other positions cannot "
            f"continue {CACHE}: pass the whole prompt without them."
        )
    if prompt_inputs is not None and decoder.target.segments:
        raise UnsupportedModel(
            f"{type(decoder.target.model).__name__} compresses segments of its text, and a prompt that is more than ids is read into "
            "transformers' cache, which has lost what an open segment needs: pass input_ids alone."
        )
    if prompt_inputs is not None and not attends(decoder.target.config):
        raise UnsupportedModel(
            f"{type(decoder.target.model).__name__} has no keys, which count the tokens of prompts of embeddings: pass input_ids."
        )
    if prompt_inputs is not None and decoder.target.deterministic:
        raise ValueError(
            "'deterministic' does not cover prompts with images or embeddings, which the model reads in its own way: leave one of "
            "the two out."
        )


def _load_cache(decoder: SpeculativeDecoder, sequences, cache: Any, columns: list[np.ndarray], length: int) -> None:
    """Start the rows with the KV of the prompts' first tokens from transformers' cache."""
    for i, seq in enumerate(sequences):
        fed = columns[i][columns[i] < length]
        if not len(fed):
            continue
        decoder.keep_outside(seq, row_of(cache, i, fed))
        if decoder.cache.states is not None:
            decoder.cache.states.load(seq.id, states_of(cache, i), len(fed))
        if len(fed) == seq.prompt_length - 1:  # generate() reads one token after a state by the one-token rule
            seq.chunked_length = len(fed)


def _check_states(decoder: SpeculativeDecoder, cache: Cache, unseen: int, num_cached: int) -> None:
    """Raise ValueError unless rows can start from the states in transformers' cache, which cannot be cut."""
    recurrent, wrong = decoder.target.recurrent, None
    assert recurrent is not None
    if unseen:
        wrong = f"input_ids are only what follows {CACHE}"
    elif num_cached < int(cache.get_seq_length()):
        wrong = f"{CACHE} holds the whole text, so the recurrent state is one token too far"
    elif recurrent.family.steps:
        wrong = "their states have a form of their own"
    elif len(stateful_layers(cache)) != len(recurrent.mixers):
        wrong = f"{CACHE} lacks recurrent states"
    elif recurrent.family.two_rules or decoder.generator.taps.whole_text:
        wrong = f"this model and method would have to read the tokens of {CACHE} again, with a different result"
    if wrong:
        raise ValueError(
            f"{type(decoder.target.model).__name__} has recurrent layers, and {wrong}: pass the whole text as input_ids, without "
            f"{CACHE}."
        )


def _speculation(run: BatchRun) -> outputs.Speculation:
    """What speculation did in the call, and what the head has learnt so far, if it learns."""
    speculation = outputs.summarize([run.statistics[seq.row] for seq in run.sequences], run.kv_cache_bytes)
    if run.decoder.learner is not None:
        speculation["learning"] = run.decoder.learner.report()
    if run.decoder.tracer is not None:
        speculation["trace"] = run.decoder.tracer.trace
    return speculation


def _has_all_layers(export: DynamicCache, run: BatchRun) -> bool:
    """False, with a warning, if our cache has layers that transformers' lacks; raises UnsupportedModel if the caller passed that cache."""
    recurrent = run.decoder.target.recurrent
    if recurrent is not None and recurrent.family.steps:
        _leave_out(export, run.decoder, "keeps states beside keys, in a form of our own")
        return False
    with_keys = [layer for layer, pair in enumerate(run.tensors[0].cache or []) if pair is not None]
    if export.layer_class_to_replicate is not None or max(with_keys, default=-1) < len(export.layers):
        return True
    _leave_out(export, run.decoder, "keeps keys in more layers than a DynamicCache of its configuration has")
    return False


def _leave_out(export: DynamicCache, decoder: SpeculativeDecoder, what: str) -> None:
    """Warn that there will be no cache; raises UnsupportedModel if the caller passed it. `what`: what the model does."""
    why = f"{type(decoder.target.model).__name__} {what}"
    if getattr(export, "_is_user_defined", False):
        raise UnsupportedModel(f"{why}: call generate() without {CACHE}, or without speculative_config.")
    logger.warning("The output has no cache: %s.", why)


def _result(run: BatchRun, returns: Returns, columns, num_fed: int, export: DynamicCache | None, unseen: int):
    """What `generate()` returns. `num_fed`: columns of the prompt that were fed; `unseen`: columns that the caller did not pass."""
    observer, tensors = run.observer, run.tensors
    ids, steps = observer.output_ids(), observer.num_steps
    if export is not None and not _has_all_layers(export, run):
        export = None
    if export is not None:
        outputs.fill_dynamic_cache(export, tensors, columns, unseen + ids.shape[1] - 1)
        if run.decoder.target.recurrent is not None:
            outputs.fill_states(export, [tensors[seq.row].states[run.num_fed(seq)] for seq in run.sequences])
    if not returns.as_dict:
        return ids
    for seq in run.sequences:
        run.statistics[seq.row].keep(min(seq.num_generated, steps))
    output: dict[str, Any] = {"sequences": ids, "speculation": _speculation(run), CACHE: export}
    for name, wanted in (("scores", returns.scores), ("logits", returns.logits)):
        if wanted:
            rows = [getattr(row, name) for row in tensors]
            output[name] = tuple(outputs.at_step(rows, step) for step in range(steps))
    if returns.hidden:
        stacked = hasattr(run.decoder.target.config, "altup_num_inputs")
        output["hidden_states"] = outputs.hidden_per_step(tensors, columns, num_fed, steps, returns.layers, stacked)
    if run.decoder.target.family is None:
        return outputs.SpeculativeDecoderOnlyOutput(**output)
    return outputs.SpeculativeEncoderDecoderOutput.of(**output)
