"""NativeRunner: runs a model's small forward passes as one call of the native library, where that is shown to be right."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from ...cache import PagedStaticCache
from ...core.errors import UnsupportedModel
from ...core.output import PackedOutput
from ...core.rows import RowInput
from ...kernels.dispatch import uses_native
from ...kernels.native import TYPES
from ..packed_batch import PackedBatch
from ..structure import interposed
from .current import Made, current_program
from .program import Program, addresses
from .subjects import ModelForward

if TYPE_CHECKING:
    from ..packed_model import Activated, PackedModel

# Each model's programs, by what is tapped and how many layers run.
_made = weakref.WeakKeyDictionary[nn.Module, dict[Any, Made]]()


class NativeRunner:
    """The program of a PackedModel, made when it is first needed and made again when the model has changed.

    Args:
        otherwise: faster linear layers for the model, used while it has no program.
        required: raise an error if the model cannot have a program.

    Attributes:
        refused: why the model runs without a program; None: it has one, or nothing has been tried.
    """

    def __init__(self, packed: PackedModel, otherwise: Activated | None = None, required: bool = False):
        self._owner = weakref.ref(packed)  # weak, because `packed` holds this object
        self._otherwise, self._required = otherwise, required
        self._program: Program | None = None
        self.refused: str | None = None
        self._stack: contextlib.ExitStack | None = (
            None  # while active and prepared; holds `otherwise` if no program runs
        )
        self._active = False

    @property
    def _packed(self) -> PackedModel:
        packed = self._owner()
        assert packed is not None
        return packed

    @property
    def is_on(self) -> bool:
        """True if `run` runs forwards now."""
        if self._active and self._stack is None:
            self._prepare()
        return self._active and self._program is not None

    @property
    def most_tokens(self) -> int:
        """Maximum number of tokens of the forwards that `run` runs now; 0: it runs none."""
        return self._program.most_tokens if self.is_on and self._program is not None else 0

    @contextlib.contextmanager
    def active(self) -> Iterator[None]:
        """Inside the context, `run` uses a program that is right for the model as it is when it is first used: a drafter may not be."""
        self._active, self._program = True, None
        try:
            if self._required:
                self._prepare()
            yield
        finally:
            self._active = False
            stack, self._stack = self._stack, None
            if stack is not None:
                stack.close()

    def _prepare(self) -> None:
        self._stack = contextlib.ExitStack()
        subject = ModelForward(self._packed)
        found = current_program(subject, _made.setdefault(subject.model, {}))
        self._program = found if isinstance(found, Program) else None
        self.refused = found if isinstance(found, str) else None
        if self._program is None and self._required:
            raise UnsupportedModel(f"'native' cannot run {subject.name}: {found}. Leave the key out.")
        if self._program is None and self._otherwise is not None:
            self._stack.enter_context(self._otherwise.active())

    def run(self, rows: list[RowInput], cache: PagedStaticCache) -> PackedOutput | None:
        """The outputs of a forward over `rows`; None if the model must run it itself."""
        if torch.is_autocast_enabled("cpu") or interposed() or not self.is_on:
            return None
        assert self._program is not None
        if not 0 < sum([row.num_tokens for row in rows]) <= self._program.most_tokens:
            return None
        if not all(isinstance(row.offset, int) for row in rows):  # positions of several axes
            return None
        packed = self._packed
        batch = PackedBatch.pack(rows, cache, packed.device, gather=False)
        return output_of(packed, batch, self._program.run(batch, addresses(self._program, cache)))


def output_of(packed: PackedModel, batch: PackedBatch, results: list[torch.Tensor]) -> PackedOutput:
    """The outputs of a forward from those of the program, in the order of `subjects.outputs_of`."""
    remaining = iter(results)
    taps = packed.taps
    return PackedOutput(
        logits=next(remaining),
        last_hidden=next(remaining) if taps.last_hidden else None,
        layers={index: next(remaining) for index in taps.layers},
        input_ids=batch.input_ids[0],
        all_logits=next(remaining) if taps.logits else None,
    )


def can_try(packed: PackedModel) -> bool:
    """True if a program might run this model: it is on a CPU with the library, reads pages, and its rows are only text. A program has no
    collectives, so a sharded model never gets one."""
    plain = (
        packed.ranks is None
        and packed.recurrent is None
        and not packed.gather
        and not packed.deterministic
        and packed.graphs is None
    )
    return plain and uses_native(packed.device) and packed.model.dtype in TYPES
