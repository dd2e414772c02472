"""lazy_names(): names of a package that are imported when they are first asked for, so that a process loads what it uses."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from typing import Any


def lazy_names(package: str, names_of: dict[str, list[str]]) -> Callable[[str], Any]:
    """The `__getattr__` of a package, which gets a `__dir__`, too. `names_of`: names by their module, relative to the package."""
    module_of, here = {name: module for module, names in names_of.items() for name in names}, sys.modules[package]
    setattr(here, "__dir__", lambda: sorted({*vars(here), *module_of}))  # noqa: B010 (modules declare none)

    def get(name: str) -> Any:
        if name not in module_of:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        value = getattr(importlib.import_module(module_of[name], package), name)
        setattr(here, name, value)
        return value

    return get
