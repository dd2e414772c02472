"""Sampling parameters and random streams of a batch in buffers on the device, for drafting and for captured rounds."""

from __future__ import annotations

from dataclasses import astuple, fields
from typing import Any

import numpy as np
import torch

from ..core.sequence import Sequence
from ..kernels import sampling
from ..kernels.transfer import upload_into
from .parameters import OFF, SamplingKind, SamplingParameters, parameters_of

_FIELDS = {  # wide types first, so that each field starts at a multiple of its size
    "seeds": (np.int64, torch.int64), "positions": (np.int64, torch.int64), "steps": (np.int64, torch.int64),
    "temperature": (np.float32, torch.float32), "top_p": (np.float32, torch.float32),
    "min_p": (np.float32, torch.float32), "top_k": (np.int32, torch.int32), "do_sample": (np.bool_, torch.bool),
}  # fmt: skip
_BYTES = sum(np.dtype(each).itemsize for each, _ in _FIELDS.values())


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
        self.parameters = sampling.RowParameters(**on_device)

    @classmethod
    def of(cls, sequences: list[Sequence], kind: SamplingKind, device: torch.device) -> SamplingBuffers:
        """Buffers filled with these rows."""
        out = cls(len(sequences), kind, device)
        out.fill(sequences)
        return out

    def fill(self, sequences: list[Sequence]) -> None:
        """Write the parameters of these rows. Later rows of the buffers are unused; their parameters are set to off."""
        values = {each: astuple(each) for each in set(map(parameters_of, sequences))}
        rows = [
            (seq.seed, len(seq.tokens), seq.num_steps, seq.do_sample, *values[parameters_of(seq)]) for seq in sequences
        ]
        names = [field.name for field in fields(SamplingParameters)]
        for name, off in zip(names, astuple(OFF), strict=True):
            self._views[name][:] = off
        names = ["seeds", "positions", "steps", "do_sample", *names]
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
