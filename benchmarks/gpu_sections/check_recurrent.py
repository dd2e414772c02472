"""Recurrences over chains and trees, and the convolution before them, against their definitions."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch

from . import recurrent_rules as definitions
from .context import TOLERANCE, Context, relative_error, worst
from .report import Row, at_most

MODULES = ("recurrent",)
PARENTS = {"chain": [-1, 0, 1, 2, 3], "tree": [-1, 0, 0, 1, 1]}
SAVED = {"chain": [-1] * 5, "tree": [0, 1, -1, -1, -1]}  # states that a token which is not the next one starts from


def rows(context: Context, name: str, dtype: torch.dtype) -> Iterator[Row]:
    """A line per function and shape: the largest error of outputs and of the pool of states."""
    # Interpreted, bfloat16 is cut off, not rounded.
    bound = TOLERANCE[name] * (1 if context.on_gpu else 8)
    for shape in PARENTS:
        for what, errors in {
            "gated delta rule": delta(context, dtype, shape, False), "decay per channel": delta(context, dtype, shape, True),
            "mamba-2": mamba2(context, dtype, shape),
        }.items():  # fmt: skip
            yield at_most("correctness", f"recurrent {name}: {what}, {shape}", worst(errors), bound, "rel. error")
    yield at_most(
        "correctness", f"recurrent {name}: convolution", worst(convolution(context, dtype)), bound, "rel. error"
    )


def _walk(context: Context, lines: int, shape: str):
    from hf_specdec.kernels.recurrent import Walk

    def rows_of(own: list[int], step: int = 0) -> torch.Tensor:
        table = [[each + step * line if each >= 0 else each for each in own] for line in range(lines)]
        return torch.tensor(table, dtype=torch.int32, device=context.device)

    saved, into = SAVED[shape], [2, 0, 1, 3, -1]
    number = max(saved) + 1
    return Walk(rows_of(PARENTS[shape]), rows_of(into, 4), rows_of(saved, number), num_saved=number * lines)


def _errors(context: Context, kernel: Callable, step: Callable, inputs, before, walk) -> list[float]:
    pools = [before.new_full((4 * len(before), *before.shape[1:]), 1e3) for _ in range(2)]  # far from any state
    found = kernel(inputs, before, walk, pools[0])
    expected = definitions.lines(step, inputs, before, walk, pools[1])
    return [relative_error(found, expected.double()), relative_error(pools[0], pools[1].double())]


def delta(context: Context, dtype: torch.dtype, shape: str, per_channel: bool) -> list[float]:
    """Errors for heads of Qwen3-Next's size."""
    from hf_specdec.kernels.recurrent import triton

    lines, key_heads, heads, width = (2, 1, 2, 16) if context.toy else (8, 16, 32, 128)
    tokens = len(PARENTS[shape])

    def draw(*sizes: int) -> torch.Tensor:
        return context.randn(lines, tokens, *sizes, dtype=dtype)

    decay = -draw(heads, *([width] if per_channel else [])).float().exp()
    key_heads = heads if per_channel else key_heads
    inputs = (draw(key_heads, width), draw(key_heads, width), draw(heads, width), decay, draw(heads).sigmoid())
    before = context.randn(lines, heads, width, width)
    return _errors(
        context, triton.gated_delta, definitions.gated_delta_step, inputs, before, _walk(context, lines, shape)
    )


def mamba2(context: Context, dtype: torch.dtype, shape: str) -> list[float]:
    """Errors for heads of Nemotron-H's size."""
    from hf_specdec.kernels.recurrent import triton

    lines, heads, groups, width, size = (2, 2, 1, 8, 16) if context.toy else (8, 128, 8, 64, 128)
    tokens = len(PARENTS[shape])

    def draw(*sizes: int) -> torch.Tensor:
        return context.randn(lines, tokens, *sizes, dtype=dtype)

    inputs = (draw(heads, width), draw(heads), draw(groups, size), draw(groups, size))
    constants = (-context.randn(heads).exp(), context.randn(heads, dtype=dtype), context.randn(heads, dtype=dtype))
    before = context.randn(lines, heads, width, size)
    return _errors(
        context,
        lambda own, *others: triton.mamba2(own, constants, *others),
        lambda own, state: definitions.mamba2_step(own, constants, state),
        inputs,
        before,
        _walk(context, lines, shape),
    )


def convolution(context: Context, dtype: torch.dtype) -> list[float]:
    """Errors for the channels of Qwen3-Next."""
    from hf_specdec.kernels.recurrent import triton

    lines, channels, tokens, size = (2, 24, 3, 4) if context.toy else (8, 8192, 5, 4)
    x, weight = context.randn(lines, channels, size + tokens, dtype=dtype), context.randn(channels, size, dtype=dtype)
    windows = torch.arange(tokens)[:, None] + 1 + torch.arange(size)
    windows = windows.expand(lines, -1, -1).to(context.device, torch.int32).contiguous()
    into = torch.arange(lines * tokens, dtype=torch.int32, device=context.device).view(lines, tokens)
    pools = [x.new_full((lines * tokens, channels, size), float("nan")) for _ in range(2)]
    found = triton.convolution(x, windows, weight, None, True, into, pools[0])
    expected = definitions.convolution(x, windows, weight, None, True, into, pools[1])
    return [relative_error(found, expected.double()), relative_error(pools[0], pools[1].double())]
