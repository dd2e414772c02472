"""What differs between model families: which can be served and how, where their layers are, what must be adapted."""

from __future__ import annotations

import contextlib
import weakref
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from transformers import PreTrainedModel

from ..core.errors import UnsupportedModel

if TYPE_CHECKING:
    from ..core.output import Taps
    from .packed_batch import PackedBatch

_ATTENTION_LAYER_TYPES = {"full_attention", "sliding_attention"}
# Their layers do not hand arguments of the forward on to the attention function.
_DROPS_ARGUMENTS = {"stablelm", "nemotron"}
# Their attention derives positions or masks from where a key stands in memory, which packing rows breaks.
_POSITION_BY_SLOT = {"mpt", "gpt_neo", "xglm", "ctrl", "codegen", "doge"}
# Their own cache slides although their masks do not, so plain generate() depends on how the text was fed.
_WINDOWED_BY_CACHE = {"moshi", "kyutai_speech_to_text"}


def check_supported(model: PreTrainedModel) -> None:
    """Raise UnsupportedModel for models whose outputs would not be exact here."""
    name, config = type(model).__name__, model.config
    text = config.get_text_config(decoder=True)
    if getattr(config, "is_encoder_decoder", False):
        raise UnsupportedModel(
            f"{name} is an encoder-decoder model; speculative_config works with decoder-only models."
        )
    if model.get_output_embeddings() is None:
        raise UnsupportedModel(f"{name} has no language-model head.")
    kinds = set(getattr(text, "layer_types", None) or []) - _ATTENTION_LAYER_TYPES
    masks = {kind for kind in kinds if kind.endswith("attention") and kind != "linear_attention"}
    if getattr(model, "_is_stateful", False) or kinds - masks:
        what = f"{', '.join(sorted(kinds - masks))} layers" if kinds - masks else "a recurrent state"
        raise UnsupportedModel(
            f"{name} has {what}, which cannot be rolled back after a rejected draft. Call generate() without speculative_config."
        )
    if masks:
        raise UnsupportedModel(
            f"{name} has {', '.join(sorted(masks))} layers, whose masks are not made for packed rows and draft trees. "
            "Call generate() without speculative_config."
        )
    if text.model_type in _POSITION_BY_SLOT or (text.model_type == "falcon" and getattr(text, "alibi", False)):
        raise UnsupportedModel(
            f"{name} computes attention biases from memory order, not from positions, so packed rows would be wrong. "
            "Call generate() without speculative_config."
        )
    if text.model_type in _WINDOWED_BY_CACHE and getattr(text, "sliding_window", None) is not None:
        raise UnsupportedModel(
            f"{name} forgets old keys only while it generates token by token, so several tokens at once give other outputs. "
            "Call generate() without speculative_config."
        )


def reads_pages(model: PreTrainedModel) -> bool:
    """Whether the model can attend through a registered attention function that reads pages.

    Not for models off the attention interface or whose layers keep arguments from it, latent attention (its cache holds
    what is expanded later), layers that reuse another layer's keys, and soft-capping that the model's own attention leaves out.
    """
    text = model.config.get_text_config(decoder=True)
    latent = getattr(text, "kv_lora_rank", None) is not None
    shared = bool(getattr(text, "num_kv_shared_layers", 0))
    # torch's sdpa cannot soft-cap: transformers 5.17 runs Gemma 2 uncapped with it, and plain generate() is what counts.
    uncapped = getattr(text, "attn_logit_softcapping", None) is not None and text._attn_implementation == "sdpa"
    handed_on = model._can_set_attn_implementation() and text.model_type not in _DROPS_ARGUMENTS
    return handed_on and not (latent or shared or uncapped)


def check_length(model: PreTrainedModel, prompt_length: int, max_length: int) -> None:
    """Raise ValueError if a sequence does not fit the positions the model has."""
    text = model.config.get_text_config(decoder=True)
    limit = getattr(text, "max_position_embeddings", None)
    rope = getattr(text, "rope_parameters", None)
    if limit is not None and prompt_length >= limit:
        raise ValueError(
            f"The prompt has {prompt_length} tokens; {type(model).__name__} has {limit} positions. Shorten the prompt."
        )
    if limit is not None and not rope and getattr(text, "model_type", "") != "bloom" and max_length > limit:
        raise ValueError(
            f"{max_length} tokens (prompt and output) were asked of {type(model).__name__}, which has {limit} learned "
            "positions. Lower max_new_tokens or max_length."
        )
    for kind in _rope_parameters(rope):
        changes_at = kind.get("original_max_position_embeddings") or limit
        if kind.get("rope_type") in ("dynamic", "longrope") and changes_at and max_length > changes_at:
            raise ValueError(
                f"{type(model).__name__} changes its {kind['rope_type']} rotary frequencies beyond {changes_at} tokens, which "
                f"would change the keys already cached; prompt and output may have {changes_at} tokens together, "
                f"not {max_length}."
            )


def _rope_parameters(rope: Any) -> list[dict]:
    if not rope:
        return []
    nested = [value for value in rope.values() if isinstance(value, dict)]
    return nested or [rope]


def layer_windows(config) -> dict[str, int | None]:
    """Sliding window by kind of layer (None: sees everything)."""
    window = getattr(config, "sliding_window", None)
    if hasattr(config, "layer_types"):
        return {"full_attention": None, "sliding_attention": window}
    return {"attention": window}


_layer_windows = weakref.WeakKeyDictionary[nn.Module, "int | None"]()


def layer_window(module: nn.Module) -> int | None:
    """The sliding window of one attention module, for models that do not pass it to the attention function.

    Remembered: reading a configuration's attributes is slow, and this is asked for every layer of every step.
    """
    if module not in _layer_windows:
        config = module.config
        kinds = getattr(config, "layer_types", None)
        slides = kinds[module.layer_idx] == "sliding_attention" if kinds else True
        _layer_windows[module] = getattr(config, "sliding_window", None) if slides else None
    return _layer_windows[module]


def decoder_of(model: PreTrainedModel) -> nn.Module:
    """The module that turns ids into final hidden states."""
    decoder = model.get_decoder() if hasattr(model, "get_decoder") else model.base_model
    while not any(isinstance(child, nn.ModuleList) for child in decoder.children()):
        inner = getattr(decoder, "decoder", None) or getattr(decoder, "model", None)
        if inner is None:
            raise UnsupportedModel(f"{type(model).__name__} has no list of decoder layers.")
        decoder = inner
    return decoder


def layer_list(model: PreTrainedModel) -> tuple[nn.Module, str]:
    """The decoder and the name of its list of layers."""
    decoder = decoder_of(model)
    count = model.config.get_text_config(decoder=True).num_hidden_layers
    for name, child in decoder.named_children():
        if isinstance(child, nn.ModuleList) and len(child) == count:
            return decoder, name
    raise UnsupportedModel(f"{type(model).__name__} has no list of {count} decoder layers.")


def decoder_layers(model: PreTrainedModel) -> nn.ModuleList:
    """The decoder's layers."""
    decoder, name = layer_list(model)
    return getattr(decoder, name)


@contextlib.contextmanager
def first_layers(model: PreTrainedModel, count: int | None):
    """Early exit: inside, the model has its first `count` layers only (then its own final norm and head)."""
    if count is None:
        yield
        return
    decoder, name = layer_list(model)
    layers = getattr(decoder, name)
    decoder._modules[name] = layers[:count]
    try:
        yield
    finally:
        decoder._modules[name] = layers


@contextlib.contextmanager
def without_checkpointing(model: PreTrainedModel):
    """Inside, no layer recomputes its activations: one that does in training hands no cache on. There are no gradients here."""
    own = [module for module in model.modules() if vars(module).get("gradient_checkpointing")] if model.training else []
    for module in own:
        module.gradient_checkpointing = False
    try:
        yield
    finally:
        for module in own:
            module.gradient_checkpointing = True


@contextlib.contextmanager
def tapped(model: PreTrainedModel, taps: Taps, found: dict[Any, torch.Tensor] | None = None):
    """Collect hidden states of forwards of batch 1: yields a dict (`found`, if given) that holds those of the latest,
    `last_hidden` and layer indices, [T, H] each."""
    found = {} if found is None else found
    handles = []

    def keep(key):
        def hook(module, args, output):
            hidden = output[0] if isinstance(output, tuple) else getattr(output, "last_hidden_state", output)
            found[key] = hidden[0] if hidden.dim() == 3 else hidden

        return hook

    def keep_input(module, args, kwargs):
        found[0] = (args[0] if args else kwargs["hidden_states"])[0]

    if taps.last_hidden:
        handles.append(decoder_of(model).register_forward_hook(keep("last_hidden")))
    if taps.layers:
        decoder, name = layer_list(model)
        layers = getattr(decoder, name)
        for index in taps.layers:
            if index == 0:  # what enters the first layer: some models scale the embeddings or add positions
                handles.append(layers[0].register_forward_pre_hook(keep_input, with_kwargs=True))
            else:
                handles.append(layers[index - 1].register_forward_hook(keep(index)))
    try:
        yield found
    finally:
        for handle in handles:
            handle.remove()


@contextlib.contextmanager
def alibi(model: PreTrainedModel, batch: PackedBatch):
    """BLOOM builds ALiBi from a padding mask; inside, it gets the biases of the packed keys' real positions."""
    inner = getattr(model, "transformer", None)
    if model.config.model_type != "bloom" or inner is None:
        yield
        return
    original = inner.build_alibi_tensor
    positions = torch.from_numpy(batch.key_positions())

    def from_positions(attention_mask, num_heads, dtype):
        two_keys = original(torch.ones(1, 2, device=attention_mask.device), num_heads, torch.float32)
        slopes = two_keys[:, :, 1:] - two_keys[:, :, :1]  # [heads, 1, 1]
        return (slopes * positions.to(slopes.device)).to(dtype)

    inner.build_alibi_tensor = from_positions
    try:
        yield
    finally:
        del inner.build_alibi_tensor
