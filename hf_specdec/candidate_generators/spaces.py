"""Spaces: each space has its own tables that learn from texts, so a text is drafted for only from the texts of its own space."""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, TypeVar

from ..core.sequence import Sequence

Tables = TypeVar("Tables")
MOST_SPACES = 16  # per drafter; their tables outlive the texts


class Spaces(Generic[Tables]):
    """The tables of each space (`Sequence.space`). A text that is not shared gets tables of its own, which are dropped when it ends.

    At most MOST_SPACES spaces have tables. The least recently used are dropped, but never while one of their texts is running.

    Args:
        make: returns new tables; its argument says whether texts share them.
        drop: called with the tables that are dropped.

    Attributes:
        shared: tables by space, the least recently used first.
    """

    def __init__(self, make: Callable[[bool], Tables], drop: Callable[[Tables], None] = lambda tables: None):
        self.make, self.drop = make, drop
        self.shared: dict[str, Tables] = {"": make(True)}
        self._running: dict[int, tuple[str | None, Tables]] = {}  # sequence id → its space (None: its own) and tables

    def enter(self, seq: Sequence) -> Tables:
        """The tables of a sequence: its space's, or its own if it is not shared. They stay the same until `leave`."""
        if seq.id in self._running:
            return self._running[seq.id][1]
        if not seq.is_shared:
            space, tables = None, self.make(False)
        else:
            space = seq.space
            tables = self.shared.pop(space) if space in self.shared else self.make(True)
            self.shared[space] = tables
        self._running[seq.id] = space, tables
        self._bound()
        return tables

    def leave(self, seq: Sequence) -> None:
        """The sequence ends."""
        space, tables = self._running.pop(seq.id, ("", None))
        if space is None and tables is not None:
            self.drop(tables)
        self._bound()

    def _bound(self) -> None:
        if len(self.shared) <= MOST_SPACES:
            return
        used = {space for space, _ in self._running.values()}
        for space in [each for each in self.shared if each not in used][: len(self.shared) - MOST_SPACES]:
            self.drop(self.shared.pop(space))
