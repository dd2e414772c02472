"""Joined linear layers in plain torch: the definition, the CPU path, and the path for many rows."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F

# The largest inputs of the kernel.
MOST_ROWS = 16  # the narrow side of the kernel's tile; from 32 rows on cuBLAS was as fast
MOST_WEIGHTS = 3  # of one launch: queries, keys and values
DTYPES = (torch.bfloat16, torch.float16)


def linears(
    x: torch.Tensor,
    weights: Sequence[torch.Tensor],
    biases: Sequence[torch.Tensor] | None = None,
    residual: torch.Tensor | None = None,
) -> list[torch.Tensor]:
    """[x @ weight^T (+ bias)] for x [.., K] and weights [N_i, K]; `residual` [.., N] is added to a single product."""
    outs = [F.linear(x, weight, bias) for weight, bias in zip(weights, biases or [None] * len(weights), strict=True)]
    return outs if residual is None else [residual + outs[0]]


def gated_linear(x: torch.Tensor, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """silu(x [.., K] @ gate^T) * (x @ up^T)."""
    return F.silu(F.linear(x, gate)) * F.linear(x, up)
