"""Sampling parameters and noise in the native library for CPUs."""

from __future__ import annotations

import torch

from ..native import Sampling
from ..random_bits import TOKEN_STREAM
from ..random_bits.native import choose
from .reference import RowParameters, owners_of


def sampling_of(parameters: RowParameters, by_round: bool = False) -> Sampling:
    """The parameters as the library reads them, in their own memory; `by_round`: each round has its own noise."""
    given = (parameters.temperature, parameters.top_k, parameters.top_p, parameters.min_p)
    pointers = (None if tensor is None else tensor.data_ptr() for tensor in (parameters.do_sample, *given))
    steps = parameters.steps.data_ptr() if by_round else None
    return Sampling(parameters.seeds.data_ptr(), parameters.positions.data_ptr(), steps, *pointers)


def choices(
    logits: torch.Tensor, parameters: RowParameters, ahead: int, rows: torch.Tensor | None = None
) -> torch.Tensor:
    """See `reference.choices`. Nothing is sorted: top-k and top-p look for the least score that they keep."""
    owners = owners_of(logits, rows)
    return choose(logits.flatten(0, 1), owners, sampling_of(parameters), ahead, TOKEN_STREAM).view(logits.shape[:2])
