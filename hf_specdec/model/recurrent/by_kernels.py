"""Functions that replace those of a modeling module and read lines with our kernels."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ...cache.state_pool import StatePool
from ...kernels import recurrent
from .lines import DeviceWalk
from .rules import Rule

_SILU = ("silu", "swish")


def rule_over_lines(
    rule: Rule, one_token: Callable, lines: DeviceWalk, base: torch.Tensor, pool: StatePool, layer: int, kept: Any
):
    """The rule over lines in one launch, as a replacement of the chunk form; writes kept states and inputs to the pool.

    Args:
        base: [n, ..], the recurrent states that each line starts from, before what it replays.
        kept: if drafts are replayed, (lines, columns) and slots of the tokens whose inputs are kept.
    """
    kept_inputs = pool.inputs.get(layer, ())

    def replacement(chunk: Callable, *args: Any, **kwargs: Any):
        inputs, _ = rule.bind(one_token, *args, **kwargs)
        walked = inputs
        if lines.num_replays:
            before = (each[lines.replays] for each in kept_inputs)
            walked = tuple(torch.cat(both, dim=1) for both in zip(before, inputs, strict=True))
        assert rule.over_lines is not None
        out = rule.over_lines(*args, **kwargs)(walked, base, lines.walk, pool.recurrent[layer])
        where, slots = kept
        for pool_of_input, each in zip(kept_inputs, inputs, strict=bool(kept_inputs)):
            pool_of_input.index_copy_(0, slots, each[where])
        return out[:, lines.num_replays :], base

    return replacement


def convolution_over_lines(lines: DeviceWalk, pool: torch.Tensor):
    """The convolution of lines, as a replacement of the module's; writes the kept inputs to a layer's pool [slots, C, k].

    Raises:
        ValueError: the activation after it is unknown.
    """

    def replacement(
        convolution: Callable,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None = None,
        activation: str | None = None,
        **_: Any,
    ) -> torch.Tensor:
        if activation is not None and activation not in _SILU:
            raise ValueError(f"A convolution followed by {activation!r} is not known to the kernels.")
        windows = lines.windows_of(weight.shape[-1])
        return recurrent.convolution(x, windows, weight, bias, activation is not None, lines.slots, pool)

    return replacement
