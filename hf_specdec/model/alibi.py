"""ALiBi, and GPT-Neo's masks, over packed rows: biases follow each key's position in its own text, not its place in memory."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from transformers import PreTrainedModel
from transformers.models.falcon import modeling_falcon

from .functions import ModuleFunctions
from .threads import for_this_thread, replaced_method, replaced_values

if TYPE_CHECKING:
    from .packed_batch import PackedBatch


def is_needed(model: PreTrainedModel) -> bool:
    """True if `packed` changes anything for the model."""
    kind = model.config.model_type
    if kind == "falcon":
        return model.config.alibi
    return (kind in _BUILDERS or kind == "gpt_neo") and hasattr(model, "transformer")


def packed(model: Any, batch: PackedBatch) -> contextlib.AbstractContextManager[None]:
    """Inside the context, the biases of a model for which this `is_needed` follow the packed keys' real positions."""
    kind, decoder = model.config.model_type, model.transformer
    if kind == "gpt_neo":
        layers = [block.attn.attention for block in decoder.h]
        return replaced_values(
            (vars(layer), "bias", _mask_of(layer, model.config.window_size, batch)) for layer in layers
        )
    if kind == "falcon":
        functions = ModuleFunctions.of(modeling_falcon, biases="build_alibi_tensor")
        return functions.replaced(biases=functools.partial(_falcon_biases, torch.from_numpy(batch.key_positions())))
    name, biases = _BUILDERS[kind]
    return replaced_method(decoder, name, functools.partial(biases, batch))


def _mask_of(layer: Any, window_size: int, batch: PackedBatch) -> _Sliced:
    mask = batch.dense_mask(window_size if layer.attention_type == "local" else None, torch.float32, layer.bias.device)
    return _Sliced(for_this_thread(lambda _: mask == 0, layer.bias.__getitem__))


class _Sliced:
    """What GPT-Neo's layers take in place of their causal buffer, which they slice by places in memory."""

    def __init__(self, slice_of: Callable[[Any], torch.Tensor]):
        self._slice_of = slice_of

    def __getitem__(self, index: Any) -> torch.Tensor:
        return self._slice_of(index)


def _bloom(batch: PackedBatch, original: Callable[..., torch.Tensor], attention_mask, num_heads, dtype) -> torch.Tensor:
    """Biases [heads, 1, S_total]; BLOOM derives positions from a padding mask."""
    slopes = _slopes(original(torch.ones(1, 2, device=attention_mask.device), num_heads, torch.float32))
    return (slopes * torch.from_numpy(batch.key_positions()).to(slopes.device)).to(dtype)


def _mpt(
    batch: PackedBatch, original: Callable[..., torch.Tensor], num_heads, sequence_length, alibi_bias_max=8, device=None
) -> torch.Tensor:
    """Biases [heads, 1, S_total]; MPT counts back from the last key, which is here the last of each row."""
    ends = np.cumsum([row.start + row.num_tokens for row in batch.inputs])
    rows = np.split(batch.key_positions(), ends[:-1])
    positions = torch.from_numpy(np.concatenate([places - places.max() for places in rows]))
    slopes = _slopes(original(num_heads, 2, alibi_bias_max, device))
    return slopes * positions.to(slopes.device)


def _slopes(of_two_keys: torch.Tensor) -> torch.Tensor:
    """[heads, 1, 1] from the biases of two keys, [heads, 1, 2]."""
    return of_two_keys[:, :, 1:] - of_two_keys[:, :, :1]


_BUILDERS: dict[str, tuple[str, Any]] = {
    "bloom": ("build_alibi_tensor", _bloom),
    "mpt": ("build_mpt_alibi_tensor", _mpt),
}


def _falcon_biases(
    positions: torch.Tensor, original: Callable[..., torch.Tensor], attention_mask: torch.Tensor, num_heads: int, dtype: torch.dtype
) -> torch.Tensor:  # fmt: skip
    """Biases [heads, 1, S_total], in bfloat16's precision as Falcon computes them."""
    length = int(positions.max()) + 1
    every = original(torch.ones(1, length, dtype=torch.long, device=attention_mask.device), num_heads, dtype)
    return every.index_select(2, positions.to(every.device))
