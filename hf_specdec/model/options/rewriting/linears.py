"""Linear layers in a traced layer's graph, put together for steps of few rows: our kernels read their weights in fewer launches.

Layers of one input become one operator, a layer whose output is added to the residual stream adds it itself, and of a gated
unit (Shazeer 2020, SwiGLU) both layers and the product are one. For more rows the operators are what they were made of.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import fx

from ....kernels import linear
from .nodes import argument, calls_of_two, dtype_of, is_alone, is_call, replace, shape_of, value_of

_LINEARS = (F.linear, torch._C._nn.linear)
_MOST = 3  # layers of one operator: queries, keys and values


# ---- operators ------------------------------------------------------------------------------------------------------


@torch.library.custom_op("hf_specdec::linears", mutates_args=())
def linears(x: torch.Tensor, weights: Sequence[torch.Tensor], biases: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """[x @ weight^T (+ bias)] of x [..., K] and weights [N_i, K]; `biases` is empty where there are none."""
    outs = linear.linears(x.reshape(-1, x.shape[-1]), weights, biases or None)
    return [out.view(*x.shape[:-1], out.shape[-1]) for out in outs]


@torch.library.custom_op("hf_specdec::linear_and_residual", mutates_args=())
def linear_and_residual(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, residual: torch.Tensor
) -> torch.Tensor:
    """residual [..., N] + (x [..., K] @ weight^T (+ bias))."""
    flat = residual.reshape(-1, residual.shape[-1])
    out = linear.linears(x.reshape(-1, x.shape[-1]), [weight], None if bias is None else [bias], flat)[0]
    return out.view(residual.shape)


@torch.library.custom_op("hf_specdec::gated_linear", mutates_args=())
def gated_linear(x: torch.Tensor, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """silu(x [..., K] @ gate^T) * (x @ up^T)."""
    return linear.gated_linear(x.reshape(-1, x.shape[-1]), gate, up).view(*x.shape[:-1], gate.shape[0])


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


def put_together(graph: fx.GraphModule) -> fx.GraphModule:
    """Rewrite a graph that dynamo traced, in place; returns it. Weights that are no inputs of the graph are left alone."""
    _gate(graph.graph)
    _add_residuals(graph.graph)
    _join(graph.graph)
    return graph


def _gate(graph: fx.Graph) -> None:
    for product in calls_of_two(graph, operator.mul, torch.mul):
        for activated, upper in (product.args, product.args[::-1]):
            if not (is_call(activated, F.silu) and is_alone(activated) and _is_layer(upper) and is_alone(upper)):
                continue
            gate = activated.args[0]
            fits = _is_layer(gate) and is_alone(gate) and gate is not upper and gate.args[0] is upper.args[0]
            if fits and _bias(gate) is _bias(upper) is None and shape_of(gate.args[1]) == shape_of(upper.args[1]):
                arguments = gate.args[0], gate.args[1], upper.args[1]
                replace(graph, product, gated_linear._opoverload, arguments)
                break


def _add_residuals(graph: fx.Graph) -> None:
    for total in calls_of_two(graph, operator.add, torch.add):
        if total.kwargs:
            continue
        for residual, layer in (total.args, total.args[::-1]):
            alike = shape_of(residual) == shape_of(layer) and dtype_of(residual) == dtype_of(layer)
            if _is_layer(layer) and is_alone(layer) and residual is not layer and alike:
                arguments = layer.args[0], layer.args[1], _bias(layer), residual
                replace(graph, total, linear_and_residual._opoverload, arguments)
                break


def _join(graph: fx.Graph) -> None:
    groups: dict[tuple, list[list[fx.Node]]] = {}
    for node in graph.nodes:
        if _is_layer(node):
            weight = node.args[1]
            same = node.args[0], shape_of(weight)[1:], dtype_of(weight), _bias(node) is None
            of_input = groups.setdefault(same, [[]])
            if len(of_input[-1]) == _MOST:
                of_input.append([])
            of_input[-1].append(node)
    for nodes in (nodes for of_input in groups.values() for nodes in of_input):
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
    """A linear layer whose weight and bias are inputs of the graph."""
    if not is_call(node, *_LINEARS) or len(node.args) < 2:
        return False
    parameters = [each for each in (node.args[1], _bias(node)) if each is not None]
    known = all(isinstance(each, fx.Node) and each.op in ("placeholder", "get_attr") for each in parameters)
    weight, dtype = value_of(node.args[1]), dtype_of(node)
    alike = dtype is not None and dtype_of(node.args[0]) == dtype_of(node.args[1]) == dtype  # autocast makes others
    return known and alike and weight is not None and weight.is_contiguous()


def _bias(node: fx.Node) -> Any:
    return argument(node, 2, "bias")
