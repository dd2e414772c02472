"""Fuses linear layers in a traced layer's graph, for steps of few rows: our kernels read the weights in fewer launches.

Layers with the same input become one operator; so do a layer and the sum that adds its output to the residual stream, and
the two layers and the product of a gated unit (Shazeer 2020, SwiGLU). For more rows the operators run the original
operations.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import fx

from ....kernels import linear
from .nodes import argument, calls_of_two, dtype_of, has_one_user, is_call, replace, shape_of, value_of

_LINEARS = (F.linear, torch._C._nn.linear)
_MOST = 3  # maximum number of layers in one operator: queries, keys and values


# ---- operators ------------------------------------------------------------------------------------------------------


@torch.library.custom_op("hf_specdec::linears", mutates_args=())
def linears(x: torch.Tensor, weights: Sequence[torch.Tensor], biases: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """[x @ weight^T (+ bias)] for x [..., K] and weights [N_i, K]; `biases` is empty if the layers have none."""
    return linear.linears(x, weights, biases or None)


@torch.library.custom_op("hf_specdec::linear_and_residual", mutates_args=())
def linear_and_residual(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, residual: torch.Tensor
) -> torch.Tensor:
    """residual [..., N] + (x [..., K] @ weight^T (+ bias))."""
    return linear.linears(x, [weight], None if bias is None else [bias], residual)[0]


@torch.library.custom_op("hf_specdec::gated_linear", mutates_args=())
def gated_linear(x: torch.Tensor, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """silu(x [..., K] @ gate^T) * (x @ up^T)."""
    return linear.gated_linear(x, gate, up)


@linears.register_fake
def _(x, weights, biases):
    return [x.new_empty(*x.shape[:-1], weight.shape[0]) for weight in weights]


@linear_and_residual.register_fake
def _(x, weight, bias, residual):
    return residual.new_empty(residual.shape)


@gated_linear.register_fake
def _(x, gate, up):
    return x.new_empty(*x.shape[:-1], gate.shape[0])


# ---- rewriting ------------------------------------------------------------------------------------------------------


def fuse_linears(graph: fx.GraphModule) -> fx.GraphModule:
    """Fuse the linear layers of a graph that dynamo traced, in place; returns it. Weights must be inputs of the graph."""
    _fuse_gated_units(graph.graph)
    _fuse_residual_sums(graph.graph)
    _join_layers_of_one_input(graph.graph)
    return graph


def _fuse_gated_units(graph: fx.Graph) -> None:
    for product in calls_of_two(graph, operator.mul, torch.mul):
        for activated, upper in (product.args, product.args[::-1]):
            if not (
                is_call(activated, F.silu) and has_one_user(activated) and _is_layer(upper) and has_one_user(upper)
            ):
                continue
            gate = activated.args[0]
            fits = _is_layer(gate) and has_one_user(gate) and gate is not upper and gate.args[0] is upper.args[0]
            if fits and _bias(gate) is _bias(upper) is None and shape_of(gate.args[1]) == shape_of(upper.args[1]):
                arguments = gate.args[0], gate.args[1], upper.args[1]
                replace(graph, product, gated_linear._opoverload, arguments)
                break


def _fuse_residual_sums(graph: fx.Graph) -> None:
    for total in calls_of_two(graph, operator.add, torch.add):
        if total.kwargs:
            continue
        for residual, layer in (total.args, total.args[::-1]):
            alike = shape_of(residual) == shape_of(layer) and dtype_of(residual) == dtype_of(layer)
            if _is_layer(layer) and has_one_user(layer) and residual is not layer and alike:
                arguments = layer.args[0], layer.args[1], _bias(layer), residual
                replace(graph, total, linear_and_residual._opoverload, arguments)
                break


def _join_layers_of_one_input(graph: fx.Graph) -> None:
    groups: dict[tuple, list[list[fx.Node]]] = {}  # per input and kind of layer, groups of at most _MOST layers
    for node in graph.nodes:
        if _is_layer(node):
            weight = node.args[1]
            key = node.args[0], shape_of(weight)[1:], dtype_of(weight), _bias(node) is None
            groups_of_key = groups.setdefault(key, [[]])
            if len(groups_of_key[-1]) == _MOST:
                groups_of_key.append([])
            groups_of_key[-1].append(node)
    for nodes in (nodes for groups_of_key in groups.values() for nodes in groups_of_key):
        biases = [_bias(node) for node in nodes if _bias(node) is not None]
        with graph.inserting_before(nodes[0]):
            arguments = nodes[0].args[0], [node.args[1] for node in nodes], biases
            joined = graph.call_function(linears._opoverload, arguments)
            parts = [graph.call_function(operator.getitem, (joined, index)) for index in range(len(nodes))]
        for node, part in zip(nodes, parts, strict=True):
            part.meta = dict(node.meta)
            node.replace_all_uses_with(part)
            graph.erase_node(node)


def _is_layer(node: Any) -> bool:
    """True for a call of a linear layer whose weight and bias are inputs of the graph."""
    if not is_call(node, *_LINEARS) or len(node.args) < 2:
        return False
    parameters = [each for each in (node.args[1], _bias(node)) if each is not None]
    known = all(isinstance(each, fx.Node) and each.op in ("placeholder", "get_attr") for each in parameters)
    weight, dtype = value_of(node.args[1]), dtype_of(node)
    alike = dtype is not None and dtype_of(node.args[0]) == dtype_of(node.args[1]) == dtype  # not so under autocast
    return known and alike and weight is not None and weight.is_contiguous()


def _bias(node: fx.Node) -> Any:
    return argument(node, 2, "bias")
