"""Rewrites the graphs of traced layers to use our fused kernels, which need fewer launches than inductor's.

Root-mean-square norms (Zhang and Sennrich 2019) become one operator each. Rotary embeddings go into attention: it gets unrotated queries
and keys and their angles, and the kernel that writes the keys rotates both. Linear layers are fused for steps of few rows: layers with the
same input become one operator; so do a layer and the sum that adds its output to the residual stream, and the two layers and the product
of a gated unit (Shazeer 2020, SwiGLU). For more rows the operators run the original operations.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import fx

from ...kernels import linear, norms

Node = Any  # fx.Node, whose arguments are typed as whatever a graph may hold
_ASSIGNMENTS = {
    operator.setitem, operator.iadd, operator.isub, operator.imul, operator.itruediv, operator.ifloordiv, operator.imod,
    operator.ipow, operator.iand, operator.ior, operator.ixor, operator.imatmul,
}  # fmt: skip


def is_call(node: Any, *functions: Callable) -> bool:
    """True for a call of one of these functions."""
    return isinstance(node, fx.Node) and node.op == "call_function" and node.target in functions


def is_method(node: Any, name: str) -> bool:
    """True for a call of a method of this name."""
    return isinstance(node, fx.Node) and node.op == "call_method" and node.target == name


def has_one_user(node: Node) -> bool:
    """True if one other node reads the node's result."""
    return len(node.users) == 1


def calls_of_two(graph: fx.Graph, *functions: Callable) -> Iterator[Node]:
    """Calls of these functions with two nodes as arguments. The graph may be edited during the iteration."""
    for node in list(graph.nodes):
        if is_call(node, *functions) and len(node.args) == 2 and all(isinstance(arg, fx.Node) for arg in node.args):
            yield node


def argument(node: Node, index: int, name: str, default: Any = None) -> Any:
    """An argument of a call, given by position or by name."""
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


def replace(graph: fx.Graph, node: Node, operation: Any, arguments: tuple) -> None:
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


def _modifies(node: Node) -> bool:
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


# ---- norms ----


@torch.library.custom_op("hf_specdec::rms_norm", mutates_args=())
def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """See `kernels.norms.rms_norm`."""
    return norms.rms_norm(x, weight, eps)


@rms_norm.register_fake
def _(x, weight, eps):
    return x.new_empty(x.shape)


def fuse_norms(graph: fx.GraphModule) -> fx.GraphModule:
    """Fuse the norms of a graph that dynamo traced, in place; returns it."""
    for node in calls_of_two(graph.graph, operator.mul, torch.mul):
        for weight, normed in (node.args, node.args[::-1]):
            norm = _normed(normed)
            value = value_of(weight)
            if norm is None or weight.op not in ("placeholder", "get_attr") or value is None or value.ndim != 1:
                continue
            x, eps = norm
            traced = value_of(x)
            if traced is not None and traced.dtype == value.dtype and traced.ndim >= 2:
                replace(graph.graph, node, rms_norm._opoverload, (x, weight, eps))
                break
    return graph


def _normed(node: Any) -> tuple[Node, Any] | None:
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


# ---- rotary embeddings ----


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


def _unrotated(node: Any) -> tuple[Node, Node, Node] | None:
    """(x [1, H, T, D], cos, sin [1, T, D]) if a node is x * cos + cat(-x[D/2:], x[:D/2]) * sin, as in Llama and GPT-NeoX."""
    if (
        not is_call(node, operator.add)
        or len(node.args) != 2
        or not all(is_call(arg, operator.mul) for arg in node.args)
    ):
        return None
    (x, cos), (rotated_half, sin) = (arg.args for arg in node.args)
    angles = _angles(cos), _angles(sin)
    if not is_call(rotated_half, torch.cat) or angles[0] is None or angles[1] is None:
        return None
    parts, width = rotated_half.args[0], _width(x)
    over_last = argument(rotated_half, 1, "dim") == -1 and len(parts) == 2 and width.isdigit()
    if not over_last or not is_call(parts[0], operator.neg):
        return None
    half = int(width) // 2
    has_second_half = _is_slice(parts[0].args[0], x, slice(half, None, None))
    has_first_half = _is_slice(parts[1], x, slice(None, half, None))
    if not (has_second_half and has_first_half) or {_width(angles[0]), _width(angles[1])} != {width}:
        return None
    return x, angles[0], angles[1]


def _angles(node: Any) -> Node | None:
    """The cosines or sines [1, T, D] if a node is their `unsqueeze(1)`."""
    if not is_method(node, "unsqueeze") or node.args[1:] != (1,):
        return None
    value = value_of(node.args[0])
    return node.args[0] if value is not None and value.ndim == 3 and value.shape[0] == 1 else None


def _is_slice(node: Any, x: Node, wanted: slice) -> bool:
    return is_call(node, operator.getitem) and node.args == (x, (Ellipsis, wanted))


def _width(node: Node) -> str:
    """Size of a node's last dimension, as text; empty if unknown."""
    shape = shape_of(node)
    return "" if shape is None else shape[-1]


_LINEARS = (F.linear, torch._C._nn.linear)  # pyright: ignore[reportAttributeAccessIssue]
_MOST = 3  # maximum number of layers in one operator: queries, keys and values


# ---- linear layers: operators ----


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
                is_call(activated, F.silu) and _is_layer(upper) and has_one_user(activated) and has_one_user(upper)
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
    groups: dict[tuple, list[list[Node]]] = {}  # per input and kind of layer, groups of at most _MOST layers
    for node in graph.nodes:
        if _is_layer(node):
            weight = node.args[1]
            key = node.args[0], (shape_of(weight) or ())[1:], dtype_of(weight), _bias(node) is None
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
    parameters = [argument for argument in (node.args[1], _bias(node)) if argument is not None]
    known = all(
        isinstance(parameter, fx.Node) and parameter.op in ("placeholder", "get_attr") for parameter in parameters
    )
    weight, dtype = value_of(node.args[1]), dtype_of(node)
    alike = dtype is not None and dtype_of(node.args[0]) == dtype_of(node.args[1]) == dtype  # not so under autocast
    return known and alike and weight is not None and weight.is_contiguous()


def _bias(node: Node) -> Any:
    return argument(node, 2, "bias")
