"""How rows sample, on the device: temperature, top-k, top-p and min-p, and the keys of their random numbers."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import astuple, dataclass, fields
from typing import NamedTuple

import numpy as np
import torch

from ..core.sequence import Sequence
from ..kernels import random_bits
from ..kernels.dispatch import uses_triton
from ..kernels.sampling_reference import sampling_scores
from ..kernels.transfer import upload_into


@dataclass(frozen=True)
class SamplingParameters:
    """In the order in which they are applied; as they stand here all are off."""

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0


OFF = SamplingParameters()
_OFF = astuple(OFF)
DRAWS_PER_ROUND = 4096  # of a row at one position, at most


def parameters_of(seq: Sequence) -> SamplingParameters:
    """The parameters that the sequence's processors end with."""
    found = None if seq.processors is None else seq.processors.sampling
    return OFF if found is None else found


class SamplingKind(NamedTuple):
    """What any of the rows has: the rest is not read, so that a round of one kind runs the same kernels on other rows."""

    noise: bool = False
    temperature: bool = False
    top_k: bool = False
    top_p: bool = False
    min_p: bool = False

    @classmethod
    def of(cls, sequences: Iterable[Sequence], noise: bool) -> SamplingKind:
        """Of these rows; noise: whether any token is drawn."""
        columns = zip(*map(astuple, set(map(parameters_of, sequences))), strict=True)
        return cls(noise, *(set(column) != {off} for column, off in zip(columns, _OFF, strict=False)))

    @property
    def removes(self) -> bool:
        """Whether any token is removed."""
        return self.top_k or self.top_p or self.min_p


_FIELDS = {  # wide ones first, so that each begins at a multiple of its size
    "seeds": (np.int64, torch.int64), "positions": (np.int64, torch.int64), "steps": (np.int64, torch.int64),
    "temperature": (np.float32, torch.float32), "top_p": (np.float32, torch.float32),
    "min_p": (np.float32, torch.float32), "top_k": (np.int32, torch.int32), "do_sample": (np.bool_, torch.bool),
}  # fmt: skip
_BYTES = sum(np.dtype(each).itemsize for each, _ in _FIELDS.values())


class SamplingRows:
    """What B rows sample by, in buffers that stay where they are; one copy to the device fills them.

    Attributes:
        kind: what is read; parameters of which no row has any are None.
        seeds, positions, steps: int64 [B], each row's stream, the index of the token behind its last, and its round.
        do_sample: bool [B].
        temperature, top_p, min_p: float32 [B]; top_k: int32 [B].
    """

    seeds: torch.Tensor
    positions: torch.Tensor
    steps: torch.Tensor
    do_sample: torch.Tensor
    temperature: torch.Tensor | None
    top_k: torch.Tensor | None
    top_p: torch.Tensor | None
    min_p: torch.Tensor | None

    def __init__(self, num_rows: int, kind: SamplingKind, device: torch.device):
        self.kind = kind
        self._host = np.zeros(_BYTES * num_rows, dtype=np.uint8)
        self._device = torch.zeros(len(self._host), dtype=torch.uint8, device=device)
        self._views: dict[str, np.ndarray] = {}
        start = 0
        for name, (host_type, device_type) in _FIELDS.items():
            end = start + np.dtype(host_type).itemsize * num_rows
            self._views[name] = self._host[start:end].view(host_type)
            is_read = getattr(kind, name, True)
            setattr(self, name, self._device[start:end].view(device_type) if is_read else None)
            start = end

    @classmethod
    def of(cls, sequences: list[Sequence], kind: SamplingKind, device: torch.device) -> SamplingRows:
        """For these rows."""
        out = cls(len(sequences), kind, device)
        out.fill(sequences)
        return out

    def fill(self, sequences: list[Sequence]) -> None:
        """Put rows in. Those behind them, which nobody reads, get parameters that are off."""
        values = {each: astuple(each) for each in set(map(parameters_of, sequences))}
        rows = [
            (seq.seed, len(seq.tokens), seq.num_steps, seq.do_sample, *values[parameters_of(seq)]) for seq in sequences
        ]
        parameters = [field.name for field in fields(SamplingParameters)]
        for name, off in zip(parameters, _OFF, strict=True):
            self._views[name][:] = off
        for name, column in zip(
            ("seeds", "positions", "steps", "do_sample", *parameters), zip(*rows, strict=True), strict=True
        ):
            self._views[name][: len(rows)] = column
        upload_into(self._device, self._host)

    def scores(self, logits: torch.Tensor, rows: torch.Tensor | None = None) -> torch.Tensor:
        """What the parameters leave of logits, removed tokens at -inf.

        Args:
            logits: [R, F, V], F of each row.
            rows: int64 [R], which of the B rows; None: all.

        Returns: float32 [R, F, V]; the logits themselves where all parameters are off.
        """
        if not any(self.kind[1:]):
            return logits
        if uses_triton(logits.device):
            return self._fused(logits, rows)
        owners = self._owners(logits, rows)
        given = (self.temperature, self.top_k, self.top_p, self.min_p)
        of_each = (None if each is None else each[owners] for each in given)
        return sampling_scores(logits.flatten(0, 1), *of_each).view(logits.shape)

    def noisy(
        self,
        logits: torch.Tensor,
        ahead: int,
        stream: int,
        shared: bool,
        rows: torch.Tensor | None = None,
        applied: bool = False,
    ) -> torch.Tensor:
        """As `scores`, with Gumbel noise on rows that sample: their argmax is a draw. Float32 [R, F, V].

        Args:
            ahead: how far behind each row's `positions` the chosen token stands.
            stream: which of `random_bits`' streams.
            shared: whether the F draws of a row have the same noise, in every round; else each has its own.
            applied: the logits are what `scores` returned.
        """
        if uses_triton(logits.device):
            return self._fused(logits, rows, self._keys(logits, rows, ahead, shared), stream, applied)
        count = 1 if shared else logits.shape[1]
        keys = self._keys(logits[:, :count], rows, ahead, shared)
        noise = random_bits.gumbel(*keys, stream, logits.shape[2]).view(len(logits), count, -1)
        scores = logits if applied else self.scores(logits, rows)
        return torch.where(_of(self.do_sample, rows)[:, None, None], scores + noise, scores)

    def choices(self, logits: torch.Tensor, ahead: int, rows: torch.Tensor | None = None) -> torch.Tensor:
        """The argmax of `noisy` scores with shared noise of TOKEN_STREAM, int64 [R, F]; on a GPU in one read of the logits."""
        if not uses_triton(logits.device):
            scores = self.scores(logits, rows).flatten(0, 1)
            of_rows = torch.arange(len(logits), device=logits.device).repeat_interleave(logits.shape[1])
            drawn = random_bits.noisy_argmax(
                scores, *self._keys(logits[:, :1], rows, ahead, True), random_bits.TOKEN_STREAM, of_rows
            )
            sampled = _of(self.do_sample, rows)[of_rows]
            return torch.where(sampled, drawn, scores.argmax(1)).view(logits.shape[:2])
        from ..kernels.verification import target_choices

        flat, owners = logits.flatten(0, 1), self._owners(logits, rows)
        at = torch.arange(len(flat), device=flat.device)[:, None]
        chosen = target_choices(
            flat, at, at.new_zeros(len(flat), 0, dtype=torch.bool), None, self.seeds[owners],
            self.positions[owners] + ahead, self.do_sample[owners],
            None if self.temperature is None else self.temperature[owners], self._limits(flat, owners),
        )  # fmt: skip
        return chosen.view(logits.shape[:2])

    def _owners(self, logits: torch.Tensor, rows: torch.Tensor | None) -> torch.Tensor:
        """Which of the B rows each of the R F rows of logits belongs to, int64 [R F]."""
        rows = torch.arange(len(logits), device=logits.device) if rows is None else rows
        return rows.repeat_interleave(logits.shape[1])

    def _keys(
        self, logits: torch.Tensor, rows: torch.Tensor | None, ahead: int, shared: bool
    ) -> tuple[torch.Tensor, ...]:
        """Seeds, positions and steps of the noise on each row of logits, int64 [R F]."""
        owners = self._owners(logits, rows)
        seeds, positions = self.seeds[owners], self.positions[owners] + ahead
        if shared:
            return seeds, positions, torch.zeros_like(seeds)
        ranks = torch.arange(logits.shape[1], device=logits.device).repeat(len(logits))
        return seeds, positions, self.steps[owners] * DRAWS_PER_ROUND + ranks

    def _limits(self, flat: torch.Tensor, owners: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor] | None:
        from ..kernels.sampling import sampling_limits

        given = (self.temperature, self.top_k, self.top_p, self.min_p)
        return sampling_limits(flat, owners, *given) if self.kind.removes else None

    def _fused(
        self,
        logits: torch.Tensor,
        rows: torch.Tensor | None,
        keys: tuple[torch.Tensor, ...] | None = None,
        stream: int = 0,
        applied: bool = False,
    ) -> torch.Tensor:
        """`scores`, or with `keys` of noise `noisy` ones: one pass over the logits, and the search for what is removed."""
        from ..kernels import sampling

        flat, owners = logits.flatten(0, 1), self._owners(logits, rows)
        noise = None if keys is None else sampling.Noise(*keys, self.do_sample[owners], stream)
        temperature, limits = (None, None) if applied else (self.temperature, self._limits(flat, owners))
        return sampling.sampling_scores(flat, limits, owners, temperature, noise).view(logits.shape)


def _of(values: torch.Tensor, rows: torch.Tensor | None) -> torch.Tensor:
    return values if rows is None else values[rows]
