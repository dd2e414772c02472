"""NativeHead: a draft head's small forwards, and its logits, as calls of the native library."""

from __future__ import annotations

import contextlib
import copy
import threading
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import nn

from ...cache import PagedStaticCache
from ...core.rows import RowInput
from ...kernels.dispatch import uses_native
from ...kernels.native import TYPES
from ..packed_batch import PackedBatch
from ..structure import interposed
from .current import Made, current_program
from .program import Program, addresses
from .subjects import HeadForward, RowFunction, Subject

if TYPE_CHECKING:
    from ..packed_head import PackedHead
    from ..packed_model import Activated

Head = TypeVar("Head", bound="PackedHead")


def natively(head: Head, wanted: bool | None = None) -> Head:
    """A copy of a head, with the same weights, that runs its small forwards in the native library; the head itself if that cannot be done.

    Args:
        wanted: False: always return the head itself.
    """
    serves = uses_native(head.device) and head.dtype in TYPES
    if wanted is False or not serves or head.gather or head.graphs is not None:
        return head
    own = copy.copy(head)
    own.native = NativeHead(otherwise=head.linears)
    return own


class NativeHead:
    """The programs of a draft head: for its forwards, and for one function of its hidden states.

    In each context, a program is compared once with the modules it was made from. If the program of a forward is refused, no program
    runs in that context.

    Args:
        otherwise: faster linear layers for the head, used when no program runs.
    """

    def __init__(self, otherwise: Activated | None):
        self._otherwise = otherwise
        self._made: dict[Any, Made] = {}
        self._current: dict[str, Program | None] = {}  # in this context
        self._depth, self._lock = 0, threading.RLock()
        self._stack: contextlib.ExitStack | None = None  # holds `otherwise` while no program runs

    @property
    def refused(self) -> list[str]:
        """The reason of each refusal to make a program."""
        return [found for *_, found in self._made.values() if isinstance(found, str)]

    @contextlib.contextmanager
    def active(self) -> Iterator[None]:
        """Inside the context, programs run. Each is checked against its modules when it is first used in this context."""
        with self._lock:
            self._depth += 1
        try:
            yield
        finally:
            with self._lock:
                self._depth -= 1
                if self._depth == 0:
                    stack, self._stack, self._current = self._stack, None, {}
                    if stack is not None:
                        stack.close()

    def _program(self, key: str, subject: Callable[[], Subject]) -> Program | None:
        """The program of a subject with this key; None if the caller must compute it."""
        if not self._depth or self._stack is not None or torch.is_autocast_enabled("cpu") or interposed():
            return None
        if key not in self._current:
            with self._lock:
                found = current_program(subject(), self._made)
                self._current[key] = found if isinstance(found, Program) else None
                if isinstance(found, str) and key != "rows":
                    self._stack = contextlib.ExitStack()
                    if self._otherwise is not None:
                        self._stack.enter_context(self._otherwise.active())
        return self._current[key]

    def run(
        self,
        head: PackedHead,
        rows: list[RowInput],
        features: torch.Tensor,
        cache: PagedStaticCache,
        reads: bool = False,
    ) -> torch.Tensor | None:
        """Hidden states [T, H]; None if the head must compute them.

        Args:
            features: [T, F].
            reads: the features are the input of the head's `fuse`.
        """
        key = "reads" if reads else "drafts"
        program = self._program(key, lambda: HeadForward(head, key, reads, features.shape[1]))
        if program is None or not 0 < features.shape[0] <= program.most_tokens:
            return None
        batch = PackedBatch.pack(rows, cache, head.device, gather=False)
        return program.run(batch, addresses(program, cache), features)[0]

    def apply(
        self, function: Callable[[torch.Tensor], torch.Tensor], called: list[nn.Module], hidden: torch.Tensor
    ) -> torch.Tensor:
        """`function(hidden)`, such as a norm and a language-model head. Every call must pass the same function.

        Args:
            called: the modules that it calls.
            hidden: [n, F].
        """
        program = self._program("rows", lambda: RowFunction("rows", function, called, hidden))
        if program is None or not 0 < hidden.shape[0] <= program.most_tokens:
            return function(hidden)
        return program.run_rows(hidden)[0]
