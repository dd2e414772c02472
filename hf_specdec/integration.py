"""install()/uninstall(): `speculative_config=` on every `GenerationMixin.generate()`, as a registered generation mode."""

from __future__ import annotations

import contextlib
import functools
import json
import threading
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import transformers.generation.utils as generation_utils
from transformers import GenerationConfig, PreTrainedModel
from transformers.generation import GenerationMixin
from transformers.generation.continuous_batching import ContinuousMixin
from transformers.generation.logits_process import LogitsProcessorList

from .candidate_generators import CandidateGenerator, make_generator, parse_config
from .candidate_generators.base import DrafterContext, held_weakly
from .config import PER_CALL_KEYS, SpeculativeConfig
from .core.errors import UnsupportedModel
from .decoding import SpeculativeDecoder, decode
from .model.architectures import reads_prompts_both_ways
from .model.prepare import ModelOptions, prepare
from .refusals import check_inputs, check_mode, check_model

MODE = "specdec"
_METHOD = "_specdec_decoding"

_lock = threading.RLock()
_originals: dict[str, Any] = {}  # transformers' own functions, while ours replace them
_installed = False
_explicit_calls = 0  # running calls of our generate(), which need the plugin until they return
_models_in_use: weakref.WeakSet[PreTrainedModel] = weakref.WeakSet()


def install() -> None:
    """Make `speculative_config=` an argument of every `generate()`. Idempotent; `import hf_specdec` calls it."""
    global _installed
    with _lock:
        _installed = True
        _patch()


def uninstall() -> None:
    """Restore transformers' own functions and drop all decoders."""
    global _installed
    with _lock:
        _installed = False
        if not _explicit_calls:
            _unpatch()
    release()


def _patch() -> None:
    if _originals:
        return
    _originals["mode"] = GenerationConfig.get_generation_mode
    _originals["validate"] = GenerationMixin._validate_generation_mode
    GenerationConfig.speculative_config = _CarriedConfig()  # accepted as argument, in configs, in request bodies
    GenerationConfig.get_generation_mode = _get_generation_mode
    GenerationMixin._validate_generation_mode = _validate_generation_mode
    GenerationMixin.generate_batch = _generate_batch
    setattr(GenerationMixin, _METHOD, _specdec_decoding)
    generation_utils.GENERATION_MODES_MAPPING[MODE] = _METHOD


def _unpatch() -> None:
    if not _originals:
        return
    GenerationConfig.get_generation_mode = _originals.pop("mode")
    GenerationMixin._validate_generation_mode = _originals.pop("validate")
    del GenerationConfig.speculative_config, GenerationMixin.generate_batch
    delattr(GenerationMixin, _METHOD)
    del generation_utils.GENERATION_MODES_MAPPING[MODE]


@contextlib.contextmanager
def _patched():
    """Patched while inside. On exit unpatched again, unless the plugin was installed."""
    global _explicit_calls
    with _lock:
        _explicit_calls += 1
        _patch()
    try:
        yield
    finally:
        with _lock:
            _explicit_calls -= 1
            if not _installed and not _explicit_calls:
                _unpatch()


def generate(model: PreTrainedModel, *args, speculative_config: Any, **kwargs) -> Any:
    """`model.generate(...)` with speculation, whether or not the plugin is installed.

    Takes and returns what `generate()` does; docs/usage.md explains `speculative_config`.
    """
    own = getattr(
        type(model), "generate", None
    )  # the instance may carry a repository's custom_generate, which calls this function
    call = model.generate if own is None else functools.partial(own, model)
    with _patched():
        return call(*args, speculative_config=speculative_config, **kwargs)


class _CarriedConfig:
    """`GenerationConfig.speculative_config`, None unless set."""

    def __get__(self, generation_config: GenerationConfig | None, owner: type | None = None) -> Any:
        return None if generation_config is None else vars(generation_config).get("speculative_config")

    def __set__(self, generation_config: GenerationConfig, value: Any) -> None:
        vars(generation_config)["speculative_config"] = value
        if value is not None:
            # Otherwise a config derived from the model's would be derived again when it is loaded, and lose this key.
            generation_config._from_model_config = False


# ---- the generation mode --------------------------------------------------------------------------------------------


class _Mode(str):
    """MODE, with the call's parsed configuration: `generate()` hands the mode on to `_validate_generation_mode`."""

    config: SpeculativeConfig

    def __new__(cls, config: SpeculativeConfig) -> _Mode:
        mode = super().__new__(cls, MODE)
        mode.config = config
        return mode


def _get_generation_mode(self: GenerationConfig, assistant_model: PreTrainedModel | None = None):
    mode = _originals["mode"](self, assistant_model)
    # transformers gives an assistant model a copy of this config, marked `is_assistant`.
    if self.speculative_config is None or getattr(self, "is_assistant", False):
        return mode
    config = parse_config(self.speculative_config)
    check_mode(self, mode)
    return _Mode(config)


def _validate_generation_mode(self, generation_mode, generation_config, generation_mode_kwargs):
    if generation_mode != MODE:
        return _originals["validate"](self, generation_mode, generation_config, generation_mode_kwargs)
    config = generation_mode.config
    generation_config.speculative_config = config  # of the call's own copy; `_specdec_decoding` reads it there
    return check_model(self, config, generation_config, generation_mode_kwargs.get("assistant_model"))


@functools.wraps(ContinuousMixin.generate_batch)
def _generate_batch(self, inputs, generation_config=None, *args, **kwargs):
    carried = (generation_config or self.generation_config).speculative_config
    if kwargs.get("speculative_config", carried) is not None:
        raise ValueError(
            "speculative_config cannot be combined with transformers' continuous batching (generate_batch, "
            "cache_implementation='paged'): pass the batch to generate()."
        )
    return ContinuousMixin.generate_batch(self, inputs, generation_config, *args, **kwargs)


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
    """The generation mode of `speculative_config`: `generate()` calls it instead of `_sample`."""
    config: SpeculativeConfig = generation_config.speculative_config  # parsed: see _validate_generation_mode
    input_ids = input_ids.long()
    is_more_than_ids = check_inputs(self, input_ids, generation_config, model_kwargs)
    seed = config.seed
    if seed is None:
        seed = int(torch.randint(2**62, ()).item()) if generation_config.do_sample else 0
    with contextlib.ExitStack() as stack:
        # A decoder runs one batch at a time, and switches the models' attention while it runs.
        for model in sorted({self, assistant_model} - {None}, key=id):
            stack.enter_context(_kept(model).lock)
        decoder = get_decoder(self, config, DrafterContext(assistant_model, tokenizer, assistant_tokenizer))
        return decode(
            decoder,
            input_ids,
            model_kwargs.get("attention_mask"),
            logits_processor,
            stopping_criteria,
            generation_config,
            seed,
            streamer=streamer,
            synced_gpus=synced_gpus,
            past_key_values=model_kwargs.get("past_key_values"),
            prompt_inputs=model_kwargs if is_more_than_ids else None,
        )


# ---- what is kept between calls -------------------------------------------------------------------------------------


MOST_DECODERS = 16  # per model


@dataclass(eq=False)
class _Entry:
    """A cached decoder, with the configuration it serves and weak references to the call's objects that it uses (None: none)."""

    config: str
    given: dict[str, Callable[[], Any] | None]
    decoder: SpeculativeDecoder

    def serves(self, context: DrafterContext) -> bool:
        """True if the call passes the very same objects. An object that was deleted matches nothing."""
        for name, reference in self.given.items():
            thing = context.given[name]
            if (reference is None) != (thing is None) or (reference is not None and reference() is not thing):
                return False
        return True


class _Kept:
    """A model's decoders, kept between calls: a suffix tree remembers, a draft model stays loaded.

    They are stored on the model and freed with it. Copies and pickles of the model leave them out. Other objects of the caller
    (an assistant model, tokenizers) are held weakly; a decoder is freed with any of them. At most MOST_DECODERS are kept, the
    most recently used ones.
    """

    def __init__(self) -> None:
        self.entries: list[_Entry] = []  # the most recently used last
        self.lock = threading.RLock()

    def find(self, config: str, context: DrafterContext) -> SpeculativeDecoder | None:
        """The decoder for a configuration and the call's objects, or None."""
        for entry in list(self.entries):
            if entry.config == config and entry.serves(context):
                self.entries.remove(entry)
                self.entries.append(entry)
                return entry.decoder
        return None

    def keep(self, config: str, context: DrafterContext, decoder: SpeculativeDecoder) -> None:
        """Keep a new decoder until one of the objects it was built from is deleted."""
        entry = _Entry(config, {}, decoder)
        kept, made = weakref.ref(self), weakref.ref(entry)

        def gone(reference: Any) -> None:
            owner, dead = kept(), made()
            if owner is not None and dead in owner.entries:
                owner.entries.remove(dead)

        for name in context.used:
            thing = context.given[name]
            entry.given[name] = None if thing is None else held_weakly(thing, gone)
        self.entries.append(entry)
        del self.entries[:-MOST_DECODERS]

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
    """Drop what is kept between calls (suffix trees, loaded drafters), for one model or for all."""
    with _lock:
        for each in list(_models_in_use) if model is None else [model]:
            vars(each).pop("_hf_specdec", None)
            _models_in_use.discard(each)


def model_lock(model: PreTrainedModel) -> threading.RLock:
    """Held by whoever runs a decoder on the model: its attention is switched then."""
    return _kept(model).lock


def make_decoder(
    model: PreTrainedModel, config: SpeculativeConfig, context: DrafterContext | None = None
) -> SpeculativeDecoder:
    """A decoder of its own, which is not kept between calls of `generate()`. Its sequences read their prompts as ids.

    Raises:
        UnsupportedModel: the model's prompts are more than ids, even if they are text.
    """
    if reads_prompts_both_ways(model):
        raise UnsupportedModel(
            f"{type(model).__name__} attends to its prompts both ways, so that only its own generate() can read them, which takes "
            "speculative_config."
        )
    generator = generator_for(model, config, context or DrafterContext())
    return SpeculativeDecoder(generator.target, generator, config)


def get_decoder(
    model: PreTrainedModel, config: SpeculativeConfig, context: DrafterContext | None = None
) -> SpeculativeDecoder:
    """The decoder for a model, a configuration and the context's objects that it uses. Built at the first call and kept (see
    `_Kept`).

    Seed and verification are per call, so they do not need a new decoder. If the kept one is running (a callback called
    `generate()` again), the result is a new one that is not kept.
    """
    context = context or DrafterContext()
    per_decoder = {k: v for k, v in config.to_dict().items() if k not in PER_CALL_KEYS}
    key = json.dumps(per_decoder, sort_keys=True)
    kept = _kept(model)
    found = decoder = kept.find(key, context)
    if decoder is None or decoder.statistics:
        generator = generator_for(model, config, context)
        decoder = SpeculativeDecoder(generator.target, generator, config)
        if found is None:
            kept.keep(key, context, decoder)
    decoder.config = decoder.generator.config = decoder.generator.with_checkpoint_defaults(config)
    return decoder


def generator_for(model: PreTrainedModel, config: SpeculativeConfig, context: DrafterContext) -> CandidateGenerator:
    """A new drafter for a model, and its prepared target."""
    options = ModelOptions(
        prepack_weights=config.prepack_weights,
        cuda_graphs=config.cuda_graphs,
        deterministic=config.deterministic,
        quantization=config.target_quantization,
        compile=config.compile,
        native=config.native,
        recurrent_states=config.recurrent_states,
    )
    target = prepare(model, options)
    return make_generator(config, target, context)
