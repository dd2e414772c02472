"""Assembles a recorded tape into a Program: which steps are needed, where registers are in memory, and the encoded operations."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from ...kernels.native import OP, TYPES, UNARY_FUNCTIONS, Operation, Rows
from .program import MOST_TOKENS, Output, Program
from .tape import NotLowered, Place, Register, Step, Tape, Value

_KEEPS = {Operation.WRITE, Operation.ATTEND}
_SHARED = {Operation.LINEAR, Operation.ATTEND}  # the threads share their work; one thread does the others
_ALIGNMENT = 64
_CACHED_BYTES = 32 << 20  # of weights: fewer stay in a processor's last cache from call to call


def assemble(
    tape: Tape,
    outputs: Sequence[Value],
    pools: dict[int, tuple[int, ...]],
    dtype: torch.dtype,
    max_positions: int | None = None,
) -> Program:
    """The program of a tape, with buffers for `MOST_TOKENS` tokens.

    Args:
        outputs: the values to return, each [T or R, width] after dimensions of size 1.
        pools: by layer: key heads, width, value heads, value width.
        dtype: of keys and values.
        max_positions: see `Program`.

    Raises:
        NotLowered: an output has another shape.
    """
    returned = [Register(value.dtype, _width(tape, value), output=True) for value in outputs]
    steps = _needed([*tape.steps, *(_copy(tape, *each) for each in zip(outputs, returned, strict=True))])
    registers = list({id(each): each for step in steps for each in _registers(step)}.values())
    slot_of = {id(each): slot for slot, each in enumerate(registers)}
    slots, memory = _allocated(steps, registers)
    weights = [each.tensor for each in registers if each.tensor is not None]
    streams = sum(each.nbytes for each in weights) > _CACHED_BYTES
    return Program(
        MOST_TOKENS, _encoded(steps, slot_of, slots, streams), slots, memory, weights,
        [(slot_of[id(each)], each.table) for each in registers if each.table is not None],
        next((slot_of[id(each)] for each in registers if each.features), None),
        [
            Output(slot_of[id(each)], each.dtype, each.elements, value.rows)
            for each, value in zip(returned, outputs, strict=True)
        ],
        pools, dtype, max_positions,
    )  # fmt: skip


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


def _allocated(steps: list[Step], registers: list[Register]) -> tuple[np.ndarray, torch.Tensor]:
    """The address of every register, int64, and the buffer that holds the program's own registers. Registers share memory if one is
    written after the last step that reads the other."""
    last = {}
    for index, step in enumerate(steps):
        last |= {id(each): index for each in _registers(step)}
    free: dict[int, list[int]] = {}  # offsets of unused memory by size
    places: dict[int, tuple[int, int]] = {}
    used = 0
    for index, step in enumerate(steps):
        own = {
            id(each): each
            for each in _registers(step)
            if not (each.tensor is not None or each.table or each.features or each.output)
        }
        for key, register in own.items():
            if key in places:
                continue
            size = -(-register.elements * register.dtype.itemsize * MOST_TOKENS // _ALIGNMENT) * _ALIGNMENT
            if free.get(size):
                places[key] = (free[size].pop(), size)
            else:
                places[key], used = (used, size), used + size
        for key in own:
            if last[key] == index:
                free.setdefault(places[key][1], []).append(places[key][0])
    memory = torch.empty(used + _ALIGNMENT, dtype=torch.uint8)
    start = -(-memory.data_ptr() // _ALIGNMENT) * _ALIGNMENT
    slots = np.zeros(len(registers), dtype=np.int64)
    for slot, register in enumerate(registers):
        if id(register) in places:
            slots[slot] = start + places[id(register)][0]
        elif register.tensor is not None:
            slots[slot] = register.tensor.data_ptr()
    return slots, memory


def _encoded(steps: list[Step], slot_of: dict[int, int], slots: np.ndarray, streams: bool) -> np.ndarray:
    ops = np.zeros(len(steps), dtype=OP)
    for op, step in zip(ops, steps, strict=True):
        for name in ("operation", "kind", "function", "rows", "size", "scalar", "scalar2"):
            op[name] = getattr(step, name)
        for name in ("out", "a", "b", "c"):
            place = getattr(step, name)
            if place is None:
                op[name]["slot"] = -1
                continue
            slot = slot_of[id(place.register)]
            op[name] = (slot, place.offset, TYPES[place.register.dtype], place.token, place.strides)
        for name, number in step.attention.items():
            op[name] = number
    # A register that gets its address when the program runs shares memory with no other.
    ops["waits"] = _waits(steps, {key: int(slots[slot]) or -1 - slot for key, slot in slot_of.items()})
    ops["kind"][ops["operation"] == Operation.LINEAR] = streams
    return ops


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


def _waits(steps: list[Step], memory_of: dict[int, int]) -> list[bool]:
    """For each step: True if all threads must have finished the earlier steps before it begins. Until then a shared step may neither
    read what another writes, nor write where another reads or writes.

    Args:
        memory_of: id of a register → its memory; equal for registers that share it.
    """
    waits, read, written, shared, alone = [], set(), set(), False, False
    for step in steps:
        is_shared = step.operation in _SHARED
        sources = {memory_of[id(each)] for each in step.inputs}
        targets = set() if step.out is None else {memory_of[id(step.out.register)]}
        if is_shared:
            wait = alone or not written.isdisjoint(sources | targets) or not read.isdisjoint(targets)
        else:
            wait = shared
        if wait:
            read, written, shared, alone = set(), set(), False, False
        if is_shared:
            shared = True
            read |= sources
            written |= targets
        else:
            alone = True
        waits.append(wait)
    return waits
