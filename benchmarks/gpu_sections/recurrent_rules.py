"""The rules of layers with a state, token by token, in plain torch: what the kernels of `kernels.recurrent` are checked against.

The package runs no such code: without the kernels, tokens are read by the modules' own functions.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F

from hf_specdec.kernels.recurrent import Walk

Inputs = tuple[torch.Tensor, ...]


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
    """Definition of `kernels.recurrent.triton.convolution`."""
    line = torch.arange(x.shape[0], device=x.device)[:, None, None]
    inputs = x.transpose(1, 2)[line, windows.long()]  # [n, T, k, C]
    for place, kept in zip(into.flatten().tolist(), inputs.flatten(0, 1), strict=True):
        if place >= 0:
            pool[place] = kept.T
    out = (inputs.to(weight.dtype).float() * weight.float().T).sum(2)
    out = (out if bias is None else out + bias.float()).to(weight.dtype)
    return (F.silu(out) if silu else out).to(x.dtype).transpose(1, 2)
