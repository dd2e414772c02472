"""A batch: texts padded on the right, the tokens that count, and the target's hidden states; and the order of batches, a function of
seed, epoch and lengths, so that a run can be resumed."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace

import numpy as np
import torch
import torch.nn.functional as F
from torch.nn.utils.rnn import pad_sequence

from .data import Sample

_POOL = 32  # batches whose samples are sorted by length together


@dataclass
class Batch:
    """B texts (see the package's docstring for the alignment).

    Attributes:
        input_ids: int64 [B, S].
        lengths: int64 [B], tokens of each row; the rest is padding.
        loss_mask: bool [B, S], tokens of answers; False on padding.
        last_hidden: [B, S, H] or None, the target's final hidden states after the last norm.
        layers: {i: [B, S, H]}, of the tapped layers.
    """

    input_ids: torch.Tensor
    lengths: torch.Tensor
    loss_mask: torch.Tensor
    last_hidden: torch.Tensor | None = None
    layers: dict[int, torch.Tensor] = field(default_factory=dict)

    @property
    def present(self) -> torch.Tensor:
        """bool [B, S]: not padding."""
        positions = torch.arange(self.input_ids.shape[1], device=self.input_ids.device)
        return positions < self.lengths[:, None]

    @property
    def position_ids(self) -> torch.Tensor:
        """int64 [1, S], the same for every row."""
        return torch.arange(self.input_ids.shape[1], device=self.input_ids.device)[None]

    def hidden(self) -> torch.Tensor:
        """`last_hidden`, for trainers whose taps include it."""
        assert self.last_hidden is not None
        return self.last_hidden

    def labels(self, guess: int) -> tuple[torch.Tensor, torch.Tensor]:
        """For every t: x_{t+2+guess} [B, S], and whether it exists and counts, bool [B, S]."""
        return self.ahead(self.input_ids, 2 + guess), self.ahead(self.loss_mask, 2 + guess)

    @staticmethod
    def ahead(tensor: torch.Tensor, steps: int) -> torch.Tensor:
        """`tensor` shifted: position t of the result [B, S, ..] is `tensor` at t + steps; zero (False) beyond the end."""
        moved = tensor[:, steps:]
        missing = tensor.shape[1] - moved.shape[1]
        return F.pad(moved, (0, 0) * (tensor.dim() - 2) + (0, missing))

    def to(self, device: torch.device) -> Batch:
        """The batch on a device."""
        moved = {name: value.to(device) for name, value in vars(self).items() if isinstance(value, torch.Tensor)}
        return replace(self, **moved, layers={index: states.to(device) for index, states in self.layers.items()})


@dataclass
class Places:
    """The places u >= 1 in a batch whose next token x_{u+1} counts, latest first.

    Step s guesses x_{u+1} in column u - 1 - s; places that have this column come first. With `stride` 0 all steps guess in
    column u - 1, as a draft does, and step s guesses x_{u+1+s}.

    Attributes:
        rows, places: int64 [N].
        size: B and S of the batch.
        taken: per step, which of the places are guessed.
        shares: per step, how many of the places that have a column are guessed.
        runs: per step, the columns int64 [B, C] that it runs, which the step before has first; None: all.
    """

    rows: torch.Tensor
    places: torch.Tensor
    num_steps: int
    size: torch.Size
    stride: int = 1

    def __post_init__(self) -> None:
        counts = [(self.places > step * self.stride).sum() for step in range(self.num_steps)]
        self.taken: list[slice | torch.Tensor] = [slice(count) for count in torch.stack(counts).tolist()]
        self.shares: list[float] = [1.0] * self.num_steps
        self.runs: list[torch.Tensor | None] = [None] * self.num_steps

    @classmethod
    def of(cls, batch: Batch, num_steps: int, stride: int = 1) -> Places:
        """All such places of a batch."""
        mask = batch.ahead(batch.loss_mask, 1)
        mask[:, 0] = False
        rows, places = mask.nonzero(as_tuple=True)
        order = places.argsort(descending=True, stable=True)
        return cls(rows[order], places[order], num_steps, batch.input_ids.shape, stride)

    def keep(self, mask: torch.Tensor) -> Places:
        """The places where `mask` [N] is True."""
        return replace(self, rows=self.rows[mask], places=self.places[mask])

    def sampled(self, ratio: float) -> Places:
        """With fewer columns at later steps: of the n columns of a row that guess, step s keeps ceil(n ratio^s), drawn at random from
        those that step s - 1 keeps (COD sampling of P-EAGLE, https://arxiv.org/abs/2602.01469).
        """
        fewer, used = replace(self), self.used()
        drawn = torch.rand(used.shape, device=used.device).masked_fill(~used, -1.0)
        order = drawn.argsort(dim=1, descending=True)
        ranks, count = order.argsort(dim=1).flatten(), used.sum(1)
        for step in range(1, self.num_steps):
            kept = torch.ceil(count * ratio**step)
            chosen = ranks[self.columns(step)] < kept[self.rows[self.taken[step]]]
            fewer.taken[step] = taken = chosen.nonzero()[:, 0]
            fewer.shares[step] = len(taken) / max(1, len(chosen))
            fewer.runs[step] = order[:, : max(1, int(kept.max()))]
        return fewer

    def at(self, states: torch.Tensor) -> torch.Tensor:
        """Values [N, ..] of a tensor [B, S, ..] at the places u."""
        return states.flatten(0, 1).index_select(0, self.rows * self.size[1] + self.places)

    def guessed(self, states: torch.Tensor, step: int) -> torch.Tensor:
        """Values [n, ..] of a tensor [B, S, ..] at the columns that guess at `step`."""
        return states.flatten(0, 1).index_select(0, self.columns(step))

    def columns(self, step: int) -> torch.Tensor:
        """The columns that guess at `step`, int64 [n], numbered through all rows."""
        taken = self.taken[step]
        return self.rows[taken] * self.size[1] + self.places[taken] - 1 - step * self.stride

    def used(self) -> torch.Tensor:
        """bool [B, S]: the columns that guess at some step."""
        used = torch.zeros(self.size.numel(), dtype=torch.bool, device=self.rows.device)
        for step in range(self.num_steps):
            used[self.columns(step)] = True
        return used.view(self.size)


def batches(lengths: np.ndarray, tokens_per_batch: int) -> list[np.ndarray]:
    """Group consecutive samples into batches of at most `tokens_per_batch` padded tokens; a longer sample gets a batch of its own."""
    out, first, widest = [], 0, 0
    for i, length in enumerate(lengths.tolist()):
        widest = max(widest, length)
        if i > first and widest * (i + 1 - first) > tokens_per_batch:
            out.append(np.arange(first, i))
            first, widest = i, length
    return [*out, np.arange(first, len(lengths))] if len(lengths) else []


class BatchOrder:
    """Batches of samples with similar lengths, shuffled every epoch. A step has `per_step` of them: those left over at the end of an
    epoch are dropped; too few for one step are repeated.
    """

    def __init__(self, lengths: list[int], tokens_per_batch: int, per_step: int, seed: int):
        self.lengths, self.seed = np.asarray(lengths), seed
        self.tokens_per_batch, self.per_step = tokens_per_batch, per_step

    def epoch(self, epoch: int) -> list[list[np.ndarray]]:
        """The steps of an epoch: lists of `per_step` batches, each an array of sample indices."""
        rng = np.random.default_rng([self.seed, epoch])
        order = rng.permutation(len(self.lengths))
        mean = max(1.0, float(self.lengths.mean()))
        pool = max(1, int(_POOL * self.tokens_per_batch / mean))
        pools = (order[i : i + pool] for i in range(0, len(order), pool))
        by_length = np.concatenate([part[np.argsort(self.lengths[part], kind="stable")] for part in pools])
        parts = [by_length[part] for part in batches(self.lengths[by_length], self.tokens_per_batch)]
        parts = [parts[i] for i in rng.permutation(len(parts))]
        while len(parts) < self.per_step:  # less data than one step: repeat it
            parts += parts
        whole = len(parts) // self.per_step
        return [parts[i * self.per_step : (i + 1) * self.per_step] for i in range(whole)]

    def num_steps(self, epochs: int) -> int:
        """Steps of so many epochs."""
        return sum(len(self.epoch(epoch)) for epoch in range(epochs))

    def steps(self, first: int) -> Iterator[list[np.ndarray]]:
        """An endless iterator over the steps' batches, from step `first` (from 0)."""
        epoch, passed = 0, 0
        while True:
            steps = self.epoch(epoch)
            yield from steps[max(0, first - passed) :]
            passed += len(steps)
            epoch += 1


def collate(samples: list[Sample]) -> Batch:
    """Samples padded on the right with token 0, on the CPU."""
    input_ids = pad_sequence([torch.from_numpy(sample.token_ids).long() for sample in samples], batch_first=True)
    loss_mask = pad_sequence([torch.from_numpy(sample.loss_mask) for sample in samples], batch_first=True)
    return Batch(input_ids, torch.tensor([len(sample) for sample in samples]), loss_mask)


def in_order(samples: list[Sample], tokens_per_batch: int) -> list[list[Sample]]:
    """Batches of all samples once, longest first."""
    ordered = sorted(samples, key=len, reverse=True)
    return [[ordered[i] for i in part] for part in batches(np.array([len(s) for s in ordered]), tokens_per_batch)]
