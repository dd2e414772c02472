"""The generation mode of `speculative_config=`, and what a model keeps between calls. `plugin.py` imports it at the first call."""

from __future__ import annotations

import contextlib
import json
import threading
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from transformers import GenerationConfig, PreTrainedModel
from transformers.generation.logits_process import LogitsProcessorList

from .candidate_generators import CandidateGenerator, make_generator, parse_config
from .candidate_generators.base import DrafterContext, HasHead, held_weakly, save_tables
from .candidate_generators.combined import corpora_of
from .candidate_generators.corpora import CorpusConfig
from .candidate_generators.prediction import predictions_of
from .config import PER_CALL_KEYS, SpeculativeConfig
from .core.errors import UnsupportedModel
from .core.names import CACHE
from .core.ranks import ranks_of
from .decoding import SpeculativeDecoder, decode
from .decoding.measuring import measure_costs
from .decoding.outputs import attention_weights, check_attention_weights
from .decoding.ranked import agreed_call, decoder_of
from .model.architectures import has_bidirectional_prompts
from .model.encoder_decoder import family_of, is_encoder_decoder
from .model.encoder_decoder.source import sources_of
from .model.prepare import ModelOptions, prepare
from .model.recurrent.families import num_cached
from .model.self_test import check, is_intervened
from .model.structure import hooks_in, structure_of
from .refusals import adapter_names, check_inputs, check_mode, check_model
from .virtual_tokens import with_virtual_tokens

_lock = threading.RLock()
_models_in_use: weakref.WeakSet[PreTrainedModel] = weakref.WeakSet()


def check_call(model: PreTrainedModel, generation_config: GenerationConfig, mode: Any, assistant_model: Any) -> None:
    """Refuse what would not be exact, before any work is done, and parse the call's configuration, for `specdec_decoding`. `mode`: what the
    mode would be without speculation. Raises ValueError, SpeculativeConfigError: a bad configuration, or what cannot be sped up.
    """
    carried: Any = generation_config
    names = carried.adapter_names = adapter_names(model)  # whatever is refused, PEFT's hooks must not stay
    config = carried.speculative_config = parse_config(carried.speculative_config)
    check_mode(generation_config, mode)
    check_model(model, config, generation_config, assistant_model)
    if names is not None and config.compile:
        raise config.fail("compile", "compiles layers with the active adapters, not with adapter_names: leave one out.")


def specdec_decoding(
    model: PreTrainedModel,
    input_ids: torch.LongTensor,
    logits_processor: LogitsProcessorList,
    stopping_criteria,
    generation_config: GenerationConfig,
    synced_gpus: bool = False,
    streamer=None,
    assistant_model: PreTrainedModel | None = None,
    tokenizer=None,
    assistant_tokenizer=None,
    inputs_tensor: Any = None,
    **model_kwargs,
):
    """The generation mode of `speculative_config`: `generate()` calls it instead of `_sample`."""
    config: SpeculativeConfig = vars(generation_config)["speculative_config"]  # parsed: see check_call
    input_ids = cast(torch.LongTensor, input_ids.long())
    model_kwargs, offsets = with_virtual_tokens(model, input_ids, model_kwargs)
    is_more_than_ids = check_inputs(model, input_ids, generation_config, model_kwargs)
    if is_more_than_ids and offsets is not None:
        raise UnsupportedModel(
            "PEFT's virtual tokens work before prompts of text only: call generate() without speculative_config."
        )
    adapters = _of_rows(vars(generation_config)["adapter_names"], input_ids, is_more_than_ids)
    with_encoder = is_encoder_decoder(model)
    seed = config.seed
    if seed is None:
        seed = int(torch.randint(2**62, ()).item()) if generation_config.do_sample else 0
    with contextlib.ExitStack() as stack:
        ranks, mask = ranks_of(model), model_kwargs.get("decoder_attention_mask" if with_encoder else "attention_mask")
        if ranks is not None:
            seed = stack.enter_context(agreed_call(ranks, seed, config, generation_config, input_ids, mask))
        # A decoder runs one batch at a time, and switches the models' attention while it runs.
        for used in sorted({model, assistant_model} - {None}, key=id):
            stack.enter_context(_kept(used).lock)
        decoder = get_decoder(model, config, DrafterContext(assistant_model, tokenizer, assistant_tokenizer))
        wants_weights = bool(generation_config.return_dict_in_generate and generation_config.output_attentions)
        if wants_weights:
            cache: Any = None if with_encoder else model_kwargs.get(CACHE)
            has_read = offsets is not None or (cache is not None and num_cached(cache) > 0)
            check_attention_weights(decoder.target, is_more_than_ids or has_read or adapters is not None)
        result = decode(
            decoder,
            input_ids,
            mask,
            logits_processor,
            stopping_criteria,
            generation_config,
            seed,
            streamer=streamer,
            synced_gpus=synced_gpus,
            cache=None if with_encoder else model_kwargs.get(CACHE),
            prompt_inputs=model_kwargs if is_more_than_ids else None,
            offsets=offsets,
            sources=sources_of(model, inputs_tensor, model_kwargs, config.block_size) if with_encoder else None,
            adapters=adapters,
            predictions=predictions_of(config, input_ids.shape[0], tokenizer, decoder.target.vocab_size),
        )
        if torch.is_tensor(result):
            return result
        if with_encoder and generation_config.output_hidden_states:
            result["encoder_hidden_states"] = model_kwargs["encoder_outputs"].get("hidden_states")
        if wants_weights:
            for name, steps in attention_weights(decoder.target, input_ids, result["sequences"], model_kwargs).items():
                result[name] = steps
        return result


def _of_rows(names: list[str] | None, input_ids: torch.Tensor, is_more_than_ids: bool) -> list[str] | None:
    """PEFT's `adapter_names`, one for each row of the ids [B, S]; None: the active adapters compute all rows."""
    if names is not None and is_more_than_ids:
        raise UnsupportedModel("adapter_names is for prompts of text only: call generate() without speculative_config.")
    if names is not None and len(names) != input_ids.shape[0]:
        raise ValueError(f"adapter_names has {len(names)} names for {input_ids.shape[0]} rows: pass one for each row.")
    return names


MOST_DECODERS = 16  # per model


@dataclass(eq=False)
class _Entry:
    """A cached decoder, the configuration and structure it was made for, and weak references to the call's objects that it uses."""

    made_for: tuple[str, tuple]
    given: dict[str, Callable[[], Any] | None]
    decoder: SpeculativeDecoder

    def serves(self, context: DrafterContext) -> bool:
        """True if the call passes the very same objects. An object that was deleted matches nothing."""
        pairs = [(vars(context)[name], reference) for name, reference in self.given.items()]
        return all((thing is None) if of is None else (thing is not None and of() is thing) for thing, of in pairs)


class _Kept:
    """A model's decoders, kept between calls: a suffix tree remembers, a draft model stays loaded.

    They are stored on the model and freed with it. Copies and pickles of the model leave them out. Other objects of the caller
    (an assistant model, tokenizers) are held weakly; a decoder is freed with any of them.
    """

    def __init__(self) -> None:
        self.entries: list[_Entry] = []  # the most recently used last
        self.lock = threading.RLock()

    def find(self, made_for: tuple[str, tuple], context: DrafterContext) -> SpeculativeDecoder | None:
        """The decoder for a configuration, the model as it is now and the call's objects, or None."""
        for entry in list(self.entries):
            if entry.made_for == made_for and entry.serves(context):
                self.entries.remove(entry)
                self.entries.append(entry)
                return entry.decoder
        return None

    def keep(self, made_for: tuple[str, tuple], context: DrafterContext, decoder: SpeculativeDecoder) -> None:
        """Keep a new decoder until one of the objects it was built from is deleted."""
        entry = _Entry(made_for, {}, decoder)
        kept, made = weakref.ref(self), weakref.ref(entry)

        def gone(reference: Any) -> None:
            owner, dead = kept(), made()
            if owner is not None and dead in owner.entries:
                owner.entries.remove(dead)

        for name in context.used:
            thing = vars(context)[name]
            entry.given[name] = None if thing is None else held_weakly(thing, gone)
        hooks = hooks_in(made_for[1])  # decoders for others will not be found again
        living = [kept for kept in self.entries if hooks_in(kept.made_for[1]) <= hooks]
        others = [kept for kept in living if kept.made_for != made_for or not kept.serves(context)]
        self.entries = [*others, entry][-MOST_DECODERS:]

    def __deepcopy__(self, memo) -> _Kept:
        return _Kept()

    def __reduce__(self):
        return dict, ()  # so that a pickled model loads where this package is not installed


def _kept(model: PreTrainedModel) -> _Kept:
    with _lock:
        kept = vars(model).get("_hf_specdec")
        if not isinstance(kept, _Kept):
            kept = model.__dict__["_hf_specdec"] = _Kept()
            _models_in_use.add(model)
        return kept


def kept_decoders(model: PreTrainedModel) -> list[SpeculativeDecoder]:
    """The decoders kept for a model, least recently used first."""
    return [entry.decoder for entry in _kept(model).entries]


def release(model: PreTrainedModel | None = None) -> None:
    """Drop what is kept between calls (suffix trees, loaded drafters), for one model or for all. If `lookup_cache` is set, tables are
    first written to disk."""
    with _lock:
        for used in list(_models_in_use) if model is None else [model]:
            kept = vars(used).pop("_hf_specdec", None)
            for entry in kept.entries if isinstance(kept, _Kept) else []:
                save_tables(entry.decoder.generator)
            _models_in_use.discard(used)


def model_lock(model: PreTrainedModel) -> threading.RLock:
    """The lock to hold while a decoder runs on the model, because the model's attention is replaced meanwhile."""
    return _kept(model).lock


def make_decoder(
    model: PreTrainedModel, config: SpeculativeConfig, context: DrafterContext | None = None
) -> SpeculativeDecoder:
    """A new decoder, which is not kept between calls of `generate()`. It reads prompts as token ids only.

    Raises:
        UnsupportedModel: the model attends to prompts bidirectionally, so only `generate()` can read them, or needs another's encoder.
        SpeculativeConfigError: the configuration has a key that is for a call of `generate()`.
    """
    needs_encoder = family_of(model) is not None and not is_encoder_decoder(model)
    if has_bidirectional_prompts(model) or needs_encoder:
        why = "has prompts for another model's encoder" if needs_encoder else "attends to its prompts bidirectionally"
        raise UnsupportedModel(
            f"{type(model).__name__} {why}, so only its own generate() can read them: call generate(..., speculative_config=...) instead."
        )
    if config.trace:
        raise config.fail("trace", "is for generate() and `hf-specdec bench --trace`: leave it out here.")
    if config.prediction is not None:
        raise config.fail(
            "prediction", "is for generate(); each request of a server or LLM brings its own: leave it out here."
        )
    return _new_decoder(model, config, context or DrafterContext())


def _new_decoder(model: PreTrainedModel, config: SpeculativeConfig, context: DrafterContext) -> SpeculativeDecoder:
    """A new decoder. If its head learns, the decoder's configuration has the head's folder as its `model`."""
    if not getattr(config, "learn", False):
        decoder = decoder_of(generator_for(model, config, context))
        measure_costs(decoder)
        return decoder
    from .learning import Learner, begin_learning, located  # training's modules are loaded only where a head learns

    placed = located(config, model)
    assert placed.model is not None
    trainer = begin_learning(placed, model, begin=getattr(config, "model", None))
    generator = generator_for(model, placed, context)
    decoder = decoder_of(generator)
    assert isinstance(generator, HasHead)  # `located` has checked the method
    decoder.learn(Learner(trainer, generator.head_module, Path(placed.model), placed.learn_share))
    return decoder


def get_decoder(
    model: PreTrainedModel, config: SpeculativeConfig, context: DrafterContext | None = None
) -> SpeculativeDecoder:
    """The decoder for a model as it is now, a configuration and the context's objects that it uses. Built at the first call and kept
    (see `_Kept`); a model with other modules, hooks or adapters than before gets another one.

    Seed and verification are per call, so they do not need a new decoder. If the kept one is running (a callback called
    `generate()` again), the result is a new one that is not kept.
    """
    context = context or DrafterContext()
    per_decoder = {k: v for k, v in config.to_dict().items() if k not in PER_CALL_KEYS}
    key = json.dumps(per_decoder, sort_keys=True), structure_of(model)
    kept = _kept(model)
    known = decoder = kept.find(key, context)
    ranks = ranks_of(model)
    if ranks is not None and not ranks.least(int(known is not None)):
        known = decoder = None  # all ranks make one, or none does
    if decoder is not None and is_intervened(decoder.target):
        check(decoder.target)
    if decoder is None or decoder.statistics:
        decoder = _new_decoder(model, config, context)
        if known is None:
            kept.keep(key, context, decoder)
    decoder.configure(config)
    return decoder


def generator_for(model: PreTrainedModel, config: SpeculativeConfig, context: DrafterContext) -> CandidateGenerator:
    """A new drafter for a model; its `target` is the prepared model."""
    names = "prepack_weights", "cuda_graphs", "deterministic", "compile", "native", "recurrent_states", "kv_cache_dtype"
    options = {name: getattr(config, name) for name in names}
    target = prepare(model, ModelOptions(quantization=config.target_quantization, **options))
    generator = make_generator(config, target, context)
    if isinstance(config, CorpusConfig) and config.lookup_corpus is not None:
        config.load_corpora(corpora_of(generator), context.tokenizer)
    if target.family is not None and (generator.taps.last_hidden or generator.taps.layers):
        raise config.fail(
            "method",
            f"reads hidden states of decoder-only targets, and {type(model).__name__} has an encoder: use another method.",
        )
    return generator
