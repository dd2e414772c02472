"""The recurrences of transformers' layers, token by token, with each module's own one-token function.

Plain decoding runs a prompt in a chunk form and every later token with the one-token function. The two differ: in rounding
everywhere, in the products of bfloat16 for Mamba-2, and in the clamp of dt for Nemotron-H and Zamba2. Drafts are therefore read
with the one-token function too.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from ...kernels.recurrent import Walk

Inputs = tuple[torch.Tensor, ...]
OverLines = Callable[[Inputs, torch.Tensor, Walk, torch.Tensor], torch.Tensor]
# Reads n tokens, given their inputs [n, ..], each after its own state [n, ..]: (outputs [n, ..], the states after them). May write
# to the states it is given.
Step = Callable[[Inputs, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]


@dataclass(frozen=True)
class Rule:
    """One kind of recurrence.

    Attributes:
        chunk: name of the module's function over many tokens.
        one_token: name of its function over one token.
        bind: (the one-token function, the arguments of the chunk function) → the tokens' inputs [B, T, ..], and how to read them.
        over_lines: the arguments of the chunk function → our kernel of this rule: (inputs, states before the lines, walk, pool) →
            outputs (see `kernels.recurrent.triton`); None: this rule has no kernel.
        tokens_last: the chunk function returns [B, channels, T]; otherwise [B, T, ..].
        continues: the chunk function can start from a state.
    """

    chunk: str
    one_token: str
    bind: Callable[..., tuple[Inputs, Step]]
    over_lines: Callable[..., OverLines] | None = None
    tokens_last: bool = False
    continues: bool = True


def _delta(one_token, query, key, value, *, g, beta, **_) -> tuple[Inputs, Step]:
    """Gated DeltaNet and Kimi delta attention: query, key, value [B, T, heads, width], state [B, heads, dk, dv]."""

    def step(inputs: Inputs, state: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        q, k, v, decay, rate = (tensor.unsqueeze(1) for tensor in inputs)
        out, state = one_token(
            q, k, v, g=decay, beta=rate, initial_state=state, output_final_state=True, use_qk_l2norm_in_kernel=True
        )
        return out[:, 0], state

    return (query, key, value, g, beta), step


def _mamba2(one_token, x, dt, A, B, C, *, D, dt_bias, **_) -> tuple[Inputs, Step]:
    """Mamba-2: x [B, T, heads, p], dt [B, T, heads], A and D [heads], B and C [B, T, groups, n], state [B, heads, p, n]."""
    width, size = x.shape[-1], B.shape[-1]
    A = A[:, None, None].expand(-1, width, size)
    D, dt_bias = (vector[:, None].expand(-1, width) for vector in (D, dt_bias))

    def step(inputs: Inputs, state: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        own_x, own_dt, own_b, own_c = inputs
        spread = own_dt[..., None].expand(-1, -1, width)
        out = one_token(state, own_x, spread, A, own_b, own_c, D, z=None, dt_bias=dt_bias, dt_softplus=True)
        return out, state

    return (x, dt, B, C), step


def _delta_lines(*_: Any, **__: Any) -> OverLines:
    from ...kernels.recurrent.triton import gated_delta

    return gated_delta


def _mamba2_lines(x, dt, A, B, C, *, D, dt_bias, **_) -> OverLines:
    from ...kernels.recurrent.triton import mamba2

    return lambda inputs, before, walk, pool: mamba2(inputs, (A, D, dt_bias), before, walk, pool)


def _mamba1(one_token, x, dt, A, B, C, *, D, z, delta_bias, **_) -> tuple[Inputs, Step]:
    """Mamba-1: x, dt, z [B, channels, T], A [channels, n], B and C [B, n, T], D [channels], state [B, channels, n]."""
    D = D.to(x.dtype)  # the scan is given a float32 copy

    def step(inputs: Inputs, state: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        own_x, own_dt, own_b, own_c, own_z = inputs
        out = one_token(state, own_x, own_dt, A, own_b, own_c, D, z=own_z, dt_bias=delta_bias, dt_softplus=True)
        return out, state

    return tuple(tensor.transpose(1, 2) for tensor in (x, dt, B, C, z)), step


GATED_DELTA = Rule("torch_chunk_gated_delta_rule", "torch_recurrent_gated_delta_rule", _delta, _delta_lines)
KIMI_DELTA = Rule("chunk_kimi_delta_attention", "recurrent_kimi_delta_attention", _delta, _delta_lines)
MAMBA2 = Rule("mamba2_chunk_scan", "mamba2_selective_state_update", _mamba2, _mamba2_lines)
MAMBA1 = Rule("mamba_selective_scan", "mamba_selective_state_update", _mamba1, tokens_last=True, continues=False)
