"""What a model's forward is made of: modules, forward functions, hooks and adapters.

What was learnt of a model (a verdict, a decoder, a program) holds for the structure in which it was learnt. Comparing two
structures is exact: identities are numbers that are given once in a process, so that an address that is used again deceives nobody.
What holds addresses and numbers of a model (a program, a CUDA graph) depends on its state, too: where its weights are, and its settings.
"""

from __future__ import annotations

import functools
import itertools
import types
import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn
from torch.nn.modules import module as hooks_of_all
from torch.utils._device import DeviceContext
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from . import architectures

_numbers: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()
_NO_MATTER = ("transformers.utils.output_capturing", "hf_specdec.model.architectures", "hf_specdec.model.native.trace")
_next_number = itertools.count().__next__
_NO_SETTINGS = {
    "forward",
    "peft_config",  # what it says of an adapter is in the adapter's layers
    *(name for name, value in vars(nn.Module()).items() if isinstance(value, dict)),
}
_ADAPTERS = ("_active_adapter", "_disable_adapters", "merged_adapters")  # of PEFT's layers
_LIBRARIES = ("torch.nn.", "transformers.", "transformers_modules.", "peft.", "hf_specdec.")
# Forwards of these in place of a module's serve each token alone.
_WRAPPERS = (*_LIBRARIES, "torch.", "accelerate.", "compressed_tensors.")
# These replace a class's forward at the first use of a model.
_OURS = ("hf_specdec.model.latent", "hf_specdec.model.segments")
_SCALARS = {int, float, bool, str, type(None)}
_FUNCTIONS = {types.FunctionType, types.BuiltinFunctionType, types.MethodType, functools.partial}
_PLAIN = (nn.Parameter, type(None))
_NONE = object()


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
    """How each module of a model computes: its class's call and forward, a forward of its own, its hooks, its active adapters, the
    attention that its configuration names, and how weights of other classes than torch's own compute."""
    shared = functools.cache(_shared)
    return tuple(_forward(module, shared) for module in architectures.all_modules(model))


def structure_of(model: nn.Module) -> tuple:
    """`forwards_of`, and which modules these are."""
    shared = functools.cache(_shared)
    return tuple((number_of(module), _forward(module, shared)) for module in architectures.all_modules(model))


def _shared(kind: type[nn.Module], attention: str | None) -> tuple:
    """What modules of a class share, and those whose configurations name the same attention."""
    registered = ALL_ATTENTION_FUNCTIONS.get(attention), ALL_MASK_ATTENTION_FUNCTIONS.get(attention)
    forward: Any = kind.forward
    if getattr(forward, "__globals__", {}).get("__name__") in _OURS:
        forward = forward.__wrapped__
    return tuple(map(number_of, (forward, kind.__call__, *registered)))


def _forward(module: nn.Module, shared: Callable[[type[nn.Module], str | None], tuple]) -> tuple:
    fields = vars(module)
    forward = number_of(fields["forward"]) if "forward" in fields else None
    adapters = tuple(repr(fields.get(name)) for name in _ADAPTERS) if "merged_adapters" in fields else ()
    attention = getattr(fields.get("config"), "_attn_implementation_internal", None)
    weights = tuple(_kind_of(weight) for weight in fields["_parameters"].values() if type(weight) not in _PLAIN)
    return shared(type(module), attention), forward, hooks_of(module), (*adapters, *weights)


def _kind_of(weight: torch.Tensor) -> tuple[int, str]:
    """What a quantized weight's class computes with it: the class, and its settings."""
    flatten: Any = getattr(weight, "__tensor_flatten__", None)
    return number_of(type(weight)), "" if flatten is None else repr(flatten()[1])


def state_of(modules: Iterable[nn.Module]) -> tuple:
    """Everything about modules that a recorded forward keeps, except the values of weights: their settings and configurations, and where
    their tensors are."""
    facts: list[Any] = []
    configs: dict[int, Any] = {}
    for module in modules:
        kind, attributes = type(module), vars(module)
        if attributes.get("config") is not None:
            configs[id(attributes["config"])] = attributes["config"]
        settings = [_setting(value) for name, value in attributes.items() if name not in _NO_SETTINGS]
        known = tuple(setting for setting in settings if setting is not _NONE)
        facts.append((kind, kind.forward, kind.__call__, known, hooks_of(module), "forward" in attributes))
        for tensors in (module._parameters, module._buffers):
            facts += [None if tensor is None else place_of(tensor) for tensor in tensors.values()]
    fields = [getattr(config, "__dict__", {"": config}).items() for config in configs.values()]
    return tuple(facts), repr([sorted((name, repr(value)) for name, value in of_config) for of_config in fields])


def place_of(tensor: torch.Tensor) -> tuple:
    """Where a tensor's memory is, and how it is read; of a tensor made of others, such as a quantized one, where these are."""
    if hasattr(tensor, "__tensor_flatten__"):
        names, _ = tensor.__tensor_flatten__()  # pyright: ignore[reportAttributeAccessIssue]
        parts = [getattr(tensor, name) for name in names]  # of a sharded one, its mesh, too
        return type(tensor), *(place_of(part) if isinstance(part, torch.Tensor) else number_of(part) for part in parts)
    return tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype, tensor.device


def _setting(value: Any) -> Any:
    """What an attribute of a module that is no tensor adds to its state; _NONE: nothing."""
    if type(value) in _SCALARS:
        return value
    if type(value) in (tuple, list) and all(type(item) in _SCALARS for item in value):
        return tuple(value)
    if type(value) is dict:  # PEFT's settings by adapter
        return tuple((key, _setting(item)) for key, item in value.items() if type(key) in _SCALARS)
    return number_of(value) if type(value) in _FUNCTIONS else _NONE


def interventions(model: nn.Module) -> list[str]:
    """What was put into a model's forward from outside, in words: hooks, replaced forwards, wrappers that no library defines."""
    reasons = ["a hook of all modules or a torch mode"] if interposed() else []
    for module in architectures.all_modules(model):
        name = type(module).__name__
        if hooks_of(module):
            reasons.append(f"a hook on {name}")
        if "forward" in vars(module) and not _is_of_libraries(module):
            reasons.append(f"a forward of its own on {name}")
        if module._modules and not f"{type(module).__module__}.".startswith(_LIBRARIES):
            reasons.append(name)  # leaves of others are quantized layers, which treat every token alike
    return list(dict.fromkeys(reasons))


def _is_of_libraries(module: nn.Module) -> bool:
    """True if a library replaced the module's forward: compiled ones, and accelerate's, unless it calls a hook of the user's."""
    forward = vars(module)["forward"]
    function = getattr(getattr(forward, "func", forward), "__func__", getattr(forward, "func", forward))
    origins = [getattr(function, "__globals__", {}).get("__name__")]  # wrappers copy the name of what they wrap
    hook = vars(module).get("_hf_hook")
    if hook is not None:
        origins += [type(part).__module__ for part in (hook, *getattr(hook, "hooks", ()))]
    return all(f"{origin}.".startswith(_WRAPPERS) for origin in origins)
