"""Fuses each root-mean-square norm (Zhang and Sennrich 2019) in a traced layer's graph into one operator."""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx

from ....kernels import layer_reference
from ....kernels.dispatch import uses_triton
from .nodes import argument, calls_of_two, has_one_user, is_call, is_method, replace, value_of


@torch.library.custom_op("hf_specdec::rms_norm", mutates_args=())
def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """See `layer_reference.rms_norm`."""
    if uses_triton(x.device):
        from ....kernels import norms

        if x.shape[-1] <= norms.MOST_WIDTH:
            return norms.rms_norm(x, weight, eps)
    return layer_reference.rms_norm(x, weight, eps)


@rms_norm.register_fake
def _(x, weight, eps):
    return x.new_empty(x.shape)


def fuse_norms(graph: fx.GraphModule) -> fx.GraphModule:
    """Fuse the norms of a graph that dynamo traced, in place; returns it."""
    for node in calls_of_two(graph.graph, operator.mul, torch.mul):
        for weight, normed in (node.args, node.args[::-1]):
            found = _normed(normed)
            value = value_of(weight)
            if found is None or weight.op not in ("placeholder", "get_attr") or value is None or value.ndim != 1:
                continue
            x, eps = found
            traced = value_of(x)
            if traced is not None and traced.dtype == value.dtype and traced.ndim >= 2:
                replace(graph.graph, node, rms_norm._opoverload, (x, weight, eps))
                break
    return graph


def _normed(node: Any) -> tuple[fx.Node, Any] | None:
    """(x, eps) if a node is `(h * rsqrt(h.pow(2).mean(-1, keepdim=True) + eps)).to(x.dtype)` with `h = x.to(float32)`."""
    if not is_method(node, "to") or not has_one_user(node) or not is_call(node.args[0], operator.mul):
        return None
    wide, factor = node.args[0].args
    if not (is_method(wide, "to") and wide.args[1:] == (torch.float32,) and is_call(factor, torch.rsqrt)):
        return None
    total = factor.args[0]
    if not is_call(total, operator.add) or not is_method(total.args[0], "mean"):
        return None
    mean, eps = total.args
    over_last = argument(mean, 1, "dim") in (-1, [-1], (-1,)) and mean.kwargs.get("keepdim") is True
    squared = mean.args[0]
    if not over_last or not is_method(squared, "pow") or squared.args != (wide, 2):
        return None
    x, result = value_of(wide.args[0]), value_of(node)
    return (wide.args[0], eps) if x is not None and result is not None and x.dtype == result.dtype else None
