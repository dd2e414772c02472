"""Products of few rows and norms against float64, and bit for bit alone and in company."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
import torch.nn.functional as F

from .context import TOLERANCE, Context, relative_error, worst
from .report import Row, at_most

MODULES = ("linear", "norms")
EPS = 1e-5


def functions(context: Context, dtype: torch.dtype) -> dict[str, tuple[Callable, Callable, int]]:
    """name: (kernels, definition, width of a row); what they return is one line per row."""
    from hf_specdec.kernels.linear import triton as linear
    from hf_specdec.kernels.norms import triton as norms

    width, queries, keys, inner = (48, 64, 16, 40) if context.toy else (4096, 4096, 1024, 14336)

    def weight(outputs: int, inputs: int = width) -> torch.Tensor:
        return (context.randn(outputs, inputs) * inputs**-0.5).to(dtype)

    projections = [weight(queries), weight(keys), weight(keys)]
    biases = [context.randn(len(each), dtype=dtype) for each in projections]
    out, gate, up, down = weight(width), weight(inner), weight(inner), weight(width, inner)
    scale = context.randn(width, dtype=dtype)

    def joined(x: torch.Tensor) -> torch.Tensor:
        return torch.cat(
            [each + bias for each, bias in zip((x @ w.to(x).T for w in projections), biases, strict=True)], 1
        )

    return {
        "queries, keys, values": (lambda x: torch.cat(linear.linears(x, projections, biases), 1), joined, width),
        "output and residual": (lambda x: linear.linears(x, [out], None, x)[0], lambda x: x + x @ out.to(x).T, width),
        "gated unit": (
            lambda x: linear.gated_linear(x, gate, up),
            lambda x: F.silu(x @ gate.to(x).T) * (x @ up.to(x).T),
            width,
        ),
        "down": (lambda x: linear.linears(x, [down])[0], lambda x: x @ down.to(x).T, inner),
        "rms norm": (
            lambda x: norms.rms_norm(x, scale, EPS),
            lambda x: x * (x.square().mean(-1, keepdim=True) + EPS).rsqrt() * scale.to(x),
            width,
        ),
    }


def rows(context: Context, name: str, dtype: torch.dtype) -> Iterator[Row]:
    """Two lines per function."""
    if dtype == torch.float32:
        return
    for what, (kernel, definition, width) in functions(context, dtype).items():
        errors, changed = [], 0
        for count in (1, 3, 16):
            x = context.randn(count, width, dtype=dtype)
            out = kernel(x)
            errors.append(relative_error(out, definition(x.double())))
            changed += sum(not torch.equal(kernel(x[i : i + 1].clone())[0], out[i]) for i in {0, count // 2, count - 1})
        # Interpreted, bfloat16 is cut off, not rounded.
        bound = TOLERANCE[name] * (1 if context.on_gpu else 2)
        yield at_most("correctness", f"few rows {name}: {what}", worst(errors), bound, "rel. error")
        yield at_most("correctness", f"few rows {name}: {what}, alone and in company", changed, 0, "rows differ")
