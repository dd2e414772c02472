"""The rules of layers with a state, token by token, in plain torch: the definition."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F

Inputs = tuple[torch.Tensor, ...]


class Walk(NamedTuple):
    """How lines of T tokens are read, column after column. A token's parent stands in a column before its own.

    Attributes:
        parents: int32 [n, T], the column of the token whose state each token starts from; -1: the state before the line; -2: no
            token, skipped.
        into: int32 [n, T], the place in a pool of states for the state after each token; -1: it is not kept.
        saved: int32 [n, T], places for states that a token other than the next one needs again; -1: the state is not saved.
        num_saved: how many places `saved` names.
    """

    parents: torch.Tensor
    into: torch.Tensor
    saved: torch.Tensor
    num_saved: int


def lines(
    step: Callable[[Inputs, torch.Tensor], tuple[torch.Tensor, torch.Tensor]],
    inputs: Inputs,
    before: torch.Tensor,
    walk: Walk,
    pool: torch.Tensor,
) -> torch.Tensor:
    """Outputs [n, T, ..] of a rule over lines, each token after its parent's state; writes the kept states to the pool.

    Args:
        step: reads one token: (its inputs [1, ..], the state before it [1, ..]) → (output [1, ..], the state after it).
    """
    out, into = None, walk.into.tolist()
    for line, parents in enumerate(walk.parents.tolist()):
        states = {-1: before[line : line + 1]}
        for column, parent in enumerate(parents):
            if parent < -1:
                continue
            read, states[column] = step(tuple(each[line : line + 1, column] for each in inputs), states[parent])
            if out is None:
                out = read.new_zeros(*walk.parents.shape, *read.shape[1:])
            out[line, column] = read[0]
            if into[line][column] >= 0:
                pool[into[line][column]] = states[column][0]
    assert out is not None, "the lines have no tokens"
    return out


def gated_delta(inputs: Inputs, before: torch.Tensor, walk: Walk, pool: torch.Tensor) -> torch.Tensor:
    """The gated delta rule (https://arxiv.org/abs/2412.06464), or Kimi's with a decay per channel, over lines.

    Args:
        inputs: query and key [n, T, Hk, dk], value [n, T, H, dv], log of the decay [n, T, H] or [n, T, H, dk], and the rate
            beta [n, T, H]. Each key head serves H / Hk value heads in turn.
        before: [n, H, dk, dv] float32, the states before the lines.
        pool: [.., H, dk, dv] float32; the states that `walk.into` names are written.

    Returns: outputs [n, T, H, dv] in the query's dtype; zeros where there is no token.
    """
    return lines(gated_delta_step, inputs, before, walk, pool)


def gated_delta_step(inputs: Inputs, state: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """S' = e^g S + k (beta (v - k e^g S)) and the output q S' / sqrt(dk), with q and k of length 1: all in float32.

    Args:
        inputs: q and k [b, Hk, dk], v [b, H, dv], g [b, H] or [b, H, dk], beta [b, H].
        state: S [b, H, dk, dv].
    """
    query, key, value, decay, rate = (each.float() for each in inputs)
    group = value.shape[1] // key.shape[1]
    query, key = (_unit(each).repeat_interleave(group, dim=1) for each in (query, key))
    decayed = state.float() * (decay if decay.dim() == 3 else decay[..., None]).exp()[..., None]
    known = (decayed * key[..., None]).sum(-2)
    state = decayed + key[..., None] * ((value - known) * rate[..., None])[..., None, :]
    out = (state * (query / query.shape[-1] ** 0.5)[..., None]).sum(-2)
    return out.to(inputs[0].dtype), state


def _unit(x: torch.Tensor) -> torch.Tensor:
    return x * torch.rsqrt((x * x).sum(-1, keepdim=True) + 1e-6)


def mamba2(
    inputs: Inputs,
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
    return lines(lambda token, state: mamba2_step(token, constants, state), inputs, before, walk, pool)


def mamba2_step(inputs: Inputs, constants: Inputs, state: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """S' = e^(dt A) S + (dt B) x and the output C S' + D x; products of B, x and C are rounded to their dtypes, as in transformers.

    Args:
        inputs: x [b, H, p], dt [b, H] before bias and softplus, B and C [b, groups, N].
        constants: A, D and dt's bias, each [H].
        state: S [b, H, p, N], float32.
    """
    x, step, into_state, out_of_state = inputs  # dt, B, C
    rate, skip, bias = constants
    group = x.shape[1] // into_state.shape[1]
    into_state, out_of_state = (each.repeat_interleave(group, dim=1) for each in (into_state, out_of_state))
    step = F.softplus(step + bias.to(step.dtype))
    decay = torch.exp(step.float() * rate.float())[..., None, None]
    new = (step[..., None] * into_state)[:, :, None] * x[..., None]
    state = state * decay + new
    out = (state.to(out_of_state.dtype).float() * out_of_state.float()[:, :, None]).sum(-1).to(out_of_state.dtype)
    return (out + x * skip[:, None]).to(x.dtype), state


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

    Sums are in float32, rounded to the weight's dtype before and after SiLU.
    """
    line = torch.arange(x.shape[0], device=x.device)[:, None, None]
    inputs = x.transpose(1, 2)[line, windows.long()]  # [n, T, k, C]
    for place, kept in zip(into.flatten().tolist(), inputs.flatten(0, 1), strict=True):
        if place >= 0:
            pool[place] = kept.T
    out = (inputs.to(weight.dtype).float() * weight.float().T).sum(2)
    out = (out if bias is None else out + bias.float()).to(weight.dtype)
    return (F.silu(out) if silu else out).to(x.dtype).transpose(1, 2)
