"""Lines: tokens that are read one by one after kept states, and how the layers find them."""

from __future__ import annotations

import functools
from dataclasses import dataclass, field

import numpy as np
import torch

from ...cache.state_pool import Base
from ...kernels.recurrent import Walk
from ...kernels.transfer import upload

_BEFORE, _NO_TOKEN = -1, -2  # instead of a parent's column


@dataclass
class Level:
    """Tokens that are read together, one rule call for all: each one's parent was read by the level before.

    Attributes:
        lines, columns: numpy [n], the tokens' places among the lines.
        parents: numpy [n], the parents' indices in the level before; in the first level, lines.
        kept, states: numpy [m], indices of the tokens after which the recurrent state is kept, and where.
    """

    lines: np.ndarray
    columns: np.ndarray
    parents: np.ndarray
    kept: np.ndarray
    states: np.ndarray


@dataclass
class Lines:
    """All tokens that are read one by one after a kept state, as lines [n, T] of tokens that descend from one state each.

    Lines are padded on the right, which no real token sees, and T is at least 2: for one token the layers would take another path.

    Attributes:
        packed: numpy [n, T], each token's packed index (padding: 0).
        lengths: numpy [n].
        bases: where each line starts.
        slots: numpy [n, T], each token's slot; -1: not kept.
        parents: numpy [n, T], the column of each token's parent; -1: the state before the line.
        states: numpy [n, T], where the recurrent state after each token goes; -1: it is not kept.
        levels: the tokens by depth.
    """

    packed: np.ndarray
    lengths: np.ndarray
    bases: list[Base]
    slots: np.ndarray
    parents: np.ndarray
    states: np.ndarray
    levels: list[Level]
    _on_device: dict = field(default_factory=dict)

    @property
    def is_chain(self) -> bool:
        """True if each token follows the one before it."""
        return bool((self.parents == np.arange(self.parents.shape[1]) - 1).all())

    def windows(self, size: int) -> np.ndarray:
        """The last `size` inputs of the convolution at each token: columns [n, T, size] of (those before the line, the line)."""
        count, length = self.parents.shape
        if self.is_chain:
            one = np.arange(length)[:, None] + 1 + np.arange(size)
            return np.broadcast_to(one, (count, length, size))
        windows = np.empty((count, length + 1, size), dtype=np.int64)
        windows[:, 0] = np.arange(size)  # before the line
        lines = np.arange(count)
        for column in range(length):
            windows[:, column + 1, :-1] = windows[lines, self.parents[:, column] + 1, 1:]
            windows[:, column + 1, -1] = size + column
        return windows[:, 1:]

    def on(self, device: torch.device) -> LinesOnDevice:
        """The same as tensors; made once per step, not per layer."""
        if device not in self._on_device:
            self._on_device[device] = LinesOnDevice(self, device)
        return self._on_device[device]


class LinesOnDevice:
    """Index tensors of `Lines`.

    Attributes:
        packed: see Lines.
        bases, states: slots [n] of the lines' bases.
        replays: for the first, second, .. token that the states have not read: the lines that have one (None: all), and their slots.
        real: (lines, columns) of the tokens that are not padding, and `targets`, their packed indices.
        levels: per level, (lines, columns), parents (None: all tokens in order), kept (None: all tokens), states.
        kept: (lines, columns) of all tokens that have slots, and `slots`.
    """

    def __init__(self, lines: Lines, device: torch.device):
        def send(array: np.ndarray) -> torch.Tensor:
            return upload(np.ascontiguousarray(array, dtype=np.int64), device)

        self.of, self.device = lines, device
        self.packed, self.bases = send(lines.packed), send(np.array([base.slot for base in lines.bases]))
        self.states, self.replays = send(np.array([base.state for base in lines.bases])), []
        for index in range(max(len(base.replayed) for base in lines.bases)):
            has = [i for i, base in enumerate(lines.bases) if len(base.replayed) > index]
            slots = send(np.array([lines.bases[i].replayed[index] for i in has]))
            self.replays.append((None if len(has) == len(lines.bases) else send(np.array(has)), slots))
        real = np.nonzero(np.arange(lines.packed.shape[1]) < lines.lengths[:, None])
        self.real, self.targets = (send(real[0]), send(real[1])), send(lines.packed[real])
        self.levels, before = [], len(lines.bases)
        for level in lines.levels:
            same = len(level.parents) == before and bool((level.parents == np.arange(before)).all())
            everything = len(level.kept) == len(level.lines)
            self.levels.append((
                (send(level.lines), send(level.columns)), None if same else send(level.parents),
                None if everything else send(level.kept), send(level.states),
            ))  # fmt: skip
            before = len(level.lines)
        self._kept = np.nonzero(lines.slots >= 0)
        self.kept, self.slots = (send(self._kept[0]), send(self._kept[1])), send(lines.slots[self._kept])
        self._windows: dict[int, tuple[torch.Tensor, torch.Tensor | None]] = {}

    @functools.cached_property
    def walk(self) -> DeviceWalk:
        """The lines as the kernels read them."""
        return walk_of(self.of, self.device)

    def windows(self, size: int) -> tuple[torch.Tensor, torch.Tensor | None]:
        """`Lines.windows` [m, size] of the kept tokens, and [n, T, size] of all tokens (None for chains)."""
        if size not in self._windows:
            windows = self.of.windows(size)
            kept = upload(np.ascontiguousarray(windows[self._kept]), self.device)
            everything = None if self.of.is_chain else upload(np.ascontiguousarray(windows), self.device)
            self._windows[size] = kept, everything
        return self._windows[size]


@dataclass
class DeviceWalk:
    """What a line's state has not read yet, followed by the line, as one walk.

    Attributes:
        replays: int64 [n, R], slots of tokens whose inputs are read first; lines that have fewer skip the last ones.
        walk: over R + T columns.
        windows: int32 [n, T, k] per k, the columns of each token's inputs of the convolution.
        slots: int32 [n, T], where these inputs are kept; -1: nowhere.
    """

    replays: torch.Tensor
    walk: Walk
    slots: torch.Tensor
    lines: Lines
    windows: dict[int, torch.Tensor]

    @property
    def num_replays(self) -> int:
        """R, the number of columns of replayed tokens."""
        return self.replays.shape[1]

    def windows_of(self, size: int) -> torch.Tensor:
        """`Lines.windows` [n, T, size]."""
        if size not in self.windows:
            self.windows[size] = _sent(self.lines.windows(size), self.slots.device)
        return self.windows[size]


def walk_of(lines: Lines, device: torch.device) -> DeviceWalk:
    """The lines' walk; see `DeviceWalk`."""
    replays, parents, into, saved = walk_columns(lines)
    walk = Walk(*(_sent(each, device) for each in (parents, into, saved)), num_saved=int(saved.max(initial=-1)) + 1)
    return DeviceWalk(upload(replays, device), walk, _sent(lines.slots, device), lines, {})


def walk_columns(lines: Lines) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """numpy: the slots of replayed tokens [n, R], and `parents`, `into` and `saved` of a Walk over R + T columns."""
    count, width = lines.packed.shape
    most = max(len(base.replayed) for base in lines.bases)
    replays = np.zeros((count, most), dtype=np.int64)
    parents = np.full((count, most + width), _NO_TOKEN)
    into, saved = np.full(parents.shape, -1), np.full(parents.shape, -1)
    real = np.arange(width) < lines.lengths[:, None]
    for line, base in enumerate(lines.bases):
        number = len(base.replayed)
        replays[line, :number] = base.replayed
        parents[line, :number] = np.arange(number) + _BEFORE
        first = number - 1 if number else _BEFORE  # after the replayed tokens, or the state itself
        own = np.where(lines.parents[line] < 0, first, lines.parents[line] + most)
        parents[line, most:] = np.where(real[line], own, _NO_TOKEN)
    into[:, most:] = np.where(real, lines.states, -1)
    numbers = 0
    for line in range(count):
        columns = np.flatnonzero(parents[line] != _NO_TOKEN)
        apart = parents[line, columns[1:]]
        again = np.unique(apart[(apart != columns[:-1]) & (apart >= 0)])
        saved[line, again] = numbers + np.arange(len(again))
        numbers += len(again)
    return replays, parents, into, saved


def _sent(array: np.ndarray, device: torch.device) -> torch.Tensor:
    return upload(np.ascontiguousarray(array, dtype=np.int32), device)
