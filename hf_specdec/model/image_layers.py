"""Layers that attend to the images of a row's prompt and to nothing else (Mllama): the images' keys, and these layers over packed rows."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from transformers.cache_utils import Cache, DynamicCache

from ..cache.image_keys import ImageKeys
from ..core.errors import UnsupportedModel
from ..core.names import CACHE
from .architectures import decoder_layers, image_layers
from .packed_batch import PackedBatch
from .threads import replaced_method


def holds_images(config: Any, cache: Cache | None) -> bool:
    """True if transformers' cache holds keys of images."""
    layers: list[Any] = [] if cache is None else cache.layers
    of_images = [layers[index] for index in image_layers(config) if index < len(layers)]
    return any(getattr(layer, "keys", None) is not None and layer.keys.numel() for layer in of_images)


def reads_images(config: Any, inputs: dict[str, Any] | None) -> bool:
    """True if such layers get images from `inputs` of the model's forward."""
    return bool(image_layers(config)) and inputs is not None and inputs.get("pixel_values") is not None


def check_cache(model: Any, config: Any, cache: Cache | None, inputs: dict[str, Any] | None) -> None:
    """Raise UnsupportedModel if the caller's cache holds, or would have to hold, keys of images. `inputs`: of the model's forward."""
    is_given = getattr(cache, "_is_user_defined", False)
    if is_given and (reads_images(config, inputs) or holds_images(config, cache)):
        raise UnsupportedModel(
            f"{type(model).__name__} keeps keys of images apart from those of text, and {CACHE} cannot pass them on here: pass the whole "
            f"prompt with its images, without {CACHE}."
        )


def image_keys(config: Any, cache: DynamicCache, inputs: dict[str, Any], num_rows: int) -> list[ImageKeys] | None:
    """Per row, the keys that text after a prompt sees, from transformers' cache after it; None: the prompts had no images.

    Every later token has the mask of the prompt's last one. If that hides all tiles, transformers' attention sees all of them, and
    the layers' MLPs add nothing.

    Args:
        inputs: of the model's forward, with `cross_attention_mask` [B, T, images, tiles], 1 where a token sees a tile; None: it sees all.
    """
    if not holds_images(config, cache):
        return None
    layers: dict[int, Any] = {index: cache.layers[index] for index in image_layers(config)}
    mask, rows = inputs.get("cross_attention_mask"), []
    for row in range(num_rows):
        num_keys = next(iter(layers.values())).keys.shape[2]
        seen = torch.ones(num_keys, dtype=torch.bool)
        if mask is not None:
            tiles = mask[row, -1].flatten() == 1
            seen = tiles.repeat_interleave(num_keys // len(tiles)).cpu()
        has_any = bool(seen.any())
        places = (seen if has_any else ~seen).nonzero()[:, 0]
        pairs = {
            index: tuple(
                part[row : row + 1].index_select(2, places.to(part.device)) for part in (layer.keys, layer.values)
            )
            for index, layer in layers.items()
        }
        rows.append(ImageKeys(pairs, has_any))
    return rows


@contextlib.contextmanager
def attending_to_images(model: Any, batch: PackedBatch, arguments: dict[str, Any]) -> Iterator[None]:
    """Inside the context, for this thread, the layers that attend to images read those of the batch's rows; rows without images pass
    them unchanged. `arguments`, of the model's forward, get what makes it run these layers."""
    arguments["cross_attention_states"] = batch.input_ids  # which no layer reads; with None they would be left out
    rows = [batch.cache.images.get(row.seq_id) for row in batch.inputs]
    sees = torch.tensor([row is not None and row.sees_tiles for row in rows])
    counts = torch.tensor([row.num_tokens for row in batch.inputs])
    sees = sees.repeat_interleave(counts)[None, None, :, None]  # [1, 1, T, 1], as transformers' layers take it
    with contextlib.ExitStack() as stack:
        for layer in decoder_layers(model):
            attention: Any = getattr(layer, "cross_attn", None)
            if attention is not None:
                stack.enter_context(replaced_method(layer, "forward", functools.partial(_with_rows, sees)))
                attend = functools.partial(_attend, batch, rows, attention.layer_idx)
                stack.enter_context(replaced_method(attention, "forward", attend))
        yield


def _with_rows(sees: torch.Tensor, original: Callable, hidden_states: torch.Tensor, **kwargs: Any) -> Any:
    """A layer's forward. Without our batch neither the attention nor a compiled layer takes it for one over pages."""
    kwargs = {name: value for name, value in kwargs.items() if name != "specdec"}
    kwargs["full_text_row_masked_out_mask"] = sees.to(hidden_states)
    return original(hidden_states, **kwargs)


def _attend(
    batch: PackedBatch,
    rows: list[ImageKeys | None],
    index: int,
    original: Callable,
    hidden_states: torch.Tensor,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """The attention of a layer, row by row: [1, T, H] from [1, T, H]; zeros for rows without images."""
    out = torch.zeros_like(hidden_states)
    for row, start, end in zip(rows, batch.starts[:-1], batch.starts[1:], strict=True):
        if row is not None:
            keys, values = row.layers[index]
            cache: Any = DynamicCache()
            cache.update(*(part.to(hidden_states.device) for part in (keys, values)), index)
            # All zeros: without a mask, sdpa would attend causally.
            mask = hidden_states.new_zeros(1, 1, end - start, keys.shape[2])
            given = {**kwargs, "cross_attention_states": None, "attention_mask": mask, CACHE: cache}
            out[:, start:end] = original(hidden_states[:, start:end], **given)[0]
    return out, None
