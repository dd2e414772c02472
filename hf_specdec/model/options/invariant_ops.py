"""InvariantOps: a mode in which a token's results have the same bits whatever other tokens are in the batch.

A dispatch mode sees every operation that a thread runs. This one replaces operations that sum by `kernels.invariant`, runs
unchanged those that only move data or that IEEE 754 rounds correctly, and raises an error for operations it does not know.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch

from ...core.dispatch_mode import ExclusiveMode
from ...core.errors import UnsupportedModel
from ...kernels import invariant

aten = torch.ops.aten

# Correctly rounded, or exact: the same result in vector instructions and in the scalar loop for the remainder.
_EXACT = {
    "abs", "add", "bitwise_and", "bitwise_not", "bitwise_or", "ceil", "clamp", "clamp_max", "clamp_min", "div", "eq", "fill",
    "floor", "floor_divide", "ge", "gt", "isfinite", "isinf", "isnan", "le", "logical_and", "logical_not", "logical_or", "lt",
    "masked_fill", "maximum", "minimum", "mul", "ne", "neg", "relu", "remainder", "round", "rsub", "sign", "sqrt", "sub",
    "trunc", "where",
}  # fmt: skip
# Operations that move, choose or create elements.
_MOVING = {
    "_index_put_impl", "_local_scalar_dense", "_to_copy", "_unsafe_view", "alias", "amax", "amin", "arange", "argmax", "argmin", "argsort",
    "cat", "clone", "constant_pad_nd", "copy", "detach", "embedding", "empty", "empty_like", "empty_strided", "expand", "eye", "flip",
    "full", "full_like", "gather", "index", "index_copy", "index_put", "index_select", "lift_fresh", "masked_scatter",
    "masked_select", "max", "min", "new_empty", "new_empty_strided", "new_full", "new_ones", "new_zeros", "nonzero", "ones",
    "ones_like", "repeat", "repeat_interleave", "resize", "roll", "scalar_tensor", "scatter", "select_scatter", "set",
    "slice_scatter", "sort", "split_with_sizes_copy", "stack", "topk", "tril", "triu", "unfold", "zero", "zeros", "zeros_like",
    "histc",  # counts elements
    "index_add",  # mixtures of experts: the experts add to a token in a fixed order, each at most once
}  # fmt: skip
# Sums over ranks. Two summands have only one order; `prepare` refuses more than two ranks.
_COLLECTIVES = {"c10d", "_c10d_functional", "_dtensor"}


class InvariantOps(ExclusiveMode):
    """A mode for one forward, in the thread that runs it. Deterministic forwards of several threads take turns."""

    def __init__(self, what: str):
        super().__init__()
        self.what = what
        self._direct = False

    @contextlib.contextmanager
    def direct(self) -> Iterator[None]:
        """Inside the context, operations run unchanged: for code that is already batch-invariant."""
        before, self._direct = self._direct, True
        try:
            yield
        finally:
            self._direct = before

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = kwargs or {}
        passes = self._direct or func.namespace in _COLLECTIVES or (_passes(func) and kwargs.get("alpha", 1) == 1)
        if passes:
            return func(*args, **kwargs)
        tensors = _tensors(args, kwargs)
        floats = [tensor for tensor in tensors if tensor.is_floating_point() or tensor.is_complex()]
        if not floats:
            return func(*args, **kwargs)
        replace = _REPLACED.get(func) or _REPLACED.get(func.overloadpacket)
        if replace is not None:
            out = replace(*args, **kwargs)
            if out is not NotImplemented:
                return out
            raise self._refusal(func)
        if func.overloadpacket in (aten.add, aten.sub):  # with a factor alpha, which some loops fuse into the sum
            return func(args[0], args[1] * kwargs["alpha"])
        if func.namespace == "aten" and torch.Tag.pointwise in func.tags:
            if floats[0].is_cuda:  # CUDA computes every element by the same code
                return func(*args, **kwargs)
            if len(tensors) == 1 and args and args[0] is floats[0]:
                return _vectorised(func, args, kwargs)
        if torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), torch._C.DispatchKey.CompositeImplicitAutograd):
            with self:
                return func.decompose(*args, **kwargs)
        raise self._refusal(func)

    def _refusal(self, func: Any) -> UnsupportedModel:
        return UnsupportedModel(
            f"'deterministic': {self.what} uses {func}, which has no implementation whose result for a token is independent of the "
            "other tokens in the batch. Leave the key out."
        )


@functools.cache
def _passes(func: Any) -> bool:
    """True if an operation is batch-invariant without replacement."""
    name = func._schema.name.removeprefix("aten::").removesuffix("_")
    return func.namespace == "aten" and (func.is_view or name in _MOVING or name in _EXACT)


def _tensors(args: tuple, kwargs: dict) -> list[torch.Tensor]:
    lists = (arg if isinstance(arg, (list, tuple)) else (arg,) for arg in (*args, *kwargs.values()))
    return [tensor for arg in lists for tensor in arg if isinstance(tensor, torch.Tensor)]


def _vectorised(func: Any, args: tuple, kwargs: dict) -> torch.Tensor:
    """Apply an elementwise function so that vector instructions compute every element, without a scalar remainder."""
    x = args[0]
    if func._schema.is_mutable:
        plain = getattr(getattr(aten, func._schema.name.split("::")[1].removesuffix("_")), func._overloadname)
        return x.copy_(invariant.elementwise(lambda part: plain(part, *args[1:], **kwargs), x))
    return invariant.elementwise(lambda part: func(part, *args[1:], **kwargs), x)


# ---- replacements, with aten's arguments ----------------------------------------------------------------------------


def _addmm(bias, x, weight, *, beta=1, alpha=1):
    if beta == 1 and alpha == 1 and bias.dim() == 1:
        return invariant.linear(x, weight, bias)
    return _scaled_sum(bias, beta, invariant.linear(x, weight), alpha)


def _baddbmm(added, x, weights, *, beta=1, alpha=1):
    return _scaled_sum(added, beta, invariant.batched_product(x, weights), alpha)


def _scaled_sum(added, beta, product, alpha):
    product = product if alpha == 1 else product * alpha
    return product if beta == 0 else product + (added if beta == 1 else added * beta)


def _grouped_mm(x, weights, offs=None, bias=None, out_dtype=None):
    """Product of rows x [T, K], in groups that end at `offs` [G], with one weight matrix per group, [G, K, N]."""
    if x.dim() != 2 or weights.dim() != 3 or offs is None or bias is not None or x.is_cuda:
        return NotImplemented
    out = x.new_zeros(x.shape[0], weights.shape[2])
    begin = 0
    for group, end in enumerate(offs.tolist()):
        out[begin:end] = invariant.linear(x[begin:end], weights[group])
        begin = end
    return out if out_dtype is None else out.to(out_dtype)


def _cumsum(x, dim, *, dtype=None):
    return NotImplemented if dtype is None or dtype.is_floating_point else aten.cumsum(x, dim, dtype=dtype)


def _reduced(x: torch.Tensor, dim: Any, keepdim: bool, reduce: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
    """Apply `reduce`, which reduces the last dimension, to the dimensions `dim` (None or []: all)."""
    dims = [dim] if isinstance(dim, int) else list(dim or range(x.dim()))
    dims = sorted(d % max(x.dim(), 1) for d in dims)
    kept = [d for d in range(x.dim()) if d not in dims]
    out = reduce(x.permute(kept + dims).reshape(*(x.shape[d] for d in kept), -1))
    return out.reshape([1 if d in dims else size for d, size in enumerate(x.shape)]) if keepdim else out


def _sum(x, dim=None, keepdim=False, *, dtype=None):
    x = x if dtype is None else x.to(dtype)
    return _reduced(invariant.wide(x), dim, keepdim, invariant.sum_last).to(x.dtype)


def _mean(x, dim=None, keepdim=False, *, dtype=None):
    return _reduced(x if dtype is None else x.to(dtype), dim, keepdim, invariant.mean_last)


def _var(x, dim=None, *, correction=None, keepdim=False):
    correction = 1 if correction is None else correction
    return _reduced(x, dim, keepdim, lambda lines: invariant.variance_last(lines, correction))


def _norm(x, ord=2, dim=None, keepdim=False, *, dtype=None):
    if ord != 2:
        return NotImplemented
    wide = invariant.wide(x)
    return _sum(wide * wide, dim, keepdim).sqrt().to(dtype or x.dtype)


def _along(over_last: Callable[..., torch.Tensor], x, dim, half_to_float=False):
    dtype = torch.float32 if half_to_float else x.dtype
    return over_last(x.transpose(dim, -1), dtype).transpose(dim, -1)


def _layer_norm(x, shape, weight, bias, eps):
    lines = x.reshape(*x.shape[: x.dim() - len(shape)], -1)
    flat = [None if vector is None else vector.reshape(-1) for vector in (weight, bias)]
    out, mean, rstd = invariant.layer_norm(lines, flat[0], flat[1], eps)
    statistics = [*lines.shape[:-1], *(1 for _ in shape)]
    return out.reshape(x.shape), mean.reshape(statistics), rstd.reshape(statistics)


def _rms_norm(x, shape, weight, eps):
    lines = x.reshape(*x.shape[: x.dim() - len(shape)], -1)
    eps = torch.finfo(invariant.wide(x).dtype).eps if eps is None else eps
    flat = None if weight is None else weight.reshape(-1)
    out, rstd = invariant.rms_norm(lines, flat, eps)
    return out.reshape(x.shape), rstd.reshape(*lines.shape[:-1], *(1 for _ in shape))


_REPLACED: dict[Any, Callable[..., Any]] = {
    aten.mm: invariant.linear,
    aten.addmm: _addmm,
    aten.bmm: invariant.batched_product,
    aten.baddbmm: _baddbmm,
    aten.mv: lambda x, vector: invariant.linear(x, vector[:, None])[:, 0],
    aten._grouped_mm: _grouped_mm,
    aten.cumsum: _cumsum,
    aten.sum: _sum,
    aten.mean: _mean,
    aten.var.correction: _var,
    aten.std.correction: lambda *args, **given: _var(*args, **given).sqrt(),
    aten.var_mean.correction: lambda x, dim=None, *, keepdim=False, **given: (
        _var(x, dim, keepdim=keepdim, **given),
        _mean(x, dim, keepdim),
    ),
    aten.linalg_vector_norm: _norm,
    aten._softmax: functools.partial(_along, invariant.softmax_last),
    aten._log_softmax: functools.partial(_along, invariant.log_softmax_last),
    aten.native_layer_norm: _layer_norm,
    aten._fused_rms_norm: _rms_norm,
}
