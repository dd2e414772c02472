"""The current program of a subject: a kept one is used again only if the subject has not changed since it was made."""

from __future__ import annotations

import logging
from typing import Any

import torch
from torch import nn

from ..architectures import rope_parameters
from ..options.native_weights import NativeWeight
from ..structure import hooks_of, state_of
from .check import Assumption, CalledCode, Traceable, build, hold
from .program import Program
from .trace import NotLowered

logger = logging.getLogger(__name__)

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
    found = made[subject.key][2]
    if isinstance(found, Program):
        found.num_positions = 0  # a module's frequencies may have changed
    return found


def _built(subject: Traceable) -> tuple[list[Assumption], Program | str]:
    called = CalledCode()
    try:
        problem = obstacle(subject)
        if problem is not None:
            raise NotLowered(problem)
        found: Program | str = build(subject, called)
    except NotLowered as error:
        logger.info("%s runs operator by operator on the CPU: %s.", subject.name, error)
        found = str(error)
    return called.assumptions(subject.modules), found


def obstacle(subject: Traceable) -> str | None:
    """Why a program recorded from one forward might be wrong for others; None if it is safe.

    Modules must be torch's or transformers' own (in a drafter also ours), without hooks or wrappers: adapters and layers that others
    quantized keep settings in places that `state_of` does not compare.
    """
    text = None if subject.config is None else subject.config.get_text_config(decoder=True)
    kinds = {each.get("rope_type") for each in rope_parameters(getattr(text, "rope_parameters", None))}
    if kinds & {"dynamic", "longrope"} and not subject.ours:
        return "its rotary frequencies depend on the length of the text"
    known = ("torch.nn.modules.", "transformers.", *(("hf_specdec.",) if subject.ours else ()))
    for module in subject.modules:
        name = type(module).__name__
        if not type(module).__module__.startswith(known):
            return f"{name} is neither torch's nor transformers'"
        if hooks_of(module) or "forward" in vars(module):
            return f"its {name} is hooked or wrapped"
        for each in (*module._parameters.values(), *module._buffers.values()):
            plain = (nn.Parameter, torch.Tensor, nn.Buffer, NativeWeight)
            if each is not None and (each.device.type != "cpu" or type(each) not in plain):
                return f"weights of its {name} are not plain tensors on the CPU"
    return None
