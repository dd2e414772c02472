"""What a model's forward is made of: modules, forward functions, hooks and adapters.

What was learnt of a model (a verdict, a decoder, a program) holds for the structure in which it was learnt. Comparing two
structures is exact: identities are numbers that are given once in a process, so that an address that is used again deceives nobody.
"""

from __future__ import annotations

import itertools
import types
import weakref
from typing import Any

import torch
from torch import nn
from torch.nn.modules import module as hooks_of_all
from torch.utils._device import DeviceContext

from . import architectures

_numbers: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()
_NO_MATTER = ("transformers.utils.output_capturing", "hf_specdec.model.architectures")
_next_number = itertools.count().__next__
_ADAPTERS = ("_active_adapter", "_disable_adapters", "merged_adapters")  # of PEFT's layers
_LIBRARIES = ("torch.nn.", "transformers.", "transformers_modules.", "peft.", "hf_specdec.")
_WRAPPERS = (*_LIBRARIES, "torch.", "accelerate.")  # their forwards in place of a module's compute the same


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

    Two kinds are left out: hooks with which transformers records hidden states, which stay on a model after a call that returned hidden
    states and do nothing in other calls; and ours.
    """
    hooks = (*module._forward_hooks.items(), *module._forward_pre_hooks.items())
    return tuple(i for i, hook in hooks if getattr(hook, "__module__", None) not in _NO_MATTER) if hooks else ()


def hooks_in(structure: tuple) -> set[int]:
    """The hooks of all modules of a structure. One that is gone from a model never comes back."""
    return {hook for _, (_, _, hooks, _) in structure for hook in hooks}


def interposed() -> bool:
    """True if each operator or module call has listeners: torch modes, or hooks of all modules.

    `torch.device` as a context is such a mode, too, and only says where new tensors go.
    """
    hooks = hooks_of_all._global_forward_hooks or hooks_of_all._global_forward_pre_hooks
    if hooks or torch._C._len_torch_dispatch_stack():
        return True
    modes = [torch._C._get_function_stack_at(i) for i in range(torch._C._len_torch_function_stack())]
    return not all(isinstance(mode, DeviceContext) for mode in modes)


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
    found = ["a hook of all modules or a torch mode"] if interposed() else []
    for module in architectures.all_modules(model):
        name = type(module).__name__
        if hooks_of(module):
            found.append(f"a hook on {name}")
        if "forward" in vars(module) and not _is_of_libraries(module):
            found.append(f"a forward of its own on {name}")
        if module._modules and not f"{type(module).__module__}.".startswith(_LIBRARIES):
            found.append(name)  # leaves of others are quantized layers, which treat every token alike
    return list(dict.fromkeys(found))


def _is_of_libraries(module: nn.Module) -> bool:
    """True if a library replaced the module's forward: compiled ones, and accelerate's, unless it calls a hook of the user's."""
    own = vars(module)["forward"]
    function = getattr(getattr(own, "func", own), "__func__", getattr(own, "func", own))
    origins = [getattr(function, "__globals__", {}).get("__name__")]  # wrappers copy the name of what they wrap
    hook = vars(module).get("_hf_hook")
    if hook is not None:
        origins += [type(each).__module__ for each in (hook, *getattr(hook, "hooks", ()))]
    return all(f"{origin}.".startswith(_WRAPPERS) for origin in origins)
