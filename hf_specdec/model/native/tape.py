"""A `Tape`: a list of operations of the native library, and the registers that they read and write.

Tensors of a recorded forward are followed as `Value`s: which register (or weight) holds them, and in which layout. In a register the tokens
come first and a token's elements are contiguous. Every view is applied to a `shadow`, a tensor without data that has the register's
strides; so the layout after any chain of views is known without a rule for each of them.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn

from ...kernels.linear.quantized import WeightLayout
from ...kernels.native import BINARY, BINARY_FUNCTIONS, TYPES, UNARY, UNARY_FUNCTIONS, Operation, Rows


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

    @property
    def is_buffer(self) -> bool:
        """True if it is a buffer of the program."""
        return self.tensor is None and not (self.table or self.features or self.output)


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
        """Of its elements."""
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
        """The registers that it reads."""
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
        axes = [i for i, size in enumerate(shape) if size == self.sizes[rows]]
        refuse_if(len(axes) != 1, f"a tensor of shape {tuple(shape)} whose tokens are not one dimension")
        return axes[0]

    def row_axis(self, value: Value) -> int | None:
        """The dimension of a value that counts its rows; NotLowered if rows are missing or out of order. None: it has one row."""
        axis = self.axis(value.shadow.shape, value.rows)
        if axis is not None:
            pitch = value.register.elements
            mixes = value.shadow.stride(axis) != pitch or value.shadow.storage_offset() >= max(pitch, 1)
            refuse_if(mixes, "a tensor that mixes tokens")
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
        strides = tuple(shadow.stride(group[-1]) if group else 0 for group in dims)
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
        size = tuple(torch.Size([shape[i] for i in group]).numel() for group in dims)
        places = [self.place(value, shape, axis, dims) for value in (out, *inputs)]
        options = {"kind": kind, "function": function, "scalar": scalars[0], "scalar2": scalars[1]}
        self.add(Operation.ELEMENTWISE, out.rows, size, *places, **options)

    def unary(self, name: str, value: Value, shape, dtype, scalar: float = 0.0, scalar2: float = 0.0) -> Value:
        """One of UNARY_FUNCTIONS, of each element."""
        return self.elementwise(UNARY, UNARY_FUNCTIONS.index(name), [value], shape, dtype, (scalar, scalar2))

    def binary(self, name: str, a: Value, b: Value, shape, dtype) -> Value:
        """One of BINARY_FUNCTIONS, of each pair of elements."""
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
            part = replace(out, shadow=out.shadow.narrow(dim, first, size))
            self._emit(UNARY, UNARY_FUNCTIONS.index("copy"), [value], part)
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
        first, second = (shape[group[0]] if group else 1 for group in dims[:2])
        size = first, second, shape[-1]
        a, there = self.place(value, shape, axis, dims), self.place(out, out.shadow.shape, axis, dims)
        more = [*places, None, None][:2]
        self.add(Operation.ELEMENTWISE, value.rows, size, there, a, *more, kind=kind, scalar=scalar)
        return out

    def linear(self, x: Value, weight: Value, bias: Value | None, shape, dtype) -> Value:
        """x [T, K] times weight [N, K] transposed, plus bias [N]; `shape` [T, N]. Rows or columns of the weight are contiguous."""
        refuse_if(weight.rows != Rows.ONE, "a product of tokens")
        refuse_if(x.dtype != weight.dtype, f"a product of {x.dtype} with {weight.dtype}")
        rows, columns = weight.shadow.stride()
        refuse_if(1 not in (rows, columns), "a product with scattered weights")
        by_columns, place = int(columns != 1), weight.place(rows if columns == 1 else columns)
        return self._product(x, place, weight.shadow.shape[1], bias, shape, dtype, by_columns)

    def quantized_linear(
        self, x: Value, panels: torch.Tensor, form: WeightLayout, bias: Value | None, shape, dtype
    ) -> Value:
        """x [T, K] times quantized weights [N, K] transposed, plus bias [N]; `shape` [T, N]."""
        register = self.weights.setdefault(id(panels), Register(form.scales, tensor=panels))
        return self._product(x, Place(register), form.inputs, bias, shape, dtype, bits=form.bits, group=form.group)

    def _product(
        self, x: Value, weight: Place, inputs: int, bias: Value | None, shape, dtype, function: int = 0, **fields: int
    ) -> Value:
        refuse_if(x.rows == Rows.ONE or (bias is not None and bias.rows != Rows.ONE), "a product of weights")
        refuse_if(x.dtype != dtype or (bias is not None and bias.dtype != dtype), f"a product of {x.dtype} in {dtype}")
        refuse_if(bias is not None and not bias.is_vector, "a product with a bias in a scattered layout")
        if self.row_axis(x) != 0 or x.shadow.stride(1) != 1:
            x = self.copied(x)
        out = self.new(shape, dtype, x.rows)
        places = out.place(out.shadow.stride(0)), x.place(x.shadow.stride(0)), weight, bias and bias.place()
        self.add(Operation.LINEAR, x.rows, (1, shape[-1], inputs), *places, function=function, fields=fields)
        return out

    def adapted(self, layer: int, x: Value, output: Value) -> bool:
        """Let the product that made `output` add what the rows' adapters of this LoRA layer make of `x`, if one of `x` did."""
        maker = next((s for s in reversed(self.steps) if s.out is not None and s.out.register is output.register), None)
        if maker is None or maker.operation != Operation.LINEAR or maker.a is None or maker.kind:
            return False
        read = (maker.a.register, maker.a.offset, maker.size[2]) == (x.register, x.place().offset, x.shadow.shape[-1])
        maker.kind = 1 + layer if read and output.shadow.shape[-1] == maker.size[1] else 0
        return bool(maker.kind)

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
        is_odd = x.rows == Rows.ONE or bool(x.shift) or (is_id and x.shadow.dim() != 2)
        refuse_if(is_odd, f"what its {type(module).__name__} reads")
        if x.register.features:
            x = self.copied(x)
        self.row_axis(x)
        out = self.new(shape, dtype, x.rows)
        place = None if is_id else x.place()
        self.add(Operation.CALL, x.rows, (1, 1, 1), out.place(), place, call=Call(weakref.ref(module), x, out))
        return out

    def selected(self, value: Value, dim: int, shape) -> Value:
        """The tokens whose logits are wanted."""
        is_other = value.rows != Rows.TOKENS or self.row_axis(value) != dim % value.shadow.dim()
        refuse_if(is_other, "a selection of something other than tokens")
        flat = value.shadow.movedim(dim, 0).flatten(1) if value.shadow.numel() else value.shadow
        refuse_if(flat.stride(1) != 1, "a selection of tokens in a scattered layout")
        out, width = self.new(shape, value.dtype, Rows.SELECTED), flat.shape[1]
        places = out.place(width), value.place(flat.stride(0))
        self.add(Operation.SELECT, Rows.SELECTED, (1, 1, width), *places)
        return out

    def heads(self, value: Value) -> Place:
        """A place of [T, heads, width] whose width is contiguous."""
        is_scattered = value.rows != Rows.TOKENS or self.row_axis(value) != 0 or value.shadow.stride(2) != 1
        refuse_if(is_scattered, "heads in a scattered layout")
        return value.place(value.shadow.stride(0), (0, value.shadow.stride(1), 1))
