"""What a model's forward is made of: modules, forward functions, hooks and adapters.

What was learnt of a model (a verdict, a decoder, a program) holds for the structure in which it was learnt. Comparing two
structures is exact: identities are numbers that are given once in a process, so that an address that is used again deceives nobody.
"""

from __future__ import annotations

import itertools
import types
import weakref
from typing import Any

from torch import nn

from . import architectures

_numbers: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()
_next_number = itertools.count().__next__
_ADAPTERS = ("_active_adapter", "_disable_adapters", "merged_adapters")  # of PEFT's layers
_LIBRARIES = ("torch.nn.", "transformers.", "transformers_modules.", "peft.", "hf_specdec.")


def number_of(thing: Any) -> Any:
    """A hashable that stands for this very object; it keeps nothing alive."""
    if isinstance(thing, types.MethodType):
        return number_of(thing.__self__), number_of(thing.__func__)
    try:
        number = _numbers.get(thing)
        if number is None:
            number = _numbers[thing] = _next_number()
        return number
    except TypeError:  # neither weak references nor hashes: a builtin function, or an object of the user's
        return type(thing).__name__, id(thing)


def hooks_of(module: nn.Module) -> tuple[int, ...]:
    """The numbers of a module's forward hooks and pre-hooks, which torch gives once in a process.

    Hooks with which transformers records hidden states are left out: they stay on a model after a call that returned hidden
    states, and do nothing in other calls.
    """
    hooks = module._forward_hooks
    kept = [
        i for i, hook in hooks.items() if getattr(hook, "__module__", None) != "transformers.utils.output_capturing"
    ]
    return *kept, *module._forward_pre_hooks


def forwards_of(model: nn.Module) -> tuple:
    """How each module of a model computes: its class's forward, a forward of its own, its hooks, its active adapters."""
    return tuple(_forward(module) for module in architectures.all_modules(model))


def structure_of(model: nn.Module) -> tuple:
    """`forwards_of`, and which modules these are."""
    return tuple((number_of(module), _forward(module)) for module in architectures.all_modules(model))


def _forward(module: nn.Module) -> tuple:
    own = vars(module)
    forward = number_of(own["forward"]) if "forward" in own else None
    adapters = tuple(repr(own.get(name)) for name in _ADAPTERS) if "merged_adapters" in own else ()
    return number_of(type(module).forward), forward, hooks_of(module), adapters


def interventions(model: nn.Module) -> list[str]:
    """What was put into a model's forward from outside, in words: hooks, replaced forwards, wrappers that no library defines."""
    found = []
    for module in architectures.all_modules(model):
        name = type(module).__name__
        if hooks_of(module):
            found.append(f"a hook on {name}")
        if "forward" in vars(module):
            found.append(f"a forward of its own on {name}")
        if module._modules and not f"{type(module).__module__}.".startswith(_LIBRARIES):
            found.append(name)  # leaves of others are quantized layers, which treat every token alike
    return list(dict.fromkeys(found))
