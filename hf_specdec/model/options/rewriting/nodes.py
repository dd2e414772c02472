"""Helpers to inspect and edit the nodes of graphs that dynamo traced."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import fx

_ASSIGNMENTS = {
    operator.setitem, operator.iadd, operator.isub, operator.imul, operator.itruediv, operator.ifloordiv, operator.imod,
    operator.ipow, operator.iand, operator.ior, operator.ixor, operator.imatmul,
}  # fmt: skip


def is_call(node: Any, *functions: Callable) -> bool:
    """True if a node calls one of these functions."""
    return isinstance(node, fx.Node) and node.op == "call_function" and node.target in functions


def is_method(node: Any, name: str) -> bool:
    """True if a node calls a method of this name."""
    return isinstance(node, fx.Node) and node.op == "call_method" and node.target == name


def has_one_user(node: fx.Node) -> bool:
    """True if exactly one node uses a node's result."""
    return len(node.users) == 1


def calls_of_two(graph: fx.Graph, *functions: Callable) -> Iterator[fx.Node]:
    """Calls of these functions with two nodes as arguments. The graph may be edited during the iteration."""
    for node in list(graph.nodes):
        if is_call(node, *functions) and len(node.args) == 2 and all(isinstance(each, fx.Node) for each in node.args):
            yield node


def argument(node: fx.Node, index: int, name: str, default: Any = None) -> Any:
    """An argument of a call, by position or by name."""
    return node.args[index] if index < len(node.args) else node.kwargs.get(name, default)


def value_of(node: Any) -> torch.Tensor | None:
    """The example tensor that a node had while it was traced; None if it was not a tensor."""
    value = node.meta.get("example_value") if isinstance(node, fx.Node) else None
    return value if isinstance(value, torch.Tensor) else None


def shape_of(node: Any) -> tuple[str, ...] | None:
    """The sizes of a node's tensor as text. Comparing symbolic sizes would add guards on them; comparing text does not."""
    value = value_of(node)
    return None if value is None else tuple(map(str, value.shape))


def dtype_of(node: Any) -> torch.dtype | None:
    """The dtype of a node's example tensor."""
    value = value_of(node)
    return None if value is None else value.dtype


def replace(graph: fx.Graph, node: fx.Node, operation: Any, arguments: tuple) -> None:
    """Replace a node by a call of `operation`, and erase the nodes that only it used."""
    with graph.inserting_before(node):
        replacement = graph.call_function(operation, arguments)
    replacement.meta = dict(node.meta)
    node.replace_all_uses_with(replacement)
    erase_unused(graph, [node])


def erase_unused(graph: fx.Graph, nodes: Sequence[Any]) -> None:
    """Erase nodes without users, and then the inputs that only they used. (`eliminate_dead_code` would also erase in-place calls.)"""
    for node in nodes:
        if isinstance(node, fx.Node) and not node.users and node.op in ("call_function", "call_method"):
            inputs = node.all_input_nodes
            graph.erase_node(node)
            erase_unused(graph, inputs)


def modifies_in_place(graph: fx.GraphModule) -> bool:
    """True if any node of a graph modifies a tensor in place: then its operations must not be reordered."""
    return any(_modifies(node) for node in graph.graph.nodes)


def _modifies(node: fx.Node) -> bool:
    # In module `operator`, a trailing underscore (`and_`) only avoids a keyword.
    if getattr(node.target, "__module__", None) == operator.and_.__module__:
        return node.target in _ASSIGNMENTS
    name = node.target if node.op == "call_method" else getattr(node.target, "__name__", "")
    has_inplace_name = isinstance(name, str) and name.endswith("_") and not name.endswith("__")
    return has_inplace_name or node.kwargs.get("inplace") is True or "out" in node.kwargs


def without_dropout(graph: fx.GraphModule) -> fx.GraphModule:
    """Remove dropout in evaluation mode from a graph, in place; returns it."""
    for node in list(graph.graph.nodes):
        if is_call(node, F.dropout) and argument(node, 2, "training", True) is False:
            node.replace_all_uses_with(node.args[0])
            graph.graph.erase_node(node)
    return graph
