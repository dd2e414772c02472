"""A recorded forward as a program of the native library: memory for its registers, and one call that runs it."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import numpy as np
import torch

from ...cache import PagedStaticCache
from ...kernels.native import TYPES, library
from ...kernels.native import Step as StepInputs
from ...kernels.native.operations import OP, UNARY_FUNCTIONS, Operation, Rows
from ..packed_batch import PackedBatch
from .tape import NotLowered, Place, Register, Step, Tape, Value

_KEEPS = {Operation.WRITE, Operation.ATTEND}
_SHARED = {Operation.LINEAR, Operation.ATTEND}  # the threads share their work; one thread does the others
_ALIGNMENT = 64


class Program:
    """The operations that the outputs need, over buffers for at most `most_tokens` tokens.

    Weights are read in the model's own memory, so a write to them takes effect at once.

    Args:
        outputs: the values to return, each [T or R, width] after dimensions of size 1.
        pools: by layer: key heads, width, value heads, value width.
        dtype: of keys and values.
    """

    def __init__(
        self,
        tape: Tape,
        outputs: Sequence[Value],
        pools: dict[int, tuple[int, ...]],
        most_tokens: int,
        dtype: torch.dtype,
    ):
        self.dtype = dtype
        self.most_tokens, self.pools = most_tokens, pools
        self.outputs = [Register(value.dtype, _width(tape, value), output=True) for value in outputs]
        steps = [*tape.steps, *(self._copy(tape, *each) for each in zip(outputs, self.outputs, strict=True))]
        self.steps = _needed(steps)
        registers = list({id(each): each for step in self.steps for each in _registers(step)}.values())
        self.weights = [each for each in registers if each.tensor is not None]
        self.tables = [each for each in registers if each.table is not None]
        self.slot_of = {id(each): slot for slot, each in enumerate(registers)}
        self.slots = np.zeros(len(registers), dtype=np.int64)
        self._allocate(registers)
        self.ops = np.zeros(len(self.steps), dtype=OP)
        self._encode()
        self.num_positions = 0
        self.kept_tables: list[torch.Tensor] = []
        self.output_rows = [value.rows for value in outputs]
        for register in self.weights:
            assert register.tensor is not None
            self.slots[self.slot_of[id(register)]] = register.tensor.data_ptr()

    @staticmethod
    def _copy(tape: Tape, value: Value, output: Register) -> Step:
        """The step that copies a value to an output."""
        shape = value.shadow.shape
        axis = tape.row_axis(value)
        dims = tape.dims([value], shape, axis)
        size = tuple(torch.Size([shape[i] for i in own]).numel() for own in dims)
        if value.rows == Rows.ONE or size[:2] != (1, 1):
            raise NotLowered("an output that is not one line per token")
        there = Place(output, 0, size[2], (0, 0, 1))
        copy = UNARY_FUNCTIONS.index("copy")
        return Step(
            Operation.ELEMENTWISE,
            value.rows,
            (1, 1, size[2]),
            there,
            tape.place(value, shape, axis, dims),
            function=copy,
        )

    def _allocate(self, registers: list[Register]) -> None:
        """Give registers places in one buffer; a place is used again after the last step that reads it."""
        last = {}
        for index, step in enumerate(self.steps):
            last |= {id(each): index for each in _registers(step)}
        free: dict[int, list[int]] = {}  # places by size
        offsets, used = {}, 0
        for index, step in enumerate(self.steps):
            own = {
                id(each): each
                for each in _registers(step)
                if not (each.tensor is not None or each.table or each.output)
            }
            for key, register in own.items():
                if key not in offsets:
                    size = -(-register.elements * register.dtype.itemsize * self.most_tokens // _ALIGNMENT) * _ALIGNMENT
                    places = free.get(size)
                    if places:
                        offsets[key] = (places.pop(), size)
                    else:
                        offsets[key], used = (used, size), used + size
            for key in own:
                if last[key] == index:
                    free.setdefault(offsets[key][1], []).append(offsets[key][0])
        self.memory = torch.empty(used + _ALIGNMENT, dtype=torch.uint8)
        start = -(-self.memory.data_ptr() // _ALIGNMENT) * _ALIGNMENT
        for register in registers:
            if id(register) in offsets:
                self.slots[self.slot_of[id(register)]] = start + offsets[id(register)][0]

    def _encode(self) -> None:
        for op, step in zip(self.ops, self.steps, strict=True):
            op["operation"], op["kind"], op["function"], op["rows"] = (
                step.operation,
                step.kind,
                step.function,
                step.rows,
            )
            op["size"], op["scalar"], op["scalar2"] = step.size, step.scalar, step.scalar2
            for name in ("out", "a", "b", "c"):
                place = getattr(step, name)
                if place is None:
                    op[name]["slot"] = -1
                    continue
                slot = self.slot_of[id(place.register)]
                op[name] = (slot, place.offset, TYPES[place.register.dtype], place.token, place.strides)
            for name, number in step.attention.items():
                op[name] = number
        self.ops["waits"] = _waits(self.steps)

    # ---- running ----------------------------------------------------------------------------------------------------

    def fill_tables(self, num_positions: int) -> None:
        """Compute the tables by position again, for so many positions."""
        found: dict[int, list[torch.Tensor]] = {}
        self.kept_tables = []
        for register in self.tables:
            assert register.table is not None
            rows = register.table.rows
            if id(rows) not in found:
                found[id(rows)] = rows(num_positions)  # pyright: ignore[reportCallIssue]
            table = found[id(rows)][register.table.part]
            self.kept_tables.append(table)
            self.slots[self.slot_of[id(register)]] = table.data_ptr()
        self.num_positions = num_positions

    def run(self, batch: PackedBatch, pools: np.ndarray) -> list[torch.Tensor]:
        """The outputs for a batch of at most `most_tokens` tokens. Writes its keys and values to their slots.

        Args:
            pools: int64, the addresses of keys and values of layer 0, of layer 1, ..

        Raises:
            IndexError: an id or a position has no embedding.
        """
        num_tokens = batch.input_ids.shape[1]
        selected = torch.arange(num_tokens) if batch.logit_index is None else batch.logit_index
        counts = {Rows.TOKENS: num_tokens, Rows.SELECTED: selected.shape[0]}
        results = []
        for register, rows in zip(self.outputs, self.output_rows, strict=True):
            results.append(torch.empty(counts[rows], register.elements, dtype=register.dtype))
            self.slots[self.slot_of[id(register)]] = results[-1].data_ptr()
        rows = batch.native_rows()
        inputs = StepInputs(
            num_tokens, selected.shape[0], batch.input_ids.data_ptr(), batch.position_ids.data_ptr(), selected.data_ptr(),
            batch.write_slots.data_ptr(), rows.table.ctypes.data, len(rows.table), pools.ctypes.data,
        )  # fmt: skip
        loaded = library()
        assert loaded is not None
        failed = loaded.specdec_run(
            self.ops.ctypes.data, len(self.ops), self.slots.ctypes.data, ctypes.byref(inputs), torch.get_num_threads()
        )
        if failed >= 0:
            raise IndexError("index out of range: an id or a position that the model has no embedding for")
        return results


def addresses(program: Program, cache: PagedStaticCache) -> np.ndarray:
    """int64: where keys and values of layer 0, of layer 1, .. are in a cache; pools that do not exist yet are allocated."""
    found = np.zeros(2 * len(cache.layers), dtype=np.int64)
    for layer, (heads, width, value_heads, value_width) in program.pools.items():
        own = cache.layers[layer]
        if not own.is_initialized:
            shapes = (1, heads, 1, width), (1, value_heads, 1, value_width)
            own.lazy_initialization(*(torch.empty(shape, dtype=program.dtype) for shape in shapes))
        found[2 * layer], found[2 * layer + 1] = own.keys.data_ptr(), own.values.data_ptr()
    return found


def _registers(step: Step) -> list[Register]:
    return step.inputs if step.out is None else [*step.inputs, step.out.register]


def _width(tape: Tape, value: Value) -> int:
    """Elements of a value's row."""
    axis = tape.row_axis(value)
    return torch.Size([size for i, size in enumerate(value.shadow.shape) if i != axis]).numel()


def _needed(steps: list[Step]) -> list[Step]:
    """The steps that outputs depend on, and those that write or read the cache."""
    wanted: set[int] = set()
    kept = []
    for step in reversed(steps):
        makes = step.out is not None and (step.out.register.output or id(step.out.register) in wanted)
        if makes or step.operation in _KEEPS:
            wanted |= {id(each) for each in step.inputs}
            kept.append(step)
    return kept[::-1]


def _waits(steps: list[Step]) -> list[bool]:
    """Before which steps all threads must have done the steps before."""
    waits, written, shared, alone = [], set(), False, False
    for step in steps:
        if step.operation in _SHARED:
            wait = alone or any(id(each) in written for each in step.inputs)
        else:
            wait = shared
        if wait:
            written, shared, alone = set(), False, False
        if step.operation in _SHARED:
            shared = True
            assert step.out is not None
            written.add(id(step.out.register))
        else:
            alone = True
        waits.append(wait)
    return waits
