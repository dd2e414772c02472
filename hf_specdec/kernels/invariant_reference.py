"""Operations whose result for a row does not depend on the other rows, in plain torch: the definition, and the CPU path.

torch's own do depend on them: a matrix product of one row takes other code than one of six, and a vectorised loop finishes
the last elements of a tensor with scalar functions that round differently (sigmoid, silu, gelu; rsqrt in bfloat16). The
remedy is that of "Defeating Nondeterminism in LLM Inference" (He et al., Thinking Machines, 2025): what is computed for a row,
and in which order it is summed, is fixed before the number of rows is known. Here every result is bit-equal by one of:

* the same call on the same data: products in blocks of `BLOCK_ROWS` rows, attention query by query;
* operations that IEEE 754 rounds correctly, in an order that the width alone decides: sums by halving;
* no scalar remainder: elements padded to whole vectors.

All hold for a given machine, build of torch and number of threads.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F

from .reference import _attention_with_softcap_or_sinks

BLOCK_ROWS = 8  # of a product on the CPU; a default draft and the token before it are 6
_WHOLE_VECTORS = 64  # elements: two vectors of the widest kind, of the narrowest type; loops are unrolled twice
_SERIAL = 16384  # elements that torch never splits among threads
_ALIGNMENT = 64  # bytes; nothing that a CPU loads at once is wider
_PROBED_ELEMENTS = 128  # of a product, at least: two orders of few terms can agree by chance

Sums = Callable[[torch.Tensor], torch.Tensor]  # over the last dimension

# ---- products -------------------------------------------------------------------------------------------------------

_keeps_rows_apart: dict[tuple, bool] = {}


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """x [M, K] @ weight [K, N] (+ bias [N]), summed in float32 or wider, rounded once to x's dtype.

    Every call into torch has the same shape, of `BLOCK_ROWS` rows, the last ones zeros; or, where a check shows that a row
    then depends on its place or its neighbours, one row.
    """
    rows, width = x.shape
    num_outputs = weight.shape[1]
    if rows == 0 or num_outputs == 0 or width == 0:
        return torch.mm(x, weight) if bias is None else torch.addmm(bias, x, weight)
    size = BLOCK_ROWS if _rows_are_apart(x, weight, bias) else 1
    # Fresh memory for every block: libraries choose code by how their arguments are aligned, too.
    outputs = [_product(_block(x, first, size), weight, bias) for first in range(0, rows, size)]
    return outputs[0][:rows] if len(outputs) == 1 else torch.cat(outputs)[:rows]


def batched_product(x: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """x [B, M, K] @ weights [B, K, N], entry by entry."""
    if x.shape[2] == 1:  # an outer product: each element is one multiplication
        return x * weights
    entries = [linear(x[i], weights[i].contiguous()) for i in range(x.shape[0])]
    return torch.stack(entries) if entries else torch.bmm(x, weights)


def _product(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    return torch.mm(x, weight) if bias is None else torch.addmm(bias, x, weight)


def _block(x: torch.Tensor, first: int, size: int) -> torch.Tensor:
    block = x.new_zeros(size, x.shape[1])
    part = x[first : first + size]
    block[: part.shape[0]] = part
    return block


def _rows_are_apart(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> bool:
    """Whether a row of a block of this shape is the same bits wherever it stands and whatever stands beside it.

    Looked at once per shape, layout and alignment (libraries choose code by these, never by values), on weights whose products
    cancel: what is left are rounding errors, which show the order of the sum in bfloat16 too.
    """
    alignment = weight.data_ptr() % _ALIGNMENT
    key = (
        weight.shape,
        weight.stride(),
        alignment,
        x.dtype,
        weight.dtype,
        bias is None,
        x.device,
        torch.get_num_threads(),
    )
    if key not in _keeps_rows_apart:
        _keeps_rows_apart[key] = _check_rows(weight, bias, x.dtype)
    return _keeps_rows_apart[key]


def _check_rows(weight: torch.Tensor, bias: torch.Tensor | None, dtype: torch.dtype) -> bool:
    num_outputs = weight.shape[1]
    generator = torch.Generator().manual_seed(0)
    like, bias = _empty_like(weight), None if bias is None else torch.zeros_like(bias)
    for _ in range(max(2, _PROBED_ELEMENTS // num_outputs)):
        probe, few = _cancelling(weight.shape[0], min(num_outputs, 64), generator)
        few = few.to(weight.device, weight.dtype)
        for first in range(0, num_outputs, few.shape[1]):
            like[:, first : first + few.shape[1]] = few[:, : num_outputs - first]
        others = torch.randn(BLOCK_ROWS, weight.shape[0], generator=generator).to(weight.device, dtype)
        if not _probe_is_apart(probe.to(weight.device, dtype), others, like, bias):
            return False
    return True


def _cancelling(width: int, outputs: int, generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    """A row [width] and weights [width, outputs] whose products cancel in pairs, anywhere in the sum.

    The pairs' sizes are far apart, so that products of few bits round too when they are added, and large enough for float16 to
    hold the errors. Of an odd width, what has no partner is small, or it would hide what rounding leaves of the others.
    """
    order, half = torch.randperm(width, generator=generator), width // 2
    row, weights = torch.randn(width, generator=generator), 2.0**8 * torch.randn(width, outputs, generator=generator)
    row[order[:half]] *= 2.0 ** -torch.randint(0, 13, (half,), generator=generator).float()
    row[order[half : 2 * half]] = row[order[:half]]
    weights[order[half : 2 * half]] = -weights[order[:half]]
    row[order[2 * half :]] *= 2.0**-16
    return row, weights


def _probe_is_apart(probe: torch.Tensor, others: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> bool:
    """Whether `probe` [K] times weight [K, N] is the same in all places of a block, and beside `others` [BLOCK_ROWS, K]."""
    everywhere = _product(probe.expand(BLOCK_ROWS, -1).contiguous(), weight, bias)
    if not torch.equal(everywhere, everywhere[:1].expand_as(everywhere)):
        return False
    for place in (0, 1, BLOCK_ROWS - 1):
        beside = others.clone()
        beside[place] = probe
        if not torch.equal(_product(beside, weight, bias)[place], everywhere[0]):
            return False
    return True


def _empty_like(weight: torch.Tensor) -> torch.Tensor:
    """Memory of the same shape and strides, at the same distance from a multiple of `_ALIGNMENT` bytes."""
    size = 1 + sum((n - 1) * stride for n, stride in zip(weight.shape, weight.stride(), strict=True))
    spare = _ALIGNMENT // weight.element_size()
    memory = weight.new_empty(size + spare)
    begin = (weight.data_ptr() - memory.data_ptr()) % _ALIGNMENT // weight.element_size()
    return memory.as_strided(weight.shape, weight.stride(), begin)


# ---- reductions over the last dimension -----------------------------------------------------------------------------


def sum_last(x: torch.Tensor) -> torch.Tensor:
    """Sums over the last dimension [..., N] → [...], in x's dtype: halves are added until one element is left."""
    width = x.shape[-1]
    if width == 0:
        return x.sum(-1)
    size = 1 << (width - 1).bit_length()
    while size > 1:
        size //= 2
        if x.shape[-1] > size:
            front, rest = x[..., :size], x[..., size:]
            extra = rest.shape[-1]
            x = front + rest if extra == size else torch.cat([front[..., :extra] + rest, front[..., extra:]], dim=-1)
    return x[..., 0]


def mean_last(x: torch.Tensor, sums: Sums = sum_last) -> torch.Tensor:
    """Means over the last dimension [..., N] → [...], summed in float32 or wider."""
    return (sums(wide(x)) / x.shape[-1]).to(x.dtype)


def variance_last(x: torch.Tensor, correction: float = 0.0, sums: Sums = sum_last) -> torch.Tensor:
    """Variances over the last dimension [..., N] → [...], in two passes."""
    exact = wide(x)
    centred = exact - (sums(exact) / x.shape[-1])[..., None]
    return (sums(centred * centred) / max(x.shape[-1] - correction, 0)).to(x.dtype)


def softmax_last(x: torch.Tensor, dtype: torch.dtype | None = None) -> torch.Tensor:
    """softmax over the last dimension, computed in float32 or wider, in `dtype` (None: x's)."""
    weights = _exponentials(x)
    return (weights / sum_last(weights)[..., None]).to(dtype or x.dtype)


def log_softmax_last(x: torch.Tensor, dtype: torch.dtype | None = None) -> torch.Tensor:
    """log_softmax over the last dimension, computed in float32 or wider, in `dtype` (None: x's)."""
    shifted = wide(x) - wide(x).amax(-1, keepdim=True)
    return (shifted - elementwise(torch.log, sum_last(_exponentials(x)))[..., None]).to(dtype or x.dtype)


def layer_norm(
    x: torch.Tensor, weight: torch.Tensor | None, bias: torch.Tensor | None, eps: float, sums: Sums = sum_last
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Layer norm over the last dimension; also the means and the reciprocal deviations [..., 1], float32 or wider."""
    exact = wide(x)
    mean = mean_last(exact, sums)[..., None]
    rstd = 1.0 / (variance_last(exact, 0, sums)[..., None] + eps).sqrt()
    out = (exact - mean) * rstd
    if weight is not None:
        out = out * weight
    if bias is not None:
        out = out + bias
    return out.to(x.dtype), mean, rstd


def rms_norm(
    x: torch.Tensor, weight: torch.Tensor | None, eps: float, sums: Sums = sum_last
) -> tuple[torch.Tensor, torch.Tensor]:
    """RMS norm over the last dimension; also the reciprocal root mean squares [..., 1], float32 or wider."""
    exact = wide(x)
    rstd = 1.0 / (mean_last(exact * exact, sums)[..., None] + eps).sqrt()
    out = exact * rstd
    return (out if weight is None else out * weight).to(x.dtype), rstd


def wide(x: torch.Tensor) -> torch.Tensor:
    """x in the dtype that its sums are computed in: float64, or float32."""
    return x if x.dtype == torch.float64 else x.to(torch.float32)


def _exponentials(x: torch.Tensor) -> torch.Tensor:
    exact = wide(x)
    return elementwise(torch.exp, exact - exact.amax(-1, keepdim=True))


# ---- elementwise functions ------------------------------------------------------------------------------------------


def elementwise(function: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor) -> torch.Tensor:
    """`function` of every element of x (any shape), each computed by the vectorised loop."""
    if x.is_cuda:  # one function for every element
        return function(x)
    count = x.numel()
    short = -count % _WHOLE_VECTORS
    if not short and x.is_contiguous() and (count < _SERIAL or torch.get_num_threads() == 1):
        return function(x)
    flat = x.new_zeros(count + short)
    flat[:count] = x.reshape(-1)
    if count < _SERIAL or torch.get_num_threads() == 1:
        out = function(flat)
    else:  # threads would begin where vectors do not
        out = torch.cat([function(part) for part in flat.split(_SERIAL)])
    return out[:count].view(x.shape)


# ---- attention ------------------------------------------------------------------------------------------------------


class LinearRow(NamedTuple):
    """One line of text: a row of a batch, or one path of its tree.

    `start:end` are its queries among the packed tokens; its keys are in `slots` [S], in the order of the text, those of the
    queries last. A query sees the keys up to its own.
    """

    start: int
    end: int
    slots: torch.Tensor


def paged_attention(
    query: torch.Tensor,
    key_pool: torch.Tensor,
    value_pool: torch.Tensor,
    rows: list[LinearRow],
    scaling: float,
    window: int | None = None,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """`reference.paged_attention`, one call per query, whose shapes only depend on how much of its text the query sees.

    Args:
        query: [T, H, D].
        key_pool, value_pool: [slots, Hkv, D] and [slots, Hkv, Dv]; the batch's own keys are written.
        window: a query sees the last `window` keys only, its own included.
        scaling, softcap, sinks: as there.

    Returns: [T, H, Dv].
    """
    num_tokens, num_heads, _ = query.shape
    num_kv_heads, value_width = value_pool.shape[1:]
    out = query.new_zeros(num_tokens, num_heads, value_width)
    for row in rows:
        keys, values = key_pool.index_select(0, row.slots), value_pool.index_select(0, row.slots)
        before = keys.shape[0] - (row.end - row.start)
        for token in range(row.start, row.end):
            end = before + token - row.start + 1
            begin = 0 if window is None else max(end - window, 0)
            q = query[token].clone()
            k, v = keys[begin:end].transpose(0, 1)[None], values[begin:end].transpose(0, 1)[None]
            if softcap is None and sinks is None:
                attended = F.scaled_dot_product_attention(
                    q[None, :, None], k, v, scale=scaling, enable_gqa=num_heads != num_kv_heads
                )
            else:
                folded = q.view(1, num_kv_heads, num_heads // num_kv_heads, -1)
                attended = _attention_with_softcap_or_sinks(folded, k, v, None, scaling, softcap, sinks)
            out[token] = attended.reshape(num_heads, value_width)
    return out
