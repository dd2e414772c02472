"""What a call returns besides tokens: statistics, scores, hidden states, attention weights and a cache to continue from."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from transformers.cache_utils import DynamicCache
from transformers.generation.utils import GenerateDecoderOnlyOutput, GenerateEncoderDecoderOutput

from ..cache import PagedStaticCache
from ..cache.state_pool import KeptStates
from ..core.names import CACHE
from ..core.sequence import Sequence
from ..model.encoder_decoder import is_encoder_decoder
from ..model.packed_model import PackedModel
from ..model.self_test import evaluating


@dataclass
class SpeculativeDecoderOnlyOutput(GenerateDecoderOnlyOutput):
    """transformers' own output with `.speculation` (see `Speculation`)."""

    speculation: dict[str, Any] | None = None


class SpeculativeEncoderDecoderOutput(GenerateEncoderDecoderOutput):
    """transformers' own output for encoder-decoder models, with `.speculation`, which is no item: Whisper splits every item by row."""

    speculation: Speculation

    @classmethod
    def of(
        cls, speculation: Speculation, hidden_states: tuple | None = None, **more: Any
    ) -> SpeculativeEncoderDecoderOutput:
        """The output of a call; `hidden_states` are the decoder's."""
        output = cls(decoder_hidden_states=hidden_states, **more)
        output.speculation = speculation
        return output


class Speculation(dict):
    """Statistics of speculation: a dict whose keys are attributes too.

    Keys: `num_steps` (target forwards a row took part in, summed over rows), `num_draft_tokens`, `num_accepted_tokens`,
    `num_new_tokens`, `mean_accepted_length` (τ: tokens emitted per target forward), `acceptance_rate` (accepted / drafted
    tokens), `acceptance_per_position` (of the rounds that drafted this deep, the share in which the token at this depth was
    accepted), `drafters` (method "auto": the same figures, by drafter, of the steps it drafted for; those that drafted; with any
    method "prediction" and "grammar", if the rows brought drafts themselves),
    `learning` (where a head learns: the texts, tokens and steps it has learnt from, weights put in place and dropped, seconds, and τ on
    held-out texts), `trace` (if the configuration has it: see `decoding.trace.Trace`), `kv_cache_bytes` (peak memory of the target's KV
    and states) and `rows`: the same figures for each row.
    """

    def __getattr__(self, name: str) -> Any:
        try:
            return self[name]
        except KeyError:
            raise AttributeError(f"Speculation has no {name!r}; it has {', '.join(self)}.") from None


# Of a step: nodes drafted, depth of the tree, tokens emitted, how many of them were drafted.
Counts = tuple[int, int, int, int]
PLAIN: Counts = 0, 0, 1, 0


def _cut(counts: Counts, num_new: int) -> Counts:
    """The same if at most `num_new` tokens are emitted."""
    num_nodes, depth, new, accepted = counts
    return num_nodes, depth, min(new, num_new), min(accepted, new, num_new)


@dataclass
class RowStatistics:
    """Statistics of one row, by verified step; and what of a step with drafts is whose, by the drafter's name (None: there is only one)."""

    steps: list[Counts] = field(default_factory=list)
    shares: list[dict[str | None, Counts]] = field(default_factory=list)
    several: bool = False  # whether there are several drafters, even if none of them drafted
    num_cached_tokens: int = 0  # tokens of its prompt whose KV came from earlier sequences

    def keep(self, num_new: int) -> None:
        """Count only the first `num_new` tokens as emitted, because a stopping criterion dropped the rest."""
        if sum([new for _, _, new, _ in self.steps]) <= num_new:
            return
        of_drafts = iter(self.shares)
        for i, step in enumerate(self.steps):
            left, shares = num_new, next(of_drafts) if step[0] else {}
            for name, share in shares.items():
                shares[name] = _cut(share, left)
                left -= shares[name][2]
            self.steps[i] = _cut(step, num_new)
            num_new -= self.steps[i][2]

    def summary(self) -> Speculation:
        """`Speculation` of this row, without the key `rows`."""
        num_steps, drafted = len(self.steps), [step for step in self.steps if step[0]]
        num_drafted = sum(nodes for nodes, _, _, _ in drafted)
        num_new = sum([new for _, _, new, _ in self.steps])
        num_accepted = sum(accepted for _, _, _, accepted in drafted)
        deepest = max((depth for _, depth, _, _ in drafted), default=0)
        drafted_at = [sum(depth > position for _, depth, _, _ in drafted) for position in range(deepest)]
        accepted_at = [sum(accepted > position for _, _, _, accepted in drafted) for position in range(deepest)]
        out = Speculation(
            num_steps=num_steps,
            num_draft_tokens=num_drafted,
            num_accepted_tokens=num_accepted,
            num_new_tokens=num_new,
            mean_accepted_length=num_new / num_steps if num_steps else 0.0,
            acceptance_rate=num_accepted / num_drafted if num_drafted else 0.0,
            acceptance_per_position=[a / d for a, d in zip(accepted_at, drafted_at, strict=True)],
        )
        names = dict.fromkeys(name for shares in self.shares for name in shares if name is not None)
        if names or self.several:
            by_name = {name: [shares[name] for shares in self.shares if name in shares] for name in names}
            out["drafters"] = {name: RowStatistics(steps).summary() for name, steps in by_name.items()}
        return out


def summarize(rows: list[RowStatistics], kv_cache_bytes: int) -> Speculation:
    """Figures over all rows, and each row's own under `rows`."""
    of_rows = [row.summary() for row in rows]
    if len(rows) == 1:
        return Speculation(of_rows[0], kv_cache_bytes=kv_cache_bytes, rows=of_rows)
    steps, shares = [step for row in rows for step in row.steps], [names for row in rows for names in row.shares]
    total = RowStatistics(steps, shares, any(row.several for row in rows)).summary()
    return Speculation(total, kv_cache_bytes=kv_cache_bytes, rows=of_rows)


@dataclass
class RowTensors:
    """Per-token tensors of one row, collected as tokens are accepted.

    Attributes:
        scores, logits: [V] per new token.
        prompt_hidden: per layer, hidden states [fed, H] of the prompt tokens that were fed (not those in a cache that was passed
            in). Gemma 3n: [fed, A, H].
        hidden: for each step, per layer, the hidden states [n, H] of the n tokens fed in it.
        cache: per layer, keys and values [length, heads, width], taken when the row left; None for a layer that reads another
            layer's, or has none.
        states: number of tokens → the recurrent states after them, near the row's end; empty without recurrent layers.
    """

    scores: list[torch.Tensor] = field(default_factory=list)
    logits: list[torch.Tensor] = field(default_factory=list)
    prompt_hidden: list[torch.Tensor] | None = None
    hidden: list[list[torch.Tensor]] = field(default_factory=list)
    cache: list[tuple[torch.Tensor, torch.Tensor] | None] | None = None
    states: dict[int, KeptStates] = field(default_factory=dict)


def at_step(rows: list[list[torch.Tensor]], step: int) -> torch.Tensor:
    """The rows' tensors [V] of one generated token as [B, V]; zeros where a row had already finished."""
    filler = torch.zeros_like(next(row[step] for row in rows if len(row) > step))
    return torch.stack([row[step] if len(row) > step else filler for row in rows])


def hidden_per_step(
    rows: list[RowTensors],
    columns: list[np.ndarray],
    num_fed: int,
    num_steps: int,
    layers: list[int] | None,
    stacked: bool,
) -> tuple:
    """transformers' hidden_states: a tuple over layers of [B, num_fed, H] for the prompt, then one of [B, 1, H] per token; zeros
    at padding. Layers that have A streams of states return [B, .., A, H]; if they are `stacked`, as those of Gemma 3n, [A, B, .., H].

    Args:
        columns: per row, the columns of the padded prompt that hold its tokens.
        num_fed: how many columns of the padded prompt were fed: the last ones.
        num_steps: generated tokens; the last one was never fed.
        layers: return only these layers, None in place of the others; None: all layers.
    """
    num_layers = len(rows[0].prompt_hidden or [])
    wanted = range(num_layers) if layers is None else {index % num_layers for index in layers}
    by_layer = [
        _layer_hidden(rows, layer, columns, num_fed, num_steps, stacked) if layer in wanted else [None] * num_steps
        for layer in range(num_layers)
    ]
    return tuple(zip(*by_layer, strict=True))


def _layer_hidden(
    rows: list[RowTensors], layer: int, columns: list[np.ndarray], num_fed: int, num_steps: int, stacked: bool
) -> list[torch.Tensor]:
    prompts = [row.prompt_hidden[layer] for row in rows]  # type: ignore[index]
    first = prompts[0].new_zeros(len(rows), num_fed, *prompts[0].shape[1:])
    later = first.new_zeros(len(rows), num_steps - 1, *first.shape[2:])
    for i, row in enumerate(rows):
        places = columns[i][len(columns[i]) - len(prompts[i]) :] - (columns[i][-1] + 1 - num_fed)
        first[i, torch.from_numpy(places).to(first.device)] = prompts[i]
        fed = torch.cat([piece[layer] for piece in row.hidden])[: num_steps - 1]
        later[i, : len(fed)] = fed
    every = [first, *(later[:, step : step + 1] for step in range(num_steps - 1))]
    return [states.movedim(2, 0) for states in every] if stacked and first.dim() == 4 else every


def read_cache(cache: PagedStaticCache, seq: Sequence) -> list[tuple[torch.Tensor, ...] | None]:
    """Per layer, the states (see PagedLayer) of the row's tokens that were fed; None for a layer that reads another layer's keys."""
    length = len(seq.tokens)
    layers = cache.read(seq.id)
    return [None if states is None else tuple(tensor[:length] for tensor in states) for states in layers]


def fill_dynamic_cache(cache: DynamicCache, rows: list[RowTensors], columns: list[np.ndarray], length: int) -> None:
    """Write the rows' KV to the places transformers would have used: [B, heads, length, width] per layer."""
    places = [_as_slice(np.concatenate([prompt, np.arange(prompt[-1] + 1, length)])) for prompt in columns]
    for layer, example_pair in enumerate(rows[0].cache or []):
        if example_pair is None:
            continue
        states = []
        for which in range(len(example_pair)):
            example = example_pair[which]
            full = example.new_zeros(len(rows), example.shape[1], length, example.shape[2])
            for i, row in enumerate(rows):
                place, piece = places[i], row.cache[layer][which].transpose(0, 1)  # type: ignore[index]
                # An index would be one more copy to the device, which takes longer than all else here.
                if isinstance(place, slice):
                    place = slice(place.start, min(place.stop, place.start + piece.shape[1]))
                    full[i, :, place] = piece[:, : place.stop - place.start]
                else:
                    piece = piece[:, : len(place)]
                    full[i, :, place[: piece.shape[1]].to(full.device)] = piece
            states.append(full)
        there: Any = cache.layers[layer] if layer < len(cache.layers) else None
        if there is not None and there.get_seq_length() > 0:
            there.keys, there.values = states[:2]
            there.is_indexer_initialized = False
        else:
            cache.update(states[0], states[1], layer)
        if len(states) > 2:
            cache.update_indexer(states[2][:, 0], layer)


def _as_slice(places: np.ndarray) -> slice | torch.Tensor:
    """Ascending places as a slice, if none is left out."""
    first, end = int(places[0]), int(places[-1]) + 1
    return slice(first, end) if end - first == len(places) else torch.from_numpy(places)


def read_states(cache: PagedStaticCache, seq: Sequence, counts: list[int]) -> dict[int, KeptStates]:
    """Copies of a row's states after each of these numbers of tokens, where they were kept."""
    if cache.states is None:
        return {}
    kept = {count: cache.states.copy(seq.id, count) for count in counts}
    return {count: states for count, states in kept.items() if states is not None}


def fill_states(cache: DynamicCache, rows: list[KeptStates]) -> None:
    """Write the rows' states to transformers' cache, which has a layer for each."""
    for layer in rows[0].conv:
        conv = torch.stack([row.conv[layer] for row in rows])
        cache.update_conv_state(conv, layer, conv_kernel_size=conv.shape[-1])
    for layer in rows[0].recurrent:
        cache.update_recurrent_state(torch.stack([row.recurrent[layer] for row in rows]), layer)


def check_attention_weights(target: PackedModel, is_more: bool) -> None:
    """Raise ValueError if `attention_weights` could not compute them. `is_more`: rows are more than token ids that the model has not read
    yet."""
    why, shared = None, bool(getattr(target.config, "num_kv_shared_layers", 0))
    if target.config._attn_implementation != "eager":
        why = "transformers forms them with attn_implementation='eager' only: load the model with it"
    elif is_more:
        why = "the prompt must be token ids without a cache, virtual tokens, or rows with adapters of their own"
    elif target.quantizes_cache:
        why = "the model would form them of exact keys, and kv_cache_dtype 'int8' rounds the keys"
    elif target.ranks is not None or target.recurrent is not None or target.segments or shared:
        why = f"{type(target.model).__name__} is sharded, or has layers that do not attend to keys of their own"
    if why is not None:
        raise ValueError(
            f"output_attentions cannot be served with speculative_config: {why}; or leave output_attentions out."
        )


@torch.no_grad()
def attention_weights(
    target: PackedModel, prompts: torch.Tensor, ids: torch.Tensor, inputs: dict[str, Any]
) -> dict[str, tuple]:
    """What `generate()` returns for `output_attentions`, by name: for every step and layer the weights [B, heads, queries, keys]. The first
    step's queries are the prompts. A later step has one query, and the keys that the layer's cache has then.

    Paged attention forms no weights. So the model reads the prompts and then all that was written, in two forwards of its own.

    Args:
        prompts, ids: int64 [B, S] and [B, S + n], without and with what was written.
        inputs: the arguments that `generate()` prepared for the model's forward.
    """
    model: Any = target.model
    with_encoder, count = is_encoder_decoder(model), ids.shape[1] - 1 - prompts.shape[1]
    names = ("decoder_attentions", "cross_attentions") if with_encoder else ("attentions",)
    inputs = {**inputs, "use_cache": True, "output_attentions": True}
    if not with_encoder:
        inputs[CACHE] = DynamicCache(config=target.config)
    cache = inputs[CACHE].self_attention_cache if with_encoder else inputs[CACHE]
    with evaluating(model), target.reading():
        given = model.prepare_inputs_for_generation(prompts, is_first_iteration=True, **inputs)
        output = model(**given, return_dict=True)
        steps = {name: [tuple(output.get(name) or ())] for name in names}
        if count:
            inputs = model._update_model_kwargs_for_generation(output, inputs, with_encoder, num_new_tokens=count)
            given = model.prepare_inputs_for_generation(ids[:, :-1], next_sequence_length=count, **inputs)
            output = model(**given, return_dict=True)
    for name in names if count else ():
        if not output.get(name):  # a model that returns none
            steps[name] += [()] * count
            continue
        windows = [getattr(layer, "sliding_window", None) for layer in cache.layers]
        grows = name != "cross_attentions"
        by_layer = [_by_query(*pair, grows) for pair in zip(output[name], windows, strict=True)]
        steps[name] += zip(*by_layer, strict=True)
    encoder = {"encoder_attentions": inputs["encoder_outputs"].get("attentions")} if with_encoder else {}
    return {name: tuple(steps[name]) for name in names} | encoder


def _by_query(weights: torch.Tensor, window: int | None, grows: bool) -> list[torch.Tensor]:
    """The weights [B, heads, n, keys] of n queries as n tensors [B, heads, 1, keys], where the last queries' own keys are not seen by those
    before (`grows`), and a cache holds the keys of a `window` only."""
    ends = weights.shape[3] - np.arange(weights.shape[2])[::-1] if grows else [weights.shape[3]] * weights.shape[2]
    starts = [max(end - window, 0) if grows and window is not None else 0 for end in ends]
    return [weights[:, :, i : i + 1, start:end] for i, (start, end) in enumerate(zip(starts, ends, strict=True))]
