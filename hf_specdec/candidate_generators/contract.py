"""What a method from outside this package must keep to. An error of such a method names the method and what was asked of it."""

from __future__ import annotations

import functools
from typing import Any

import torch

from ..cache import OutOfBlocks
from ..config import SpeculativeConfigError
from ..core.draft_trees import DraftTrees
from ..core.errors import UnsupportedModel
from ..core.sequence import Sequence
from .base import CandidateGenerator

CONTRACTS = {
    "start": "start(seq) is told of a text that joins, and returns nothing",
    "propose": "propose(sequences, limits) must return DraftTrees with a row a sequence, on the target's device, no path longer than the "
    "row's limit (DraftTrees.from_lists makes them of lists)",
    "observe": "observe(outcome) is told what a step has written, and returns nothing",
    "stop": "stop(seq) is told of a text that leaves, and returns nothing",
}
_PASSED_ON = (OutOfBlocks, SpeculativeConfigError, UnsupportedModel)  # they say what is wrong themselves


class MethodError(RuntimeError):
    """A method from outside this package raised an error, or broke the contract."""


def hold_to_contract(generator: CandidateGenerator) -> None:
    """Check what a generator from outside this package returns, and name the method in its errors."""
    if type(generator).__module__.partition(".")[0] == __name__.partition(".")[0]:
        return
    for name in CONTRACTS:
        setattr(generator, name, _checked(generator, name))


def _checked(generator: CandidateGenerator, name: str) -> Any:
    call, kind = getattr(generator, name), type(generator)
    where = f"Method {generator.config.method!r}: {kind.__module__}.{kind.__qualname__}.{name}"

    @functools.wraps(call)
    def checked(*args: Any) -> Any:
        try:
            found = call(*args)
        except _PASSED_ON:
            raise
        except Exception as error:
            raise MethodError(f"{where} raised {type(error).__name__}: {error}. {CONTRACTS[name]}.") from error
        if name == "propose" and (problem := _problem(generator, found, *args)):
            raise MethodError(f"{where} {problem}. {CONTRACTS[name]}.")
        return found

    return checked


def _problem(generator: CandidateGenerator, found: Any, sequences: list[Sequence], limits: list[int]) -> str | None:
    """What is wrong with a proposal; None if it may be verified."""
    if not isinstance(found, DraftTrees):
        return f"returned {type(found).__name__}"
    tokens, device = found.tokens, generator.target.device
    if len(found.lengths) != len(sequences):
        return f"returned {len(found.lengths)} rows for {len(sequences)} sequences"
    if tokens.dim() != 2 or tokens.dtype != torch.long or tokens.device != device:
        return f"returned tokens of shape {list(tokens.shape)}, {tokens.dtype}, on {tokens.device}, not int64 [B, N] on {device}"
    try:
        found.check()
    except ValueError as error:
        return f"returned trees that are none: {error}"
    for row, (depth, limit) in enumerate(zip(found.row_depths, limits, strict=True)):
        if depth > limit:
            return f"drafted {depth} tokens for row {row}, whose limit is {limit}"
    if max(found.lengths, default=0) > generator.max_draft_nodes:
        return (
            f"drafted {max(found.lengths)} nodes for a row, more than its max_draft_nodes, {generator.max_draft_nodes}"
        )
    size = generator.target.vocab_size
    drafted = tokens[torch.from_numpy(found.valid)] if device.type == "cpu" else tokens[:0]  # elsewhere it would wait
    if ((drafted < 0) | (drafted >= size)).any():
        return f"drafted ids that are not among the target's {size}"
    return None
