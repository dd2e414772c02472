"""OnwardRows: rows that go on from step to step, one token each, in arrays that change in place."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from ..cache import BlockTable
from ..core.rows import RowInput


class OnwardRows:
    """Rows of one token each, all with logits, without drafts and after their prompts.

    Attributes:
        inputs: the rows.
        places: sequence id → index of its row.
        tables: their block tables.
        columns: int64 [3, B]: slots, ids and positions.
        starts: int64 [B], the logical index of each row's token.
        described: int64 [B, 8], the table of `NativeRows`.
    """

    def __init__(self) -> None:
        self.block_size, self.inputs, self.tables = 1, list[RowInput](), list[BlockTable]()
        self.columns, self.starts = np.zeros((3, 0), dtype=np.int64), np.zeros(0, dtype=np.int64)
        self.described, self.places = np.zeros((0, 8), dtype=np.int64), dict[int, int]()

    def exchange(self, tables: list[BlockTable], block_size: int, make: Callable[[int], RowInput]) -> None:
        """Let rows leave, join and change their order.

        Args:
            tables: of all rows that there are now.
            block_size: of the tables.
            make: the input of a row that joins, by its index. Its offset is one number.
        """
        places = {id(table): i for i, table in enumerate(self.tables)}
        before = np.array([places.get(id(table), -1) for table in tables], dtype=np.int64)
        stay, count = np.flatnonzero(before >= 0), len(tables)
        columns, starts = np.zeros((3, count), dtype=np.int64), np.full(count, -1, dtype=np.int64)  # -1: in no block
        columns[:, stay], starts[stay] = self.columns[:, before[stay]], self.starts[before[stay]]
        self.inputs = [make(i) if place < 0 else self.inputs[place] for i, place in enumerate(before.tolist())]
        self.places = {row.seq_id: i for i, row in enumerate(self.inputs)}
        self.block_size, self.tables, self.columns, self.starts = block_size, tables, columns, starts
        self.described = np.zeros((count, 8), dtype=np.int64)
        self.described[:, 0], self.described[:, 1] = np.arange(count), np.arange(count) + 1
        self._offsets = np.array([row.offset for row in self.inputs], dtype=np.int64)
        for i, row in enumerate(self.inputs):
            row.tokens = columns[1, i : i + 1]

    def go_on(self, starts: np.ndarray, ids: list[int]) -> None:
        """Make these the rows of the next step. Their slots must be reserved.

        Args:
            starts: int64 [B], how many tokens of each row have been fed.
            ids: of the tokens.
        """
        slots, self.columns[1], self.columns[2] = self.columns[0], ids, starts + self._offsets
        slots += starts - self.starts  # within a block
        for i in np.flatnonzero(starts // self.block_size != self.starts // self.block_size).tolist():
            slots[i] = self.tables[i].slots[starts[i]]
        self.starts, self.described[:, 2] = starts, starts + 1
        self.described[:, 3] = [table.slots_at for table in self.tables]
        for row, start in zip(self.inputs, starts.tolist(), strict=True):
            row.start = start


NO_ROWS = OnwardRows()


class StepRows(list[RowInput]):
    """The rows of a step's forward: those that go on, before others."""

    def __init__(self, onward: OnwardRows, others: Sequence[RowInput] = ()):
        super().__init__([*onward.inputs, *others])
        self.onward = onward


def divided(rows: list[RowInput]) -> tuple[OnwardRows, list[RowInput]]:
    """The rows that go on, and those after them."""
    if not isinstance(rows, StepRows) or not rows.onward.inputs:
        return NO_ROWS, rows
    return rows.onward, rows[len(rows.onward.inputs) :]


def with_onward(groups: list[list[RowInput]] | None, rows: list[RowInput]) -> list[list[RowInput]] | None:
    """The groups into which rows were divided. If the first one has all rows that go on, it is `StepRows`."""
    onward, _ = divided(rows)
    if groups is not None and len(groups) > 1 and 0 < len(onward.inputs) <= len(groups[0]):
        groups[0] = StepRows(onward, groups[0][len(onward.inputs) :])
    return groups
