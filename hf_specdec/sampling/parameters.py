"""Temperature, top-k, top-p and min-p of sequences, and how drafting and the verification kernels read them on the device."""

from __future__ import annotations

import functools
from collections.abc import Iterable
from collections.abc import Sequence as Ordered
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch

from ..config import SpeculativeConfig
from ..core.draft_trees import DraftTrees
from ..core.sequence import Sequence
from ..kernels import sampling
from ..kernels.dispatch import current, uses_triton
from ..kernels.sampling.reference import RowParameters
from ..kernels.transfer import upload, upload_into


class SamplingParameters(NamedTuple):
    """The parameters, in the order in which they are applied. The defaults turn all of them off."""

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0


OFF = SamplingParameters()


def parameters_of(seq: Sequence) -> SamplingParameters:
    """The parameters that the sequence's processors end with."""
    parameters = None if seq.processors is None else seq.processors.sampling
    return OFF if parameters is None else parameters


class SamplingKind(NamedTuple):
    """Which features at least one row of a batch uses. No others are read, so rounds of one kind run the same kernels."""

    noise: bool = False
    temperature: bool = False
    top_k: bool = False
    top_p: bool = False
    min_p: bool = False

    @classmethod
    def of(cls, sequences: Iterable[Sequence], noise: bool) -> SamplingKind:
        """The kind of these rows; `noise`: at least one token is drawn at random."""
        columns = zip(*set(map(parameters_of, sequences)), strict=True)
        return cls(noise, *(set(column) != {off} for column, off in zip(columns, OFF, strict=False)))


# ---- in buffers on the device, for drafting and for captured rounds ----

_FIELDS = {  # wide types first, so that each field starts at a multiple of its size
    "seeds": (np.int64, torch.int64), "positions": (np.int64, torch.int64), "steps": (np.int64, torch.int64),
    "temperature": (np.float32, torch.float32), "top_p": (np.float32, torch.float32),
    "min_p": (np.float32, torch.float32), "top_k": (np.int32, torch.int32), "do_sample": (np.bool_, torch.bool),
}  # fmt: skip
_BYTES = sum(np.dtype(kind).itemsize for kind, _ in _FIELDS.values())


class SamplingBuffers:
    """How B rows sample, in buffers that never move, so that CUDA graphs can read them. One copy to the device fills them.

    Attributes:
        kind: the features in use; other parameters are None.
        parameters: the buffers, as the operations of `kernels.sampling` take them.
    """

    def __init__(self, num_rows: int, kind: SamplingKind, device: torch.device):
        self.kind = kind
        self._host = np.zeros(_BYTES * num_rows, dtype=np.uint8)
        self._device = torch.zeros(len(self._host), dtype=torch.uint8, device=device)
        self._views: dict[str, np.ndarray] = {}
        on_device: dict[str, Any] = {}
        start = 0
        for name, (host_type, device_type) in _FIELDS.items():
            end = start + np.dtype(host_type).itemsize * num_rows
            self._views[name] = self._host[start:end].view(host_type)
            if getattr(kind, name, True):
                on_device[name] = self._device[start:end].view(device_type)
            start = end
        self.parameters = RowParameters(**on_device)

    @classmethod
    def of(cls, sequences: list[Sequence], kind: SamplingKind, device: torch.device) -> SamplingBuffers:
        """Buffers filled with these rows."""
        out = cls(len(sequences), kind, device)
        out.fill(sequences)
        return out

    def fill(self, sequences: list[Sequence]) -> None:
        """Write the parameters of these rows. Later rows of the buffers are unused; their parameters are set to off."""
        rows = [
            (seq.seed, len(seq.tokens), seq.num_steps, seq.do_sample and self.kind.noise, *parameters_of(seq))
            for seq in sequences
        ]
        for name, off in OFF._asdict().items():
            self._views[name][:] = off
        names = ["seeds", "positions", "steps", "do_sample", *OFF._fields]
        for name, column in zip(names, zip(*rows, strict=True), strict=True):
            self._views[name][: len(rows)] = column
        upload_into(self._device, self._host)

    def scores(self, logits: torch.Tensor, rows: torch.Tensor | None = None) -> torch.Tensor:
        """See `kernels.sampling.apply_parameters`."""
        return sampling.apply_parameters(logits, self.parameters, rows)

    def noisy(self, logits: torch.Tensor, *more: Any, **options: Any) -> torch.Tensor:
        """See `kernels.sampling.noisy_scores`; further arguments as there, after the parameters."""
        return sampling.noisy_scores(logits, self.parameters, *more, **options)

    def choices(self, logits: torch.Tensor, ahead: int, rows: torch.Tensor | None = None) -> torch.Tensor:
        """See `kernels.sampling.choices`."""
        return sampling.choices(logits, self.parameters, ahead, rows)


# ---- for the verification kernels, which apply them while they read the logits ----

RULES_WITH_KERNELS = ("greedy", "coupled", "rejection")


@dataclass
class FusedSampling:
    """Sampling parameters of B sequences that are still to be applied to their logits [R, V].

    Attributes:
        owners: int64 [R], the sequence that each row of logits belongs to.
        temperature: float32 [B]; None: 1.
        thresholds: score float32 [R] and id int32 [R] from which tokens are kept (`kernels.sampling.triton.sampling_thresholds`);
            None: all tokens are kept.
    """

    owners: torch.Tensor
    temperature: torch.Tensor | None
    thresholds: tuple[torch.Tensor, torch.Tensor] | None

    def select(self, rows: list[int]) -> FusedSampling:
        """The parameters of some sequences. The rows of logits keep their numbers."""
        if self.temperature is None or len(rows) == len(self.temperature):
            return self
        index = upload(rows, self.owners.device)
        return FusedSampling(self.owners, self.temperature[index], self.thresholds)

    def applied_to(self, logits: torch.Tensor) -> torch.Tensor:
        """Scores float32 [R, V], removed tokens at -inf."""
        from ..kernels.sampling.triton import sampling_scores

        return sampling_scores(logits, self.thresholds, self.owners, self.temperature)


def fuses_sampling(sequences: list[Sequence], config: SpeculativeConfig, device: torch.device) -> bool:
    """True if the verification kernels should apply the sampling parameters of these rows."""
    return (
        config.verification_rule in RULES_WITH_KERNELS
        and uses_triton(device)
        and any(parameters_of(seq) != OFF for seq in sequences)
    )


def fused_sampling(trees: DraftTrees, logits: torch.Tensor, sequences: list[Sequence]) -> FusedSampling:
    """The parameters to apply to the logits [R, V] after each sequence's root and nodes. Call only if `fuses_sampling`."""
    from ..kernels.sampling.triton import sampling_thresholds

    temperature, top_k, top_p, min_p = _on_device(tuple(map(parameters_of, sequences)), logits.device)
    counts = np.asarray(trees.lengths, dtype=np.int64) + 1
    owners = upload(np.repeat(np.arange(len(sequences)), counts), logits.device)
    thresholds = None
    if any(parameter is not None for parameter in (top_k, top_p, min_p)):
        with current(logits.device):
            thresholds = sampling_thresholds(logits, owners, temperature, top_k, top_p, min_p)
    return FusedSampling(owners, temperature, thresholds)


@functools.lru_cache(maxsize=16)
def _on_device(
    parameters: tuple[SamplingParameters, ...], device: torch.device
) -> tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]:
    """Temperature, top-k, top-p and min-p of the rows as the kernels read them; None if a parameter is off in all rows."""
    columns: list[Ordered[float]] = list(zip(*parameters, strict=True))
    dtypes = (torch.float32, torch.int32, torch.float32, torch.float32)
    return tuple(  # pyright: ignore[reportReturnType]
        None if set(column) == {off} else torch.tensor(column, dtype=dtype, device=device)
        for column, dtype, off in zip(columns, dtypes, OFF, strict=True)
    )
