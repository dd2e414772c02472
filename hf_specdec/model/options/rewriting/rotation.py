"""Rotary embeddings in a traced layer's graph: where attention gets rotated queries and keys, it gets them unrotated with their
angles, and what writes the keys rotates both."""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx

from .nodes import argument, is_call, is_method, replace, shape_of, value_of


def rotate_with_attention(graph: fx.GraphModule, attend: Any, attend_rotating: Any) -> fx.GraphModule:
    """Rewrite a graph that dynamo traced, in place; returns it.

    Args:
        attend: operator of (query, key, value, ...).
        attend_rotating: operator of (query, key, value, cos, sin, ...).
    """
    for node in list(graph.graph.nodes):
        if not is_call(node, attend):
            continue
        query, key = _unrotated(node.args[0]), _unrotated(node.args[1])
        if query is not None and key is not None and query[1:] == key[1:]:
            arguments = query[0], key[0], node.args[2], query[1], query[2], *node.args[3:]
            replace(graph.graph, node, attend_rotating, arguments)
    return graph


def _unrotated(node: Any) -> tuple[fx.Node, fx.Node, fx.Node] | None:
    """(x [1, H, T, D], cos, sin [1, T, D]) if a node is x * cos + cat(-x[D/2:], x[:D/2]) * sin, as in Llama and GPT-NeoX."""
    if (
        not is_call(node, operator.add)
        or len(node.args) != 2
        or not all(is_call(each, operator.mul) for each in node.args)
    ):
        return None
    (x, cos), (turned, sin) = (each.args for each in node.args)
    angles = _of_every_head(cos), _of_every_head(sin)
    if not is_call(turned, torch.cat) or angles[0] is None or angles[1] is None:
        return None
    parts, width = turned.args[0], _width(x)
    if (
        argument(turned, 1, "dim") != -1
        or len(parts) != 2
        or not is_call(parts[0], operator.neg)
        or not width.isdigit()
    ):
        return None
    half = int(width) // 2
    behind = _is_slice(parts[0].args[0], x, slice(half, None, None))
    before = _is_slice(parts[1], x, slice(None, half, None))
    if not (behind and before) or {_width(angles[0]), _width(angles[1])} != {width}:
        return None
    return x, angles[0], angles[1]


def _of_every_head(node: Any) -> fx.Node | None:
    """The angles [1, T, D] of which a node is the `unsqueeze(1)`."""
    if not is_method(node, "unsqueeze") or node.args[1:] != (1,):
        return None
    value = value_of(node.args[0])
    return node.args[0] if value is not None and value.ndim == 3 and value.shape[0] == 1 else None


def _is_slice(node: Any, x: fx.Node, wanted: slice) -> bool:
    return is_call(node, operator.getitem) and node.args == (x, (Ellipsis, wanted))


def _width(node: fx.Node) -> str:
    shape = shape_of(node)
    return "" if shape is None else shape[-1]
