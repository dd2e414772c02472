"""Layers that attend to the images of a row's prompt and to nothing else (Mllama): the images' keys, and these layers over packed rows."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from transformers.cache_utils import Cache, DynamicCache

from ..cache import PagedStaticCache
from ..core.errors import UnsupportedModel
from ..core.names import CACHE
from .architectures import all_parameters, decoder_layers, image_layers
from .attention import attend_next_to
from .encoder_decoder.forward import CrossCache
from .packed_batch import PackedBatch
from .threads import replaced_method


@dataclass
class ImageKeys:
    """Keys and values of the n keys of image tiles that all tokens after a row's prompt see.

    Attributes:
        layers: by index [n, heads, width] each; None: a layer of text.
        is_hidden: the prompt's mask hides all tiles, so that the layers' MLPs add nothing.
    """

    layers: list[tuple[torch.Tensor, ...] | None]
    is_hidden: bool

    @property
    def num_keys(self) -> int:
        """n."""
        return next(pair[0].shape[0] for pair in self.layers if pair is not None)


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
    """Per row, the keys that text after a prompt sees, from transformers' cache after it; None: the prompts had no images. `inputs`: of
    the model's forward."""
    if not holds_images(config, cache):
        return None
    beside, rows = image_layers(config), []
    for row in range(num_rows):
        tiles, sees_tiles = _seen_tiles(inputs, row)
        layers: list[Any] = [None] * len(cache.layers)
        for index in beside:
            layer: Any = cache.layers[index]
            places = tiles.repeat_interleave(layer.keys.shape[2] // len(tiles)).to(layer.keys.device)
            layers[index] = tuple(part[row][:, places].transpose(0, 1) for part in (layer.keys, layer.values))
        rows.append(ImageKeys(layers, not sees_tiles))
    return rows


def keep_images(model: Any, cache: PagedStaticCache, seq_id: int, images: ImageKeys, num_blocks: int) -> None:
    """Keep the keys of a row's images, with those of other rows in at most `num_blocks`. Raises OutOfBlocks: they do not fit; nothing was
    done."""
    cache.keep_source(seq_id, images.num_keys, lambda: images.layers, num_blocks, all_parameters(model))
    pools: Any = cache.cross
    pools.tables[seq_id].is_hidden = images.is_hidden


def _seen_tiles(inputs: dict[str, Any], row: int) -> tuple[torch.Tensor, bool]:
    """Which tiles the text after a prompt attends to, bool [images * tiles], and whether its mask shows any.

    Every later token has the mask of the prompt's last one. If that hides all tiles, transformers' attention sees all of them, and
    the layers' MLPs add nothing.

    Args:
        inputs: with `pixel_values` [B, images, tiles, ..] and `cross_attention_mask` [B, T, images, tiles], 1 where a token sees a tile;
            None: it sees all. Tensors or numpy arrays.
    """
    mask = inputs.get("cross_attention_mask")
    shown = np.ones(inputs["pixel_values"].shape[1:3]) if mask is None else mask[row, -1]
    tiles = torch.as_tensor(shown).flatten().cpu() == 1
    has_any = bool(tiles.any())
    return tiles if has_any else ~tiles, has_any


def _keys_of_tile(config: Any) -> int:
    return (config.vision_config.image_size // config.vision_config.patch_size) ** 2 + 1


def most_keys_of_image(model: Any) -> int:
    """Number of keys of an image of all tiles; 0 if no layer attends to images alone."""
    config = model.config
    has_images = image_layers(config.get_text_config(decoder=True)) and hasattr(config, "vision_config")
    return config.vision_config.max_num_tiles * _keys_of_tile(config) if has_images else 0


def num_image_keys(model: Any, inputs: dict[str, Any]) -> int:
    """Number of keys of images that the text after a prompt of one row sees in such layers. `inputs`: see `_seen_tiles`."""
    if not reads_images(model.config.get_text_config(decoder=True), inputs):
        return 0
    return int(_seen_tiles(inputs, 0)[0].sum()) * _keys_of_tile(model.config)


def bytes_per_image_key(config: Any, dtype: torch.dtype) -> int:
    """Bytes of a key and its value in all such layers of a text model of this configuration."""
    if not image_layers(config):
        return 0
    width = config.hidden_size // config.num_attention_heads
    return 2 * len(image_layers(config)) * config.num_key_value_heads * width * dtype.itemsize


@contextlib.contextmanager
def attending_to_images(model: Any, batch: PackedBatch, arguments: dict[str, Any]) -> Iterator[None]:
    """Inside the context, for this thread, the layers that attend to images read those of the batch's rows; rows without images pass
    them unchanged. `arguments`, of the model's forward, get what makes it run these layers."""
    arguments["cross_attention_states"] = batch.input_ids  # which no layer reads; with None they would be left out
    pools: Any = batch.cache.cross
    tables = [pools.tables.get(row.seq_id) for row in batch.inputs for _ in range(row.num_tokens)]
    lacks = [[table is None, table is None or table.is_hidden] for table in tables]
    lacks_images, sees_none = torch.tensor(lacks, device=batch.input_ids.device).T
    with contextlib.ExitStack() as stack:
        stack.callback(attend_next_to, None)  # an error may come between a layer's keys and its attention
        for layer in decoder_layers(model):
            attention: Any = getattr(layer, "cross_attn", None)
            if attention is not None:
                stack.enter_context(replaced_method(layer, "forward", functools.partial(_with_rows, sees_none)))
                attend = functools.partial(_attend, batch.cross, lacks_images)
                stack.enter_context(replaced_method(attention, "forward", attend))
        yield


def _with_rows(sees_none: torch.Tensor, original: Callable, hidden_states: torch.Tensor, **kwargs: Any) -> Any:
    """A layer's forward. Without our batch neither the attention nor a compiled layer takes it for one over pages."""
    kwargs = {name: value for name, value in kwargs.items() if name != "specdec"}
    kwargs["full_text_row_masked_out_mask"] = (~sees_none).to(hidden_states)[None, None, :, None]
    return original(hidden_states, **kwargs)


def _attend(
    cross: PackedBatch, lacks_images: torch.Tensor, original: Callable, hidden_states: torch.Tensor, **kwargs: Any
) -> tuple[torch.Tensor, None]:
    """The attention of a layer: [1, T, H] from [1, T, H]; zeros for rows without images."""
    mask = cross.dense_mask(None, hidden_states.dtype, hidden_states.device) if cross.gather else None
    given = {**kwargs, "cross_attention_states": None, "attention_mask": mask, CACHE: CrossCache(cross)}
    out = original(hidden_states, **given)[0]
    return out.masked_fill(lacks_images.to(out.device)[None, :, None], 0), None
