"""install()/uninstall(): `speculative_config=` on every `GenerationMixin.generate()`, as a registered generation mode."""

from __future__ import annotations

import copy
import functools
import json
import threading
import weakref
from typing import Any

import torch
import transformers.generation.utils as generation_utils
from transformers import GenerationConfig, PreTrainedModel
from transformers.generation import GenerationMixin
from transformers.generation.logits_process import LogitsProcessorList

from .candidate_generators import generator_class, parse_config
from .candidate_generators.base import DrafterContext
from .config import SpeculativeConfig
from .decoding import SpeculativeDecoder, decode
from .decoding.generate import left_padding
from .runtime import PackedModel
from .runtime.architectures import UnsupportedModel
from .runtime.sequence import stream_seeds

MODE = "specdec"
_METHOD = "_specdec_decoding"
_COMPATIBLE_MODES = ("greedy_search", "sample", "assisted_generation")
# What generate() prepares for the forward and the loop makes itself, or that means nothing for one row of ids.
_KNOWN_INPUTS = {"attention_mask", "position_ids", "past_key_values", "use_cache", "logits_to_keep", "cache_position"}

_original_mode: Any = None
# Decoders outlive the call that made them: a suffix tree remembers, a draft model stays loaded.
_decoders: weakref.WeakKeyDictionary[PreTrainedModel, dict[str, SpeculativeDecoder]] = weakref.WeakKeyDictionary()
_lock = threading.RLock()


def install() -> None:
    """Make `speculative_config=` an argument of every `generate()`. Idempotent; `import hf_specdec` calls it."""
    global _original_mode
    if _original_mode is not None:
        return
    _original_mode = GenerationConfig.get_generation_mode
    GenerationConfig.speculative_config = None  # a class attribute: accepted as argument, in configs, in request bodies
    GenerationConfig.get_generation_mode = _get_generation_mode
    setattr(GenerationMixin, _METHOD, _specdec_decoding)
    generation_utils.GENERATION_MODES_MAPPING[MODE] = _METHOD


def uninstall() -> None:
    """Restore transformers as it was, and drop every decoder."""
    global _original_mode
    if _original_mode is None:
        return
    GenerationConfig.get_generation_mode = _original_mode
    del GenerationConfig.speculative_config
    delattr(GenerationMixin, _METHOD)
    del generation_utils.GENERATION_MODES_MAPPING[MODE]
    _original_mode = None
    release()


def release(model: PreTrainedModel | None = None) -> None:
    """Forget what was kept between calls (suffix trees, loaded drafters) for one model, or for all."""
    with _lock:
        if model is None:
            _decoders.clear()
        else:
            _decoders.pop(model, None)


def generate(model: PreTrainedModel, *args, speculative_config: Any, **kwargs) -> Any:
    """`model.generate(...)` with speculation, whether or not the plugin is installed.

    Takes and returns what `generate()` does; see README for `speculative_config`.
    """
    if _original_mode is not None:
        return model.generate(*args, speculative_config=speculative_config, **kwargs)
    with _lock:
        install()
        try:
            return model.generate(*args, speculative_config=speculative_config, **kwargs)
        finally:
            _uninstall_keeping_decoders()


def _uninstall_keeping_decoders() -> None:
    kept = dict(_decoders)
    uninstall()
    _decoders.update(kept)


def _get_generation_mode(self: GenerationConfig, assistant_model: PreTrainedModel | None = None):
    mode = _original_mode(self, assistant_model)
    # A drafter in transformers' own loop gets a copy of our config, marked `is_assistant`.
    if self.speculative_config is None or getattr(self, "is_assistant", False):
        return mode
    if mode not in _COMPATIBLE_MODES:
        raise ValueError(
            f"speculative_config cannot be combined with {str(getattr(mode, 'value', mode)).replace('_', ' ')}: it decodes greedily "
            "or by sampling (num_beams=1, no constraints, no penalty_alpha)."
        )
    for key in ("prompt_lookup_num_tokens", "use_mtp", "assistant_early_exit", "dola_layers", "speculation_type"):
        if getattr(self, key, None):
            raise ValueError(f"speculative_config and {key} are two ways to decode: pass one of them.")
    if getattr(self, "cache_implementation", None) is not None:
        raise ValueError(
            f"speculative_config brings its own paged KV cache: drop cache_implementation={self.cache_implementation!r}."
        )
    return MODE


def _specdec_decoding(
    self: PreTrainedModel,
    input_ids: torch.LongTensor,
    logits_processor: LogitsProcessorList,
    stopping_criteria,
    generation_config: GenerationConfig,
    synced_gpus: bool = False,
    streamer=None,
    assistant_model: PreTrainedModel | None = None,
    tokenizer=None,
    assistant_tokenizer=None,
    inputs_tensor: torch.Tensor | None = None,
    **model_kwargs,
):
    """The generation mode behind `speculative_config`: called by `generate()` in place of `_sample`."""
    config = parse_config(generation_config.speculative_config)
    _refuse_unsupported(self, generation_config, model_kwargs)
    mask = model_kwargs.get("attention_mask")
    padding = left_padding(input_ids, mask)
    seed = config.seed if config.seed is not None else int(torch.randint(2**62, ()).item()) if generation_config.do_sample else 0
    prompts = [row[pads:] for row, pads in zip(input_ids.tolist(), padding, strict=True)]
    with _lock:  # a decoder runs one batch at a time, and a model's attention is switched while it runs
        decoder = get_decoder(self, config, DrafterContext(assistant_model, tokenizer, assistant_tokenizer))
        return decode(
            decoder,
            input_ids,
            mask,
            logits_processor,
            stopping_criteria,
            generation_config,
            seeds=stream_seeds(seed, prompts),
            streamer=streamer,
            synced_gpus=synced_gpus,
            past_key_values=model_kwargs.get("past_key_values"),
        )


def get_decoder(
    model: PreTrainedModel, config: SpeculativeConfig, context: DrafterContext | None = None
) -> SpeculativeDecoder:
    """The decoder of a model and configuration, made at the first call and kept as long as the model lives.

    Sampling seed and verification are per call, so they do not make a new one.
    """
    context = context or DrafterContext()
    per_decoder = {k: v for k, v in config.to_dict().items() if k not in ("seed", "rejection_sample_method")}
    key = json.dumps([per_decoder, *(id(part) for part in vars(context).values() if part is not None)], sort_keys=True)
    with _lock:
        kept = _decoders.setdefault(model, {})
        if key not in kept:
            target = PackedModel(model, prepack_weights=config.prepack_weights)
            kept[key] = SpeculativeDecoder(target, generator_class(config.method)(config, target, context), config)
            kept[key].context = context  # keeps the ids in the key alive
        decoder = kept[key]
        decoder.config = decoder.generator.config = config
        decoder.rule = config.rejection_sample_method or "coupled"
        return decoder


def _refuse_unsupported(model: PreTrainedModel, generation_config: GenerationConfig, model_kwargs: dict) -> None:
    unknown = sorted(k for k, v in model_kwargs.items() if v is not None and k not in _KNOWN_INPUTS)
    if unknown:
        raise UnsupportedModel(
            f"speculative_config decodes from token ids; these inputs of generate() are not supported with it: {', '.join(unknown)}."
        )
    if generation_config.return_dict_in_generate and generation_config.output_attentions:
        raise ValueError("speculative_config cannot return attention weights (paged attention never forms them): drop output_attentions.")
    prepare = vars(model).get("prepare_inputs_for_generation")
    peft_config = getattr(getattr(prepare, "__self__", None), "active_peft_config", None)
    if peft_config is not None and getattr(peft_config, "is_prompt_learning", False):
        raise UnsupportedModel(
            f"PEFT's {peft_config.peft_type.value} adds virtual tokens outside the prompt, which speculative_config does not support; "
            "LoRA and other weight adapters work."
        )
