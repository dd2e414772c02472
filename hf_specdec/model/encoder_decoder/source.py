"""Source: what the encoder has read for one row, and the keys that the decoder's layers make of it."""

from __future__ import annotations

import functools
import inspect
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.cache_utils import DynamicCache, EncoderDecoderCache
from transformers.modeling_outputs import BaseModelOutput

from ...cache import PagedStaticCache
from ...core.errors import UnsupportedModel
from ...core.names import CACHE
from ..attention import own_attention
from ..threads import for_this_thread
from .families import Family, decoder_layers, is_encoder_decoder, mask_of_cross, shares_vocabulary


@dataclass
class Source:
    """What the encoder reads for one row.

    Attributes:
        reader: the model whose encoder reads it.
        length: number of the encoder's states.
        num_blocks: number of blocks for the keys of all rows that may run together.
        given: the encoder's arguments, its tensors [1, ..]; without a main one if the caller passed the encoder's output.
        ids: the ids that the encoder reads, without padding; empty if it reads something else, or has a vocabulary of its own.
        outputs: the encoder's output, its tensors [1, S, ..]; None until `read`.
    """

    reader: PreTrainedModel
    length: int
    num_blocks: int
    given: dict[str, Any] = field(default_factory=dict)
    ids: list[int] = field(default_factory=list)
    outputs: BaseModelOutput | None = None

    @torch.no_grad()
    @own_attention()
    def read(self) -> BaseModelOutput:
        """The encoder's output, which is kept."""
        outputs: Any = self.outputs
        if outputs is None:
            outputs = self.outputs = self.reader.get_encoder()(**self.given, return_dict=True)
        return outputs

    def read_by(self, model: Any) -> Source:
        """The same input for another model's encoder, if it has one.

        Raises:
            UnsupportedModel: that encoder takes other arguments, cannot read these, or the caller passed the encoder's output.
        """
        if model is self.reader or not is_encoder_decoder(model):
            return self
        encoder = model.get_encoder()
        parameters = inspect.signature(encoder.forward).parameters
        given = {name: value for name, value in self.given.items() if name in parameters}
        if not {encoder.main_input_name, "inputs_embeds"} & given.keys():
            raise UnsupportedModel(
                f"{type(model).__name__} cannot draft: its encoder needs {encoder.main_input_name}, which generate() was not given."
            )
        given = {name: part.to(model.dtype) if part.is_floating_point() else part for name, part in given.items()}
        source = Source(model, self.length, self.num_blocks, given, self.ids)
        try:
            source.length = source.read()[0].shape[1]
            source.num_blocks = -(-self.num_blocks * source.length // self.length)
        except (RuntimeError, IndexError) as error:  # features of another size, or a longer text than its positions
            raise UnsupportedModel(
                f"{type(model).__name__} cannot draft: its encoder cannot read the target's input ({error})."
            ) from error
        return source


def sources_of(model: PreTrainedModel, inputs: torch.Tensor, prepared: dict[str, Any], block_size: int) -> list[Source]:
    """The sources of a batch.

    Args:
        inputs: what the caller passed for the encoder, [B / n, ..] for n returned sequences each; -100 if it is the encoder's output.
        prepared: the arguments that `generate()` prepared for the model's forward, [B, ..] each.
        block_size: of the cache.
    """
    outputs: Any = prepared["encoder_outputs"]
    num_rows, returned = outputs[0].shape[0], outputs.get("attention_mask") if isinstance(outputs, dict) else None
    batched = {name: part for name, part in prepared.items() if torch.is_tensor(part) and part.shape[:1] == (num_rows,)}
    given = {name: tensor for name, tensor in batched.items() if not name.startswith("decoder_")}
    inputs = inputs.repeat_interleave(num_rows // inputs.shape[0], dim=0)
    whole = inputs.shape[1] == outputs[0].shape[1]  # else ids that generate() made up beside the encoder's output
    are_ids = whole and not inputs.is_floating_point() and bool((inputs >= 0).all())
    is_text = are_ids and shares_vocabulary(model.config)
    if are_ids or (inputs.is_floating_point() and "inputs_embeds" not in given):
        given[model.get_encoder().main_input_name] = inputs
    mask = given.get("attention_mask") if are_ids else None
    sources = []
    for row in range(num_rows):
        here = slice(row, row + 1)
        output = encoder_output(outputs[0][here], None if returned is None else returned[here])
        ids = (inputs[row] if mask is None else inputs[row][mask[row] != 0]).tolist() if is_text else []
        arguments = {name: tensor[here] for name, tensor in given.items()}
        length = outputs[0].shape[1]
        sources.append(Source(model, length, num_rows * -(-length // block_size), arguments, ids, output))
    return sources


def encoder_output(last_hidden_state: torch.Tensor, attention_mask: torch.Tensor | None = None) -> BaseModelOutput:
    """An encoder's output [B, S, H], with the mask that some encoders return."""
    output = BaseModelOutput(last_hidden_state=last_hidden_state)  # pyright: ignore[reportArgumentType]
    output.attention_mask = attention_mask  # pyright: ignore[reportAttributeAccessIssue]
    return output


def encoder_width(model: PreTrainedModel) -> int:
    """Size of the encoder's states."""
    encoder = getattr(model.config, "encoder", model.config)
    return getattr(encoder, "output_hidden_size", None) or encoder.hidden_size  # speech encoders may end in an adapter


def dummy_sources(model: PreTrainedModel, count: int, device: torch.device) -> list[Source]:
    """Sources of three states each, all different, which no encoder has read: for tests of a decoder."""
    width = encoder_width(model)
    states = torch.sin(torch.arange(1, 3 * count * width + 1, dtype=torch.float32)).view(count, 1, 3, width)
    return [Source(model, 3, 3 * count, outputs=encoder_output(row)) for row in states.to(device, model.dtype)]


@torch.no_grad()
@own_attention()
def read_source(model: Any, family: Family, cache: PagedStaticCache, seq_id: int, source: Source) -> None:
    """Keep the keys and values that a row's layers make of its source. Raises OutOfBlocks: they do not fit; nothing was done."""
    layers = functools.partial(_cross_keys, model, family, source)
    cache.keep_source(seq_id, source.length, layers, source.num_blocks, model.parameters())


def _cross_keys(model: Any, family: Family, source: Source) -> list[Any]:
    """By layer, the keys and values [n, heads, width] of the n states that the decoder may see, from the model's own forward over a token.

    Which ones these are, the mask says that the model gives to its first layer: some encoders shorten the caller's mask, others ignore it.
    """
    outputs, masks = source.read(), []

    def note(module: Any, args: Any, kwargs: dict[str, Any]) -> None:
        masks.append(kwargs.get(mask_of_cross(kwargs)))

    first = decoder_layers(model, family)[0].get_submodule(family.cross)
    cache = EncoderDecoderCache(DynamicCache(), DynamicCache())
    token = torch.zeros(1, 1, dtype=torch.int64, device=outputs[0].device)
    arguments = {f"{family.prefix}input_ids": token, CACHE: cache, "use_cache": True, "return_dict": True}
    if family.prefix:
        arguments["attention_mask"] = source.given.get("attention_mask")
    with first.register_forward_pre_hook(for_this_thread(note, lambda *_: None), with_kwargs=True):
        model(encoder_outputs=outputs, **arguments)
    seen: Any = slice(None)
    if masks[0] is not None:  # [1, S], or [1, 1, 1, S] of truth values or of numbers that are added to scores
        mask = masks[0].reshape(-1)
        seen = mask == 0 if mask.is_floating_point() else mask != 0
        if not seen.any():
            raise ValueError(
                "attention_mask hides all of a row's input from the decoder: leave at least one position unmasked."
            )
    layers: Any = cache.cross_attention_cache.layers
    return [tuple(states[0, :, seen].transpose(0, 1) for states in (layer.keys, layer.values)) for layer in layers]
