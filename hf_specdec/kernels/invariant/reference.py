"""Batch-invariant operations in plain torch: the definition, and the CPU path.

In torch, a row's result can depend on the other rows: a matrix product of one row runs other code than one of six, and vectorised
loops finish the last elements of a tensor with scalar functions that round differently (sigmoid, silu, gelu; rsqrt in bfloat16).
As in "Defeating Nondeterminism in LLM Inference" (He et al., Thinking Machines, 2025), we fix what is computed for a row, and the
order of its sums, independently of the number of rows. Bits are equal because of one of these:

* the same call on the same data: products in blocks of `BLOCK_ROWS` rows, attention query by query;
* operations that IEEE 754 rounds correctly, in an order that depends only on the width: sums by halving;
* no scalar remainder: elements are padded to whole vectors.

This holds for a given machine, build of torch and number of threads.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

BLOCK_ROWS = 8  # of a product on the CPU; a default draft and the token before it make 6
_WHOLE_VECTORS = 64  # elements: two of the widest vectors of the narrowest type, since loops are unrolled twice
_SERIAL = 16384  # torch never splits so few elements among threads
_ALIGNMENT = 64  # bytes; no CPU loads more at once
_PROBED_ELEMENTS = 128  # the least outputs to check: with few, two orders of summation can agree by chance

# ---- products -------------------------------------------------------------------------------------------------------

_keeps_rows_apart: dict[tuple, bool] = {}


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """x [M, K] @ weight [K, N] (+ bias [N]), summed in float32 or wider, rounded once to x's dtype.

    Every call into torch has `BLOCK_ROWS` rows, padded with zeros; or one row, if a check shows that a row of a block depends on its
    place or its neighbours.
    """
    rows, width = x.shape
    num_outputs = weight.shape[1]
    if rows == 0 or num_outputs == 0 or width == 0:
        return torch.mm(x, weight) if bias is None else torch.addmm(bias, x, weight)
    size = BLOCK_ROWS if _rows_are_apart(x, weight, bias) else 1
    # Fresh memory for every block, because libraries also choose code by alignment.
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
    """True if a row of a block of this shape has the same bits at every place and beside any other rows.

    Checked once per shape, layout and alignment (libraries choose code by these, never by values), on weights whose products cancel:
    only rounding errors remain, which show the order of the sum even in bfloat16.
    """
    layout = weight.shape, weight.stride(), weight.data_ptr() % _ALIGNMENT
    key = (*layout, x.dtype, weight.dtype, bias is None, x.device, torch.get_num_threads())
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

    The pairs differ widely in size, so that sums of products with few bits also round, and are large enough for float16 to hold
    the errors. If the width is odd, the element without a partner is small, to not hide the rounding errors of the others.
    """
    order, half = torch.randperm(width, generator=generator), width // 2
    row, weights = torch.randn(width, generator=generator), 2.0**8 * torch.randn(width, outputs, generator=generator)
    row[order[:half]] *= 2.0 ** -torch.randint(0, 13, (half,), generator=generator).float()
    row[order[half : 2 * half]] = row[order[:half]]
    weights[order[half : 2 * half]] = -weights[order[:half]]
    row[order[2 * half :]] *= 2.0**-16
    return row, weights


def _probe_is_apart(probe: torch.Tensor, others: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> bool:
    """True if `probe` [K] times weight [K, N] is the same at all places of a block, and beside `others` [BLOCK_ROWS, K]."""
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
    """Uninitialised memory with the same shape, strides and alignment (modulo `_ALIGNMENT` bytes)."""
    size = 1 + sum((n - 1) * stride for n, stride in zip(weight.shape, weight.stride(), strict=True))
    spare = _ALIGNMENT // weight.element_size()
    memory = weight.new_empty(size + spare)
    begin = (weight.data_ptr() - memory.data_ptr()) % _ALIGNMENT // weight.element_size()
    return memory.as_strided(weight.shape, weight.stride(), begin)


# ---- reductions over the last dimension -----------------------------------------------------------------------------


def sum_last(x: torch.Tensor) -> torch.Tensor:
    """Sum over the last dimension [..., N] → [...] in x's dtype, by adding halves until one element is left."""
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


def softmax_last(x: torch.Tensor, dtype: torch.dtype | None = None) -> torch.Tensor:
    """softmax over the last dimension, computed in float32 or wider, in `dtype` (None: x's)."""
    weights = _exponentials(x)
    return (weights / sum_last(weights)[..., None]).to(dtype or x.dtype)


def log_softmax_last(x: torch.Tensor, dtype: torch.dtype | None = None) -> torch.Tensor:
    """log_softmax over the last dimension, computed in float32 or wider, in `dtype` (None: x's)."""
    shifted = wide(x) - wide(x).amax(-1, keepdim=True)
    return (shifted - elementwise(torch.log, sum_last(_exponentials(x)))[..., None]).to(dtype or x.dtype)


def wide(x: torch.Tensor) -> torch.Tensor:
    """x in the dtype in which it is summed: float64 stays, others become float32."""
    return x if x.dtype == torch.float64 else x.to(torch.float32)


def _exponentials(x: torch.Tensor) -> torch.Tensor:
    exact = wide(x)
    return elementwise(torch.exp, exact - exact.amax(-1, keepdim=True))


# ---- elementwise functions ------------------------------------------------------------------------------------------


def elementwise(function: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor) -> torch.Tensor:
    """Apply `function` to every element of x (any shape), always by the vectorised loop."""
    if x.is_cuda:  # a GPU uses one function for every element
        return function(x)
    count = x.numel()
    short = -count % _WHOLE_VECTORS
    if not short and x.is_contiguous() and (count < _SERIAL or torch.get_num_threads() == 1):
        return function(x)
    flat = x.new_zeros(count + short)
    flat[:count] = x.reshape(-1)
    if count < _SERIAL or torch.get_num_threads() == 1:
        out = function(flat)
    else:  # threads would start in the middle of vectors
        out = torch.cat([function(part) for part in flat.split(_SERIAL)])
    return out[:count].view(x.shape)
