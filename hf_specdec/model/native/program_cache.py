"""The current program of a subject: a kept one is used again only if the subject has not changed since it was made."""

from __future__ import annotations

import logging
from typing import Any

import torch
from torch import nn

from ..architectures import all_modules, rope_parameters
from ..options.native_weights import NativeWeight
from ..structure import hooks_of, state_of
from .check import Assumption, CalledCode, Traceable, build, hold
from .program import Program
from .tape import NotLowered
from .trace import is_rotary

logger = logging.getLogger(__name__)

_ADAPTERS = ("peft.",)
# the subject's state, what was assumed, and the program under both or why none can be made
Made = tuple[tuple, list[Assumption], Program | str]


def current_program(subject: Traceable, made: dict[Any, Made]) -> Program | str:
    """The program of a subject, or why it has none.

    Args:
        made: earlier results by the subject's key. A result is used again if the subject has not changed.
    """
    state = state_of(subject.modules)
    if subject.key not in made or made[subject.key][0] != state or not hold(made[subject.key][1]):
        made[subject.key] = state, *_built(subject)
    program = made[subject.key][2]
    if isinstance(program, Program):
        program.num_positions = 0  # a module's frequencies may have changed
    return program


def _built(subject: Traceable) -> tuple[list[Assumption], Program | str]:
    known = ("torch.nn.modules.", "transformers.", *(("hf_specdec.",) if subject.ours else ()))
    assumptions, program = _tried(subject, known + _ADAPTERS)
    if isinstance(program, str) and any(type(module).__module__.startswith(_ADAPTERS) for module in subject.modules):
        assumptions, program = _tried(subject, known)  # adapters are called
    if isinstance(program, str):
        logger.info("%s runs operator by operator on the CPU: %s.", subject.name, program)
    return assumptions, program


def _tried(subject: Traceable, known: tuple[str, ...]) -> tuple[list[Assumption], Program | str]:
    """The program if modules of `known` libraries are recorded, or why there is none."""
    code, called = CalledCode(), _called_modules(subject, known)
    problem = obstacle(subject, called, known)
    try:
        if problem is not None:
            raise NotLowered(problem)
        program: Program | str = build(subject, code, called)
        layers = [module() for module in dict.fromkeys(program.called)]
        kinds = ", ".join(dict.fromkeys(map(_kind, layers)))
        but = f", which calls its {len(layers)} layers of {kinds}" if layers else ""
        logger.info("%s runs in the native library on the CPU%s.", subject.name, but)
    except NotLowered as error:
        program = str(error)
    return code.assumptions(subject.modules), program


def _called_modules(subject: Traceable, known: tuple[str, ...]) -> list[nn.Module]:
    """Layers that a program cannot stand for, and calls: linear ones and those without modules inside, of libraries that are not `known`,
    quantized or wrapped."""
    called, inside = [], set[int]()
    for module in subject.modules:  # outer ones come first
        is_layer = not module._modules or isinstance(getattr(module, "in_features", None), int)
        if not is_layer or id(module) in inside or hooks_of(module) or is_rotary(module):
            continue
        if _peculiarity(module, known) is not None:
            called.append(module)
            inside.update(map(id, all_modules(module)))
    return called


def _kind(module: nn.Module) -> str:
    weight = getattr(module, "weight", None)
    kind = type(weight) if type(module) is nn.Linear and type(weight) is not nn.Parameter else type(module)
    return f"{kind.__name__} ({kind.__module__.partition('.')[0]})"


def obstacle(subject: Traceable, called: list[nn.Module], known: tuple[str, ...]) -> str | None:
    """Why a program recorded from one forward might be wrong for others; None if it is safe.

    Modules that are not `called` must be of `known` libraries, without hooks or wrappers: others keep settings in places that `state_of`
    does not compare.
    """
    text = None if subject.config is None else subject.config.get_text_config(decoder=True)
    kinds = {parameters.get("rope_type") for parameters in rope_parameters(getattr(text, "rope_parameters", None))}
    if kinds & {"dynamic", "longrope"} and not subject.ours:
        return "its rotary frequencies depend on the length of the text"
    inside = {id(inner) for layer in called for inner in all_modules(layer)}
    peculiarities = (_peculiarity(module, known) for module in subject.modules if id(module) not in inside)
    return next((text for text in peculiarities if text is not None), None)


def _peculiarity(module: nn.Module, known: tuple[str, ...]) -> str | None:
    """Why a module cannot be recorded."""
    name = type(module).__name__
    if not type(module).__module__.startswith(known):
        return f"{name} is neither torch's nor transformers'"
    # Rotary modules compute tables whenever they may have changed.
    if hooks_of(module) or ("forward" in vars(module) and not is_rotary(module)):
        return f"its {name} is hooked or wrapped"
    for tensor in (*module._parameters.values(), *module._buffers.values()):
        plain = (nn.Parameter, torch.Tensor, nn.Buffer, NativeWeight)
        if tensor is not None and (tensor.device.type != "cpu" or type(tensor) not in plain):
            return f"weights of its {name} are not plain tensors on the CPU"
    return None
