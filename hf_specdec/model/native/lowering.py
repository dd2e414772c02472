"""How each of torch's operators becomes operations of the native library."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ...kernels.native import LAYER_NORM, MEAN, Rows
from .tape import NotLowered, Place, Tape, Value

aten = torch.ops.aten

# Views, which are applied to the shadows themselves. If the layout does not allow a view, the value is copied first.
_VIEWS = {
    aten.transpose.int, aten.permute.default, aten.unsqueeze.default, aten.squeeze.dim, aten.squeeze.dims, aten.expand.default,
    aten.slice.Tensor, aten.select.int, aten.split.Tensor, aten.split_with_sizes.default, aten.unbind.int, aten.t.default,
    aten.detach.default, aten.alias.default, aten.view.default, aten._unsafe_view.default, aten.reshape.default,
    aten.chunk.default, aten.narrow.default, aten.flatten.using_ints, aten.unflatten.int,
}  # fmt: skip
_UNARY = {
    aten.neg.default: "negate", aten.rsqrt.default: "rsqrt", aten.sqrt.default: "sqrt", aten.exp.default: "exp",
    aten.silu.default: "silu", aten.relu.default: "relu", aten.tanh.default: "tanh", aten.sigmoid.default: "sigmoid",
    aten.reciprocal.default: "reciprocal", aten.abs.default: "absolute", aten.clone.default: "copy",
}  # fmt: skip
_BINARY = {
    aten.add.Tensor: "add", aten.sub.Tensor: "subtract", aten.mul.Tensor: "multiply", aten.div.Tensor: "divide",
    aten.maximum.default: "maximum", aten.minimum.default: "minimum",
}  # fmt: skip
_WITH_NUMBER = {"add": "plus", "multiply": "times", "divide": "over"}


def lower(tape: Tape, function: Any, args: tuple, kwargs: dict, result: Any) -> Any:
    """The values of an operator's results, given the values of its tensor arguments; `result` is what torch computed.

    Raises:
        NotLowered: the library has no equivalent.
    """
    if function in _VIEWS:
        return _view(tape, function, args, kwargs)
    if any(isinstance(each, Value) and each.register is None for each in args):
        return _of_ids(tape, function, args, result)
    if function in _UNARY:
        return tape.unary(_UNARY[function], args[0], result.shape, result.dtype)
    if function in _BINARY:
        return _binary(tape, _BINARY[function], args, kwargs, result)
    handler = _HANDLERS.get(function)
    if handler is None:
        raise NotLowered(str(function))
    return handler(tape, args, kwargs, result)


def _view(tape: Tape, function: Any, args: tuple, kwargs: dict) -> Any:
    value = args[0]
    try:
        shadows = function(value.shadow, *args[1:], **kwargs)
    except (RuntimeError, ValueError):  # the register's layout does not allow this view
        if value.register is None:
            raise NotLowered(f"{function} of ids") from None
        value = tape.copied(value)
        shadows = function(value.shadow, *args[1:], **kwargs)
    if not isinstance(shadows, torch.Tensor):
        return [_seen(value, each) for each in shadows]
    return _seen(value, shadows)


def _seen(value: Value, shadow: torch.Tensor) -> Value:
    return Value(value.register, shadow, value.rows, value.ids, value.shift)


def _of_ids(tape: Tape, function: Any, args: tuple, result: torch.Tensor) -> Value:
    """Ids read an embedding, or are shifted by a number."""
    if function == aten.embedding.default:
        return tape.embedding(args[0], args[1], result.shape)
    if function in (aten.add.Tensor, aten.add.Scalar) and isinstance(args[1], int):
        value = args[0]
        return Value(None, value.shadow, value.rows, value.ids, value.shift + args[1])
    raise NotLowered(f"{function} of ids")


def _binary(tape: Tape, name: str, args: tuple, kwargs: dict, result: torch.Tensor) -> Value:
    if kwargs.get("alpha", 1) != 1 or kwargs.get("rounding_mode") is not None:
        raise NotLowered(f"{name} with {kwargs}")
    a, b = args[:2]
    if isinstance(a, Value) and isinstance(b, Value):
        return tape.binary(name, a, b, result.shape, result.dtype)
    value, number = (a, b) if isinstance(a, Value) else (b, a)
    if isinstance(number, torch.Tensor) or name not in ("add", "subtract", "multiply", "divide"):
        raise NotLowered(f"{name} of a tensor that does not come from the ids")
    if name == "subtract":
        if value is a:
            return tape.unary("plus", value, result.shape, result.dtype, -float(number))
        return tape.unary("minus_from", value, result.shape, result.dtype, float(number))
    if name == "divide" and value is b:
        inverse = tape.unary("reciprocal", value, result.shape, torch.float32)
        return tape.unary("times", inverse, result.shape, result.dtype, float(number))
    return tape.unary(_WITH_NUMBER[name], value, result.shape, result.dtype, float(number))


def _converted(tape: Tape, args: tuple, kwargs: dict, result: torch.Tensor) -> Value:
    return tape.unary("copy", args[0], result.shape, result.dtype)


def _gelu(tape: Tape, args: tuple, kwargs: dict, result: torch.Tensor) -> Value:
    name = "gelu_tanh" if kwargs.get("approximate", "none") == "tanh" else "gelu"
    return tape.unary(name, args[0], result.shape, result.dtype)


def _power(tape: Tape, args: tuple, kwargs: dict, result: torch.Tensor) -> Value:
    value, exponent = args
    if exponent == 2:
        return tape.unary("square", value, result.shape, result.dtype)
    if exponent == -0.5:
        return tape.unary("rsqrt", value, result.shape, result.dtype)
    return tape.unary("power", value, result.shape, result.dtype, float(exponent))


def _clamp(tape: Tape, args: tuple, kwargs: dict, result: torch.Tensor) -> Value:
    low, high = (*args[1:], None, None)[:2]
    low, high = kwargs.get("min", low), kwargs.get("max", high)
    bounds = (-torch.inf if low is None else float(low), torch.inf if high is None else float(high))
    return tape.unary("clamp", args[0], result.shape, result.dtype, *bounds)


def _mean(tape: Tape, args: tuple, kwargs: dict, result: torch.Tensor) -> Value:
    value, dims = args[:2]
    keeps = args[2] if len(args) > 2 else kwargs.get("keepdim", False)
    if not keeps or [each % value.shadow.dim() for each in dims] != [value.shadow.dim() - 1]:
        raise NotLowered("a mean over other dimensions than the last")
    return tape.along_last(MEAN, value, tape.new(result.shape, result.dtype, value.rows))


def _layer_norm(tape: Tape, args: tuple, kwargs: dict, result: Any) -> list[Value | None]:
    value, shape, weight, bias, eps = args
    if len(shape) != 1:
        raise NotLowered("a norm over several dimensions")
    for each in (weight, bias):
        if each is not None and (each.rows != Rows.ONE or each.shadow.stride() != (1,)):
            raise NotLowered("a norm whose weights are not a vector")
    places = [
        None if each is None else Place(each.register, each.shadow.storage_offset(), 0, (0, 0, 1))
        for each in (weight, bias)
    ]
    out = tape.new(result[0].shape, result[0].dtype, value.rows)
    return [tape.along_last(LAYER_NORM, value, out, places, eps), None, None]


def _mm(tape: Tape, args: tuple, kwargs: dict, result: torch.Tensor) -> Value:
    x, weight = args
    return tape.linear(x, _seen(weight, weight.shadow.t()), None, result.shape, result.dtype)


def _addmm(tape: Tape, args: tuple, kwargs: dict, result: torch.Tensor) -> Value:
    if kwargs.get("alpha", 1) != 1 or kwargs.get("beta", 1) != 1:
        raise NotLowered("addmm with factors")
    bias, x, weight = args
    return tape.linear(x, _seen(weight, weight.shadow.t()), bias, result.shape, result.dtype)


def _cat(tape: Tape, args: tuple, kwargs: dict, result: torch.Tensor) -> Value:
    parts, dim = args[0], args[1] if len(args) > 1 else kwargs.get("dim", 0)
    if not all(isinstance(part, Value) for part in parts):
        raise NotLowered("a concatenation with a tensor that does not come from the ids")
    return tape.concatenated(parts, dim, result.shape, result.dtype)


def _stack(tape: Tape, args: tuple, kwargs: dict, result: torch.Tensor) -> Value:
    parts, dim = args[0], args[1] if len(args) > 1 else kwargs.get("dim", 0)
    dim %= result.dim()
    return _cat(tape, ([_seen(part, part.shadow.unsqueeze(dim)) for part in parts], dim), {}, result)


_HANDLERS: dict[Any, Callable] = {
    aten._to_copy.default: _converted,
    aten.gelu.default: _gelu,
    aten.pow.Tensor_Scalar: _power,
    aten.clamp.default: _clamp,
    aten.mean.dim: _mean,
    aten.native_layer_norm.default: _layer_norm,
    aten.mm.default: _mm,
    aten.addmm.default: _addmm,
    aten.cat.default: _cat,
    aten.stack.default: _stack,
}
