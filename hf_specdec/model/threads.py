"""What we change in a model's modules while a decoder runs is seen by the thread that runs it; others see the modules as they were."""

from __future__ import annotations

import contextlib
import copy
import functools
import threading
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import nn

_here = threading.get_ident


def _is_ours(owner: int) -> bool:
    """True in the thread `owner`, and for torch's tracer, which does not know threads: layers are traced for us alone."""
    return torch.compiler.is_compiling() or _here() == owner


def for_this_thread(ours: Callable, theirs: Callable) -> Callable:
    """A function that calls `ours` in the calling thread of this function, and `theirs` in others."""
    owner = _here()

    @functools.wraps(theirs)
    def call(*args: Any, **kwargs: Any) -> Any:
        return (ours if _here() == owner else theirs)(*args, **kwargs)

    return call


@contextlib.contextmanager
def replaced_values(changes: Iterable[tuple[dict[str, Any], str, Any]]) -> Iterator[None]:
    """Inside the context, dictionaries hold other values, or values where they have none: (dictionary, key, value) each. The dictionary is
    `vars(..)` of an object whose attributes are replaced."""
    with contextlib.ExitStack() as stack:
        for fields, name, value in changes:
            restore = functools.partial(fields.__setitem__, name, fields[name]) if name in fields else None
            stack.callback(restore or functools.partial(fields.__delitem__, name))
            fields[name] = value
        yield


def replaced_method(module: nn.Module, name: str, ours: Callable) -> contextlib.AbstractContextManager[None]:
    """Inside the context, calls of a method in this thread call `ours(method, ..)`."""
    original = getattr(module, name)
    return replaced_values([(vars(module), name, for_this_thread(functools.partial(ours, original), original))])


class FalseInThisThread:
    """A flag that was True: in the thread that made this object it is false."""

    def __init__(self) -> None:
        self._owner = _here()

    def __bool__(self) -> bool:
        return _here() != self._owner

    def __reduce__(self) -> tuple:
        return bool, (True,)  # what a copy of the model had before


class FirstLayers(nn.ModuleList):
    """A model's layers. The thread that made this object sees only the first `count`."""

    def __init__(self, layers: nn.ModuleList, count: int):
        super().__init__()
        self._modules = layers._modules
        vars(self).update(_owner=_here(), _all=layers, _first=layers[:count])

    def _seen(self) -> nn.ModuleList:
        attributes = vars(self)
        return attributes["_first"] if _is_ours(attributes["_owner"]) else attributes["_all"]

    def __getitem__(self, index: Any) -> Any:
        return self._seen()[index]

    def __iter__(self) -> Any:
        return iter(self._seen())

    def __len__(self) -> int:
        return len(self._seen())

    def __reduce__(self) -> tuple:
        return copy.copy, (vars(self)["_all"],)


class OwnParameters(dict):
    """A module's parameters. The thread that made this object sees those in `ours` in place of parameters of the same name."""

    def __init__(self, parameters: dict[str, nn.Parameter | None], ours: dict[str, nn.Parameter]):
        super().__init__({**parameters, **ours})
        self.theirs, self._ours, self._owner = parameters, {**parameters, **ours}, _here()

    def _seen(self) -> dict[str, nn.Parameter | None]:
        return self._ours if _is_ours(self._owner) else self.theirs

    def __getitem__(self, name: str) -> nn.Parameter | None:
        return self._seen()[name]

    def __setitem__(self, name: str, value: nn.Parameter | None) -> None:
        self._seen()[name] = value

    def get(self, name: str, default: Any = None) -> Any:
        return self._seen().get(name, default)

    def values(self) -> Any:
        return self._seen().values()

    def items(self) -> Any:
        return self._seen().items()

    def __reduce__(self) -> tuple:
        return dict, (dict(self.theirs),)
