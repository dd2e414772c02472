"""Layers with a state over drafts: recurrences along chains and trees, where a token's state comes from its parent's, and the short
convolution before them."""

from __future__ import annotations

import torch

from ..dispatch import uses_triton
from . import reference
from .walk import Walk

__all__ = ["Walk", "convolution", "gated_delta", "mamba2"]


def gated_delta(inputs: tuple[torch.Tensor, ...], before: torch.Tensor, walk: Walk, pool: torch.Tensor) -> torch.Tensor:
    """The gated delta rule (https://arxiv.org/abs/2412.06464), or Kimi's with a decay per channel, over lines.

    Args:
        inputs: query and key [n, T, Hk, dk], value [n, T, H, dv], log of the decay [n, T, H] or [n, T, H, dk], and the rate
            beta [n, T, H]. Each key head serves H / Hk value heads in turn.
        before: [n, H, dk, dv] float32, the states before the lines.
        pool: [.., H, dk, dv] float32; the states that `walk.into` names are written.

    Returns: outputs [n, T, H, dv] in the query's dtype; zeros where there is no token.
    """
    if uses_triton(before.device):
        from .triton import gated_delta as by_kernel

        return by_kernel(inputs, before, walk, pool)
    return reference.lines(reference.gated_delta, inputs, before, walk, pool)


def mamba2(
    inputs: tuple[torch.Tensor, ...],
    constants: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    before: torch.Tensor,
    walk: Walk,
    pool: torch.Tensor,
) -> torch.Tensor:
    """Mamba-2's recurrence (https://arxiv.org/abs/2405.21060) over lines, rounded as transformers' one-token function rounds.

    Args:
        inputs: x [n, T, H, p], the time step before its bias and softplus [n, T, H], B and C [n, T, groups, N].
        constants: A (negative), D and the time step's bias, each [H].
        before: [n, H, p, N] float32, the states before the lines.
        pool: [.., H, p, N] float32; the states that `walk.into` names are written.

    Returns: outputs [n, T, H, p] in x's dtype; zeros where there is no token.
    """
    if uses_triton(before.device):
        from .triton import mamba2 as by_kernel

        return by_kernel(inputs, constants, before, walk, pool)

    def step(inputs: tuple[torch.Tensor, ...], state: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return reference.mamba2(inputs, constants, state)

    return reference.lines(step, inputs, before, walk, pool)


def convolution(
    x: torch.Tensor,
    windows: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    silu: bool,
    into: torch.Tensor,
    pool: torch.Tensor,
) -> torch.Tensor:
    """A depthwise convolution whose k inputs at each token are given, and those inputs kept as the state after the token.

    Args:
        x: [n, C, k + T], the inputs before the lines, then the lines' own.
        windows: int32 [n, T, k], the columns of each token's inputs, oldest first.
        weight, bias: [C, k] and [C].
        silu: whether SiLU follows.
        into: int32 [n, T], the place in the pool for the inputs at each token; -1: they are not kept.
        pool: [.., C, k]; those places are written.

    Returns: [n, C, T] in x's dtype.
    """
    if uses_triton(x.device):
        from .triton import convolution as by_kernel

        return by_kernel(x, windows, weight, bias, silu, into, pool)
    return reference.convolution(x, windows, weight, bias, silu, into, pool)
