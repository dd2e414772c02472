"""What a call returns beside the tokens: statistics of speculation, scores, hidden states, a cache to go on with."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from transformers.cache_utils import DynamicCache
from transformers.generation.utils import GenerateDecoderOnlyOutput

from ..cache import PagedStaticCache
from ..runtime import Sequence


@dataclass
class SpeculativeDecoderOnlyOutput(GenerateDecoderOnlyOutput):
    """transformers' own output with `.speculation` (see `Speculation`)."""

    speculation: dict[str, Any] | None = None


class Speculation(dict):
    """What speculation did: a dict whose keys are attributes too.

    Keys: `num_steps` (target forwards a row took part in, summed over rows), `num_draft_tokens`, `num_accepted_tokens`,
    `num_new_tokens`, `mean_accepted_length` (τ: tokens emitted per target forward), `acceptance_rate` (accepted / drafted
    tokens), `acceptance_per_position` (share of the rounds drafting that deep in which the draft token at this depth was
    accepted) and, for a batch, `rows`: the same for each row.
    """

    def __getattr__(self, name: str) -> Any:
        try:
            return self[name]
        except KeyError:
            raise AttributeError(f"Speculation has no {name!r}; it has {', '.join(self)}.") from None


@dataclass
class RowStatistics:
    """Counts of one row."""

    num_steps: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    num_new_tokens: int = 0
    drafted_at: list[int] = field(default_factory=list)
    accepted_at: list[int] = field(default_factory=list)

    def record(self, num_nodes: int, num_new: int, num_accepted: int, depth: int) -> None:
        """Count one verified step: nodes drafted, tokens emitted, drafted tokens among them, depth of the tree."""
        self.num_steps += 1
        self.num_draft_tokens += num_nodes
        self.num_accepted_tokens += num_accepted
        self.num_new_tokens += num_new
        for counts, reached in ((self.drafted_at, depth), (self.accepted_at, num_accepted)):
            counts += [0] * (reached - len(counts))
            for position in range(reached):
                counts[position] += 1

    def __add__(self, other: RowStatistics) -> RowStatistics:
        def total(a: list[int], b: list[int]) -> list[int]:
            width = max(len(a), len(b))
            return [x + y for x, y in zip(a + [0] * (width - len(a)), b + [0] * (width - len(b)), strict=True)]

        return RowStatistics(
            self.num_steps + other.num_steps,
            self.num_draft_tokens + other.num_draft_tokens,
            self.num_accepted_tokens + other.num_accepted_tokens,
            self.num_new_tokens + other.num_new_tokens,
            total(self.drafted_at, other.drafted_at),
            total(self.accepted_at, other.accepted_at),
        )

    def summary(self) -> Speculation:
        """The figures of `Speculation`, without `rows`."""
        accepted = self.accepted_at + [0] * (len(self.drafted_at) - len(self.accepted_at))
        return Speculation(
            num_steps=self.num_steps,
            num_draft_tokens=self.num_draft_tokens,
            num_accepted_tokens=self.num_accepted_tokens,
            num_new_tokens=self.num_new_tokens,
            mean_accepted_length=self.num_new_tokens / self.num_steps if self.num_steps else 0.0,
            acceptance_rate=self.num_accepted_tokens / self.num_draft_tokens if self.num_draft_tokens else 0.0,
            acceptance_per_position=[a / d for a, d in zip(accepted, self.drafted_at, strict=False)],
        )


def summarize(rows: list[RowStatistics]) -> Speculation:
    """All rows together, with each row's own figures under `rows`."""
    total = sum(rows, RowStatistics()).summary()
    total["rows"] = [row.summary() for row in rows]
    return total


@dataclass
class RowTensors:
    """Per-token tensors of one row, collected as tokens are accepted.

    Attributes:
        scores, logits: [n, V] pieces, one row per new token.
        prompt_hidden, hidden: per layer, the prompt's hidden states [prompt, H] and pieces [n, H] for the tokens fed since.
        cache: per layer, keys and values [length, heads, width], taken when the row left.
    """

    scores: list[torch.Tensor] = field(default_factory=list)
    logits: list[torch.Tensor] = field(default_factory=list)
    prompt_hidden: list[torch.Tensor] | None = None
    hidden: list[list[torch.Tensor]] = field(default_factory=list)
    cache: list[tuple[torch.Tensor, torch.Tensor]] | None = None


def per_step(rows: list[list[torch.Tensor]], num_steps: int) -> tuple[torch.Tensor, ...]:
    """Pieces [n, V] per row → transformers' tuple of [B, V] per generated token (0 where a row had already finished)."""
    table: torch.Tensor | None = None
    for i, pieces in enumerate(rows):
        joined = torch.cat(pieces)[:num_steps]
        if table is None:
            table = joined.new_zeros(num_steps, len(rows), joined.shape[1])
        table[: len(joined), i] = joined
    return () if table is None else tuple(table)


def hidden_per_step(rows: list[RowTensors], padding: list[int], width: int, num_steps: int) -> tuple:
    """transformers' hidden_states: for the prompt a tuple over layers of [B, S, H], then per token of [B, 1, H]."""
    first = []
    for layer, example in enumerate(rows[0].prompt_hidden or []):
        states = example.new_zeros(len(rows), width, example.shape[-1])
        for i, row in enumerate(rows):
            assert row.prompt_hidden is not None
            states[i, padding[i] :] = row.prompt_hidden[layer]
        first.append(states)
    steps = [tuple(first)]
    num_layers = len(first)
    by_layer = [per_step_hidden([row.hidden for row in rows], layer, first[layer], num_steps - 1) for layer in range(num_layers)]
    for step in range(num_steps - 1):
        steps.append(tuple(by_layer[layer][step][:, None] for layer in range(num_layers)))
    return tuple(steps)


def per_step_hidden(rows: list[list[list[torch.Tensor]]], layer: int, like: torch.Tensor, num_steps: int) -> torch.Tensor:
    """[num_steps, B, H] of one layer from pieces [n, H] per row."""
    table = like.new_zeros(max(num_steps, 0), len(rows), like.shape[-1])
    for i, pieces in enumerate(rows):
        if pieces:
            joined = torch.cat([piece[layer] for piece in pieces])[:num_steps]
            table[: len(joined), i] = joined
    return table


def read_cache(cache: PagedStaticCache, seq: Sequence) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """A row's keys and values per layer, for the tokens transformers would have cached (all but the last)."""
    length = len(seq.tokens) - 1
    pairs = (cache.read(seq.id, layer) for layer in range(len(cache.layers)))
    return [(keys[:length], values[:length]) for keys, values in pairs]


def fill_dynamic_cache(cache: DynamicCache, rows: list[RowTensors], padding: list[int], length: int) -> None:
    """Write the rows' KV into transformers' cache, left-padded as it would have been: [B, heads, length, width] per layer."""
    for layer in range(len(rows[0].cache or [])):
        states = []
        for which in (0, 1):
            example = rows[0].cache[layer][which]  # type: ignore[index]
            full = example.new_zeros(len(rows), example.shape[1], length, example.shape[2])
            for i, row in enumerate(rows):
                piece = row.cache[layer][which][: length - padding[i]]  # type: ignore[index]
                full[i, :, padding[i] : padding[i] + len(piece)] = piece.transpose(0, 1)
            states.append(full)
        if layer < len(cache.layers) and cache.layers[layer].get_seq_length() > 0:
            cache.layers[layer].keys, cache.layers[layer].values = states
        else:
            cache.update(states[0], states[1], layer)
