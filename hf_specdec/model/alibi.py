"""ALiBi, and GPT-Neo's masks, over packed rows: biases follow each key's position in its own text, not its place in memory."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from transformers import PreTrainedModel
from transformers.models.falcon import modeling_falcon

from .functions import ModuleFunctions
from .threads import for_this_thread

if TYPE_CHECKING:
    from .packed_batch import PackedBatch


def is_needed(model: PreTrainedModel) -> bool:
    """True if `packed` changes anything for the model."""
    kind = model.config.model_type
    if kind == "falcon":
        return model.config.alibi
    return (kind in _BUILDERS or kind == "gpt_neo") and hasattr(model, "transformer")


@contextlib.contextmanager
def packed(model: PreTrainedModel, batch: PackedBatch) -> Iterator[None]:
    """Inside the context, the biases of a model for which this `is_needed` follow the packed keys' real positions."""
    if model.config.model_type == "gpt_neo":
        decoder: Any = model.transformer
        layers = [block.attn.attention for block in decoder.h]
        for layer in layers:
            window = model.config.window_size if layer.attention_type == "local" else None
            mask = batch.dense_mask(window, torch.float32, layer.bias.device) == 0
            vars(layer)["bias"] = _Sliced(for_this_thread(lambda _, mask=mask: mask, layer.bias.__getitem__))
        try:
            yield
        finally:
            for layer in layers:
                del vars(layer)["bias"]
        return
    if model.config.model_type == "falcon":
        functions = ModuleFunctions.of(modeling_falcon, biases="build_alibi_tensor")
        with functions.replaced(biases=functools.partial(_falcon_biases, torch.from_numpy(batch.key_positions()))):
            yield
        return
    inner, (name, make) = model.transformer, _BUILDERS[model.config.model_type]
    original = getattr(inner, name)
    setattr(inner, name, for_this_thread(make(original, batch), original))
    try:
        yield
    finally:
        delattr(inner, name)


class _Sliced:
    """What GPT-Neo's layers take in place of their causal buffer, which they slice by places in memory."""

    def __init__(self, slice_of: Callable[[Any], torch.Tensor]):
        self._slice_of = slice_of

    def __getitem__(self, index: Any) -> torch.Tensor:
        return self._slice_of(index)


def _bloom(original: Callable[..., torch.Tensor], batch: PackedBatch) -> Callable[..., torch.Tensor]:
    """Biases [heads, 1, S_total]; BLOOM derives positions from a padding mask."""
    positions = torch.from_numpy(batch.key_positions())

    def biases(attention_mask, num_heads, dtype):
        slopes = _slopes(original(torch.ones(1, 2, device=attention_mask.device), num_heads, torch.float32))
        return (slopes * positions.to(slopes.device)).to(dtype)

    return biases


def _mpt(original: Callable[..., torch.Tensor], batch: PackedBatch) -> Callable[..., torch.Tensor]:
    """Biases [heads, 1, S_total]; MPT counts back from the last key, which is here the last of each row."""
    ends = np.cumsum([row.start + row.num_tokens for row in batch.inputs])
    rows = np.split(batch.key_positions(), ends[:-1])
    positions = torch.from_numpy(np.concatenate([places - places.max() for places in rows]))

    def biases(num_heads, sequence_length, alibi_bias_max=8, device=None):
        slopes = _slopes(original(num_heads, 2, alibi_bias_max, device))
        return slopes * positions.to(slopes.device)

    return biases


def _slopes(of_two_keys: torch.Tensor) -> torch.Tensor:
    """[heads, 1, 1] from the biases of two keys, [heads, 1, 2]."""
    return of_two_keys[:, :, 1:] - of_two_keys[:, :, :1]


_BUILDERS: dict[str, tuple[str, Any]] = {
    "bloom": ("build_alibi_tensor", _bloom),
    "mpt": ("build_mpt_alibi_tensor", _mpt),
}


def _falcon_biases(
    positions: torch.Tensor,
    original: Callable[..., torch.Tensor],
    attention_mask: torch.Tensor,
    num_heads: int,
    dtype: torch.dtype,
) -> torch.Tensor:
    """Biases [heads, 1, S_total], in bfloat16's precision as Falcon computes them."""
    length = int(positions.max()) + 1
    every = original(torch.ones(1, length, dtype=torch.long, device=attention_mask.device), num_heads, dtype)
    return every.index_select(2, positions.to(every.device))
