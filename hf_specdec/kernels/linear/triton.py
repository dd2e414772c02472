"""Launch linear layers of few rows, which take about the time of reading their weights (definitions: `reference`).

With few rows, a product is limited by memory traffic. Libraries lose the time in which memory idles: between launches, and while
splits are summed. Here, layers of one input are one launch, and so are a layer with its residual and the two layers of a gated unit.
"""

# pyright: reportCallIssue=false
from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import triton

from .sizes import DTYPES, MOST_ROWS, MOST_WEIGHTS
from .triton_kernels import few_rows_kernel, gated_kernel

_ENOUGH_TILES = 96  # enough to saturate the bandwidth of an H100, whose 132 multiprocessors hold two wide tiles each
WIDE = {"BLOCK_M": MOST_ROWS, "BLOCK_N": 64, "BLOCK_K": 128, "STAGES": 4}
NARROW = {"BLOCK_M": MOST_ROWS, "BLOCK_N": 16, "BLOCK_K": 256, "STAGES": 5}


def linears(
    x: torch.Tensor,
    weights: Sequence[torch.Tensor],
    biases: Sequence[torch.Tensor] | None = None,
    residual: torch.Tensor | None = None,
) -> list[torch.Tensor]:
    """[x @ weight^T (+ bias)] in one launch, summed in float32.

    Args:
        x: [M, K] with M up to MOST_ROWS, of one of DTYPES.
        weights: up to MOST_WEIGHTS of [N_i, K], contiguous.
        biases: [N_i] each, or None.
        residual: [M, N], added to the rounded product of a single weight.

    Returns: [M, N_i] each.

    Raises:
        ValueError: the shapes or dtypes are not supported.
    """
    _check(x, weights, biases)
    num_rows, width = x.shape
    sizes = [weight.shape[0] for weight in weights]
    if residual is not None and (
        len(weights) != 1 or residual.shape != (num_rows, sizes[0]) or residual.dtype != x.dtype
    ):
        raise ValueError(
            f"a residual {tuple(residual.shape)} of {residual.dtype} goes with one product [{num_rows}, {sizes[0]}] of {x.dtype}."
        )
    outs = [x.new_empty(num_rows, size) for size in sizes]
    if num_rows == 0:
        return outs
    tile = tile_of(sum(sizes))
    with torch.cuda.device_of(x):
        few_rows_kernel[(sum(triton.cdiv(size, tile["BLOCK_N"]) for size in sizes),)](
            *_three(outs), x.contiguous(), *_three(weights), *(_three(biases) if biases else (None,) * 3),
            None if residual is None else residual.contiguous(), num_rows, *sizes, *[0] * (MOST_WEIGHTS - len(sizes)), width,
            HAS_BIAS=bool(biases), HAS_RESIDUAL=residual is not None, **_fit(x, sizes, tile),
        )  # fmt: skip
    return outs


def gated_linear(x: torch.Tensor, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """silu(x @ gate^T) * (x @ up^T) in one launch, rounded to x's dtype at the same places as three operations.

    Args:
        x: [M, K] with M up to MOST_ROWS, of one of DTYPES.
        gate, up: [N, K], contiguous.

    Returns: [M, N].

    Raises:
        ValueError: the shapes or dtypes are not supported.
    """
    _check(x, (gate, up), None)
    if gate.shape != up.shape:
        raise ValueError(
            f"a gated unit of {tuple(gate.shape)} and {tuple(up.shape)}: both weights must have one shape."
        )
    size = gate.shape[0]
    out = x.new_empty(x.shape[0], size)
    if out.numel() == 0:
        return out
    half = WIDE["BLOCK_N"] // 2
    with torch.cuda.device_of(x):
        gated_kernel[(triton.cdiv(size, half),)](
            out, x.contiguous(), gate, (up.data_ptr() - gate.data_ptr()) // gate.itemsize, x.shape[0], size, x.shape[1],
            **_fit(x, [size], WIDE, half),
        )  # fmt: skip
    return out


def tile_of(num_outputs: int) -> dict[str, int]:
    """Wide tiles if there are enough of them, else narrow ones."""
    return WIDE if num_outputs >= _ENOUGH_TILES * WIDE["BLOCK_N"] else NARROW


def _fit(x: torch.Tensor, sizes: Sequence[int], tile: dict[str, int], outputs: int | None = None) -> dict[str, Any]:
    """Keyword arguments of a launch; `outputs`: number of outputs per tile."""
    outputs = outputs or tile["BLOCK_N"]
    return {
        "EVEN_N": all(size % outputs == 0 for size in sizes),
        "EVEN_K": x.shape[1] % tile["BLOCK_K"] == 0,
        "UPCAST": not x.is_cuda,
        **tile,
        "num_warps": 4,
        "num_stages": tile["STAGES"],
    }


def _check(x: torch.Tensor, weights: Sequence[torch.Tensor], biases: Sequence[torch.Tensor] | None) -> None:
    if x.ndim != 2 or x.shape[0] > MOST_ROWS or not 1 <= len(weights) <= MOST_WEIGHTS:
        raise ValueError(
            f"{len(weights)} products of {tuple(x.shape)}: x must be [M, K] with up to {MOST_ROWS} rows, for up to "
            f"{MOST_WEIGHTS} weights."
        )
    for index, weight in enumerate(weights):
        bias = biases[index] if biases else None
        fits = weight.shape[1:] == x.shape[1:] and (bias is None or bias.shape == weight.shape[:1])
        if not fits or not weight.is_contiguous() or not (bias is None or bias.is_contiguous()):
            raise ValueError(
                f"a product of {tuple(x.shape)} and {tuple(weight.shape)}: shapes must fit, weights and biases be contiguous."
            )
        if x.dtype not in DTYPES or weight.dtype != x.dtype or (bias is not None and bias.dtype != x.dtype):
            raise ValueError(f"a product of {x.dtype} and {weight.dtype}: both must be bfloat16 or both float16.")


def _three(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    return [*tensors, *[tensors[0]] * (MOST_WEIGHTS - len(tensors))]
