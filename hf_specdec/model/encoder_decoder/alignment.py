"""When the tokens of a transcript are spoken: where in its source each of them attends (Whisper)."""

from __future__ import annotations

import contextlib
import functools
from typing import Any

import torch
from transformers.generation.utils import GenerateEncoderDecoderOutput

from ..attention import own_attention
from ..threads import for_this_thread
from .families import FAMILIES, decoder_layers
from .source import Source


@torch.no_grad()
@own_attention()
def token_times(model: Any, source: Source, ids: list[int], num_given: int, num_frames: int) -> list[float]:
    """For every token, the second after the window's beginning at which it ends, by the rules of Whisper's `generate()`.

    Paged attention forms no weights. So the model reads the text once more, and those of its alignment heads are computed beside it.

    Args:
        source: the window's.
        ids: a transcript, of which the first `num_given` are not spoken: their time is 0.
        num_frames: frames of the window that hold the recording.
    """
    heads, outputs = model.generation_config.alignment_heads, source.read()
    tokens, states = torch.tensor([ids], device=outputs[0].device), outputs[0]
    # Of layers without such heads, transformers reads the shape only.
    weights = [tokens.new_zeros(1).expand(1, 1, len(ids) - 1, states.shape[1])] * model.config.decoder_layers

    def note(layer: int, module: Any, args: Any, kwargs: dict[str, Any]) -> None:
        asks = args[0] if args else kwargs["hidden_states"]
        queries, keys = (
            project(part).unflatten(2, (-1, module.head_dim)).transpose(1, 2).float()
            for project, part in ((module.q_proj, asks), (module.k_proj, states))
        )
        weights[layer] = (queries * module.scaling @ keys.mT).softmax(-1)

    family = FAMILIES["whisper"]
    with contextlib.ExitStack() as stack:
        for layer in {layer for layer, _ in heads}:
            cross = decoder_layers(model, family)[layer].get_submodule(family.cross)
            seen = for_this_thread(functools.partial(note, layer), lambda *_: None)
            stack.enter_context(cross.register_forward_pre_hook(seen, with_kwargs=True))
        model(encoder_outputs=outputs, decoder_input_ids=tokens[:, :-1], use_cache=False)
    output = GenerateEncoderDecoderOutput(sequences=tokens, cross_attentions=(tuple(weights),))  # pyright: ignore
    (times,) = model._extract_token_timestamps(output, heads, num_frames=max(num_frames, 2), num_input_ids=num_given)
    return times.tolist()
