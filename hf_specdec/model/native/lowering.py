"""How torch's operators become operations of a `Tape`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch

from ...kernels.native import LAYER_NORM, MEAN
from .tape import NotLowered, Tape, Value, refuse_if

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
    aten.reciprocal.default: "reciprocal", aten.abs.default: "absolute", aten.clone.default: "copy", aten._to_copy.default: "copy",
}  # fmt: skip
_BINARY = {
    aten.add.Tensor: "add", aten.sub.Tensor: "subtract", aten.mul.Tensor: "multiply", aten.div.Tensor: "divide",
    aten.maximum.default: "maximum", aten.minimum.default: "minimum",
}  # fmt: skip
_WITH_NUMBER = {"add": "plus", "subtract": "minus_from", "multiply": "times", "divide": "over"}


def lower(tape: Tape, function: Any, args: tuple, kwargs: dict, result: Any) -> Any:
    """The values of an operator's results, given the values of its tensor arguments; `result` is what torch computed. Raises NotLowered:
    the library has no equivalent."""
    if function in _VIEWS:
        return _view(tape, function, args, kwargs)
    if any(isinstance(arg, Value) and arg.register.ids is not None for arg in args):
        return _of_ids(tape, function, args, result)
    if function in _UNARY:
        return tape.unary(_UNARY[function], args[0], result.shape, result.dtype)
    if function in _BINARY:
        return _binary(tape, _BINARY[function], args, kwargs, result)
    handler = _HANDLERS.get(function)
    if handler is None:
        raise NotLowered(str(function))
    return handler(tape, result, *args, **kwargs)


def _view(tape: Tape, function: Any, args: tuple, kwargs: dict) -> Any:
    value = args[0]
    try:
        shadows = function(value.shadow, *args[1:], **kwargs)
    except (RuntimeError, ValueError):  # the register's layout does not allow this view
        if value.register.ids is not None:
            raise NotLowered(f"{function} of ids") from None
        value = tape.copied(value)
        shadows = function(value.shadow, *args[1:], **kwargs)
    if not isinstance(shadows, torch.Tensor):
        return [replace(value, shadow=shadow) for shadow in shadows]
    return replace(value, shadow=shadows)


def _of_ids(tape: Tape, function: Any, args: tuple, result: torch.Tensor) -> Value:
    """Ids read an embedding, or are shifted by a number."""
    if function == aten.embedding.default:
        return tape.embedding(args[0], args[1], result.shape)
    if function in (aten.add.Tensor, aten.add.Scalar) and isinstance(args[1], int):
        return replace(args[0], shift=args[0].shift + args[1])
    raise NotLowered(f"{function} of ids")


def _binary(tape: Tape, name: str, args: tuple, kwargs: dict, result: torch.Tensor) -> Value:
    refuse_if(kwargs.get("alpha", 1) != 1 or kwargs.get("rounding_mode") is not None, f"{name} with {kwargs}")
    a, b = args[:2]
    if isinstance(a, Value) and isinstance(b, Value):
        return tape.binary(name, a, b, result.shape, result.dtype)
    value, number = (a, b) if isinstance(a, Value) else (b, a)
    shape, dtype = result.shape, result.dtype
    if isinstance(number, torch.Tensor) or name not in _WITH_NUMBER:
        raise NotLowered(f"{name} of a tensor that does not come from the ids")
    if name == "subtract" and value is a:
        return tape.unary("plus", value, shape, dtype, -float(number))
    if name == "divide" and value is b:
        return tape.unary("times", tape.unary("reciprocal", value, shape, torch.float32), shape, dtype, float(number))
    return tape.unary(_WITH_NUMBER[name], value, shape, dtype, float(number))


# Handlers have the operators' own parameters, after the tape and what torch computed.


def _gelu(tape: Tape, result: torch.Tensor, x: Value, approximate: str = "none") -> Value:
    return tape.unary("gelu_tanh" if approximate == "tanh" else "gelu", x, result.shape, result.dtype)


def _power(tape: Tape, result: torch.Tensor, x: Value, exponent: float) -> Value:
    name = {2: "square", -0.5: "rsqrt"}.get(exponent, "power")
    return tape.unary(name, x, result.shape, result.dtype, float(exponent))


def _clamp(tape: Tape, result: torch.Tensor, x: Value, min: float | None = None, max: float | None = None) -> Value:
    bounds = (-torch.inf if min is None else float(min), torch.inf if max is None else float(max))
    return tape.unary("clamp", x, result.shape, result.dtype, *bounds)


def _mean(
    tape: Tape,
    result: torch.Tensor,
    x: Value,
    dim: Sequence[int],
    keepdim: bool = False,
    dtype: torch.dtype | None = None,
) -> Value:
    if not keepdim or [axis % x.shadow.dim() for axis in dim] != [x.shadow.dim() - 1]:
        raise NotLowered("a mean over other dimensions than the last")
    return tape.along_last(MEAN, x, tape.new(result.shape, result.dtype, x.rows))


def _layer_norm(
    tape: Tape, result: Any, x: Value, shape: Sequence[int], weight: Value | None, bias: Value | None, eps: float
) -> list[Value | None]:
    refuse_if(len(shape) != 1, "a norm over several dimensions")
    if not all(vector is None or vector.is_vector for vector in (weight, bias)):
        raise NotLowered("a norm whose weights are not a vector")
    places = [vector and vector.place(0, (0, 0, 1)) for vector in (weight, bias)]
    out = tape.new(result[0].shape, result[0].dtype, x.rows)
    return [tape.along_last(LAYER_NORM, x, out, places, eps), None, None]


def _addmm(
    tape: Tape, result: torch.Tensor, bias: Value | None, x: Value, weight: Value, beta: float = 1, alpha: float = 1
) -> Value:
    refuse_if(alpha != 1 or beta != 1, "addmm with factors")
    return tape.linear(x, replace(weight, shadow=weight.shadow.t()), bias, result.shape, result.dtype)


def _cat(tape: Tape, result: torch.Tensor, parts: list[Any], dim: int = 0) -> Value:
    if not all(isinstance(part, Value) for part in parts):
        raise NotLowered("a concatenation with a tensor that does not come from the ids")
    return tape.concatenated(parts, dim, result.shape, result.dtype)


def _stack(tape: Tape, result: torch.Tensor, parts: list[Any], dim: int = 0) -> Value:
    dim %= result.dim()
    return _cat(tape, result, [replace(part, shadow=part.shadow.unsqueeze(dim)) for part in parts], dim)


def _pad(tape: Tape, result: torch.Tensor, x: Value, pad: Sequence[int], value: float = 0.0) -> Value:
    refuse_if(
        len(pad) != 2 or pad[0] != 0 or not 0 < pad[1] <= x.shadow.shape[-1] or bool(value), "a padding of another kind"
    )
    zeros = replace(x, shadow=x.shadow.narrow(-1, 0, pad[1]))
    zeros = tape.unary("times", zeros, zeros.shadow.shape, x.dtype, 0.0)
    return tape.concatenated([x, zeros], -1, result.shape, result.dtype)


_HANDLERS: dict[Any, Callable] = {
    aten.constant_pad_nd.default: _pad,
    aten.gelu.default: _gelu,
    aten.pow.Tensor_Scalar: _power,
    aten.clamp.default: _clamp,
    aten.mean.dim: _mean,
    aten.native_layer_norm.default: _layer_norm,
    aten.mm.default: lambda tape, result, x, weight: _addmm(tape, result, None, x, weight),
    aten.addmm.default: _addmm,
    aten.cat.default: _cat,
    aten.stack.default: _stack,
}
