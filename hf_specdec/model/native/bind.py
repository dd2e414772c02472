"""Binds models and draft heads to programs: their forwards, and heads' logits, run as calls of the native library.

A program stands for the forward of a model, the forward of a draft head, or a function of hidden states: the `Traceable`s below.
"""

from __future__ import annotations

import contextlib
import copy
import threading
import weakref
from collections.abc import Callable, Hashable, Iterator
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import nn

from ...cache import PagedStaticCache
from ...core.errors import UnsupportedModel
from ...core.output import PackedOutput, Taps
from ...core.rows import RowInput, groups_of
from ...kernels.dispatch import uses_native
from ...kernels.native import TYPES
from .. import architectures
from ..adapters import have_adapters
from ..encoder_decoder.forward import follows_program
from ..encoder_decoder.source import dummy_sources
from ..onward_rows import divided, with_onward
from ..packed_batch import PackedBatch
from ..structure import interposed
from .check import Traceable
from .program import Program, addresses
from .program_cache import Made, current_program

if TYPE_CHECKING:
    from ..packed_head import PackedHead
    from ..packed_model import Activated, PackedModel

Head = TypeVar("Head", bound="PackedHead")

# Each model's programs, by what is tapped, how many layers run and how far they see.
_made = weakref.WeakKeyDictionary[nn.Module, dict[Any, Made]]()


def _forward_of_model(packed: PackedModel, by_row: bool) -> Traceable:
    """The forward of an active PackedModel. `by_row`: over rows with adapters of their own."""
    model, taps = packed.model, packed.taps
    adapters = packed.row_adapters if by_row else None
    modules = [*architectures.all_modules(model)] if adapters is None else adapters.modules(model)

    def compute(batch: Any, features: torch.Tensor | None) -> list[torch.Tensor]:
        with _by_row(packed, batch.inputs) if by_row else contextlib.nullcontext():
            output = packed.forward_batch(batch, batch.logit_index)
        more = [output.last_hidden] if taps.last_hidden else [], [output.all_logits] if taps.logits else []
        return [output.logits, *more[0], *output.layers.values(), *more[1]]  # pyright: ignore[reportReturnType]

    def begin(cache: PagedStaticCache, seq_id: int, row: int) -> None:
        packed.read_source(cache, seq_id, dummy_sources(model, row + 1, packed.device)[row])

    return Traceable(
        (taps, packed.num_layers, packed.window, by_row), type(model).__name__, modules, packed.device, model.dtype,
        compute, lambda: packed.new_cache(num_blocks=16, block_size=16, share_prefixes=False, is_trial=True), config=model.config,
        begin=None if packed.family is None else begin, vocab_size=packed.vocab_size,
        max_positions=packed.max_positions, ours=False, rounds=packed.rounds, adapters=adapters,
    )  # fmt: skip


def _by_row(packed: PackedModel, rows: list[RowInput]) -> contextlib.AbstractContextManager[None]:
    return packed.row_adapters.running(rows, packed.selects_logits)


def _forward_of_head(head: PackedHead, key: Hashable, reads: bool, features_width: int) -> Traceable:
    """A forward of a PackedHead: with its `fuse`, of an input of `features_width`, if `reads`; otherwise of the features after `fuse`."""
    run = head.read_batch if reads else head.forward_batch
    modules = _all_modules(head.modules())
    tables = [module.weight.shape[0] for module in modules if isinstance(module, nn.Embedding)]
    return Traceable(
        key, type(head.module).__name__, modules, head.device, head.dtype,
        lambda batch, features: [run(batch, features=features)],  # pyright: ignore[reportArgumentType]
        lambda: head.new_cache(num_blocks=16, block_size=16), config=head.config, features_width=features_width,
        vocab_size=min(tables, default=1),
    )  # fmt: skip


def _all_modules(roots: list[nn.Module]) -> list[nn.Module]:
    return [inner for root in roots for inner in architectures.all_modules(root)]


class _Bound:
    """Programs of a context, each compared once with its modules. If the forward's is refused, no program runs, and `otherwise` does."""

    def __init__(self, otherwise: Activated | None):
        self._otherwise = otherwise
        self._current: dict[str, Program | None] = {}  # in this context
        self._depth, self._lock = 0, threading.RLock()
        self._stack: contextlib.ExitStack | None = None  # holds `otherwise` while no program runs
        self.reasons: dict[str, str] = {}  # by key, why the latest attempt gave no program

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

    def current(self, key: str) -> Program | None:
        """The program with this key, if it has been made in this context and can run now."""
        if torch.is_autocast_enabled("cpu") or interposed():
            return None
        return self._current.get(key)

    def _program(self, key: str, subject: Callable[[], Traceable], made: dict[Any, Made]) -> Program | None:
        """The program of a subject with this key; None if the caller must compute it."""
        is_settled = key in self._current or not self._depth or self._stack is not None
        if is_settled or torch.is_autocast_enabled("cpu") or interposed():
            return self.current(key)
        with self._lock:
            self.reasons.pop(key, None)
            program = current_program(subject(), made)
            self._current[key] = program if isinstance(program, Program) else None
            if isinstance(program, str):
                self.reasons[key] = program
                if key not in ("rows", "by row"):
                    self._current = dict.fromkeys(self._current)
                    self._stack = contextlib.ExitStack()
                    if self._otherwise is not None:
                        self._stack.enter_context(self._otherwise.active())
        return self._current[key]


class NativeRunner(_Bound):
    """The program of a PackedModel, made when it is first needed and made again when the model has changed.

    Args:
        otherwise: faster linear layers for the model, used while it has no program.
        required: raise an error if the model cannot have a program.
    """

    def __init__(self, packed: PackedModel, otherwise: Activated | None = None, required: bool = False):
        super().__init__(otherwise)
        self._owner: Any = weakref.ref(packed)  # weak, because `packed` holds this object
        self._required = required

    @property
    def refused(self) -> str | None:
        """Why the model runs without a program; None: it has one, or nothing has been tried."""
        return self.reasons.get("forward")

    @property
    def most_tokens(self) -> int:
        """Maximum number of tokens of one call of `run`'s program; 0: it has none now."""
        program = self._forward()
        return 0 if program is None else program.most_tokens

    @contextlib.contextmanager
    def active(self) -> Iterator[None]:
        """Inside the context, `run` uses a program that is right for the model as it is when it is first used: a drafter may not be."""
        with super().active():
            if self._required and self._forward() is None and self.refused is not None:
                name = type(self._owner().model).__name__
                raise UnsupportedModel(f"'native' cannot run {name}: {self.refused}. Leave the key out.")
            yield

    def _forward(self, by_row: bool = False) -> Program | None:
        packed, key = self._owner(), "by row" if by_row else "forward"
        if not by_row and key not in self._current and packed.row_adapters.are_idle:
            program = self._forward(by_row=True)  # which no adapter that comes or goes makes anew
            if program is not None and not program.calls:
                self._current[key] = program
        return self._program(key, lambda: _forward_of_model(packed, by_row), _made.setdefault(packed.model, {}))

    def run(self, rows: list[RowInput], cache: PagedStaticCache, tapped: bool = True) -> PackedOutput | None:
        """The outputs of a forward over `rows`, with the taps if `tapped`; None if the model must run it itself."""
        by_row = have_adapters(rows)
        program = self._forward(by_row)
        groups = None if program is None else with_onward(groups_of(rows, program.most_tokens), rows)
        if (
            program is None or not groups or not all(isinstance(row.offset, int) for row in divided(rows)[1])
        ):  # positions of several axes
            return None
        taps = self._owner().taps if tapped else Taps()
        outputs = []
        for group in groups:
            returned = self._run(program, group, cache, by_row, None if tapped else 1)
            if returned is None:
                return None
            outputs.append(returned)
        remaining = iter(_joined(outputs))
        return PackedOutput(  # in the order of `_forward_of_model`
            input_ids=next(remaining),
            logits=next(remaining),
            last_hidden=next(remaining) if taps.last_hidden else None,
            layers={index: next(remaining) for index in taps.layers},
            all_logits=next(remaining) if taps.logits else None,
        )

    def _run(
        self, program: Program, rows: list[RowInput], cache: PagedStaticCache, by_row: bool, num_outputs: int | None
    ) -> list[torch.Tensor] | None:
        """The ids and outputs of one call; None if the program cannot run these rows."""
        packed = self._owner()
        batch = PackedBatch.pack(rows, cache, packed.device, gather=False)
        family = packed.family
        if family is not None and not follows_program(packed.model, family, batch, program.weights):
            return None
        adapters = packed.row_adapters.bound(rows) if by_row else None
        if by_row and adapters is None:
            return None
        with _by_row(packed, rows) if by_row and program.calls else contextlib.nullcontext():
            return [batch.input_ids[0], *program.run(batch, addresses(program, cache), None, num_outputs, adapters)]


def _joined(outputs: list[list[torch.Tensor]]) -> list[torch.Tensor]:
    """The outputs of several calls as those of one."""
    return outputs[0] if len(outputs) == 1 else [torch.cat(parts) for parts in zip(*outputs, strict=True)]


def can_try(packed: PackedModel) -> bool:
    """True if a program might run this model: it is on a CPU with the library, reads pages, and its rows are only text. A program has no
    collectives, so a sharded model never gets one."""
    whole = packed.ranks is None and packed.recurrent is None and packed.graphs is None
    plain = whole and not (packed.gather or packed.is_latent or packed.segments or packed.deterministic)
    return plain and uses_native(packed.device) and packed.model.dtype in TYPES


def natively(head: Head, wanted: bool | None = None) -> Head:
    """A copy of a head, with the same weights, that runs its forwards in the native library; the head itself if that cannot be done.

    Args:
        wanted: False: always return the head itself.
    """
    serves = uses_native(head.device) and head.dtype in TYPES
    if wanted is False or not serves or head.is_latent or head.graphs is not None:
        return head
    bound = copy.copy(head)
    bound.native = NativeHead(otherwise=head.linears)
    return bound


class NativeHead(_Bound):
    """The programs of a draft head: for its forwards, and for one function of its hidden states."""

    def __init__(self, otherwise: Activated | None):
        super().__init__(otherwise)
        self._made: dict[Any, Made] = {}

    @property
    def refused(self) -> list[str]:
        """The reason of each refusal to make a program."""
        return list(self.reasons.values())

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
        program = self._program(key, lambda: _forward_of_head(head, key, reads, features.shape[1]), self._made)
        groups = None if program is None else groups_of(rows, program.most_tokens)
        if program is None or not groups:
            return None
        outputs, first = [], 0
        for group in groups:
            batch = PackedBatch.pack(group, cache, head.device, gather=False)
            end = first + batch.starts[-1]
            outputs.append(program.run(batch, addresses(program, cache), features[first:end]))
            first = end
        return _joined(outputs)[0]

    def apply(
        self, function: Callable[[torch.Tensor], torch.Tensor], called: list[nn.Module], hidden: torch.Tensor
    ) -> torch.Tensor:
        """`function(hidden)`, such as a norm and a language-model head. Every call must pass the same function.

        Args:
            hidden: [n, F].
        """

        def of_rows() -> Traceable:
            compute: Any = lambda _, features: [function(features)]  # noqa: E731
            name, modules = type(called[0]).__name__, _all_modules(called)
            return Traceable(
                "rows", name, modules, hidden.device, hidden.dtype, compute, features_width=hidden.shape[1]
            )

        program = self._program("rows", of_rows, self._made)
        if program is None or not hidden.shape[0]:
            return function(hidden)
        return _joined([program.run_rows(part) for part in hidden.split(program.most_tokens)])[0]
