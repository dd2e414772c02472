"""Methods that keep their results; methods of transformers' classes that are replaced for good; functions of its modules, during a call."""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable
from typing import Any, TypeVar

from ..core.errors import UnsupportedModel

T = TypeVar("T")


def kept(method: Callable[..., T]) -> Callable[..., T]:
    """A method whose result its object keeps for each choice of arguments, all of them hashable and given by position."""

    @functools.wraps(method)
    def call(self: Any, *args: Any) -> T:
        results, key = vars(self).setdefault("_kept", {}), (method.__name__, *args)
        if key not in results:
            results[key] = method(self, *args)
        return results[key]

    return call


@functools.cache
def change_method(kind: type, name: str, change: Callable[[Callable], Callable]) -> None:
    """Replace a method of a class of transformers, once in a process, by what `change` makes of it."""
    setattr(kind, name, change(getattr(kind, name)))


class ModuleFunctions:
    """Wrappers of a modeling module's functions. A wrapper calls a replacement while one is set in the same thread.

    The module's names are bound to the wrappers once and stay bound, because other models of the class may run in other threads.
    """

    _found: dict[str, ModuleFunctions] = {}
    _lock = threading.Lock()

    @classmethod
    def of(cls, source: Any, **names: str) -> ModuleFunctions:
        """The wrappers of a module's functions, by role, made when first needed."""
        with cls._lock:
            if source.__name__ not in cls._found:
                cls._found[source.__name__] = cls(source, names)
            return cls._found[source.__name__]

    def __init__(self, source: Any, names: dict[str, str]):
        self.source = f"functions in {source.__name__}"
        self._current = threading.local()
        for role, name in names.items():
            setattr(source, name, self._dispatching(role, getattr(source, name)))

    def _dispatching(self, role: str, original: Callable) -> Callable:
        @functools.wraps(original)
        def call(*args: Any, **kwargs: Any) -> Any:
            replacement = getattr(self._current, role, None)
            if replacement is None:
                return original(*args, **kwargs)
            self._current.called.add(role)
            return replacement(original, *args, **kwargs)

        return call

    @contextlib.contextmanager
    def replaced(self, **replacements: Callable):
        """Inside the context, the functions named by role call these: replacement(original, *args, **kwargs). Raises UnsupportedModel:
        the module did not call one of them, so other code has computed its result."""
        self._current.called = set()
        for role, replacement in replacements.items():
            setattr(self._current, role, replacement)
        try:
            yield
        finally:
            for role in replacements:
                setattr(self._current, role, None)
        if self._current.called != set(replacements):
            raise UnsupportedModel(
                f"A layer did not call its module's {self.source}: others have replaced them, as kernels from the Hub do. Load the model "
                "without use_kernels, or call generate() without speculative_config."
            )
