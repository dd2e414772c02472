"""Differences between model families: which ones can be served and how, where their layers are, what must be adapted."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from ..core.errors import UnsupportedModel
from ..core.names import takes_cache
from ..core.rows import Chunks
from . import encoder_decoder
from .recurrent.families import attends, family_of, mixers_of
from .threads import FalseInThisThread, FirstLayers, for_this_thread, replaced_values

if TYPE_CHECKING:
    from ..core.output import Taps

_ATTENTION_LAYER_TYPES = {"full_attention", "sliding_attention", "chunked_attention"}
# Model types whose indexers select the keys that a token attends to by scores under the mask of all keys, whatever their order.
_INDEXED = {"dots3_note_text", "deepseek_v32", "glm_moe_dsa", "axk2", "hy_v4"}
# Model types whose layers also attend to compressed segments of the text (see `segments`), and the kinds of these layers.
_COMPRESSED = {"deepseek_v4"}
_COMPRESSED_LAYER_TYPES = {"compressed_sparse_attention", "heavily_compressed_attention"}
# Model types whose layers do not pass the forward's keyword arguments on to the attention function.
_DROPS_ARGUMENTS = {"stablelm", "nemotron", "trocr"}
# Model types in which several layers share one attention module, which then does not know whose keys it should read.
_SHARES_ATTENTION = {"zamba", "zamba2"}
# Model types whose attention adds a bias of its own for each key, or adds it to a mask, which our attention does not.
_BIASES_KEYS = {"longt5", "doge", "inkling_text", "inkling2_text", "inkling2_loop_text"}
# Model types whose prompts are a prefix with bidirectional attention.
_PREFIX_MODELS = {"paligemma"}
# Model types that cache an image's keys before those of the ids, and expect room for an image in every padding mask.
_IMAGES_WITHOUT_IDS = {"git"}
# Model types with a sliding cache but full masks, so plain generate() depends on how many tokens each forward was given.
_WINDOWED_BY_CACHE = {"moshi", "kyutai_speech_to_text"}
# Model types whose biases or tables of positions grow with the text.
_ENDLESS = {"bloom", "m2m_100"}
_POSITION_LIMITS = {"mpt": "max_seq_len", "whisper": "max_target_positions", "speech_to_text": "max_target_positions"}


def check_autocast(model: PreTrainedModel) -> None:
    """Raise UnsupportedModel if autocast lets this model compute in another dtype than its own, on a CPU."""
    if not torch.is_autocast_enabled("cpu") or model.device.type != "cpu":
        return
    dtype = torch.get_autocast_dtype("cpu")
    if dtype != model.dtype:
        raise UnsupportedModel(
            f"torch.autocast lets layers of {type(model).__name__} compute in {dtype}, in which its keys cannot be kept: load the model in "
            "that dtype, or decode outside autocast."
        )


def check_supported(model: PreTrainedModel) -> None:
    """Raise UnsupportedModel for models whose outputs would not be exact with this library."""
    name, config = type(model).__name__, model.config
    encoder_decoder.family_of(model)
    text = config.get_text_config(decoder=True)
    if config.model_type in _IMAGES_WITHOUT_IDS:
        raise UnsupportedModel(
            f"{name} caches keys of images for which a prompt has no ids. Call generate() without speculative_config."
        )
    if model.get_output_embeddings() is None:
        raise UnsupportedModel(f"{name} has no language-model head.")
    known = _ATTENTION_LAYER_TYPES | ({"indexed_attention"} if text.model_type in _INDEXED else set())
    known |= _COMPRESSED_LAYER_TYPES if text.model_type in _COMPRESSED else set()
    kinds = set(getattr(text, "layer_types", None) or []) - known
    masks = {kind for kind in kinds if kind.endswith("attention") and kind != "linear_attention"}
    family = family_of(text)
    if family is not None:
        mixers_of(model, family)
    elif (getattr(model, "_is_stateful", False) and text.model_type not in _COMPRESSED) or kinds - masks:
        what = f"{', '.join(sorted(kinds - masks))} layers" if kinds - masks else "a recurrent state"
        raise UnsupportedModel(
            f"{name} has {what}, and how its state changes from token to token is not known to this library, so it could not be "
            "rolled back after a rejected draft. Call generate() without speculative_config."
        )
    if masks:
        raise UnsupportedModel(
            f"{name} has {', '.join(sorted(masks))} layers, whose masks are not made for packed rows and draft trees. "
            "Call generate() without speculative_config."
        )
    if not any(takes_cache(inspect.signature(kind.forward).parameters) for kind in {*map(type, all_modules(model))}):
        raise UnsupportedModel(
            f"{name} takes no key-value cache, of which drafts could be taken back. Call generate() without speculative_config."
        )
    if text.model_type in _WINDOWED_BY_CACHE and getattr(text, "sliding_window", None) is not None:
        raise UnsupportedModel(
            f"{name} forgets old keys only while it generates token by token, so its outputs change when several tokens are fed "
            "at once. Call generate() without speculative_config."
        )


def has_repository_code(model: PreTrainedModel) -> bool:
    """True for a model that was loaded with `trust_remote_code=True` and runs code of its repository: the user has trusted that."""
    return type(model).__module__.startswith("transformers_modules.")


def is_multimodal(model: PreTrainedModel) -> bool:
    """True if a text model is only a part of the model: prompts may hold more than text."""
    whole = model.config
    return not encoder_decoder.is_encoder_decoder(model) and whole.get_text_config(decoder=True) is not whole


def has_bidirectional_prompts(model: PreTrainedModel) -> bool:
    """True if the tokens of any prompt see later ones, so that only the model itself can read it."""
    return model.config.model_type in _PREFIX_MODELS


def reads_pages(model: PreTrainedModel) -> bool:
    """True if the model can attend through a registered attention function that reads pages.

    False for models that do not use transformers' attention interface or do not pass our arguments to it, for layers that reuse another
    layer's keys or attend within chunks, and where the model is configured with soft-capping that its own attention leaves out.
    """
    text = model.config.get_text_config(decoder=True)
    shared = bool(getattr(text, "num_kv_shared_layers", 0))
    # torch's sdpa cannot soft-cap, so transformers 5.17 runs Gemma 2 uncapped with it. We must match plain generate().
    uncapped = getattr(text, "attn_logit_softcapping", None) is not None and text._attn_implementation == "sdpa"
    drops = text.model_type in _DROPS_ARGUMENTS | _SHARES_ATTENTION | _BIASES_KEYS
    fits = attends(text) and model._can_set_attn_implementation()
    return fits and not (drops or shared or uncapped or _has_chunks(text))


def has_indexers(model: nn.Module) -> bool:
    """True if some layers of a model or head attend only to keys that an indexer selects."""
    return any(getattr(module, "indexer", None) is not None for module in all_modules(model))


def _has_chunks(text: Any) -> bool:
    """True if some layers attend within chunks, which only masks can say."""
    return "chunked_attention" in (getattr(text, "layer_types", None) or [])


def position_limit(text: PreTrainedConfig) -> int | None:
    """Number of positions a model was built for; None if there is no limit, or its configuration does not say."""
    if text.model_type in _ENDLESS:
        return None
    return getattr(text, _POSITION_LIMITS.get(text.model_type, "max_position_embeddings"), None)


def check_length(model: PreTrainedModel, prompt_length: int, max_length: int) -> None:
    """Raise ValueError if a sequence needs more positions than the model has. Its last token is never read, and needs none.

    Args:
        prompt_length, max_length: tokens of the prompt, and of prompt and output together.
    """
    text: Any = model.config.get_text_config(decoder=True)
    limit = position_limit(text)
    rope = getattr(text, "rope_parameters", None)
    ends = not rope  # rotary frequencies go on
    num_read = max_length - 1
    name = type(model).__name__
    if ends and limit is not None and prompt_length > limit:
        raise ValueError(f"The prompt has {prompt_length} tokens; {name} has {limit} positions. Shorten the prompt.")
    if ends and limit is not None and num_read > limit:
        raise ValueError(
            f"{max_length} tokens (prompt and output) were requested from {name}, which has {limit} positions. "
            "Lower max_new_tokens or max_length."
        )
    if _tempers(text) and num_read >= text.floor_scale:
        raise ValueError(
            f"{name} scales its queries by their place in memory from token {text.floor_scale} on, which packed rows "
            f"do not have: prompt and output together may have at most {text.floor_scale} tokens, not {max_length}."
        )
    most = getattr(text, "keep_window_size", None)
    if most is not None and num_read > most:
        raise ValueError(
            f"{name} chooses {most} keys among those it sees, by how many tokens are read at once: prompt and output together may "
            f"have at most {most + 1} tokens, not {max_length}."
        )
    for kind in rope_parameters(rope):
        changes_at = kind.get("original_max_position_embeddings") or limit
        if kind.get("rope_type") in ("dynamic", "longrope") and changes_at and num_read > changes_at:
            raise ValueError(
                f"{name} changes its {kind['rope_type']} rotary frequencies beyond {changes_at} tokens, which "
                f"would change the keys already cached; prompt and output together may have at most {changes_at + 1} tokens, "
                f"not {max_length}."
            )


def rope_parameters(rope: Any) -> list[dict]:
    """The rotary parameters of every kind of layer: one dict, or one per kind where `rope` is nested. None: no kind has any."""
    nested = [value for value in (rope or {}).values() if isinstance(value, dict)]
    return nested or ([rope] if rope else [])


def setting(config: PreTrainedConfig, name: str) -> Any:
    """A value of a configuration, or None. Where layers have values of their own, which reading the attribute refuses, the common one."""
    return config.to_dict().get(config.attribute_map.get(name, name))


def layer_windows(config) -> dict[str, int | Chunks | None]:
    """Sliding window in tokens for each kind of layer (None: full attention)."""
    window = getattr(config, "sliding_window", None)
    if _has_chunks(config):
        return {"full_attention": None, "chunked_attention": Chunks(config.attention_chunk_size)}
    if hasattr(config, "layer_types"):
        stateful = {} if family_of(config) is None else dict.fromkeys({"linear_attention", *config.layer_types})
        sliding = {"sliding_attention": window, "hybrid_sliding": window}
        return {**stateful, "full_attention": None, "indexed_attention": None, **sliding}
    return {"attention": window}


def num_cache_layers(config: Any) -> int:
    """Number of layers with keys, states or both; layers that run several times have some for each."""
    again = getattr(config, "loop_num_passes", 1) - 1
    looped = again * (config.loop_layer_index_end - config.loop_layer_index_start) if again else 0
    return config.num_hidden_layers + looped


def layer_window(module: nn.Module) -> int | None:
    """The sliding window of one attention module, for models that do not pass it to the attention function."""
    kinds = getattr(module.config, "layer_types", None)
    slides = kinds[module.layer_idx] == "sliding_attention" if kinds else True
    return getattr(module.config, "sliding_window", None) if slides else None


def all_modules(module: nn.Module) -> Iterator[nn.Module]:
    """`module` and every module inside it, once each. `module.modules()` takes several times as long, because it makes names."""
    known, waiting = set(), [module]
    while waiting:
        module = waiting.pop()
        if id(module) not in known:
            known.add(id(module))
            yield module
            waiting += [child for child in reversed(module._modules.values()) if child is not None]


def configs_of(model: PreTrainedModel) -> list[PreTrainedConfig]:
    """The configurations of the model's modules, except those of parts that do not use transformers' attention interface."""
    configs, refused = {}, set()
    for module in all_modules(model):
        config = vars(module).get("config")
        if isinstance(config, PreTrainedConfig):
            configs[id(config)] = config
            if isinstance(module, PreTrainedModel) and not module._can_set_attn_implementation():
                refused.add(id(config))
    return [config for key, config in configs.items() if key not in refused]


def all_parameters(module: nn.Module) -> list[torch.Tensor]:
    """Every parameter once: `module.parameters()`, faster."""
    parameters = {
        id(parameter): parameter
        for inner in all_modules(module)
        for parameter in inner._parameters.values()
        if parameter is not None
    }
    return list(parameters.values())


def decoder_of(model: PreTrainedModel) -> nn.Module:
    """The module that computes the final hidden states from ids; its children include the list of layers."""
    decoder = model.get_decoder() if hasattr(model, "get_decoder") else model.base_model
    while not any(isinstance(child, nn.ModuleList) for child in decoder.children()):
        names = ("decoder", "model", "encoder")  # the last of BERT and its like
        inner = next((getattr(decoder, name) for name in names if getattr(decoder, name, None) is not None), None)
        if inner is None:
            raise UnsupportedModel(f"{type(model).__name__} has no list of decoder layers.")
        decoder = inner
    return decoder


def layer_list(model: PreTrainedModel) -> tuple[nn.Module, str]:
    """The decoder, and the name of its attribute that lists the layers."""
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
    """Early exit: inside, for this thread, the model has only its first `count` layers, then its own final norm and head. None: all."""
    if count is None:
        yield
        return
    decoder, name = layer_list(model)
    with replaced_values([(decoder._modules, name, FirstLayers(getattr(decoder, name), count))]):
        yield


def image_layers(text: Any) -> frozenset[int]:
    """Indices of the layers that attend to images and are skipped without them, from the text model's configuration."""
    return frozenset(getattr(text, "cross_attention_layers", None) or ())


def _tempers(text: Any) -> bool:
    """True if layers without rotary embeddings scale queries (Llama 4's temperature tuning): by 1 before `floor_scale` tokens."""
    return bool(getattr(text, "attn_temperature_tuning", False)) and text.model_type == "llama4_text"


def without_temperature(model: PreTrainedModel) -> contextlib.AbstractContextManager[None]:
    """Inside the context, Llama 4 does not scale queries. It would count all rows' tokens as one text; see `check_length` for the limit."""
    tempers = _tempers(model.config.get_text_config(decoder=True))
    return _switched_off(model.modules() if tempers else (), "attn_temperature_tuning")


def without_checkpointing(model: PreTrainedModel) -> contextlib.AbstractContextManager[None]:
    """Inside the context, gradient checkpointing is off: in training mode, a checkpointed layer is not given the cache."""
    return _switched_off(model.modules() if model.training else (), "gradient_checkpointing")


def _switched_off(modules: Iterable[nn.Module], flag: str) -> contextlib.AbstractContextManager[None]:
    """Inside the context, a flag that is true is false for this thread."""
    fields = (vars(module) for module in modules)
    return replaced_values((of_module, flag, FalseInThisThread()) for of_module in fields if of_module.get(flag))


@contextlib.contextmanager
def tapped(model: PreTrainedModel, taps: Taps, states: dict[Any, torch.Tensor] | None = None):
    """Collect hidden states of forwards with batch size 1.

    Yields a dict (`states`, if given) with the states of the latest forward, [T, H] each, by layer index or "last_hidden".
    """
    states = {} if states is None else states

    def keep(key: Any, hidden: torch.Tensor) -> None:
        states[key] = hidden[0] if hidden.dim() == 3 else hidden

    with tapping(model, taps, keep):
        yield states


@contextlib.contextmanager
def tapping(model: PreTrainedModel, taps: Taps, keep: Callable[[Any, torch.Tensor], None]):
    """Inside the context, every forward of this thread calls `keep` with each tapped layer's index, or "last_hidden", and its hidden states
    [B, S, H], of several streams the mean. Of several calls for one layer in a forward, the last counts."""

    def hooked(hook: Callable) -> Callable:
        return for_this_thread(hook, lambda *_: None)

    text: Any = model.config.get_text_config(decoder=True)
    skipped, has_streams = image_layers(text), hasattr(text, "hc_mult")  # hyper-connections [B, S, streams, H]

    def read(states: torch.Tensor) -> torch.Tensor:
        return states.mean(dim=2) if has_streams and states.dim() == 4 else states

    def output_of(key):
        def hook(module, args, output):
            keep(key, read(output[0] if isinstance(output, tuple) else getattr(output, "last_hidden_state", output)))

        return hooked(hook)

    def input_of(key):
        def hook(module, args, kwargs):
            keep(key, read(args[0] if args else kwargs["hidden_states"]))

        return hooked(hook)

    with contextlib.ExitStack() as stack:
        if taps.last_hidden:
            stack.enter_context(decoder_of(model).register_forward_hook(output_of("last_hidden")))
        layers: Any = decoder_layers(model) if taps.layers else ()
        for index in taps.layers:
            below = index
            while below:
                below -= 1
                stack.enter_context(layers[below].register_forward_hook(output_of(index)))
                if below not in skipped:  # else its output may be its input
                    break
            else:  # the first layer's input, not the embeddings: some models scale them or add positions
                stack.enter_context(layers[0].register_forward_pre_hook(input_of(index), with_kwargs=True))
        yield
