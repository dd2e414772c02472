"""Steps of a native program meet in memory between two barriers only where a thread finds its rows in the same place."""

import itertools

import numpy as np
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from hf_specdec.kernels.native import Operation, Rows
from hf_specdec.model.native.program import _allocated, _encoded, _registers
from hf_specdec.model.native.tape import Place, Register, TapeStep

SHARED = {Operation.LINEAR, Operation.ATTEND}


def program(widths, moves):
    """Steps and their encoded form. TapeStep i makes a register of widths[i] elements from an earlier one; `moves`: (which of those that
    exist, whether the threads share the step)."""
    features = Register(torch.float32, 64, features=True)
    made, steps = [features], []
    for width, (source, is_shared) in zip(widths, moves, strict=False):
        register = Register(torch.float32, width)
        steps.append(
            TapeStep(
                Operation.LINEAR if is_shared else Operation.ELEMENTWISE, Rows.TOKENS, (1, 1, width), Place(register),
                Place(made[source % len(made)]),
            )
        )  # fmt: skip
        made.append(register)
    registers = list({id(each): each for step in steps for each in _registers(step)}.values())
    slot_of = {id(each): slot for slot, each in enumerate(registers)}
    slots, memory = _allocated(steps, registers)
    return steps, slots, slot_of, _encoded(steps, slot_of, slots, streams=False), memory


@given(
    st.lists(st.sampled_from([64, 128]), min_size=24, max_size=24),
    st.lists(st.tuples(st.integers(0, 30), st.booleans()), min_size=2, max_size=24),
)
# The fourth step's output takes the memory of the second register, which the third step's threads may still be reading.
@example([64] * 24, [(0, True), (0, True), (1, True), (2, True)])
def test_no_two_steps_between_barriers_meet_in_memory(widths, moves):
    steps, slots, slot_of, ops, _ = program(widths, moves)

    def spans(registers):
        found = []
        for register in registers:
            start = int(slots[slot_of[id(register)]])
            if start:
                found.append((start, start + register.elements * register.dtype.itemsize * 8, register))
        return found

    def meet(first, second, by_rows):
        return any(
            a < d and c < b and not (by_rows and one is other)
            for (a, b, one), (c, d, other) in itertools.product(first, second)
        )

    epoch = np.cumsum(ops["waits"])
    for i, j in itertools.combinations(range(len(steps)), 2):
        if epoch[i] != epoch[j]:
            continue
        by_rows = not {steps[i].operation, steps[j].operation} & SHARED
        reads, writes = ([spans(steps[k].inputs) for k in (i, j)], [spans([steps[k].out.register]) for k in (i, j)])
        assert not meet(writes[0], reads[1] + writes[1], by_rows), f"step {j} uses what step {i} writes"
        assert not meet(reads[0], writes[1], by_rows), f"step {j} writes where step {i} reads"
