"""Kernels whose rows do not depend on other rows: against float64, and bit for bit alone and in company."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable, Iterator

import torch

from .context import TOLERANCE, Context, relative_error, worst
from .report import Row, at_most

MODULES = ("invariant",)
EPS = 1e-6


def functions(context: Context, dtype: torch.dtype) -> dict[str, tuple[Callable, Callable, int]]:
    """name: (kernel, definition, width of a row) for those of `kernels/invariant.py` that are there."""
    if importlib.util.find_spec("hf_specdec.kernels.invariant.triton") is None:
        return {}
    module = importlib.import_module("hf_specdec.kernels.invariant.triton")
    width, outputs = (48, 40) if context.toy else (4096, 14336)
    weight = (context.randn(width, outputs) * width**-0.5).to(dtype)
    scale = context.randn(width, dtype=dtype)
    found: dict[str, tuple[Callable, Callable, int]] = {
        "linear": (lambda x: module.linear(x, weight), lambda x: x @ weight.double(), width),
        "rms_norm": (lambda x: module.rms_norm(x, scale, EPS)[0], lambda x: rms_norm(x, scale.double()), width),
        "softmax_last": (lambda x: module.softmax_last(x), lambda x: x.softmax(-1), width),
        "log_softmax_last": (lambda x: module.log_softmax_last(x), lambda x: x.log_softmax(-1), width),
    }
    return {name: each for name, each in found.items() if hasattr(module, name)}


def rms_norm(x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """The definition, in x's dtype."""
    return x * (x.square().mean(-1, keepdim=True) + EPS).rsqrt() * scale


def rows(context: Context, name: str, dtype: torch.dtype) -> Iterator[Row]:
    """Two lines per function."""
    counts = (1, 3, 9) if context.toy else (1, 8, 64, 257)
    for what, (kernel, definition, width) in functions(context, dtype).items():
        errors, changed = [], 0
        for count in counts:
            x = context.randn(count, width, dtype=dtype)
            out = kernel(x)
            errors.append(relative_error(out, definition(x.double())))
            changed += sum(not torch.equal(kernel(x[i : i + 1].clone())[0], out[i]) for i in (0, count // 2, count - 1))
        yield at_most("correctness", f"invariant {name}: {what}", worst(errors), TOLERANCE[name], "rel. error")
        yield at_most("correctness", f"invariant {name}: {what}, alone and in company", changed, 0, "rows differ")
