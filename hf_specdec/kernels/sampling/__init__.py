"""Temperature, top-k, top-p, min-p and Gumbel noise on rows of logits that differ in their parameters.

Operations over logits [R, F, V]: F rows of logits for each of R rows. `rows` int64 [R] says which of the B rows of the parameters
they belong to; None: all, in order.
"""

from __future__ import annotations

from types import ModuleType

import torch

from ..dispatch import uses_triton
from . import reference
from .parameters import DRAWS_PER_ROUND, RowParameters
from .reference import choose_tokens, sampling_scores

__all__ = [
    "DRAWS_PER_ROUND",
    "RowParameters",
    "apply_parameters",
    "choices",
    "choose_tokens",
    "is_fused",
    "noisy_scores",
    "sampling_scores",
]


def is_fused(device: torch.device) -> bool:
    """True if kernels apply sampling parameters while they read the logits, instead of the rows' logits processors."""
    return uses_triton(device)


def _implementation(device: torch.device) -> ModuleType:
    if not uses_triton(device):
        return reference
    from . import triton

    return triton


def apply_parameters(logits: torch.Tensor, parameters: RowParameters, rows: torch.Tensor | None = None) -> torch.Tensor:
    """Logits over temperature, tokens removed by top-k, top-p and min-p at -inf: float32 [R, F, V].

    Returns the logits themselves if all parameters are off.
    """
    if parameters.are_off:
        return logits
    return _implementation(logits.device).apply_parameters(logits, parameters, rows)


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
    return _implementation(logits.device).noisy_scores(logits, parameters, ahead, stream, shared, rows, applied)


def choices(
    logits: torch.Tensor, parameters: RowParameters, ahead: int, rows: torch.Tensor | None = None
) -> torch.Tensor:
    """The argmax of `noisy_scores` with shared noise of TOKEN_STREAM: int64 [R, F]. Kernels read the logits once."""
    return _implementation(logits.device).choices(logits, parameters, ahead, rows)
