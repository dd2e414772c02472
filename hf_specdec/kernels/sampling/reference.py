"""Temperature, top-k, top-p, min-p and noise in plain torch: the definition, and the CPU path."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from .. import random_bits

DRAWS_PER_ROUND = 4096  # the most draws of a row at one position


@dataclass
class RowParameters:
    """Parameters and random streams of B rows. A parameter that is None is off in all rows.

    Attributes:
        seeds, positions, steps: int64 [B], each row's stream, the index of its next token, and its round.
        do_sample: bool [B].
        temperature, top_p, min_p: float32 [B], off at 1, 1 and 0.
        top_k: int32 [B], off at 0.
    """

    seeds: torch.Tensor
    positions: torch.Tensor
    steps: torch.Tensor
    do_sample: torch.Tensor
    temperature: torch.Tensor | None = None
    top_k: torch.Tensor | None = None
    top_p: torch.Tensor | None = None
    min_p: torch.Tensor | None = None

    @property
    def removes(self) -> bool:
        """True if top-k, top-p or min-p may remove tokens."""
        return any(setting is not None for setting in (self.top_k, self.top_p, self.min_p))

    @property
    def are_off(self) -> bool:
        """True if scores equal the logits."""
        return self.temperature is None and not self.removes

    def noise_keys(
        self, logits: torch.Tensor, rows: torch.Tensor | None, ahead: int, shared: bool
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Seeds, positions and steps of the noise of logits [R, F, V]: int64 [R F] each."""
        owners = owners_of(logits, rows)
        seeds, positions = self.seeds[owners], self.positions[owners] + ahead
        if shared:
            return seeds, positions, torch.zeros_like(seeds)
        ranks = torch.arange(logits.shape[1], device=logits.device).repeat(len(logits))
        return seeds, positions, self.steps[owners] * DRAWS_PER_ROUND + ranks


def owners_of(logits: torch.Tensor, rows: torch.Tensor | None) -> torch.Tensor:
    """Which of the B rows each of the R F rows of logits [R, F, V] belongs to, int64 [R F]."""
    rows = torch.arange(len(logits), device=logits.device) if rows is None else rows
    return rows.repeat_interleave(logits.shape[1])


def sampling_scores(logits, temperature=None, top_k=None, top_p=None, min_p=None) -> torch.Tensor:
    """Apply temperature, top-k, top-p (Holtzman et al. 2020) and min-p (Nguyen et al. 2024), with one sort for the last three.

    It keeps what the warpers of transformers keep one after another: top-k keeps all tokens that equal the k-th, top-p removes
    equal tokens in the order of an ascending sort, min-p is relative to the likeliest token. None of them removes the likeliest.

    Args:
        logits: [R, V].
        temperature, top_k, top_p, min_p: numbers, or tensors [R] in which 1, 0, 1 and 0 are off. None: off in all rows.

    Returns: [R, V], removed tokens at -inf.
    """
    temperature, top_k, top_p, min_p = (
        setting[:, None] if isinstance(setting, torch.Tensor) else setting
        for setting in (temperature, top_k, top_p, min_p)
    )
    scores = logits if temperature is None else logits / temperature
    if top_k is None and top_p is None and min_p is None:
        return scores
    vocab = scores.shape[-1]
    values, order = scores.sort(dim=-1, descending=False)  # ascending, as transformers' top-p breaks ties
    removed = torch.zeros_like(values, dtype=torch.bool)
    if isinstance(top_k, torch.Tensor):
        kth = values.gather(-1, (vocab - top_k).clamp(0, vocab - 1).long())
        removed |= (values < kth) & (top_k > 0)
    elif top_k is not None:
        removed |= values < values[..., -min(top_k, vocab), None]
    if top_p is not None:
        kept = values.masked_fill(removed, float("-inf"))
        below = kept.softmax(dim=-1).cumsum(dim=-1) <= 1 - top_p
        below[..., -1] = False
        removed |= below & (top_p < 1)
    if min_p is not None:
        probs = values.masked_fill(removed, float("-inf")).softmax(dim=-1)
        low = probs < min_p * probs[..., -1:]
        low[..., -1] = False
        removed |= low
    return scores.masked_fill(torch.zeros_like(removed).scatter(-1, order, removed), float("-inf"))


def apply_parameters(logits: torch.Tensor, parameters: RowParameters, rows: torch.Tensor | None = None) -> torch.Tensor:
    """Logits over temperature, tokens removed by top-k, top-p and min-p at -inf: float32 [R, F, V].

    Returns the logits themselves if all parameters are off.
    """
    if parameters.are_off:
        return logits
    owners = owners_of(logits, rows)
    given = (parameters.temperature, parameters.top_k, parameters.top_p, parameters.min_p)
    per_row = (None if parameter is None else parameter[owners] for parameter in given)
    return sampling_scores(logits.flatten(0, 1), *per_row).view(logits.shape)


def noisy_scores(
    logits: torch.Tensor,
    parameters: RowParameters,
    ahead: int,
    stream: int,
    shared: bool,
    rows: torch.Tensor | None = None,
    applied: bool = False,
) -> torch.Tensor:
    """As `apply_parameters`, plus Gumbel noise in rows that sample: their argmax is a draw. Float32 [R, F, V].

    Args:
        ahead: distance from each row's `positions` to the chosen token.
        stream: one of the streams of `random_bits`.
        shared: the F draws of a row use the same noise, in every round; otherwise each has its own.
        applied: the logits already come from `apply_parameters`.
    """
    count = 1 if shared else logits.shape[1]
    keys = parameters.noise_keys(logits[:, :count], rows, ahead, shared)
    noise = random_bits.gumbel(*keys, stream, logits.shape[2]).view(len(logits), count, -1)
    scores = logits if applied else apply_parameters(logits, parameters, rows)
    do_sample = parameters.do_sample if rows is None else parameters.do_sample[rows]
    return torch.where(do_sample[:, None, None], scores + noise, scores)


def choices(
    logits: torch.Tensor, parameters: RowParameters, ahead: int, rows: torch.Tensor | None = None
) -> torch.Tensor:
    """The argmax of `noisy_scores` with shared noise of TOKEN_STREAM: int64 [R, F]. Kernels read the logits once."""
    scores = apply_parameters(logits, parameters, rows).flatten(0, 1)
    do_sample = parameters.do_sample if rows is None else parameters.do_sample[rows]
    row_of = torch.arange(len(logits), device=logits.device).repeat_interleave(logits.shape[1])
    keys = parameters.noise_keys(logits[:, :1], rows, ahead, shared=True)
    drawn = random_bits.noisy_argmax(scores, *keys, random_bits.TOKEN_STREAM, row_of)
    return torch.where(do_sample[row_of], drawn, scores.argmax(1)).view(logits.shape[:2])


def choose_tokens(
    scores: torch.Tensor, seeds: list[int], positions: list[int], do_sample: list[bool], stream: int
) -> torch.Tensor:
    """One token per row of scores [R, V], int64 [R]: the argmax of the scores, to which rows that sample add Gumbel noise.

    Args:
        seeds, positions, do_sample: per row of scores, on the host; `positions` is the index of the chosen token.
    """
    sampled = [i for i, sample in enumerate(do_sample) if sample]
    if not sampled:
        return scores.argmax(1)
    # Nodes of one row at one depth share their noise: make each once.
    keys: dict[tuple[int, int], int] = {}
    which = [keys.setdefault((seeds[i], positions[i]), len(keys)) for i in sampled]
    key_seeds, key_positions, rows = (
        torch.tensor(values, device=scores.device)
        for values in ([seed for seed, _ in keys], [position for _, position in keys], which)
    )
    noise = (key_seeds, key_positions, torch.zeros_like(key_seeds), stream, rows)
    if len(sampled) == len(do_sample):
        return random_bits.noisy_argmax(scores.float(), *noise)  # noise is never rounded to the logits' precision
    chosen = scores.argmax(1)
    index = torch.tensor(sampled, device=scores.device)
    chosen[index] = random_bits.noisy_argmax(scores[index].float(), *noise)
    return chosen
