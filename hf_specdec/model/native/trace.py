"""Records what a forward computes as a `Tape`: a list of operations of the native library.

`TapeRecorder` sees torch's operators, and `lower` says how each of them becomes operations. Tensors of the recorded forward are followed as
`Value`s: which register (or weight) holds them, and in which layout. In a register the tokens come first and a token's elements are
contiguous. Every view is applied to a `shadow`, a tensor without data that has the register's strides; so the layout after any chain of
views is known without a rule for each of them.
"""

from __future__ import annotations

import contextlib
import sys
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn

from ...core.dispatch_mode import ExclusiveMode
from ...kernels.attention import attention_for
from ...kernels.attention.inputs import window_parts
from ...kernels.cache import write_keys_values
from ...kernels.linear.quantized import WeightLayout
from ...kernels.native import BINARY, BINARY_FUNCTIONS, LAYER_NORM, MEAN, TYPES, UNARY, UNARY_FUNCTIONS, Operation, Rows
from ..options.native_weights import NativeWeight
from ..options.native_weights import product as quantized_product
from ..packed_batch import PackedBatch
from ..threads import for_this_thread


class NotLowered(Exception):
    """The library has no equivalent of something in the forward; the message names it."""


def refuse_if(condition: bool, what: str) -> None:
    """Raise NotLowered if the condition holds; `what` names the thing that has no equivalent."""
    if condition:
        raise NotLowered(what)


@dataclass(eq=False)
class Register:
    """Memory of one tensor: a buffer of the program (`elements` per row), a weight, a table by position, the features that the caller
    passes, or an output; or, outside of the program's memory, `ids`: 0: the ids of the tokens, 1: their positions.

    `tensor` is the weight. `table` makes the rows of a table for positions 0 .. n - 1.
    """

    dtype: torch.dtype
    elements: int = 0
    tensor: torch.Tensor | None = None
    table: Table | None = None
    features: bool = False
    output: bool = False
    ids: int | None = None


@dataclass(eq=False)
class Table:
    """Angles by position: output `part` of a rotary module. `rows(n)` computes the module's outputs for n positions."""

    rows: Callable[[int], list[torch.Tensor]]
    part: int


@dataclass(frozen=True, eq=False)
class Value:
    """What a tensor of the recorded forward holds.

    Attributes:
        register: where it is.
        shadow: a meta tensor with its shape, and with the strides and offset it has in the register.
        rows: whether it has one row, or one per token or selected token.
        shift: a number added to ids.
    """

    register: Register
    shadow: torch.Tensor
    rows: Rows
    shift: int = 0

    @property
    def dtype(self) -> torch.dtype:
        return self.register.dtype

    @property
    def is_vector(self) -> bool:
        """True for weights that are one dimension of adjacent elements."""
        return self.rows == Rows.ONE and self.shadow.stride() == (1,)

    def place(self, token: int = 0, strides: tuple[int, int, int] = (0, 0, 0)) -> Place:
        """Where it begins, with these strides."""
        return Place(self.register, int(self.shadow.storage_offset()), token, strides)


@dataclass(eq=False)
class TapeStep:
    """One operation on rows of three sizes. A place is a register, an offset, a row stride and three strides."""

    operation: Operation
    rows: Rows
    size: tuple[int, int, int]
    out: Place | None = None
    a: Place | None = None
    b: Place | None = None
    c: Place | None = None
    kind: int = 0
    function: int = 0
    scalar: float = 0.0
    scalar2: float = 0.0
    # further fields of `OP`: of attention layer, heads, kv_heads, width, value_width, window; of LINEAR bits and group
    fields: dict[str, int] = field(default_factory=dict)
    call: Call | None = None

    @property
    def inputs(self) -> list[Register]:
        return [place.register for place in (self.a, self.b, self.c) if place is not None]


@dataclass(frozen=True, eq=False)
class Call:
    """A module that is called as it is, and where its input and its output are."""

    module: Callable[[], nn.Module | None]  # a weak reference
    x: Value
    out: Value


@dataclass(frozen=True, eq=False)
class Place:
    """Part of a register: see `Place` in `program.h`."""

    register: Register
    offset: int = 0
    token: int = 0
    strides: tuple[int, int, int] = (0, 0, 0)


class Tape:
    """The operations so far.

    Args:
        num_tokens, num_selected: sizes that no other dimension of the recorded forward has, so that they mark the rows.
    """

    def __init__(self, num_tokens: int, num_selected: int):
        self.sizes = {Rows.TOKENS: num_tokens, Rows.SELECTED: num_selected}
        self.steps: list[TapeStep] = []
        self.weights: dict[int, Register] = {}  # by id of the tensor

    def add(self, *step: Any, **options: Any) -> None:
        """Append a step; arguments as of `TapeStep`."""
        self.steps.append(TapeStep(*step, **options))

    def features(self, width: int, dtype: torch.dtype) -> Value:
        """The features [T, width] that the caller passes."""
        shadow = torch.empty(self.sizes[Rows.TOKENS], width, device="meta", dtype=dtype)
        return Value(Register(dtype, width, features=True), shadow, Rows.TOKENS)

    # ---- layouts ----------------------------------------------------------------------------------------------------

    def axis(self, shape: Sequence[int], rows: Rows) -> int | None:
        """The dimension of a shape that counts its rows; None: it has one row."""
        if rows == Rows.ONE:
            return None
        found = [i for i, size in enumerate(shape) if size == self.sizes[rows]]
        refuse_if(len(found) != 1, f"a tensor of shape {tuple(shape)} whose tokens are not one dimension")
        return found[0]

    def row_axis(self, value: Value) -> int | None:
        """The dimension of a value that counts its rows; NotLowered if rows are missing or out of order. None: it has one row."""
        axis = self.axis(value.shadow.shape, value.rows)
        if axis is not None:
            pitch = value.register.elements
            if value.shadow.stride(axis) != pitch or value.shadow.storage_offset() >= max(pitch, 1):
                raise NotLowered("a tensor that mixes tokens")
        return axis

    def new(self, shape: Sequence[int], dtype: torch.dtype, rows: Rows) -> Value:
        """A value in a register of its own."""
        refuse_if(dtype not in TYPES, f"{dtype}")
        axis, elements, strides = self.axis(shape, rows), 1, [0] * len(shape)
        for i in reversed(range(len(shape))):
            if i != axis:
                strides[i], elements = elements, elements * shape[i]
        if axis is not None:
            strides[axis] = elements
        shadow = torch.empty_strided(tuple(shape), strides, device="meta", dtype=dtype)
        return Value(Register(dtype, elements), shadow, rows)

    def weight(self, tensor: torch.Tensor) -> Value:
        """A parameter, buffer or constant, read where it is."""
        refuse_if(tensor.dtype not in TYPES, f"a weight in {tensor.dtype}")
        register = self.weights.setdefault(id(tensor), Register(tensor.dtype, tensor=tensor))
        shadow = torch.empty_strided(tensor.shape, tensor.stride(), device="meta", dtype=tensor.dtype)
        return Value(register, shadow, Rows.ONE)

    def place(self, value: Value, shape: Sequence[int], axis: int | None, dims: Sequence[Sequence[int]]) -> Place:
        """Where the elements of a value broadcast to `shape` are; `dims`: which dimensions form each of the three sizes."""
        self.row_axis(value)  # broadcasting keeps it
        shadow = value.shadow.expand(tuple(shape))
        strides = tuple(shadow.stride(own[-1]) if own else 0 for own in dims)
        token = 0 if axis is None or value.rows == Rows.ONE else shadow.stride(axis)
        return Place(value.register, shadow.storage_offset(), token, strides)  # pyright: ignore[reportArgumentType]

    def dims(self, values: Sequence[Value], shape: Sequence[int], axis: int | None) -> list[list[int]]:
        """The dimensions of `shape` except its rows, in three groups. In every value, each group has one stride."""
        shadows = [value.shadow.expand(tuple(shape)) for value in values]
        groups: list[list[int]] = []
        for i, size in enumerate(shape):
            if i == axis or size == 1:
                continue
            last = groups[-1][-1] if groups else None
            if last is not None and all(shadow.stride(last) == shadow.stride(i) * size for shadow in shadows):
                groups[-1].append(i)
            else:
                groups.append([i])
        refuse_if(len(groups) > 3, f"a tensor of shape {tuple(shape)} in a scattered layout")
        return [[]] * (3 - len(groups)) + groups

    # ---- operations -------------------------------------------------------------------------------------------------

    def elementwise(self, kind: int, function: int, inputs: Sequence[Value], shape, dtype, scalars=(0.0, 0.0)) -> Value:
        """A new value from the elements of one or two values, which are broadcast to `shape`."""
        kinds = {value.rows for value in inputs} - {Rows.ONE}
        refuse_if(len(kinds) > 1, "an operation on all tokens and selected ones")
        out = self.new(shape, dtype, kinds.pop() if kinds else Rows.ONE)
        self._emit(kind, function, inputs, out, scalars)
        return out

    def _emit(self, kind: int, function: int, inputs: Sequence[Value], out: Value, scalars=(0.0, 0.0)) -> None:
        shape = out.shadow.shape
        axis = self.axis(shape, out.rows)
        dims = self.dims([*inputs, out], shape, axis)
        size = tuple(torch.Size([shape[i] for i in own]).numel() for own in dims)
        places = [self.place(value, shape, axis, dims) for value in (out, *inputs)]
        options = {"kind": kind, "function": function, "scalar": scalars[0], "scalar2": scalars[1]}
        self.add(Operation.ELEMENTWISE, out.rows, size, *places, **options)

    def unary(self, name: str, value: Value, shape, dtype, scalar: float = 0.0, scalar2: float = 0.0) -> Value:
        return self.elementwise(UNARY, UNARY_FUNCTIONS.index(name), [value], shape, dtype, (scalar, scalar2))

    def binary(self, name: str, a: Value, b: Value, shape, dtype) -> Value:
        return self.elementwise(BINARY, BINARY_FUNCTIONS.index(name), [a, b], shape, dtype)

    def copied(self, value: Value) -> Value:
        """The same tensor in a register of its own, its elements in the order of its dimensions."""
        return self.unary("copy", value, value.shadow.shape, value.dtype)

    def concatenated(self, parts: Sequence[Value], dim: int, shape, dtype) -> Value:
        """Values one after the other along a dimension that is not their rows."""
        rows = {value.rows for value in parts}
        refuse_if(len(rows) > 1, "a concatenation of tensors with different rows")
        out = self.new(shape, dtype, rows.pop())
        dim %= len(shape)
        refuse_if(dim == self.axis(shape, out.rows), "a concatenation of tokens")
        first = 0
        for value in parts:
            size = value.shadow.shape[dim]
            own = replace(out, shadow=out.shadow.narrow(dim, first, size))
            self._emit(UNARY, UNARY_FUNCTIONS.index("copy"), [value], own)
            first += size
        return out

    def along_last(
        self, kind: int, value: Value, out: Value, places: Sequence[Place | None] = (), scalar: float = 0.0
    ) -> Value:
        """A mean or a norm over the last dimension of `value`, into `out`."""
        shape = value.shadow.shape
        axis = self.row_axis(value)
        refuse_if(axis == len(shape) - 1, "a mean over tokens")
        outer = [i for i in range(len(shape) - 1) if i != axis and shape[i] != 1]
        refuse_if(len(outer) > 2, f"a mean over the last of {len(shape)} dimensions")
        dims = [[]] * (2 - len(outer)) + [[i] for i in outer] + [[len(shape) - 1]]
        first, second = (shape[own[0]] if own else 1 for own in dims[:2])
        size = first, second, shape[-1]
        a, there = self.place(value, shape, axis, dims), self.place(out, out.shadow.shape, axis, dims)
        more = [*places, None, None][:2]
        self.add(Operation.ELEMENTWISE, value.rows, size, there, a, *more, kind=kind, scalar=scalar)
        return out

    def linear(self, x: Value, weight: Value, bias: Value | None, shape, dtype) -> Value:
        """x [T, K] times weight [N, K] transposed, plus bias [N]; `shape` [T, N]."""
        refuse_if(weight.rows != Rows.ONE, "a product of tokens")
        refuse_if(x.dtype != weight.dtype, f"a product of {x.dtype} with {weight.dtype}")
        refuse_if(weight.shadow.stride(1) != 1, "a product with weights of another layout than nn.Linear's")
        return self._product(x, weight.place(weight.shadow.stride(0)), weight.shadow.shape[1], bias, shape, dtype)

    def quantized_linear(
        self, x: Value, panels: torch.Tensor, form: WeightLayout, bias: Value | None, shape, dtype
    ) -> Value:
        """x [T, K] times quantized weights [N, K] transposed, plus bias [N]; `shape` [T, N]."""
        register = self.weights.setdefault(id(panels), Register(form.scales, tensor=panels))
        return self._product(x, Place(register), form.inputs, bias, shape, dtype, bits=form.bits, group=form.group)

    def _product(self, x: Value, weight: Place, inputs: int, bias: Value | None, shape, dtype, **fields: int) -> Value:
        refuse_if(x.rows == Rows.ONE or (bias is not None and bias.rows != Rows.ONE), "a product of weights")
        refuse_if(x.dtype != dtype or (bias is not None and bias.dtype != dtype), f"a product of {x.dtype} in {dtype}")
        refuse_if(bias is not None and not bias.is_vector, "a product with a bias in a scattered layout")
        if self.row_axis(x) != 0 or x.shadow.stride(1) != 1:
            x = self.copied(x)
        out = self.new(shape, dtype, x.rows)
        places = out.place(out.shadow.stride(0)), x.place(x.shadow.stride(0)), weight, bias and bias.place()
        self.add(Operation.LINEAR, x.rows, (1, shape[-1], inputs), *places, fields=fields)
        return out

    def embedding(self, weight: Value, ids: Value, shape) -> Value:
        """Rows of weight [V, H] at ids, which are the tokens' ids or positions."""
        plain = weight.rows == Rows.ONE and weight.shadow.dim() == 2 and weight.shadow.stride(1) == 1
        refuse_if(ids.register.ids is None or not plain, "an embedding of other numbers than ids and positions")
        self.row_axis(ids)
        out = self.new(shape, weight.dtype, ids.rows)
        count, width = weight.shadow.shape
        places = out.place(width), weight.place(weight.shadow.stride(0))
        self.add(Operation.EMBED, ids.rows, (count, 1, width), *places, kind=ids.register.ids, function=ids.shift)
        return out

    def looked_up(self, table: Table, like: torch.Tensor) -> Value:
        """Angles like [1, T, R] by position, from a table that the model's own module fills."""
        out, width = self.new(like.shape, like.dtype, Rows.TOKENS), like.shape[-1]
        places = out.place(width), Place(Register(like.dtype, width, table=table), 0, width)
        self.add(Operation.EMBED, Rows.TOKENS, (2**62, 1, width), *places, kind=1)
        return out

    def called(self, module: nn.Module, x: Value, shape, dtype) -> Value:
        """What a module makes of a tensor of as many rows."""
        is_id = x.register.ids is not None
        if x.rows == Rows.ONE or bool(x.shift) or (is_id and x.shadow.dim() != 2):
            raise NotLowered(f"what its {type(module).__name__} reads")
        if x.register.features:
            x = self.copied(x)
        self.row_axis(x)
        out = self.new(shape, dtype, x.rows)
        place = None if is_id else x.place()
        self.add(Operation.CALL, x.rows, (1, 1, 1), out.place(), place, call=Call(weakref.ref(module), x, out))
        return out

    def selected(self, value: Value, dim: int, shape) -> Value:
        """The tokens whose logits are wanted."""
        if value.rows != Rows.TOKENS or self.row_axis(value) != dim % value.shadow.dim():
            raise NotLowered("a selection of something other than tokens")
        flat = value.shadow.movedim(dim, 0).flatten(1) if value.shadow.numel() else value.shadow
        refuse_if(flat.stride(1) != 1, "a selection of tokens in a scattered layout")
        out, width = self.new(shape, value.dtype, Rows.SELECTED), flat.shape[1]
        places = out.place(width), value.place(flat.stride(0))
        self.add(Operation.SELECT, Rows.SELECTED, (1, 1, width), *places)
        return out

    def heads(self, value: Value) -> Place:
        """A place of [T, heads, width] whose width is contiguous."""
        if value.rows != Rows.TOKENS or self.row_axis(value) != 0 or value.shadow.stride(2) != 1:
            raise NotLowered("heads in a scattered layout")
        return value.place(value.shadow.stride(0), (0, value.shadow.stride(1), 1))


# ---- torch's operators ----

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
    return handler(tape, args, kwargs, result)


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


def _gelu(tape: Tape, args: tuple, kwargs: dict, result: torch.Tensor) -> Value:
    name = "gelu_tanh" if kwargs.get("approximate", "none") == "tanh" else "gelu"
    return tape.unary(name, args[0], result.shape, result.dtype)


def _power(tape: Tape, args: tuple, kwargs: dict, result: torch.Tensor) -> Value:
    value, exponent = args
    name = {2: "square", -0.5: "rsqrt"}.get(exponent, "power")
    return tape.unary(name, value, result.shape, result.dtype, float(exponent))


def _clamp(tape: Tape, args: tuple, kwargs: dict, result: torch.Tensor) -> Value:
    low, high = (*args[1:], None, None)[:2]
    low, high = kwargs.get("min", low), kwargs.get("max", high)
    bounds = (-torch.inf if low is None else float(low), torch.inf if high is None else float(high))
    return tape.unary("clamp", args[0], result.shape, result.dtype, *bounds)


def _mean(tape: Tape, args: tuple, kwargs: dict, result: torch.Tensor) -> Value:
    value, dims = args[:2]
    keeps = args[2] if len(args) > 2 else kwargs.get("keepdim", False)
    if not keeps or [dim % value.shadow.dim() for dim in dims] != [value.shadow.dim() - 1]:
        raise NotLowered("a mean over other dimensions than the last")
    return tape.along_last(MEAN, value, tape.new(result.shape, result.dtype, value.rows))


def _layer_norm(tape: Tape, args: tuple, kwargs: dict, result: Any) -> list[Value | None]:
    value, shape, weight, bias, eps = args
    refuse_if(len(shape) != 1, "a norm over several dimensions")
    if not all(vector is None or vector.is_vector for vector in (weight, bias)):
        raise NotLowered("a norm whose weights are not a vector")
    places = [vector and vector.place(0, (0, 0, 1)) for vector in (weight, bias)]
    out = tape.new(result[0].shape, result[0].dtype, value.rows)
    return [tape.along_last(LAYER_NORM, value, out, places, eps), None, None]


def _mm(tape: Tape, args: tuple, kwargs: dict, result: torch.Tensor) -> Value:
    x, weight = args
    return tape.linear(x, replace(weight, shadow=weight.shadow.t()), None, result.shape, result.dtype)


def _addmm(tape: Tape, args: tuple, kwargs: dict, result: torch.Tensor) -> Value:
    refuse_if(kwargs.get("alpha", 1) != 1 or kwargs.get("beta", 1) != 1, "addmm with factors")
    bias, x, weight = args
    return tape.linear(x, replace(weight, shadow=weight.shadow.t()), bias, result.shape, result.dtype)


def _cat(tape: Tape, args: tuple, kwargs: dict, result: torch.Tensor) -> Value:
    parts, dim = args[0], args[1] if len(args) > 1 else kwargs.get("dim", 0)
    if not all(isinstance(part, Value) for part in parts):
        raise NotLowered("a concatenation with a tensor that does not come from the ids")
    return tape.concatenated(parts, dim, result.shape, result.dtype)


def _stack(tape: Tape, args: tuple, kwargs: dict, result: torch.Tensor) -> Value:
    parts, dim = args[0], args[1] if len(args) > 1 else kwargs.get("dim", 0)
    dim %= result.dim()
    return _cat(tape, ([replace(part, shadow=part.shadow.unsqueeze(dim)) for part in parts], dim), {}, result)


_HANDLERS: dict[Any, Callable] = {
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


# ---- recording ----

# These give Python a number that depends on tensors, so another batch might take another path through the model's code.
_TELLS_PYTHON = {aten._local_scalar_dense.default, aten.equal.default, aten.nonzero.default}
_ROTARY = ("RotaryEmbedding", "RotaryPositions")  # in the names of modules whose outputs depend on positions alone


def is_rotary(module: nn.Module) -> bool:
    """True for a module whose outputs depend on positions alone."""
    return any(name in type(module).__name__ for name in _ROTARY)


class TapeRecorder(ExclusiveMode):
    """Inside the context, operators of this thread are recorded.

    A tensor that the library cannot compute has no `Value`. That is an error only if a result depends on the tensor.

    Args:
        modules: whose weights the forward reads.
        called: modules that the program calls as they are.
        batch: the packed batch that it reads; None: it reads only features.
        features: [T, F], passed to each call; None: the forward reads none.
    """

    def __init__(
        self,
        modules: list[nn.Module],
        called: list[nn.Module],
        tape: Tape,
        batch: PackedBatch | None,
        features: torch.Tensor | None = None,
    ):
        super().__init__()
        self.modules, self.called, self.tape, self.batch = modules, called, tape, batch
        self.values: dict[int, Value] = {}  # by id of the tensor
        self.kept: list[torch.Tensor] = []  # keeps the tensors alive, so that their ids are not reused
        self.reasons: dict[int, str] = {}  # why a tensor has no value
        self.pools: dict[int, tuple[int, int, int, int]] = {}  # by layer: key heads, width, value heads, width
        self.problem: str | None = None
        self._paused, self._profiles = 0, []
        tensors = [each for inner in modules for each in (*inner._parameters.values(), *inner._buffers.values())]
        self._own = {id(tensor) for tensor in tensors}
        self._panels = {id(tensor.panels) for tensor in tensors if isinstance(tensor, NativeWeight)}
        if features is not None:
            self._follow(features, tape.features(features.shape[1], features.dtype))
        if batch is None:
            return
        for kind, ids in enumerate((batch.input_ids, batch.position_ids)):
            shadow = torch.empty_strided(ids.shape, (ids.shape[1], 1), device="meta", dtype=ids.dtype)
            self._follow(ids, Value(Register(ids.dtype, 1, ids=kind), shadow, Rows.TOKENS))

    def _follow(self, tensor: torch.Tensor, value: Value | None, reason: str = "") -> None:
        self.kept.append(tensor)
        if value is None:
            self.reasons.setdefault(id(tensor), reason)
        else:
            self.values[id(tensor)] = value

    def value_of(self, tensor: torch.Tensor) -> Value:
        """The value of a tensor. Raises NotLowered: it has none; the message says why."""
        if id(tensor) in self.values:
            return self.values[id(tensor)]
        if id(tensor) in self._own:
            return self.tape.weight(tensor)
        raise NotLowered(self.reasons.get(id(tensor), "a tensor that is made inside the forward"))

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Inside the context, operators run unrecorded."""
        self._paused += 1
        try:
            yield
        finally:
            self._paused -= 1

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if self._paused:
            return result
        if func in _TELLS_PYTHON:
            self.problem = self.problem or f"Python code that depends on tensors ({func})"
        elif func._schema.is_mutable:
            self.problem = self.problem or f"a change in place ({func})"
        else:
            self._record(func, args, kwargs, result)
        return result

    def _record(self, func: Any, args: tuple, kwargs: dict, result: Any) -> None:
        results: list[Any] = list(result) if isinstance(result, (tuple, list)) else [result]
        reason = f"an unused result of {func}"
        try:
            values = self._lowered(func, args, kwargs, result)
        except NotLowered as error:
            values, reason = [None] * len(results), str(error)
        for each, value in zip(results, values if isinstance(values, list) else [values], strict=True):
            if isinstance(each, torch.Tensor):
                self._follow(each, value, reason)

    def _lowered(self, func: Any, args: tuple, kwargs: dict, result: Any) -> Any:
        """The values of the results of an operator."""
        if func == aten.lift_fresh.default and result.dim() == 0 and result.is_floating_point():
            return self.tape.weight(result)  # a number; the tape keeps the tensor
        if func == aten.index.Tensor or func == aten.index_select.default:
            return self._selected(func, args, result)
        if func == quantized_product:
            return self._multiplied(args, result)
        own = tuple(self._translated(arg) for arg in args)
        options = {name: each for name, each in kwargs.items() if not isinstance(each, torch.Tensor)}
        refuse_if(len(options) != len(kwargs), str(func))
        return lower(self.tape, func, own, options, result)

    def _translated(self, each: Any) -> Any:
        """An argument with values in place of its tensors."""
        if isinstance(each, torch.Tensor):
            return self.value_of(each)
        return [self._translated(inner) for inner in each] if isinstance(each, (list, tuple)) else each

    def _selected(self, func: Any, args: tuple, result: torch.Tensor) -> Value:
        found = [args[1:]]
        if func == aten.index.Tensor:
            found = [(dim, index) for dim, index in enumerate(args[1]) if index is not None]
        wanted = None if self.batch is None else self.batch.logit_index
        if wanted is None or len(found) != 1 or found[0][1] is not wanted:
            raise NotLowered("an index other than that of the wanted logits")
        return self.tape.selected(self.value_of(args[0]), found[0][0], result.shape)

    def _multiplied(self, args: tuple, result: torch.Tensor) -> Value:
        x, panels, bias, bits, group, outputs, scales = args
        refuse_if(id(panels) not in self._panels, "a product with quantized weights that are made inside the forward")
        added = None if bias is None else self.value_of(bias)
        own = WeightLayout(bits, group, outputs, x.shape[1], scales)
        return self.tape.quantized_linear(self.value_of(x), panels, own, added, result.shape, result.dtype)

    # ---- operations that the cache and the attention function call while recording -----------------------------------

    def write(
        self, keys: torch.Tensor, values: torch.Tensor, key_pool: torch.Tensor, value_pool: torch.Tensor, slots: Any
    ) -> None:
        """Write keys and values [T, heads, width] to their slots, and record it."""
        with self.paused():
            write_keys_values(keys, values, key_pool, value_pool, slots)
        layer = self._layer_of(key_pool)
        sizes = (*key_pool.shape[1:], *value_pool.shape[1:])
        if sizes[0] != sizes[2] or not (key_pool.is_contiguous() and value_pool.is_contiguous()):
            raise NotLowered("pools with different numbers of heads")
        if not keys.dtype == values.dtype == key_pool.dtype == value_pool.dtype:
            raise NotLowered("keys in another dtype than their pool")
        self.pools[layer] = sizes  # pyright: ignore[reportArgumentType] (four numbers)
        places = (self.tape.heads(self.value_of(states)) for states in (keys, values))
        self.tape.add(Operation.WRITE, Rows.TOKENS, (1, 1, 1), None, *places, fields=self._attention(layer))

    def attend(self, query, key_pool, value_pool, batch, scaling, *, window, softcap, sinks) -> torch.Tensor:
        """Attend, and record it. Arguments as those of what `attention_for` returns."""
        with self.paused():
            attend = attention_for(query.device, with_native=False)
            out = attend(query, key_pool, value_pool, batch, scaling, window=window, softcap=softcap, sinks=sinks)
        layer = self._layer_of(key_pool)
        refuse_if(layer not in self.pools, "attention to keys that were not written by the same layer")
        value = self.tape.new(out.shape, out.dtype, Rows.TOKENS)
        size, kept = window_parts(window)
        fields = self._attention(layer) | {"heads": query.shape[1], "window": size, "kept": kept}
        bias = None
        if sinks is not None:
            weight = self.value_of(sinks)
            refuse_if(not weight.is_vector, "sinks that are not a vector of weights")
            bias = weight.place()
        places = value.place(), self.tape.heads(self.value_of(query)), None, bias
        scalars = {"scalar": scaling, "scalar2": softcap or 0.0}
        self.tape.add(Operation.ATTEND, Rows.TOKENS, (1, 1, 1), *places, **scalars, fields=fields)
        self._follow(out, value)
        return out

    def _attention(self, layer: int) -> dict[str, int]:
        heads, width, _, value_width = self.pools[layer]
        return {"layer": layer, "kv_heads": heads, "width": width, "value_width": value_width}

    def _layer_of(self, key_pool: torch.Tensor) -> int:
        assert self.batch is not None
        layers: list[Any] = self.batch.cache.layers
        return next(i for i, layer in enumerate(layers) if layer.is_initialized and layer.keys is key_pool)

    # ---- modules whose operators are not recorded -------------------------------------------------------------------

    @contextlib.contextmanager
    def whole_modules(self) -> Iterator[None]:
        """Inside the context, the outputs of rotary modules are recorded as rows of tables that the same module computes by position, and
        the modules in `called` as calls of them."""
        handles = []
        rotary = [each for each in self.modules if is_rotary(each)]
        for then, modules in ((self._leave_rotary, rotary), (self._leave_called, self.called)):
            for module in modules:
                enter, leave = (for_this_thread(hook, lambda *_: None) for hook in (self._enter, then))
                handles.append(module.register_forward_pre_hook(enter, with_kwargs=True, prepend=True))
                handles.append(module.register_forward_hook(leave, with_kwargs=True))
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _enter(self, module: nn.Module, args: tuple, kwargs: dict) -> None:
        self._paused += 1
        self._profiles.append(sys.getprofile())
        sys.setprofile(None)  # what its code looks up is not taken for granted: the module itself is called

    def _leave(self) -> None:
        sys.setprofile(self._profiles.pop())
        self._paused -= 1

    def _leave_called(self, module: nn.Module, args: tuple, kwargs: dict, output: Any) -> None:
        self._leave()
        if len(args) != 1 or kwargs or not all(isinstance(each, torch.Tensor) for each in (args[0], output)):
            raise NotLowered(f"its {type(module).__name__} is called with other than one tensor")
        self._follow(output, self.tape.called(module, self.value_of(args[0]), output.shape, output.dtype))

    def _leave_rotary(self, module: nn.Module, args: tuple, kwargs: dict, output: Any) -> None:
        self._leave()
        assert self.batch is not None
        own = self.batch.position_ids
        given = [*args, *kwargs.values()]
        place = own.data_ptr(), own.shape, own.dtype
        known = [torch.is_tensor(each) and (each.data_ptr(), each.shape, each.dtype) == place for each in given]
        outputs = output if isinstance(output, tuple) else (output,)
        if sum(known) != 1 or any(each.dim() != 3 or each.shape[:2] != (1, own.shape[1]) for each in outputs):
            return
        # Of hidden states, the module uses only dtype and device: one element is enough.
        given = [each[:, :1].clone() if torch.is_tensor(each) and each.dim() == 3 else each for each in given]
        given = [None if is_ours else each for is_ours, each in zip(known, given, strict=True)]
        rows = _by_position(weakref.ref(module), given, len(args), list(kwargs))
        with self.paused():
            computed = rows(int(own.max()) + 1)
            equal = [torch.equal(each[0], table[own[0]]) for each, table in zip(outputs, computed, strict=True)]
        for part, (each, is_equal) in enumerate(zip(outputs, equal, strict=True)):
            if is_equal:
                self._follow(each, self.tape.looked_up(Table(rows, part), each))


def _by_position(module: Any, given: list[Any], num_args: int, names: list[str]) -> Callable[[int], list[torch.Tensor]]:
    """A function that calls a rotary module, held weakly, for positions 0 .. n - 1 (None in `given`): outputs [n, R]."""

    def rows(count: int) -> list[torch.Tensor]:
        values = [torch.arange(count)[None] if each is None else each for each in given]
        found = module()(*values[:num_args], **dict(zip(names, values[num_args:], strict=True)))
        found = found if isinstance(found, tuple) else (found,)
        return [each[0].contiguous() for each in found]

    return rows
