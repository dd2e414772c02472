"""Temperature, top-k, top-p and min-p left to the verification kernels, which apply them while they read the logits."""

from __future__ import annotations

import functools
from collections.abc import Sequence as Ordered
from dataclasses import astuple, dataclass

import numpy as np
import torch

from ..config import SpeculativeConfig
from ..core.draft_trees import DraftTrees
from ..core.sequence import Sequence
from ..kernels.dispatch import current, uses_triton
from ..kernels.transfer import upload
from .rows import OFF, SamplingParameters, parameters_of

RULES_WITH_KERNELS = ("greedy", "coupled", "rejection")


@dataclass
class RowSampling:
    """What sampling keeps of logits [R, V] that belong to B sequences.

    Attributes:
        owners: int64 [R], whose each row of logits is.
        temperature: float32 [B]; None: 1.
        limits: the score float32 [R] and the id int32 [R] above which tokens are kept (`kernels.sampling.sampling_limits`);
            None: all are.
    """

    owners: torch.Tensor
    temperature: torch.Tensor | None
    limits: tuple[torch.Tensor, torch.Tensor] | None

    def of(self, rows: list[int]) -> RowSampling:
        """For some of the sequences, verified by themselves; the rows of logits stay numbered as they are."""
        if self.temperature is None or len(rows) == len(self.temperature):
            return self
        index = upload(rows, self.owners.device)
        return RowSampling(self.owners, self.temperature[index], self.limits)

    def applied_to(self, logits: torch.Tensor) -> torch.Tensor:
        """Scores float32 [R, V], removed tokens at -inf."""
        from ..kernels.sampling import sampling_scores

        return sampling_scores(logits, self.limits, self.owners, self.temperature)


def left_to_kernels(sequences: list[Sequence], config: SpeculativeConfig, device: torch.device) -> bool:
    """Whether sampling parameters of these rows are for the verification kernels to apply."""
    return (
        config.verification_rule in RULES_WITH_KERNELS
        and uses_triton(device)
        and any(parameters_of(seq) != OFF for seq in sequences)
    )


def row_sampling(trees: DraftTrees, logits: torch.Tensor, sequences: list[Sequence]) -> RowSampling:
    """What is kept of the logits [R, V] after each sequence's root and nodes. Triton only."""
    from ..kernels.sampling import sampling_limits

    temperature, top_k, top_p, min_p = _on_device(tuple(map(parameters_of, sequences)), logits.device)
    counts = np.asarray(trees.lengths, dtype=np.int64) + 1
    owners = upload(np.repeat(np.arange(len(sequences)), counts), logits.device)
    limits = None
    if any(each is not None for each in (top_k, top_p, min_p)):
        with current(logits.device):
            limits = sampling_limits(logits, owners, temperature, top_k, top_p, min_p)
    return RowSampling(owners, temperature, limits)


@functools.lru_cache(maxsize=16)
def _on_device(
    parameters: tuple[SamplingParameters, ...], device: torch.device
) -> tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]:
    """Temperature, top-k, top-p and min-p of the rows, as the kernels read them; None where no row has any."""
    columns: list[Ordered[float]] = list(zip(*map(astuple, parameters), strict=True))
    dtypes = (torch.float32, torch.int32, torch.float32, torch.float32)
    return tuple(  # pyright: ignore[reportReturnType]
        None if set(column) == {off} else torch.tensor(column, dtype=dtype, device=device)
        for column, dtype, off in zip(columns, dtypes, astuple(OFF), strict=True)
    )
