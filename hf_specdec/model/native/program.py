"""A forward as a program of the native library: one call runs it."""

from __future__ import annotations

import ctypes
import threading
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch

from ...cache import PagedStaticCache
from ...kernels.native import OP, TYPES, UNARY_FUNCTIONS, Operation, Rows, StepInputs, library
from ..adapters import Bound
from ..packed_batch import PackedBatch
from .tape import Call, NotLowered, Place, Register, Table, Tape, TapeStep, Value

# The most tokens of a call. Measured: longer calls are not faster per token, and their buffers are larger.
MOST_TOKENS = 256

_KEEPS = {Operation.WRITE, Operation.ATTEND}
_OF_ALL_ROWS = {Operation.LINEAR, Operation.ATTEND, Operation.CALL}  # threads share the others row by row
_POOLS = 0  # stands for the memory of all keys and values
_ALIGNMENT = 64
_CACHED_BYTES = 32 << 20  # of weights: fewer stay in a processor's last cache from call to call
_POSITIONS_AT_FIRST = 1024
_BYTES_PER_THREAD = 2 << 20  # of weights: a thread that reads fewer costs more at the barriers than it saves


# Calls a module, given the numbers of rows, and ids and positions [1, T].
ModuleCall = Callable[[dict[Rows, int], Sequence[torch.Tensor]], None]


class ProgramOutput(NamedTuple):
    """A tensor that a program returns: its slot, dtype, elements per row, and what its rows are."""

    slot: int
    dtype: torch.dtype
    elements: int
    rows: Rows


@dataclass(eq=False)
class Program:
    """Operations over buffers. Weights are read in the model's own memory, so a write to them takes effect at once.

    One call runs at a time, because all calls use the same buffers.
    """

    most_tokens: int  # number of tokens that fit the buffers
    ops: np.ndarray  # the operations, an array of `OP`
    slots: np.ndarray  # int64, the address of each register
    memory: torch.Tensor  # the buffers
    weights: list[torch.Tensor]  # references that keep their memory from being reused
    tables: list[tuple[int, Table]]  # slot and table of each table by position
    features: int | None  # slot of the features that the caller passes; None: the program reads none
    outputs: list[ProgramOutput]
    calls: dict[int, ModuleCall]  # by index of the operation
    called: list[Callable[[], Any]]  # weak references to the modules of these calls
    pools: dict[int, tuple[int, ...]]  # by layer, sources' last: key heads, width, value heads, value width
    dtype: torch.dtype  # of keys and values
    # that the model was built for; its rotary module may have no angles after them. None: unknown
    max_positions: int | None = None
    num_positions: int = 0  # rows of the tables; 0: the tables are computed again before the next run

    def __post_init__(self) -> None:
        self._most_threads = max(1, sum(weight.nbytes for weight in self.weights) // _BYTES_PER_THREAD)
        attends = self.ops["operation"] == Operation.ATTEND
        self.reads_sources = bool((attends & (self.ops["kind"] == 1)).any())  # of encoder-decoder models
        self._filled: list[torch.Tensor] = []
        # Addresses of arrays that never move: asking an array for its own takes 1 µs.
        self.ops_at, self.slots_at = self.ops.ctypes.data, self.slots.ctypes.data
        self._every_token = torch.arange(self.most_tokens)
        self.lock = threading.Lock()

    @property
    def num_threads(self) -> int:
        """Number of threads that a call uses."""
        return min(torch.get_num_threads(), self._most_threads)

    def num_ops(self, num_outputs: int) -> int:
        """Number of operations that make so many outputs: the last ones write one each, in order."""
        return len(self.ops) - len(self.outputs) + num_outputs

    def make_room(self, num_positions: int) -> None:
        """Compute the tables anew if they end before `num_positions`. Call it with the lock."""
        if num_positions > self.num_positions:
            # More rows than necessary, so that tables are rarely computed again, but at most the model's own number of positions,
            # unless the text itself is longer.
            room = max(_POSITIONS_AT_FIRST, 2 * num_positions)
            most = room if self.max_positions is None or num_positions > self.max_positions else self.max_positions
            self._fill_tables(min(room, most))

    def _fill_tables(self, num_positions: int) -> None:
        """Compute the tables for positions 0 .. `num_positions` - 1."""
        by_table: dict[int, list[torch.Tensor]] = {}
        self._filled = []
        for slot, table in self.tables:
            if id(table.rows) not in by_table:
                by_table[id(table.rows)] = table.rows(num_positions)
            self._filled.append(by_table[id(table.rows)][table.part])
            self.slots[slot] = self._filled[-1].data_ptr()
        self.num_positions = num_positions

    def run(
        self,
        batch: PackedBatch,
        pools: Pools,
        features: torch.Tensor | None = None,
        num_outputs: int | None = None,
        adapters: Bound | None = None,
    ) -> list[torch.Tensor]:
        """The outputs for a batch of at most `most_tokens` tokens. Writes its keys and values to their slots.

        Args:
            pools: their `addresses`.
            features: [T, F], for programs that read them.
            num_outputs: how many of the outputs to return, from the first on; None: all.
            adapters: of the rows; None: those that the program has recorded.

        Raises:
            IndexError: an id or a position has no embedding.
        """
        num_tokens = batch.input_ids.shape[1]
        num_selected, selected = num_tokens, self._every_token
        if batch.logit_index is not None:
            num_selected, selected = len(batch.logit_index), batch.logit_index
        rows, sources = batch.native_rows(), batch.cross.native_rows() if self.reads_sources else None
        inputs = StepInputs(
            num_tokens, num_selected, batch.input_ids.data_ptr(), batch.position_ids.data_ptr(), selected.data_ptr(),
            batch.write_slots.data_ptr(), rows.table.ctypes.data, len(rows.table), pools.at, pools.scales_at,
            0 if sources is None else sources.table.ctypes.data,
        )  # fmt: skip
        if adapters is not None:
            inputs.adapters, inputs.num_adapters = adapters.columns.ctypes.data, len(adapters.columns)
            inputs.groups, inputs.selected_groups = (
                groups.ctypes.data for groups in (adapters.groups, adapters.selected_groups)
            )
        with self.lock:
            self.make_room(int(batch.position_ids.max()) + 1)
            return self._call(inputs, features, num_outputs, (batch.input_ids, batch.position_ids))

    def run_rows(self, features: torch.Tensor) -> list[torch.Tensor]:
        """The outputs for features [n, F] of at most `most_tokens` rows, for programs that read nothing else."""
        inputs = StepInputs()
        inputs.num_tokens = features.shape[0]
        with self.lock:
            return self._call(inputs, features)

    def _call(
        self,
        inputs: StepInputs,
        features: torch.Tensor | None,
        num_outputs: int | None = None,
        ids: Sequence[torch.Tensor] = (),
    ) -> list[torch.Tensor]:
        loaded = library()
        assert loaded is not None
        counts = {Rows.TOKENS: inputs.num_tokens, Rows.SELECTED: inputs.num_selected}
        outputs = self.outputs[:num_outputs]
        num_ops = self.num_ops(len(outputs))
        results = [torch.empty(counts[output.rows], output.elements, dtype=output.dtype) for output in outputs]
        for output, result in zip(outputs, results, strict=True):
            self.slots[output.slot] = result.data_ptr()
        if self.features is not None:
            assert features is not None
            features = features.contiguous()
            self.slots[self.features] = features.data_ptr()
        threads, step = self.num_threads, ctypes.byref(inputs)
        ops, slots, first = self.ops_at, self.slots_at, 0
        for last in (*self.calls, num_ops):
            if loaded.specdec_run(ops + first * OP.itemsize, last - first, slots, step, threads) >= 0:
                raise IndexError("index out of range: an id or a position that the model has no embedding for")
            if last < num_ops:
                self.calls[last](counts, ids)
            first = last + 1
        return results


class Pools(NamedTuple):
    """Addresses of the rows of `places`, int64 [N]: where keys and values of layer 0, of layer 1, .. are in a cache, and then those of
    sources; and where their scales are, if they are in int8 (0: they are not)."""

    at: int
    scales_at: int
    places: np.ndarray


def addresses(program: Program, cache: PagedStaticCache) -> Pools:
    """Where a program's keys and values are in a cache. Pools that do not exist yet are allocated."""
    known = cache.of_pools.get(id(program))
    if known is not None and known[1]() is program:
        return known[0]
    layers: list[Any] = [*cache.layers, *(cache.cross.layers if cache.cross is not None else ())]
    places = np.zeros((1 + cache.is_quantized, 2 * len(layers)), dtype=np.int64)
    for layer, (heads, width, value_heads, value_width) in program.pools.items():
        pools = layers[layer]
        if not pools.is_initialized:
            shapes = (1, heads, 1, width), (1, value_heads, 1, value_width)
            pools.lazy_initialization(*(torch.empty(shape, dtype=program.dtype) for shape in shapes))
        for row, pair in zip(places, ((pools.keys, pools.values), *pools.quantized.values()), strict=True):
            row[2 * layer : 2 * layer + 2] = [pool.data_ptr() for pool in pair]
    made = Pools(places.ctypes.data, places[1].ctypes.data if len(places) > 1 else 0, places)
    if not program.reads_sources:  # whose pools come, go and grow by themselves
        cache.of_pools[id(program)] = made, weakref.ref(program)  # another one may get its id
    return made


# ---- from a tape ----


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
    steps = _needed([*tape.steps, *(_copy(tape, *pair) for pair in zip(outputs, returned, strict=True))])
    registers = list({id(register): register for step in steps for register in _registers(step)}.values())
    slot_of = {id(register): slot for slot, register in enumerate(registers)}
    slots, memory = _allocated(steps, registers)
    weights = [register.tensor for register in registers if register.tensor is not None]
    streams = sum(weight.nbytes for weight in weights) > _CACHED_BYTES
    return Program(
        MOST_TOKENS, _encoded(steps, slot_of, slots, streams), slots, memory, weights,
        [(slot_of[id(register)], register.table) for register in registers if register.table is not None],
        next((slot_of[id(register)] for register in registers if register.features), None),
        [
            ProgramOutput(slot_of[id(register)], register.dtype, register.elements, value.rows)
            for register, value in zip(returned, outputs, strict=True)
        ],
        {
            index: _call_of(tape, step.call, memory, lambda value: int(slots[slot_of[id(value.register)]]))
            for index, step in enumerate(steps)
            if step.call is not None
        },
        [step.call.module for step in steps if step.call is not None],
        pools, dtype, max_positions,
    )  # fmt: skip


def _copy(tape: Tape, value: Value, output: Register) -> TapeStep:
    """The step that copies a value to an output."""
    shape = value.shadow.shape
    axis = tape.row_axis(value)
    dims = tape.dims([value], shape, axis)
    size = tuple(torch.Size([shape[i] for i in group]).numel() for group in dims)
    if value.rows == Rows.ONE or size[:2] != (1, 1):
        raise NotLowered("an output that is not one line per token")
    there = Place(output, 0, size[2], (0, 0, 1))
    copy = UNARY_FUNCTIONS.index("copy")
    return TapeStep(
        Operation.ELEMENTWISE, value.rows, (1, 1, size[2]), there, tape.place(value, shape, axis, dims), function=copy
    )


def _call_of(tape: Tape, call: Call, memory: torch.Tensor, address_of: Callable[[Value], int]) -> ModuleCall:
    """Calls a module with the rows at one address, or with ids, and writes what it returns to another."""
    kind, out_of = call.x.register.ids, _rows_at(tape, call.out, memory, address_of(call.out))
    x_of = None if kind is not None else _rows_at(tape, call.x, memory, address_of(call.x))

    def run(counts: dict[Rows, int], ids: Sequence[torch.Tensor]) -> None:
        module, count = call.module(), counts[call.x.rows]
        assert module is not None
        # A copy: the module may keep what it reads, and the memory is used again.
        x = ids[kind or 0] if x_of is None else x_of(count).clone(memory_format=torch.contiguous_format)
        out_of(count).copy_(module(x).detach())

    return run


def _rows_at(tape: Tape, value: Value, memory: torch.Tensor, address: int) -> Callable[[int], torch.Tensor]:
    """A function of the number of rows: the tensor that a value in the programs' own memory stands for."""
    shadow, axis, part = value.shadow, tape.row_axis(value), memory[address - memory.data_ptr() :]
    stored = part[: len(part) // value.dtype.itemsize * value.dtype.itemsize].view(value.dtype)
    shape, start = list(shadow.shape), stored.storage_offset() + int(shadow.storage_offset())
    return lambda count: stored.as_strided(
        [count if i == axis else size for i, size in enumerate(shape)], shadow.stride(), start
    )


def _allocated(steps: list[TapeStep], registers: list[Register]) -> tuple[np.ndarray, torch.Tensor]:
    """The address of every register, int64, and the programs' own buffer; registers share memory where no step needs both."""
    last = {}
    for index, step in enumerate(steps):
        last |= {id(register): index for register in _registers(step)}
    free: dict[int, list[int]] = {}  # offsets of unused memory by size
    places: dict[int, tuple[int, int]] = {}
    used = 0
    for index, step in enumerate(steps):
        buffers = {id(register): register for register in _registers(step) if register.is_buffer}
        for key, register in buffers.items():
            if key in places:
                continue
            size = -(-register.elements * register.dtype.itemsize * MOST_TOKENS // _ALIGNMENT) * _ALIGNMENT
            if free.get(size):
                places[key] = (free[size].pop(), size)
            else:
                places[key], used = (used, size), used + size
        for key in buffers:
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


def _encoded(steps: list[TapeStep], slot_of: dict[int, int], slots: np.ndarray, streams: bool) -> np.ndarray:
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
        for name, number in step.fields.items():
            op[name] = number
    # A register that gets its address when the program runs shares memory with no other.
    ops["waits"] = _waits(steps, {key: int(slots[slot]) or -1 - slot for key, slot in slot_of.items()})
    ops["streams"][ops["operation"] == Operation.LINEAR] = streams
    return ops


def _registers(step: TapeStep) -> list[Register]:
    return step.inputs if step.out is None else [*step.inputs, step.out.register]


def _width(tape: Tape, value: Value) -> int:
    axis = tape.row_axis(value)
    return torch.Size([size for i, size in enumerate(value.shadow.shape) if i != axis]).numel()


def _needed(steps: list[TapeStep]) -> list[TapeStep]:
    """The steps that outputs depend on, and those that write or read the cache."""
    wanted: set[int] = set()
    kept = []
    for step in reversed(steps):
        makes = step.out is not None and (step.out.register.output or id(step.out.register) in wanted)
        if makes or step.operation in _KEEPS:
            wanted |= {id(register) for register in step.inputs}
            kept.append(step)
    return kept[::-1]


def _waits(steps: list[TapeStep], memory_of: dict[int, int]) -> list[bool]:
    """For each step: True if all threads must have finished earlier ones, whose memory it shares (`memory_of`: register id → memory).

    A thread that computes the same rows in two steps need not wait in between, if both find a row in the same place.
    """
    # memory → how it was used since the last wait: (row by row in which layout, or None; whether it was written)
    waits, uses = [], {}
    for step in steps:
        by_rows = step.operation not in _OF_ALL_ROWS
        places = [(place, False) for place in (step.a, step.b, step.c) if place is not None]
        places += [] if step.out is None else [(step.out, True)]
        mine = []
        for place, writes in places:
            is_local = by_rows and (writes or step.operation != Operation.SELECT)
            layout = (step.rows, id(place.register), place.token) if is_local else None
            mine.append((memory_of[id(place.register)], layout, writes))
        if step.operation in _KEEPS:
            mine.append((_POOLS, (step.rows,) if by_rows else None, by_rows))
        wait = any(
            (writes or written) and (layout is None or layout != before)
            for memory, layout, writes in mine
            for before, written in uses.get(memory, ())
        )
        if wait:
            uses = {}
        for memory, layout, writes in mine:
            uses.setdefault(memory, set()).add((layout, writes))
        waits.append(wait)
    return waits
