"""KeptState: detect and undo changes that a call makes to an object. Used for logits processors written by users.

An object's state is everything its attributes and those of its class reach: containers, tensors, arrays, objects of Python classes,
closures. State in global variables is not seen. Objects whose contents Python does not show (iterators, random generators,
compiled grammars) are opaque: any object that holds one is assumed to keep state.
"""

from __future__ import annotations

import collections
import copy
import enum
import functools
import re
import types
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedTokenizerBase

_CONSTANT = (
    type(None), bool, int, float, complex, str, bytes, range, slice, type, enum.Enum, re.Pattern, types.ModuleType,
    types.BuiltinFunctionType, torch.dtype, torch.device, np.dtype, np.generic, PreTrainedTokenizerBase,
)  # fmt: skip
_PLAIN = frozenset({type(None), bool, int, float, str, bytes})
_SEQUENCES = (list, tuple, collections.deque)
_SETS = (set, frozenset)
_CONTAINERS = (*_SEQUENCES, *_SETS, dict)
_MOST_BYTES = 32 << 20  # the most bytes of tensors and arrays to copy and compare
# Their classes hold no state.
_LIBRARIES = {"builtins", "abc", "collections", "typing", "numpy", "torch", "transformers"}
_CODE = (types.FunctionType, types.MethodType, functools.partial)


class KeptState:
    """A snapshot of an object's state. `opaque`: part of the state cannot be seen, so changes cannot be detected."""

    def __init__(self, owner: Any):
        self.owner, self.opaque = owner, False
        try:
            known: dict[int, _Saved] = {}
            self._saved = _save(owner, known)
            if sum(getattr(part.value, "nbytes", 0) for part in known.values()) > _MOST_BYTES:
                raise _Opaque
        except _Opaque:
            self.opaque = True

    def has_changed(self) -> bool:
        """True if the state differs from the snapshot."""
        return not _equals(self.owner, self._saved, set())

    def restore(self) -> None:
        """Restore the state in place: others may hold the same containers and tensors."""
        _restore(self._saved, set())


class _Opaque(Exception):
    pass


class _Saved:
    """A value and its saved contents: saved parts, a copy of plain values, or None if it cannot change."""

    def __init__(self, value: Any):
        self.value, self.is_flat = value, False
        self.parts: Any = None


def _save(value: Any, known: dict[int, _Saved]) -> _Saved:
    if id(value) in known:
        return known[id(value)]
    saved = known[id(value)] = _Saved(value)  # before its parts, which may refer back to it
    if isinstance(value, _CONSTANT):
        return saved
    if isinstance(value, torch.Tensor):
        saved.parts = value.detach().clone()
    elif isinstance(value, np.ndarray):
        saved.parts = value.copy()
    elif isinstance(value, _CONTAINERS):
        if getattr(value, "__dict__", None):  # a subclass with attributes
            raise _Opaque
        saved.is_flat = _is_flat(value)
        if saved.is_flat:
            saved.parts = copy.copy(value)
        elif isinstance(value, dict):
            saved.parts = {key: _save(part, known) for key, part in value.items()}
        elif isinstance(value, _SEQUENCES):
            saved.parts = [_save(part, known) for part in value]
        else:  # sets of objects
            raise _Opaque
    elif isinstance(value, _CODE):
        saved.parts = [_save(part, known) for part in _reached(value)]
    elif isinstance(value, types.CellType):
        saved.parts = _save(value.cell_contents, known) if _is_full(value) else None
    elif _is_of_python(type(value)) and not isinstance(value, torch.nn.Module):
        saved.parts = {name: _save(part, known) for name, part in _attributes(value).items()}
    else:
        raise _Opaque
    return saved


def _equals(value: Any, saved: _Saved, seen: set[int]) -> bool:
    if id(saved) in seen and value is saved.value:
        return True
    seen.add(id(saved))
    if isinstance(saved.value, _CONSTANT):
        return value is saved.value or (type(value) is type(saved.value) and bool(value == saved.value))
    if type(value) is not type(saved.value):
        return False
    if isinstance(value, torch.Tensor):
        return value.shape == saved.parts.shape and value.dtype == saved.parts.dtype and torch.equal(value, saved.parts)
    if isinstance(value, np.ndarray):
        return value.dtype == saved.parts.dtype and np.array_equal(value, saved.parts)
    if saved.is_flat:
        return value == saved.parts
    if isinstance(value, types.CellType):
        full = _is_full(value)
        return full == (saved.parts is not None) and (not full or _equals(value.cell_contents, saved.parts, seen))
    if isinstance(value, _SEQUENCES + _CODE):
        parts = value if isinstance(value, _SEQUENCES) else _reached(value)
        return len(parts) == len(saved.parts) and all(map(_equals, parts, saved.parts, [seen] * len(parts)))
    parts = value if isinstance(value, dict) else _attributes(value)
    return list(parts) == list(saved.parts) and all(_equals(parts[name], saved.parts[name], seen) for name in parts)


def _restore(saved: _Saved, done: set[int]) -> Any:
    """Restore a saved object and return it."""
    value, parts = saved.value, saved.parts
    if id(saved) in done or isinstance(value, (_CONSTANT, frozenset)):
        return value
    done.add(id(saved))
    if isinstance(value, torch.Tensor):
        with torch.no_grad():
            value.copy_(parts) if value.shape == parts.shape else value.set_(parts.clone())
    elif isinstance(value, np.ndarray):
        if value.shape != parts.shape:
            value.resize(parts.shape, refcheck=False)
        value[...] = parts
    elif isinstance(value, types.CellType):
        if parts is not None:
            value.cell_contents = _restore(parts, done)
    elif isinstance(value, dict):
        held = dict(parts) if saved.is_flat else {key: _restore(part, done) for key, part in parts.items()}
        value.clear()
        value.update(held)
    elif isinstance(value, set):
        value.clear()
        value.update(parts)
    elif isinstance(value, _SEQUENCES + _CODE):
        held = list(parts) if saved.is_flat else [_restore(part, done) for part in parts]
        if isinstance(value, (list, collections.deque)):
            value.clear()
            value.extend(held)
    else:
        for holder, name in [key for key in _attributes(value) if key not in parts]:
            delattr(holder or value, name)
        for (holder, name), part in parts.items():
            setattr(holder or value, name, _restore(part, done))
    return value


def _is_flat(container: Any) -> bool:
    """True if a container holds only plain values, which are fast to compare and copy."""
    more = container.values() if isinstance(container, dict) else ()
    return {*map(type, container), *map(type, more)} <= _PLAIN


def _reached(code: Any) -> list[Any]:
    """The objects that a function, method or partial refers to."""
    if isinstance(code, types.MethodType):
        return [code.__self__, code.__func__]
    if isinstance(code, functools.partial):
        return [code.func, code.args, code.keywords]
    return [code.__closure__, code.__defaults__, code.__kwdefaults__, code.__dict__]


def _attributes(value: Any) -> dict[tuple[type | None, str], Any]:
    """By (holder, name). The holder is None for an object's own attributes, and the class for data of a class."""
    slots = [name for kind in type(value).__mro__ for name in _slots(kind)]
    held = {**{name: getattr(value, name) for name in slots if hasattr(value, name)}, **getattr(value, "__dict__", {})}
    shared = {key: value for kind in type(value).__mro__ for key, value in _data_of(kind).items()}
    return {**{(None, name): value for name, value in held.items()}, **shared}


def _data_of(kind: type) -> dict[tuple[type | None, str], Any]:
    """The data that a class of the user's holds itself, such as a counter of its calls."""
    if kind.__module__.partition(".")[0] in _LIBRARIES:
        return {}
    data = (*_PLAIN, *_CONTAINERS, torch.Tensor, np.ndarray)
    return {(kind, name): value for name, value in vars(kind).items() if isinstance(value, data) and name[:2] != "__"}


def _slots(kind: type) -> tuple[str, ...]:
    names = vars(kind).get("__slots__", ())
    return tuple(
        name for name in ((names,) if isinstance(names, str) else names) if name not in ("__dict__", "__weakref__")
    )


def _is_of_python(kind: type) -> bool:
    """True if objects of a class hold only attributes: their memory has no room for anything else."""
    slots = sum(len(_slots(base)) for base in kind.__mro__)
    pointers = slots + (kind.__dictoffset__ > 0) + (kind.__weakrefoffset__ > 0)
    return kind.__basicsize__ <= object.__basicsize__ + pointers * tuple.__itemsize__ and kind.__itemsize__ == 0


def _is_full(cell: types.CellType) -> bool:
    try:
        _ = cell.cell_contents
    except ValueError:  # the cell was never assigned
        return False
    return True
