"""Makes a program: records one forward, and compares the program with it on other batches before it is used.

Also what a program takes for granted: the Python objects that the recorded forward looked up.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from types import CodeType, FrameType, ModuleType
from typing import Any

import numpy as np
import torch
from torch import nn

from ...cache import PagedStaticCache
from ...core.rows import RowInput
from ..adapters import RowAdapters
from ..packed_batch import PackedBatch, _OnDevice
from ..self_test import MOST_NOISE_LOW_PRECISION, TOLERANCES, relative_error
from .program import Program, addresses, assemble
from .tape import NotLowered, Tape
from .trace import TapeRecorder

_SIZES = (29, 31, 37, 41, 43, 47, 53, 59)  # candidates for the number of recorded tokens, which no dimension may equal
_MORE = 8  # slots reserved per row for the tokens of later batches


@dataclass(frozen=True, eq=False)
class Traceable:
    """A computation that a program may stand for.

    Attributes:
        key: distinguishes it from others whose programs are kept in the same dictionary.
        modules: all modules that it calls, submodules included.
        compute: its outputs, [T or R, width] each, operator by operator, from a batch and features [T, F].
        new_cache: a small cache for trials: 16 blocks of 16 slots; None: it reads only features, and neither ids nor positions.
        begin: called with a cache, a row's id and its number before the row is fed; None: nothing needs to be done.
        features_width: number of features per token that it reads besides ids; 0: none.
        vocab_size: ids that it has embeddings for.
        max_positions: positions it was built for; None: any number.
        ours: its modules may be of this package; otherwise all must be torch's or transformers'.
        rounds: its layers round what they read.
        adapters: of its rows; None: they have none of their own.
    """

    key: Any
    name: str
    modules: list[nn.Module]
    device: torch.device
    dtype: torch.dtype
    compute: Callable[[Any, torch.Tensor | None], list[torch.Tensor]]
    new_cache: Callable[[], PagedStaticCache] | None = None
    begin: Callable[[PagedStaticCache, int, int], None] | None = None
    config: Any = None
    features_width: int = 0
    vocab_size: int = 1
    max_positions: int | None = None
    ours: bool = True
    rounds: bool = False
    adapters: RowAdapters | None = None


@torch.no_grad()
def build(subject: Traceable, code: CalledCode, called: list[nn.Module]) -> Program:
    """The program of a subject.

    Args:
        code: is told what the recorded forward runs.
        called: modules of the subject that the program calls as they are.

    Raises:
        NotLowered: the library cannot run it, or computes something else; the message says why.
    """
    num_selected, num_tokens = _sizes(subject)
    tape = Tape(num_tokens, num_selected)
    if subject.new_cache is None:
        return _build_on_rows(subject, code, called, tape, num_tokens, num_selected)
    if subject.max_positions is not None and subject.max_positions < num_tokens + _MORE:
        raise NotLowered(f"its {subject.max_positions} positions, too few to record a forward")
    rows = _first_rows(num_tokens, num_selected, subject.vocab_size)
    cache, ours = _cache(subject, rows), _cache(subject, rows)
    batch, features = PackedBatch.pack(rows, cache, subject.device, gather=False), _features(subject, num_tokens)
    recorder = TapeRecorder(subject.modules, called, tape, batch, features)
    batches = [batch] if cache.cross is None else [batch, batch.cross]
    for read in batches:
        read._on_device[subject.device] = _OnDevice(batch.write_slots, None, recorder.write, recorder.attend)
    try:
        outputs = _recorded(subject, code, recorder, batch, features)
    finally:
        for read in batches:
            read._on_device.clear()  # breaks a cycle of references that would keep the model alive until the garbage collector runs
    layers: list[Any] = [layer for read in batches for layer in read.cache.layers]
    if any(layers[layer].keys.dtype != subject.dtype for layer in recorder.pools):
        raise NotLowered("keys in another dtype than the model's")
    values = [recorder.value_of(output) for output in outputs]
    program = assemble(tape, values, recorder.pools, subject.dtype, subject.max_positions)
    _check(subject, program, ours, rows, features, outputs)
    for more in _further_rows(rows, subject.vocab_size, [] if subject.adapters is None else subject.adapters.known()):
        features = _features(subject, sum(row.num_tokens for row in more))
        batch = PackedBatch.pack(more, cache, subject.device, gather=False)
        batch.with_native = False
        _check(subject, program, ours, more, features, subject.compute(batch, features))
    return program


def _build_on_rows(
    subject: Traceable, code: CalledCode, called: list[nn.Module], tape: Tape, num_rows: int, num_more: int
) -> Program:
    """The program of a function of features alone."""
    features = _features(subject, num_rows)
    recorder = TapeRecorder(subject.modules, called, tape, None, features)
    outputs = _recorded(subject, code, recorder, None, features)
    program = assemble(tape, [recorder.value_of(output) for output in outputs], {}, subject.dtype)
    for count in (num_rows, num_more, 1):
        features = _features(subject, count)
        assert features is not None
        _compare(subject, program.run_rows(features), subject.compute(None, features))
    return program


def _sizes(subject: Traceable) -> tuple[int, int]:
    """Two numbers of tokens that no dimension of the subject's tensors is, the smaller first."""
    taken = {subject.features_width}
    if subject.config is not None:
        config = subject.config.get_text_config(decoder=True)
        settings = config.to_dict()
        taken |= {value for value in settings.values() if type(value) is int}
        names = "num_attention_heads", "num_key_value_heads", "hidden_size"
        heads, groups, width = (settings.get(config.attribute_map.get(name, name)) or 0 for name in names)
        taken |= {heads // max(groups, 1), width // max(heads, 1)}
    for module in subject.modules:
        taken.update(*(parameter.shape for parameter in module._parameters.values() if parameter is not None))
    free = [size for size in _SIZES if size not in taken]
    if len(free) < 2:
        raise NotLowered("its dimensions, which leave no number of tokens that differs from all of them")
    return free[0], free[1]


def _features(subject: Traceable, num_tokens: int) -> torch.Tensor | None:
    """Random features [T, F], the same in every process."""
    if not subject.features_width:
        return None
    random = torch.Generator().manual_seed(num_tokens)
    return torch.randn(num_tokens, subject.features_width, generator=random).to(subject.dtype)


def _first_rows(num_tokens: int, num_selected: int, vocab_size: int) -> list[RowInput]:
    """Two causal texts."""
    ids = np.arange(1, num_tokens + 1) * max(1, vocab_size // (num_tokens + 2)) % vocab_size
    split = num_tokens // 2
    texts = ids[:split], ids[split:]
    logits = num_selected - num_selected // 2, num_selected // 2
    return [RowInput(i, text, 0, logits=count) for i, (text, count) in enumerate(zip(texts, logits, strict=True))]


def _further_rows(rows: list[RowInput], vocab_size: int, adapters: list[str]) -> list[list[RowInput]]:
    """One token after one text; then a token of each text, with a tree of two siblings after the other, some with the first or last of
    these `adapters`."""
    first, second = (row.num_tokens for row in rows)
    ids = np.array([3, 5, 7, 2]) % vocab_size
    visibility = np.array([[True, False, False], [True, True, False], [True, False, True]])
    positions = np.array([second, second + 1, second + 1])
    one, other = [*adapters[:1], None][0], [None, *adapters][-1]
    tree = RowInput(1, ids[:3], second, positions, visibility, positions, logits=2, adapter=other)
    return [[RowInput(0, ids[:1], first, adapter=one)], [RowInput(0, ids[1:2], first + 1), tree]]


def _cache(subject: Traceable, rows: list[RowInput]) -> PagedStaticCache:
    assert subject.new_cache is not None
    cache = subject.new_cache()
    for i, row in enumerate(rows):
        cache.add(row.seq_id)
        if subject.begin is not None:
            subject.begin(cache, row.seq_id, i)
    for row in reversed(rows):
        cache.reserve(row.seq_id, row.num_tokens + _MORE)
    return cache


def _recorded(
    subject: Traceable,
    code: CalledCode,
    recorder: TapeRecorder,
    batch: PackedBatch | None,
    features: torch.Tensor | None,
) -> list[torch.Tensor]:
    """What the subject returns, computed under the recorder."""
    try:
        with recorder.whole_modules(), recorder, code:
            outputs = subject.compute(batch, features)
    except (NotLowered, torch.OutOfMemoryError):
        raise
    except Exception as failure:  # an unknown model may do anything with the recorded tensors
        raise NotLowered(f"its recorded forward raised {type(failure).__name__} ({failure})") from failure
    if code.foreign is not None:
        raise NotLowered(f"{code.foreign}, which may depend on anything")
    if recorder.problem is not None:
        raise NotLowered(recorder.problem)
    return outputs


def _check(
    subject: Traceable,
    program: Program,
    cache,
    rows: list[RowInput],
    features: torch.Tensor | None,
    wanted: list[torch.Tensor],
) -> None:
    """Compare the program's outputs over `rows` with those of the subject."""
    batch = PackedBatch.pack(rows, cache, subject.device, gather=False)
    adapters = None if subject.adapters is None else subject.adapters.bound(rows)
    if subject.adapters is not None and adapters is None:
        raise NotLowered("an active adapter that is no plain LoRA")
    _compare(subject, program.run(batch, addresses(program, cache), features, adapters=adapters), wanted)


def _compare(subject: Traceable, outputs: list[torch.Tensor], wanted: list[torch.Tensor]) -> None:
    """Raise NotLowered if outputs differ by more than rounding explains."""
    for ours, expected in zip(outputs, wanted, strict=True):
        error = relative_error(ours, expected.reshape(ours.shape))
        if not error <= (MOST_NOISE_LOW_PRECISION if subject.rounds else TOLERANCES.get(subject.dtype, 5e-2)):
            raise NotLowered(
                f"its program computes other values: they differ by {error:.2g} of their spread. Please report it"
            )


# ---- what a recorded forward looks up ----

# gptqmodel replaces methods of every transformers model when it is imported.
_LIBRARIES = {
    "torch", "transformers", "hf_specdec", "numpy", "accelerate", "peft", "gptqmodel", *sys.stdlib_module_names,
}  # fmt: skip
_NAMED = ("torch", "transformers")  # whose modules' attributes are looked up, too
# The code that computes a forward; elsewhere globals change all the time.
_WATCHED = ("transformers.", "torch.nn.", "peft.")


class CalledCode:
    """Inside the context, remembers which Python code this thread runs.

    Attributes:
        foreign: a function that belongs to no known library and was called, in words; None: there was none. It may read anything.
    """

    def __init__(self) -> None:
        self.foreign: str | None = None
        self._codes: dict[CodeType, dict[str, Any]] = {}

    def __enter__(self) -> CalledCode:
        self._before, self._collects = sys.gettrace(), gc.isenabled()
        gc.disable()  # a collection would run code that the forward does not call
        sys.settrace(
            self._see
        )  # which is told calls only; a profiling function is told every return and C function, too
        return self

    def __exit__(self, *args: Any) -> None:
        sys.settrace(self._before)
        if self._collects:
            gc.enable()

    def _see(self, frame: FrameType, event: str, arg: Any) -> None:
        if frame.f_code in self._codes:
            return
        self._codes[frame.f_code] = frame.f_globals
        name, code = str(frame.f_globals.get("__name__")), frame.f_code
        known = name.partition(".")[0] in _LIBRARIES or name.startswith("namedtuple_")
        if self.foreign is None and not known and not _is_logged(frame):
            self.foreign = f"{code.co_qualname if sys.version_info >= (3, 11) else code.co_name} of {name}"

    def assumptions(self, modules: Iterable[nn.Module]) -> list[Assumption]:
        """What the code looked up: globals, attributes of modules of Python, and attributes of the classes of `modules`."""
        assumed: dict[tuple[int, str], Assumption] = {}

        def assume(namespace: Mapping[str, Any], names: Iterable[str], path: tuple[Any, ...] = ()) -> None:
            for name in names:
                value = namespace.get(name, _MISSING)
                if value is _MISSING:
                    continue
                assumed[id(namespace), name] = namespace, name, value
                of_libraries = isinstance(value, ModuleType) and value.__name__.partition(".")[0] in _NAMED
                if of_libraries and value not in path:
                    assume(vars(value), names, (*path, value))

        used = {"__call__", "__getattr__", "__getattribute__"}  # looked up without being named
        for code, namespace in self._codes.items():
            if f"{namespace.get('__name__')}.".startswith(_WATCHED):
                used.update(code.co_names)
                assume(namespace, code.co_names)
        kinds = {torch.Tensor, *(type(module) for module in modules)}
        of_classes = [(kind, name, _looked_up(kind, name)) for kind in kinds for name in used]
        return [*assumed.values(), *(of_class for of_class in of_classes if of_class[2] is not _MISSING)]


def _is_logged(frame: FrameType | None) -> bool:
    """True for what a handler of log lines calls: it computes nothing of a forward."""
    while frame is not None and frame.f_globals.get("__name__") != "logging":
        frame = frame.f_back
    return frame is not None


_MISSING = object()
Assumption = tuple[Any, str, Any]  # a namespace or a class, a name, and the object that it stood for


def hold(assumptions: list[Assumption]) -> bool:
    """True if every name still stands for the same object."""
    return all(_looked_up(place, name) is value for place, name, value in assumptions)


def _looked_up(place: Any, name: str) -> Any:
    """What a name stands for in a namespace, or in a class and its bases, without calling descriptors; _MISSING: nothing."""
    if not isinstance(place, type):
        return place.get(name, _MISSING)
    return next((vars(base)[name] for base in place.__mro__ if name in vars(base)), _MISSING)
