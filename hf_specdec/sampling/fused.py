"""Sampling parameters that the verification kernels apply while they read the logits."""

from __future__ import annotations

import functools
from collections.abc import Sequence as Ordered
from dataclasses import astuple, dataclass

import numpy as np
import torch

from ..config import SpeculativeConfig
from ..core.draft_trees import DraftTrees
from ..core.sequence import Sequence
from ..kernels.dispatch import current
from ..kernels.sampling import is_fused
from ..kernels.transfer import upload
from .parameters import OFF, SamplingParameters, parameters_of

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
        and is_fused(device)
        and any(parameters_of(seq) != OFF for seq in sequences)
    )


def fused_sampling(trees: DraftTrees, logits: torch.Tensor, sequences: list[Sequence]) -> FusedSampling:
    """The parameters to apply to the logits [R, V] after each sequence's root and nodes. Call only if `fuses_sampling`."""
    from ..kernels.sampling.triton import sampling_thresholds

    temperature, top_k, top_p, min_p = _on_device(tuple(map(parameters_of, sequences)), logits.device)
    counts = np.asarray(trees.lengths, dtype=np.int64) + 1
    owners = upload(np.repeat(np.arange(len(sequences)), counts), logits.device)
    thresholds = None
    if any(each is not None for each in (top_k, top_p, min_p)):
        with current(logits.device):
            thresholds = sampling_thresholds(logits, owners, temperature, top_k, top_p, min_p)
    return FusedSampling(owners, temperature, thresholds)


@functools.lru_cache(maxsize=16)
def _on_device(
    parameters: tuple[SamplingParameters, ...], device: torch.device
) -> tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]:
    """Temperature, top-k, top-p and min-p of the rows as the kernels read them; None if a parameter is off in all rows."""
    columns: list[Ordered[float]] = list(zip(*map(astuple, parameters), strict=True))
    dtypes = (torch.float32, torch.int32, torch.float32, torch.float32)
    return tuple(  # pyright: ignore[reportReturnType]
        None if set(column) == {off} else torch.tensor(column, dtype=dtype, device=device)
        for column, dtype, off in zip(columns, dtypes, astuple(OFF), strict=True)
    )
