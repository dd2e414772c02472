"""Looking at nodes of graphs that dynamo traced."""

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
    """Whether a node calls one of these functions."""
    return isinstance(node, fx.Node) and node.op == "call_function" and node.target in functions


def is_method(node: Any, name: str) -> bool:
    """Whether a node calls a method of this name."""
    return isinstance(node, fx.Node) and node.op == "call_method" and node.target == name


def is_alone(node: fx.Node) -> bool:
    """Whether one node uses it."""
    return len(node.users) == 1


def calls_of_two(graph: fx.Graph, *functions: Callable) -> Iterator[fx.Node]:
    """Calls of one of these functions with two nodes, whatever is erased meanwhile."""
    for node in list(graph.nodes):
        if is_call(node, *functions) and len(node.args) == 2 and all(isinstance(each, fx.Node) for each in node.args):
            yield node


def argument(node: fx.Node, index: int, name: str, default: Any = None) -> Any:
    """An argument, given by position or by name."""
    return node.args[index] if index < len(node.args) else node.kwargs.get(name, default)


def value_of(node: Any) -> torch.Tensor | None:
    """The tensor a node was traced with."""
    value = node.meta.get("example_value") if isinstance(node, fx.Node) else None
    return value if isinstance(value, torch.Tensor) else None


def shape_of(node: Any) -> tuple[str, ...] | None:
    """Sizes as they are written: comparing symbols would bind them, and a size that was found to be constant may be one."""
    value = value_of(node)
    return None if value is None else tuple(map(str, value.shape))


def dtype_of(node: Any) -> torch.dtype | None:
    """Of the tensor a node was traced with."""
    value = value_of(node)
    return None if value is None else value.dtype


def replace(graph: fx.Graph, node: fx.Node, operation: Any, arguments: tuple) -> None:
    """Put an operation in the place of a node and of those that only it used."""
    with graph.inserting_before(node):
        made = graph.call_function(operation, arguments)
    made.meta = dict(node.meta)
    node.replace_all_uses_with(made)
    erase_unused(graph, [node])


def erase_unused(graph: fx.Graph, nodes: Sequence[Any]) -> None:
    """Erase nodes that nobody uses any more, and then what only they used. (`eliminate_dead_code` also erases operations in place.)"""
    for node in nodes:
        if isinstance(node, fx.Node) and not node.users and node.op in ("call_function", "call_method"):
            inputs = node.all_input_nodes
            graph.erase_node(node)
            erase_unused(graph, inputs)


def works_in_place(graph: fx.GraphModule) -> bool:
    """Whether anything in a graph changes a tensor: then nothing of it can be moved."""
    return any(_changes(node) for node in graph.graph.nodes)


def _changes(node: fx.Node) -> bool:
    if getattr(node.target, "__module__", None) == operator.and_.__module__:  # where an underscore keeps off a keyword
        return node.target in _ASSIGNMENTS
    name = node.target if node.op == "call_method" else getattr(node.target, "__name__", "")
    named = isinstance(name, str) and name.endswith("_") and not name.endswith("__")
    return named or node.kwargs.get("inplace") is True or "out" in node.kwargs


def without_dropout(graph: fx.GraphModule) -> fx.GraphModule:
    """Take out dropout that drops nothing, in place; returns the graph."""
    for node in list(graph.graph.nodes):
        if is_call(node, F.dropout) and argument(node, 2, "training", True) is False:
            node.replace_all_uses_with(node.args[0])
            graph.graph.erase_node(node)
    return graph
