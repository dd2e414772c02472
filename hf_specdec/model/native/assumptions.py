"""What a program takes for granted: the Python objects that the recorded forward looked up."""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterable, Mapping
from types import CodeType, FrameType, ModuleType
from typing import Any

import torch
from torch import nn

_LIBRARIES = {"torch", "transformers", "hf_specdec", "numpy", "accelerate", *sys.stdlib_module_names}
_WATCHED = ("transformers.", "torch.nn.")  # the code that computes a forward; elsewhere globals change all the time


class CalledCode:
    """Inside the context, remembers which Python code this thread runs.

    Attributes:
        foreign: a function that belongs to no known library and was called, in words; None: there was none. It may read anything.
    """

    def __init__(self) -> None:
        self.foreign: str | None = None
        self._codes: dict[CodeType, dict[str, Any]] = {}

    def __enter__(self) -> CalledCode:
        self._before, self._collects = sys.getprofile(), gc.isenabled()
        gc.disable()  # a collection would run code that the forward does not call
        sys.setprofile(self._see)
        return self

    def __exit__(self, *args: Any) -> None:
        sys.setprofile(self._before)
        if self._collects:
            gc.enable()

    def _see(self, frame: FrameType, event: str, arg: Any) -> None:
        if event != "call" or frame.f_code in self._codes:
            return
        self._codes[frame.f_code] = frame.f_globals
        name = str(frame.f_globals.get("__name__"))
        if name.partition(".")[0] not in _LIBRARIES and not name.startswith("namedtuple_"):
            self.foreign = (
                self.foreign
                or f"{frame.f_code.co_qualname if sys.version_info >= (3, 11) else frame.f_code.co_name} of {name}"
            )

    def assumptions(self, modules: Iterable[nn.Module]) -> list[Assumption]:
        """What the code looked up: globals, attributes of modules of Python, and attributes of the classes of `modules`."""
        found: dict[tuple[int, str], Assumption] = {}

        def assume(namespace: Mapping[str, Any], names: Iterable[str]) -> None:
            for name in names:
                value = namespace.get(name, _MISSING)
                if value is _MISSING or (id(namespace), name) in found:
                    continue
                found[id(namespace), name] = namespace, name, value
                if isinstance(value, ModuleType) and value.__name__.partition(".")[0] in ("torch", "transformers"):
                    assume(vars(value), names)

        used: set[str] = set()
        for code, namespace in self._codes.items():
            if f"{namespace.get('__name__')}.".startswith(_WATCHED):
                used.update(code.co_names)
                assume(namespace, code.co_names)
        kinds = {torch.Tensor, *(type(module) for module in modules)}
        of_classes = [(kind, name, _looked_up(kind, name)) for kind in kinds for name in used]
        return [*found.values(), *(each for each in of_classes if each[2] is not _MISSING)]


_MISSING = object()
Assumption = tuple[Any, str, Any]  # a namespace or a class, a name, and the object that it stood for


def hold(assumptions: list[Assumption]) -> bool:
    """True if every name still stands for the same object."""
    return all(_looked_up(place, name) is value for place, name, value in assumptions)


def _looked_up(place: Any, name: str) -> Any:
    """What a name stands for in a namespace, or in a class and its bases, without calling descriptors; _MISSING: nothing."""
    if not isinstance(place, type):
        return place.get(name, _MISSING)
    return next((vars(base)[name] for base in place.__mro__ if name in vars(base)), _MISSING)
