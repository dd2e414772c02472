"""Fuses rotary embeddings in a traced layer's graph into attention: it gets unrotated queries and keys and their angles, and
the kernel that writes the keys rotates both."""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx

from .nodes import argument, is_call, is_method, replace, shape_of, value_of


def fuse_rotation(graph: fx.GraphModule, attend: Any, attend_rotating: Any) -> fx.GraphModule:
    """Replace `attend` by `attend_rotating` in a graph that dynamo traced, in place; returns it.

    Args:
        attend: operator with arguments (query, key, value, ...).
        attend_rotating: operator with arguments (query, key, value, cos, sin, ...).
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
    (x, cos), (rotated_half, sin) = (each.args for each in node.args)
    angles = _angles(cos), _angles(sin)
    if not is_call(rotated_half, torch.cat) or angles[0] is None or angles[1] is None:
        return None
    parts, width = rotated_half.args[0], _width(x)
    if (
        argument(rotated_half, 1, "dim") != -1
        or len(parts) != 2
        or not is_call(parts[0], operator.neg)
        or not width.isdigit()
    ):
        return None
    half = int(width) // 2
    has_second_half = _is_slice(parts[0].args[0], x, slice(half, None, None))
    has_first_half = _is_slice(parts[1], x, slice(None, half, None))
    if not (has_second_half and has_first_half) or {_width(angles[0]), _width(angles[1])} != {width}:
        return None
    return x, angles[0], angles[1]


def _angles(node: Any) -> fx.Node | None:
    """The cosines or sines [1, T, D] if a node is their `unsqueeze(1)`."""
    if not is_method(node, "unsqueeze") or node.args[1:] != (1,):
        return None
    value = value_of(node.args[0])
    return node.args[0] if value is not None and value.ndim == 3 and value.shape[0] == 1 else None


def _is_slice(node: Any, x: fx.Node, wanted: slice) -> bool:
    return is_call(node, operator.getitem) and node.args == (x, (Ellipsis, wanted))


def _width(node: fx.Node) -> str:
    """Size of a node's last dimension, as text; empty if unknown."""
    shape = shape_of(node)
    return "" if shape is None else shape[-1]
