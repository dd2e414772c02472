"""The forward of an encoder-decoder model over packed rows: its arguments, and what is replaced in its decoder meanwhile."""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from transformers.cache_utils import Cache, EncoderDecoderCache

from ...cache.paged_layer import PagedLayer
from ...core.names import CACHE
from ..attention import attend_next_to
from ..packed_batch import PackedBatch
from ..positions import at_positions
from ..threads import replaced_method
from .families import Family, decoder_layers, decoder_of, mask_of_cross
from .source import encoder_output, encoder_width


class _CrossLayer:
    """One layer's keys and values of the rows' sources, as the model's layers read them. Reading the keys lets the next call of our
    attention read these, because nothing else tells a layer's two calls apart."""

    def __init__(self, batch: PackedBatch, pools: PagedLayer):
        self._batch, self._pools = batch, pools

    @property
    def keys(self) -> torch.Tensor:
        if not self._batch.gather:
            attend_next_to(self._batch)
        return self._of_rows(self._pools.keys)

    @property
    def values(self) -> torch.Tensor:
        return self._of_rows(self._pools.values)

    def _of_rows(self, pool: torch.Tensor) -> torch.Tensor:
        """[1, heads, S_total, width]; where attention reads pages, one of them stands for all."""
        read = self._batch.on(pool.device).read_slots
        return (pool[:1] if read is None else pool.index_select(0, read)).transpose(0, 1)[None]


class CrossCache(Cache):
    """The keys and values of the rows' sources or images, for a forward of a batch."""

    def __init__(self, batch: PackedBatch):
        self._num_keys, layers = batch.num_keys, [_CrossLayer(batch, pools) for pools in batch.cache.layers]
        super().__init__(layers=layers)  # pyright: ignore[reportArgumentType] (the model's layers only read them)

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Number of keys of all rows; transformers reads them only if there are some."""
        return self._num_keys


def arguments(model: Any, family: Family, batch: PackedBatch, masks: Any) -> dict[str, Any]:
    """The arguments of the model's forward over a batch, all but those that every model takes."""
    attend_next_to(None)
    # No layer reads these, but a pair projects them to its decoder's width.
    states = torch.zeros(1, 1, encoder_width(model), dtype=model.dtype, device=batch.input_ids.device)
    given = {
        "encoder_outputs": encoder_output(states),
        CACHE: EncoderDecoderCache(batch.cache, CrossCache(batch.cross)),
        f"{family.prefix}input_ids": batch.input_ids,
        f"{family.prefix}attention_mask": masks,
    }
    if family.positions == "argument":
        given[f"{family.prefix}position_ids"] = batch.position_ids
    return given


@contextlib.contextmanager
def replaced(model: Any, family: Family, batch: PackedBatch) -> Iterator[None]:
    """Inside the context, the decoder's positions and masks are those of the batch, for this thread."""
    layers, embed = decoder_layers(model, family), getattr(decoder_of(model, family), "embed_positions", None)
    with contextlib.ExitStack() as stack:
        stack.callback(attend_next_to, None)  # an error may come between a layer's keys and its attention

        def replace(module: Any, name: str, ours: Callable) -> None:
            stack.enter_context(replaced_method(module, name, functools.partial(ours, batch)))

        if family.positions == "table":
            replace(embed, "forward", at_positions)
        elif family.positions == "ids":
            replace(embed, "create_position_ids_from_input_ids", _numbered)
        elif family.positions == "bias":
            for attention in [layer.get_submodule(family.itself) for layer in layers]:
                if attention.has_relative_attention_bias:
                    replace(attention, "compute_bias", _biases if batch.gather else _biases_by_distance)
        for layer in layers if batch.gather else ():
            replace(layer.get_submodule(family.cross), "forward", _masked)
        yield


def _numbered(
    batch: PackedBatch, original: Callable, input_ids: torch.Tensor, padding_idx: int, *_: Any
) -> torch.Tensor:
    """Rows [1, T] of a table that has a vector for padding, and positions after it."""
    if not _has(batch, padding_idx):  # a program knows no conditions
        return batch.position_ids + (padding_idx + 1)
    return torch.where(input_ids == padding_idx, padding_idx, batch.position_ids + padding_idx + 1)


def _has(batch: PackedBatch, token: int) -> bool:
    return batch.input_ids.device.type != "cpu" or bool((batch.input_ids.numpy() == token).any())


def follows_program(model: Any, family: Family, batch: PackedBatch, weights: list[torch.Tensor]) -> bool:
    """False if the model computes this batch otherwise than a program of these weights: it looks for padding among ids, or its table grows
    or has grown."""
    if family.positions != "ids":
        return True
    table = decoder_of(model, family).embed_positions
    last = int(batch.position_ids.max()) + table.padding_idx + 1
    is_read = last < len(table.weights) and any(weight is table.weights for weight in weights)
    return is_read and not _has(batch, table.padding_idx)


def _masked(batch: PackedBatch, original: Callable, *args: Any, **kwargs: Any) -> Any:
    """The attention to the sources: every token sees the keys of its row."""
    states = args[0] if args else kwargs["hidden_states"]
    return original(
        *args, **{**kwargs, mask_of_cross(kwargs): batch.cross.dense_mask(None, states.dtype, states.device)}
    )


def _biases_by_distance(batch: PackedBatch, original: Callable, *_: Any, **__: Any) -> Callable[[int], torch.Tensor]:
    """See `Biases`: what our attention adds. It holds the layer weakly, as programs keep it."""
    layer = weakref.ref(original.__self__)  # pyright: ignore[reportFunctionMemberAccess]

    def biases(count: int) -> torch.Tensor:
        attention: Any = layer()
        of_last = type(attention).compute_bias(attention, 1, count, past_seen_tokens=count - 1)
        return of_last[0, :, 0].flip(1).T.contiguous()

    # T5's layers share it. Programs, which keep it, run on CPUs.
    return biases if batch.input_ids.device.type == "cpu" else functools.cache(biases)


def _biases(
    batch: PackedBatch, original: Callable, num_queries: int, num_keys: int, device: Any = None, **_: Any
) -> torch.Tensor:
    """Biases [1, heads, T, S_total] by the distances of real positions; a decoder's biases for later keys are those of distance 0."""
    keys = batch.key_positions()
    ends = np.cumsum([row.start + row.num_tokens for row in batch.inputs])
    queries = np.concatenate([keys[end - row.num_tokens : end] for row, end in zip(batch.inputs, ends, strict=True)])
    last = int(queries.max())
    distances = torch.from_numpy(np.minimum(keys - queries[:, None], 0) + last)
    return original(1, last + 1, device=device, past_seen_tokens=last)[:, :, 0][:, :, distances.to(device)]
