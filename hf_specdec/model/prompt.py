"""read_prompt(): the model itself reads a prompt that is more than token ids. The text after it is ids again.

Images, embeddings and prefixes with bidirectional attention go through the model's own forward, as in plain `generate()`, so that masks,
positions and the merging of features are the model's own. After the prompt, a token's position is its index plus an offset of the row.
With M-RoPE, if the prompt's last token belongs to an image, its position may differ by axis, and then each axis has its own offset.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from transformers.cache_utils import DynamicCache

from ..cache import PagedStaticCache
from ..cache.state_pool import KeptStates, StatePool
from ..core.errors import UnsupportedModel
from ..core.names import CACHE
from ..core.output import PackedOutput
from ..core.rows import RowInput
from . import architectures
from .image_layers import ImageKeys, image_keys, keep_images
from .packed_model import PackedModel
from .recurrent.families import num_cached, states_of
from .self_test import evaluating, relative_error

# by layer: keys and values, [n, heads, width] each; None: the layer reads another layer's
KeysValues = list["tuple[torch.Tensor, ...] | None"]

# Largest difference between our step and the model's own after the prompt, relative to the spread of the logits.
_TOLERANCES = {torch.float64: 1e-5, torch.float32: 1e-3}
_TOLERANCE_LOW_PRECISION = 0.25


@dataclass
class ReadPrompt:
    """A prompt that the model has read, of B rows.

    Attributes:
        output: logits [B, V] after each row's last token; features and hidden states of the tokens read, row after row.
        counts: per row, how many tokens were read: those that no cache held.
        offsets: per row, position minus index of a token after the prompt; for each axis if they differ.
        keys_values: per row, keys and values of the whole prompt.
        states: per row, the states of recurrent layers after it; None: the model has no such layers.
        images: per row, the keys in layers that attend to images alone; None: there are none.
    """

    output: PackedOutput
    counts: list[int]
    offsets: list[int | tuple[int, ...]]
    keys_values: list[KeysValues]
    states: list[KeptStates] | None = None
    images: list[ImageKeys] | None = None


@torch.no_grad()
def read_prompt(
    packed: PackedModel,
    input_ids: torch.Tensor,
    inputs: dict[str, Any],
    generation_config: Any,
    text: torch.Tensor,
    columns: list[np.ndarray],
    all_hidden_states: bool = False,
) -> ReadPrompt:
    """Let the model read a batch of prompts. Call outside `active()`: the model attends in its own way.

    Args:
        input_ids: int64 [B, S]; S is 0 if only embeddings are given.
        inputs: the arguments that `generate()` prepared for the model's forward, with the vision tower's features. A filled
            cache is continued, and holds the whole prompt afterwards.
        text: int64 [B, W], the whole padded text as drafters see it.
        columns: per row, the columns of `text` that hold its tokens.
        all_hidden_states: return the hidden states of all layers too.

    Raises:
        UnsupportedModel: what follows the prompt is not decided by token ids, positions and these keys and values.
    """
    if packed.recurrent is not None and packed.recurrent.family.steps:
        raise UnsupportedModel(
            f"{type(packed.model).__name__} keeps states in a form of our own, so only prompts of token ids run with speculative_config. "
            "Call generate() without it."
        )
    given = inputs.get(CACHE)
    cache: Any = given
    if not isinstance(given, DynamicCache) or not num_cached(given):
        # With a layer of its kind for each layer that keeps more than keys and values.
        has_kinds = packed.recurrent is not None or architectures.has_indexers(packed.model)
        cache = DynamicCache(config=packed.config) if has_kinds else DynamicCache()
    cached, end = num_cached(cache), text.shape[1]
    inputs = {**inputs, CACHE: cache, "use_cache": True, **_wanted(packed, inputs, all_hidden_states)}
    if all_hidden_states or "mm_encoder_outputs" not in inputs:  # transformers can chunk only ids and features
        generation_config.prefill_chunk_size = None
    output, hidden, positions = _prefill(packed, input_ids, inputs, generation_config)
    offsets = _offsets(packed, positions, columns)
    beside = architectures.image_layers(packed.config)
    _check_keys(packed, cache, end, beside)
    keys_values = [row_of(cache, i, places, beside) for i, places in enumerate(columns)]
    states = None if packed.recurrent is None else [states_of(cache, i) for i in range(len(columns))]
    read = [places[places >= cached] for places in columns]
    rows = np.repeat(np.arange(len(read)), [len(places) for places in read])
    at = torch.from_numpy(rows), torch.from_numpy(np.concatenate(read) - cached)

    def of_tokens(states: torch.Tensor) -> torch.Tensor:
        """[T, ..] from states [B, S, ..] of one forward, or [T, A, ..] from [A, B, S, ..]."""
        places = tuple(index.to(states.device) for index in at)
        return states[places] if states.dim() == 3 else states[:, places[0], places[1]].transpose(0, 1)

    features = {key: of_tokens(torch.cat(pieces, dim=-2)) for key, pieces in hidden.items()}
    prompt = ReadPrompt(
        PackedOutput(
            logits=output.logits[:, -1].to(torch.float32, copy=True),
            last_hidden=features.get("last_hidden"),
            layers={index: features[index] for index in packed.taps.layers},
            hidden_states=tuple(map(of_tokens, output.hidden_states)) if all_hidden_states else None,
            input_ids=text[at[0].to(text.device), at[1].to(text.device) + cached],
            all_logits=of_tokens(output.logits) if packed.taps.logits else None,
        ),
        [len(places) for places in read],
        offsets,
        keys_values,
        states,
        image_keys(packed.config, cache, inputs, len(columns)),
    )
    kind = _kind(inputs)
    if not all(isinstance(offset, int) for offset in offsets):
        kind |= {"axes"}
    if kind not in packed.checked_prompts:
        _check_next_step(packed, prompt, input_ids, inputs, output, [len(places) for places in columns])
        if states is None:
            cache.crop(-1)
        packed.checked_prompts.add(kind)
    return prompt


def _prefill(
    packed: PackedModel, input_ids: torch.Tensor, inputs: dict[str, Any], generation_config: Any
) -> tuple[Any, dict[Any, list[torch.Tensor]], torch.Tensor | None]:
    """The model's own forward over the prompts, in chunks: last output, tapped states [B, S, H] per chunk, last `position_ids`."""
    tapped: dict[Any, list[torch.Tensor]] = defaultdict(list)
    positions: list[torch.Tensor | None] = []

    def note_positions(module, args, kwargs):
        positions.append(kwargs.get("position_ids"))

    model: Any = packed.model
    noting = model.register_forward_pre_hook(note_positions, with_kwargs=True)

    def keep(key: Any, states: torch.Tensor) -> None:
        tapped[key][len(positions) - 1 :] = [states]

    tapping = architectures.tapping(model, packed.taps, keep)
    with noting, packed.reading(), tapping:
        output = model._prefill(input_ids, generation_config, dict(inputs))
    return output, tapped, positions[-1]


def _wanted(packed: PackedModel, inputs: dict[str, Any], all_hidden_states: bool) -> dict[str, Any]:
    """The arguments that say what the forward returns."""
    wanted: dict[str, Any] = {"output_hidden_states": True} if all_hidden_states else {}
    if "logits_to_keep" in inputs:
        if packed.taps.logits:
            wanted["logits_to_keep"] = 0  # logits of all tokens
        elif packed.taps.layers or packed.taps.last_hidden:
            # With a number, Gemma 4's layers that read other layers' keys run over these last tokens only.
            wanted["logits_to_keep"] = torch.tensor([-1], device=packed.device)
    return wanted


def _offsets(
    packed: PackedModel, positions: torch.Tensor | None, columns: list[np.ndarray]
) -> list[int | tuple[int, ...]]:
    """Per row, position minus index of its last token, per axis of `positions` [B, S] or [A, B, S] (four begin with the text's)."""
    name = type(packed.model).__name__
    if positions is None:
        if "position_ids" in packed.forward_parameters:
            raise UnsupportedModel(
                f"{name} counts the positions of this prompt itself, so those of the text after it are not known. "
                "Call generate() without speculative_config."
            )
        return [0] * len(columns)
    axes = positions[None] if positions.dim() == 2 else positions[1:] if positions.shape[0] == 4 else positions
    last = axes[..., -1].expand(-1, len(columns)).T.tolist()  # [B, A]
    offsets = [tuple(axis - len(places) + 1 for axis in row) for row, places in zip(last, columns, strict=True)]
    return [row[0] if len(set(row)) == 1 else row for row in offsets]


def row_of(cache: DynamicCache, index: int, columns: np.ndarray, beside: frozenset[int] = frozenset()) -> KeysValues:
    """Keys, values and an indexer's keys of a row's tokens at `columns` of transformers' cache: views where these stand together. `beside`:
    layers that keep none of text."""
    adjacent = int(columns[-1] - columns[0]) + 1 == len(columns)
    pairs: KeysValues = []
    for layer_index, layer in enumerate(cache.layers):
        states: Any = getattr(layer, "keys", None), getattr(layer, "values", None)
        if states[0] is None or layer_index in beside:  # this layer reads another layer's keys, or none of text
            pairs.append(None)
            continue
        place: Any = slice(int(columns[0]), int(columns[-1]) + 1)
        if not adjacent:
            place = torch.from_numpy(columns).to(states[0].device)
        index_keys = getattr(layer, "indexer_keys", None)
        if index_keys is not None:
            states += (index_keys[:, None],)
        pairs.append(tuple(state[index][:, place].transpose(0, 1) for state in states))
    return pairs


def _check_keys(packed: PackedModel, cache: DynamicCache, length: int, beside: frozenset[int]) -> None:
    """Raise UnsupportedModel unless every layer but those in `beside` has keys of all `length` tokens."""
    for index, layer in enumerate(cache.layers):
        keys = getattr(layer, "keys", None)
        if keys is not None and index not in beside and keys.shape[-2] != length:
            raise UnsupportedModel(
                f"{type(packed.model).__name__} keeps keys of {keys.shape[-2]} tokens in a layer, for a prompt of {length}: layers "
                "that attend to an image or drop old keys cannot continue from token ids. Call generate() without speculative_config."
            )


def _kind(inputs: dict[str, Any]) -> frozenset[str]:
    """The names of the inputs, and of the modalities in them."""
    names = {name for name, value in inputs.items() if value is not None}
    nested = [item for value in inputs.values() if isinstance(value, dict) for item in value.items()]
    return frozenset(names | {f"{name} features" for name, value in nested if value is not None})


def _check_next_step(
    packed: PackedModel,
    prompt: ReadPrompt,
    input_ids: torch.Tensor,
    inputs: dict[str, Any],
    output: Any,
    lengths: list[int],
) -> None:
    """Raise UnsupportedModel unless the token after a prompt of a new kind of input has the same logits in the model's step and in ours."""
    shifts = [(0, abs(offset)) if isinstance(offset, int) else (1, max(map(abs, offset))) for offset in prompt.offsets]
    model: Any = packed.model
    row = shifts.index(max(shifts))
    tokens = prompt.output.logits.argmax(1)
    following = model._update_model_kwargs_for_generation(output, dict(inputs), is_encoder_decoder=False)
    ids = torch.cat([input_ids, tokens[:, None].to(input_ids)], dim=1)
    with evaluating(model), packed.reading():
        step = model.prepare_inputs_for_generation(ids, next_sequence_length=1, **following)
        expected = model(**step, return_dict=True).logits[row, -1:].float()
    length = lengths[row]
    states = None if prompt.states is None else StatePool()
    num_layers = packed.config.num_hidden_layers
    cache = PagedStaticCache(
        num_layers, length // 16 + 1, 16, share_prefixes=False, states=states, is_latent=packed.is_latent
    )
    cache.add(0)
    cache.reserve(0, length + 1)
    cache.load_all(0, prompt.keys_values[row])
    if prompt.images is not None:
        keep_images(packed.model, cache, 0, prompt.images[row], prompt.images[row].num_keys)
    if states is not None and prompt.states is not None:
        states.load(0, prompt.states[row], length)
    token = RowInput(0, tokens[row : row + 1].cpu().numpy(), length, offset=prompt.offsets[row])
    with evaluating(model), packed.active():
        logits = packed.forward_eagerly([token], cache).logits
    error = relative_error(logits, expected)
    tolerance = _TOLERANCES.get(model.dtype, _TOLERANCE_LOW_PRECISION)
    if not error <= tolerance:
        raise UnsupportedModel(
            f"{type(model).__name__} does not continue this prompt from token ids as its own generate() does: the next logits differ by "
            f"{error:.2g} of their spread (rounding explains {tolerance:.2g}). Call generate() without speculative_config."
        )
