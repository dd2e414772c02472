"""Checks of a `generate()` call: requests that speculative decoding cannot serve raise one clear error before any work."""

from __future__ import annotations

import functools
from typing import Any

import torch
import transformers
from packaging.version import Version
from transformers import GenerationConfig, PreTrainedModel, SynthIDTextWatermarkingConfig
from transformers.cache_utils import DynamicCache
from transformers.generation.utils import MULTIMODAL_INPUTS_TO_DROP_OUTSIDE_PREFILL, GenerationMixin

from .config import SpeculativeConfig, SpeculativeConfigError
from .core.errors import UnsupportedModel
from .core.names import CACHE, NEWEST_TRANSFORMERS
from .decoding.prompts import text_length
from .model.adapters import check_mixed, is_disabled
from .model.architectures import all_modules, check_autocast, check_supported, has_bidirectional_prompts, is_multimodal
from .model.encoder_decoder import is_encoder_decoder
from .model.recurrent.families import num_cached

_COMPATIBLE_MODES = ("greedy_search", "sample", "assisted_generation")
_OTHER_SPECULATION = (
    "prompt_lookup_num_tokens", "use_mtp", "assistant_early_exit", "dola_layers", "speculation_type", "assistant_ensemble_weight",
)  # fmt: skip
# Inputs that generate() prepares and our loop makes itself, and flags that only choose which tensors to return.
_KNOWN_INPUTS = {
    "attention_mask", "position_ids", CACHE, "use_cache", "logits_to_keep", "output_hidden_states", "output_attentions",
    "inputs_embeds",
}  # fmt: skip
# Caches that store the same numbers as ours in another layout.
_SAME_TEXT_CACHES = ("static", "hybrid", "hybrid_chunked", "sliding_window")
_PREPARE = "prepare_inputs_for_generation"
_TOKEN_TYPES = {"token_type_ids", "mm_token_type_ids"}
# Inputs of multimodal models that say where an image's patches and tokens are, or audio's frames: this matters in the prompt only.
_FOR_POSITIONS = {
    "image_grid_thw", "video_grid_thw", "second_per_grid_ts", "image_position_ids", "video_position_ids", "feature_attention_mask",
    "aspect_ratio_ids", "aspect_ratio_mask", "cross_attention_mask",
}  # fmt: skip
# Substrings in the names of inputs other than text.
_OTHER_THAN_TEXT = ("pixel", "image", "video", "audio", "input_features")


def check_mode(generation_config: GenerationConfig, mode: Any) -> None:
    """Raise ValueError if the configuration asks for another way to decode."""
    if mode not in _COMPATIBLE_MODES:
        name = str(getattr(mode, "value", mode)).replace("_", " ")
        raise ValueError(
            f"speculative_config cannot be combined with {name}: it decodes greedily or by sampling (num_beams=1, no "
            "constraints, no penalty_alpha, no dola_layers)."
        )
    for key in _OTHER_SPECULATION:
        if getattr(generation_config, key, None):
            raise ValueError(f"speculative_config and {key} are two ways to decode: pass one of them.")


def check_model(
    model: PreTrainedModel,
    config: SpeculativeConfig,
    generation_config: GenerationConfig,
    assistant_model: PreTrainedModel | None,
) -> None:
    """Raise ValueError if this model, or the outputs asked of it, cannot be served. Called before any input is checked."""
    check_supported(model)
    if getattr(model, "_supported_generation_modes", None) is not None:
        raise UnsupportedModel(
            f"{type(model).__name__} decodes in its own way, which speculative_config would replace."
        )
    if config.rejection_sample_method == "greedy" and generation_config.do_sample:
        raise config.fail(
            "rejection_sample_method",
            "is 'greedy', but generate() was asked to sample: pass do_sample=False, or verify by 'coupled' or 'rejection'.",
        )
    if assistant_model is not None and not config.uses_assistant_model:
        raise SpeculativeConfigError(
            f"assistant_model is not used by method {config.method!r}: drop it, or use {{'method': 'draft_model'}}."
        )
    _settle_cache_implementation(model, generation_config)
    _check_processors(generation_config)
    check_autocast(model)
    wants_more = generation_config.output_attentions or generation_config.output_hidden_states
    if wants_more and generation_config.return_dict_in_generate and generation_config.use_cache is False:
        raise ValueError(
            "use_cache=False makes generate() return hidden states and attention weights of the whole text at every step, and "
            "speculative_config those of new tokens: leave use_cache out."
        )
    kind: Any = type(model)
    if kind._sample is not vars(GenerationMixin)["_sample"] or "_sample" in vars(model):
        raise UnsupportedModel(
            f"{kind.__name__} overrides _sample, the decoding loop that speculative_config replaces. Call generate() without it."
        )


def adapter_names(model: PreTrainedModel) -> list[str] | None:
    """The rows' adapters, of which PEFT tells its layers by hooks. Our forwards need no hooks, and PEFT leaves them on the model after an
    error, so they are removed. Raises UnsupportedModel: rows of these adapters cannot share a forward."""
    given: dict[str, Any] = {}
    for module in all_modules(model):
        for number, hook in list(module._forward_pre_hooks.items()):
            if isinstance(hook, functools.partial) and str(hook.func.__module__).startswith("peft."):
                given |= hook.keywords
                del module._forward_pre_hooks[number]
                module._forward_pre_hooks_with_kwargs.pop(number, None)
    if "alora_offsets" in given:
        raise UnsupportedModel(
            "an activated LoRA (aLoRA) begins inside a row, which PEFT computes by the row's place in the batch; speculative_config packs "
            "all rows into one. Call generate() with an ordinary LoRA, or without speculative_config."
        )
    names = given.get("adapter_names")
    if names is None or is_disabled(model):
        return None
    check_mixed(model, set(names))
    return list(names)


def _check_prepared_inputs(model: PreTrainedModel, input_ids: torch.Tensor, model_kwargs: dict) -> None:
    """Raise UnsupportedModel if a `prepare_inputs_for_generation` from outside transformers changes what the model reads of [B, S]."""
    kind: Any = type(model)
    prepare = getattr(model, _PREPARE)
    if prepare.__module__.startswith("peft."):  # it calls the class's
        prepare = functools.partial(kind.prepare_inputs_for_generation, model)
    origin = getattr(prepare, "func", prepare).__module__
    if origin.startswith("transformers."):
        return
    mask = model_kwargs.get("attention_mask")
    mask = torch.ones_like(input_ids) if mask is None else mask
    given = {name: value for name, value in model_kwargs.items() if name != "attention_mask"}
    for more in (0, 1):
        ids, seen = (torch.cat([tensor, tensor[:, tensor.shape[1] - more :]], dim=1) for tensor in (input_ids, mask))
        positions = given.get("position_ids")
        if more and positions is not None:
            given["position_ids"] = torch.cat([positions, positions[..., -1:] + 1], dim=-1)
        inputs = prepare(ids, attention_mask=seen, **{**given, "is_first_iteration": not more})
        fed = {"input_ids": ids, "attention_mask": seen}
        changed = [name for name, whole in fed.items() if not _is_end_of(inputs.get(name), whole)]
        if not _counts_positions(ids, seen.shape[1], seen, inputs.get("position_ids")):
            changed.append("position_ids")
        known = _KNOWN_INPUTS - {"inputs_embeds"} | model_kwargs.keys() | {"input_ids", "cache_position"}
        changed += [name for name, value in inputs.items() if name not in known and not _is_neutral(model, name, value)]
        if changed:
            raise UnsupportedModel(
                f"prepare_inputs_for_generation of {type(model).__name__} ({origin}) changes {', '.join(changed)}; speculative_config "
                "decodes from the token ids as they are. Call generate() without it."
            )


def _is_end_of(tensor: torch.Tensor | None, whole: torch.Tensor) -> bool:
    """True if a tensor [B, n] has the last n columns of `whole` [B, S]. None and masks of more dimensions stand for the whole."""
    if tensor is None or tensor.dim() != 2:
        return True
    start = whole.shape[1] - tensor.shape[1]
    return 0 <= start < whole.shape[1] and torch.equal(tensor, whole[:, start:].to(tensor))


def _settle_cache_implementation(model: PreTrainedModel, generation_config: GenerationConfig) -> None:
    """Remove `cache_implementation` from this call where our cache gives the same text, else raise ValueError."""
    implementation = getattr(generation_config, "cache_implementation", None)
    if implementation is None:
        return
    from_model = getattr(model.generation_config, "cache_implementation", None) == implementation
    if implementation == "dynamic" or (from_model and implementation in _SAME_TEXT_CACHES):
        generation_config.cache_implementation = None
        return
    if from_model:
        raise ValueError(
            f"The model's generation_config has cache_implementation={implementation!r}, but speculative_config uses its own "
            "paged KV cache: pass cache_implementation='dynamic', or set model.generation_config.cache_implementation = None."
        )
    raise ValueError(f"speculative_config uses its own paged KV cache: drop cache_implementation={implementation!r}.")


def _check_processors(generation_config: GenerationConfig) -> None:
    """Raise ValueError for arguments whose logits processors keep state, which rejected drafts would corrupt."""
    guidance = getattr(generation_config, "guidance_scale", None)
    if guidance not in (None, 1):
        raise ValueError(
            f"guidance_scale={guidance} (an argument of generate() or a field of its generation_config) decodes a second text "
            "for each row, token by token, which speculative_config cannot do: leave out one of the two."
        )
    if isinstance(getattr(generation_config, "watermarking_config", None), SynthIDTextWatermarkingConfig):
        raise ValueError(
            "watermarking_config (an argument of generate() or a field of its generation_config) asks for SynthID watermarks, "
            "which are made token by token and cannot follow drafts: leave out one of the two. WatermarkingConfig works."
        )


def check_inputs(
    model: PreTrainedModel, input_ids: torch.Tensor, generation_config: GenerationConfig, model_kwargs: dict
) -> bool:
    """Raise ValueError for inputs [B, S] that cannot be served. `model_kwargs`: what `generate()` prepared for the model's forward.

    Returns: True if the prompt is more than token ids at consecutive positions (images, embeddings), so that the model must read
        it itself (`model.prompt`).
    """
    if is_encoder_decoder(model):
        given = {k for k, v in model_kwargs.items() if k.startswith("decoder_") and v is not None}
        _check_known(model, sorted(given - {"decoder_attention_mask"}))
        _check_prepared_inputs(model, input_ids, model_kwargs)
        _cached_length(model_kwargs.get(CACHE), input_ids.shape[0], input_ids.shape[1])
        return False
    given = {k for k, v in model_kwargs.items() if k not in _KNOWN_INPUTS and not _is_neutral(model, k, v)}
    in_prompt = {k for k in given if k in MULTIMODAL_INPUTS_TO_DROP_OUTSIDE_PREFILL}
    if is_multimodal(model):
        in_prompt |= given & (_TOKEN_TYPES | _FOR_POSITIONS)
    _check_known(model, sorted(given - in_prompt))
    _check_prepared_inputs(model, input_ids, model_kwargs)
    embeds = model_kwargs.get("inputs_embeds")
    embedded = embeds is not None and not _are_of_ids(model, input_ids, embeds, model_kwargs.get("attention_mask"))
    mask, cache = model_kwargs.get("attention_mask"), model_kwargs.get(CACHE)
    length = text_length(input_ids, mask, generation_config)
    cached = _cached_length(cache, input_ids.shape[0], length)
    allowed = {0, length} if embedded else {length, length - cached}
    if (embeds is not None and embeds.shape[1] != length) or input_ids.shape[1] not in allowed:
        given_too = "" if embeds is None else f"inputs_embeds has {embeds.shape[1]} and "
        raise ValueError(
            f"attention_mask covers {length} tokens and {given_too}input_ids has {input_ids.shape[1]}: they must have the "
            f"same length, or the mask must be longer by the length of {CACHE}, which is {cached} tokens."
        )
    counted = _counts_positions(input_ids, length, mask, model_kwargs.get("position_ids"))
    if not counted and not is_multimodal(model):
        raise ValueError(
            "speculative_config counts positions from the first unmasked token; other position_ids are not supported."
        )
    more_than_ids = bool(in_prompt) or embedded or not counted or has_bidirectional_prompts(model)
    _check_continuation(model, input_ids, cached, length, more_than_ids)
    return more_than_ids


def _check_known(model: PreTrainedModel, unknown: list[str]) -> None:
    """Raise UnsupportedModel if there are inputs that no part of this library makes or passes on."""
    name = type(model).__name__
    if any("cross_attention" in key for key in unknown):
        raise UnsupportedModel(
            f"{name} gets the states of images or their mask in {', '.join(unknown)}: speculative_config needs pixel_values, and the class "
            "with the vision tower. Otherwise call generate() without it."
        )
    if any(part in key for key in unknown for part in _OTHER_THAN_TEXT):
        raise UnsupportedModel(
            f"{name} reads images, video or audio from inputs that are needed after the prompt too ({', '.join(unknown)}); "
            "speculative_config decodes from token ids after the prompt. Call generate() without it."
        )
    if unknown:
        raise UnsupportedModel(
            f"speculative_config decodes from token ids; these inputs of generate() are not supported with it: {', '.join(unknown)}."
            + _newer_transformers()
        )


def _newer_transformers() -> str:
    """A sentence to append if this transformers is newer than the newest tested, so that it may have inputs unknown here; else ''."""
    if Version(transformers.__version__).release[:2] <= NEWEST_TRANSFORMERS:
        return ""
    tested = ".".join(map(str, NEWEST_TRANSFORMERS))
    return f" transformers {transformers.__version__} is newer than {tested}, the newest tested: update hf-specdec, or install that one."


def _are_of_ids(
    model: PreTrainedModel, input_ids: torch.Tensor, embeds: torch.Tensor, mask: torch.Tensor | None
) -> bool:
    """Whether embeddings [B, S, H], which transformers reads instead of the ids, are the ids' own."""
    if input_ids.shape[1] != embeds.shape[1]:
        return False
    computed = model.get_input_embeddings()(input_ids.to(embeds.device)).to(embeds.device)
    real = (torch.ones_like(input_ids) if mask is None else mask).to(embeds.device) != 0
    return computed.shape == embeds.shape and torch.equal(computed[real], embeds[real])


def _is_neutral(model: PreTrainedModel, name: str, value: Any) -> bool:
    """True if an input changes nothing. For models that see images, generate() adds empty ones to every text prompt.

    Token types of zeros mean "text" to such a model, and BERT's relatives take zeros if none are given. Other models (GPT-2) add an
    embedding for them, even for zeros.
    """
    if isinstance(value, dict):
        return all(part is None for part in value.values())
    if not isinstance(value, torch.Tensor):
        return value is None or (isinstance(value, (list, tuple)) and not value)
    if value.numel() == 0:
        return True
    takes_zeros = is_multimodal(model) or any(key.endswith("token_type_embeddings") for key, _ in model.named_modules())
    return name in _TOKEN_TYPES and takes_zeros and not bool(value.any())


def _counts_positions(input_ids: torch.Tensor, length: int, mask: torch.Tensor | None, positions) -> bool:
    """Whether every axis of `position_ids` counts the unmasked tokens of a row."""
    if positions is None:
        return True
    mask = input_ids.new_ones(input_ids.shape[0], length) if mask is None else mask
    counted = mask.cumsum(-1) - 1
    width = min(positions.shape[-1], length)
    differ = (positions[..., -width:].to(mask.device) != counted[:, -width:]) & (mask[:, -width:] != 0)
    return not bool(differ.any())


def _check_continuation(
    model: PreTrainedModel, input_ids: torch.Tensor, cached: int, length: int, more_than_ids: bool
) -> None:
    """Raise ValueError if the cache holds the whole of a prompt that may end in an image: the last token would be read again."""
    if cached < length or input_ids.shape[1] == 0:
        return
    names = ("image_token_id", "video_token_id", "audio_token_id")
    placeholders = [token for token in (getattr(model.config, name, None) for name in names) if isinstance(token, int)]
    last = input_ids[:, -1]
    if more_than_ids or bool(torch.isin(last, torch.tensor(placeholders, device=last.device)).any()):
        raise ValueError(
            f"{CACHE} holds all {length} tokens of a prompt that is more than token ids, so there are no logits to continue from: "
            "crop the cache by one token of text, or leave it out."
        )


def _cached_length(cache: Any, num_rows: int, text_length: int) -> int:
    """How many tokens the caller's cache holds; 0 without one. Raises ValueError: it cannot be continued from."""
    if not getattr(cache, "_is_user_defined", False):
        return 0
    if type(cache) is not DynamicCache or getattr(cache, "offloading", False):
        what = "an offloaded DynamicCache" if type(cache) is DynamicCache else f"a {type(cache).__name__}"
        raise ValueError(
            f"speculative_config uses its own paged KV cache; {CACHE} can be a DynamicCache to continue from and to "
            f"fill, not {what}. Call generate() without {CACHE}."
        )
    length = num_cached(cache)
    if length == 0:
        return 0
    if any(getattr(layer, "is_sliding", False) for layer in cache.layers):
        raise ValueError(
            f"{CACHE} has sliding-window layers, which no longer hold the whole text, so speculative_config cannot "
            f"continue from it. Pass the whole text without {CACHE}."
        )
    keys = (getattr(layer, "keys", None) for layer in cache.layers)
    batch = next(states for states in keys if states is not None).shape[0]
    if batch != num_rows or length > text_length:
        raise ValueError(
            f"{CACHE} holds {length} tokens of {batch} sequences, which cannot be the beginning of {num_rows} "
            f"sequences of {text_length} tokens. Pass the whole text as input_ids, or only the tokens after the cached ones, "
            "with the attention_mask of the whole text."
        )
    return length
