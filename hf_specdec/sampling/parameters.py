"""Temperature, top-k, top-p and min-p of a sequence, and which of them a batch uses."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import astuple, dataclass
from typing import NamedTuple

from ..core.sequence import Sequence


@dataclass(frozen=True)
class SamplingParameters:
    """The parameters, in the order in which they are applied. The defaults turn all of them off."""

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0


OFF = SamplingParameters()


def parameters_of(seq: Sequence) -> SamplingParameters:
    """The parameters that the sequence's processors end with."""
    found = None if seq.processors is None else seq.processors.sampling
    return OFF if found is None else found


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
        columns = zip(*map(astuple, set(map(parameters_of, sequences))), strict=True)
        return cls(noise, *(set(column) != {off} for column, off in zip(columns, astuple(OFF), strict=False)))
