"""The registry of methods: `register`, how methods in this package and in others are found, and what those in others must keep to."""

from __future__ import annotations

import functools
import importlib
import logging
import pkgutil
import threading
from collections.abc import Callable
from importlib.metadata import EntryPoint, entry_points
from typing import Any, TypeVar

import torch

from ..cache import OutOfBlocks
from ..config import SpeculativeConfig, SpeculativeConfigError
from ..core.draft_trees import DraftTrees
from ..core.errors import UnsupportedModel
from ..core.sequence import Sequence
from ..model.options.quantized import quantize_for_good, quantizes_natively
from ..model.packed_model import PackedModel
from .base import CandidateGenerator, DrafterContext
from .checkpoints.config import HeadConfig
from .checkpoints.target_parts import DraftVocabulary, device_and_dtype, draft_ids, rows_of
from .growing.grower import GrowsDrafts
from .growing.own_cache import ReadsPages
from .growing.tree_shapes import TreeDraftingConfig

logger = logging.getLogger(__name__)

Maker = Callable[[Any, PackedModel, DrafterContext | None], CandidateGenerator]
_Made = TypeVar("_Made", bound=Callable)
ENTRY_POINTS = "hf_specdec.methods"  # the group in which other packages name their methods

_CONFIGS: dict[str, type[SpeculativeConfig]] = {}
_GENERATORS: dict[str, Maker] = {}
_lock = threading.RLock()
_discovered = False
_BROKEN: dict[str, str] = {}  # entry points that could not be loaded: the problem, by name


def register(config_class: type[SpeculativeConfig]) -> Callable[[_Made], _Made]:
    """Decorator: `@register(NGramConfig)` on a `CandidateGenerator` makes `method: "ngram"` work everywhere. If a method has several
    kinds of checkpoints, it stands on the function that makes the generator for a configuration.

    Raises:
        ValueError: the configuration has no `name`, or another class is registered under it.
    """

    def decorate(generator_class: _Made) -> _Made:
        name = config_class.name
        taken = _GENERATORS.get(name)
        if not name or (taken is not None and _place(taken) != _place(generator_class)):
            raise ValueError(f"The method name {name!r} is empty or already registered by {taken}.")
        _CONFIGS[name], _GENERATORS[name] = config_class, generator_class
        setattr(generator_class, "config_class", config_class)  # noqa: B010 (a function has it too)
        return generator_class

    return decorate


def _place(made: Any) -> tuple[str, str]:
    return made.__module__, made.__qualname__  # unchanged if a notebook defines the class again


def discover() -> None:
    """Import every method once per process: the modules of this package, then the entry points of installed packages."""
    global _discovered
    with _lock:
        if _discovered:
            return
        package = importlib.import_module(__name__.rpartition(".")[0])
        for module in pkgutil.iter_modules(package.__path__):
            importlib.import_module(f"{package.__name__}.{module.name}")
        _discovered = True  # before other packages are imported: they may ask for methods
        for entry in entry_points(group=ENTRY_POINTS):
            _load(entry)


def _load(entry: EntryPoint) -> None:
    """Import an entry point, which registers its method; one that fails is reported and leaves other methods alone."""
    try:
        entry.load()
        problem = None if entry.name in _CONFIGS else f"it registers no method {entry.name!r}"
    except Exception as error:  # whatever another package raises while it is imported
        problem = f"{type(error).__name__}: {error}"
    if problem is not None:
        owner = entry.dist.name if entry.dist is not None else "unknown"
        _BROKEN[entry.name] = (
            f"The entry point {entry.name} = {entry.value} ({ENTRY_POINTS}) of package {owner!r} cannot be used: {problem}."
        )
        logger.warning("%s Other methods are not affected.", _BROKEN[entry.name])


def available_methods() -> dict[str, type[SpeculativeConfig]]:
    """Every registered method's configuration class, by name."""
    discover()
    return dict(sorted(_CONFIGS.items()))


def broken_method(name: str) -> str | None:
    """Why the entry point of this name cannot be used; None if there is no such problem."""
    discover()
    return _BROKEN.get(name)


def imported_method(path: str) -> str:
    """The name of the method whose generator is the class at "package.module:Class". Raises SpeculativeConfigError: it cannot be
    imported, or is not a registered generator."""
    module_name, _, class_name = path.partition(":")
    try:
        module = importlib.import_module(module_name)
    except Exception as error:  # whatever a user's module raises while it is imported
        raise SpeculativeConfigError(
            f"speculative_config['method'] is {path!r}, but {module_name!r} cannot be imported: "
            f"{type(error).__name__}: {error}."
        ) from error
    generator = getattr(module, class_name, None)
    name = getattr(getattr(generator, "config_class", None), "name", None)
    if name is None or _GENERATORS.get(name) is not generator:
        raise SpeculativeConfigError(
            f"speculative_config['method'] is {path!r}, but {module_name} has no generator class {class_name!r} that is "
            "registered with @hf_specdec.register(...)."
        )
    return name


def generator_class(method: str) -> Maker:
    """The generator registered for `method`, or the function that makes it."""
    discover()
    return _GENERATORS[method]


def make_generator(
    config: SpeculativeConfig, target: PackedModel, context: DrafterContext | None = None
) -> CandidateGenerator:
    """The drafter of a configuration, its weights quantized if the configuration says so.

    Raises:
        SpeculativeConfigError: `draft_tensor_parallel_size` does not fit the target's number of ranks, or the drafter reads hidden
            states after a layer that the target lacks.
    """
    _check_size(config, target)
    ids = draft_ids(config, target, context) if isinstance(config, TreeDraftingConfig) else None
    made = generator_class(config.method)(config, target, context)
    hold_to_contract(made)
    deepest = max(made.taps.layers, default=0)
    if deepest > target.config.num_hidden_layers:
        count = target.config.num_hidden_layers
        raise config.fail(
            "model", f"reads hidden states after layer {deepest} of the target, which has {count} layers."
        )
    if getattr(config, "draft_window", None) is not None and not isinstance(made, ReadsPages):
        raise config.fail("draft_window", "is for drafters with keys and values of their own, which this one has not.")
    if ids is not None:
        _score_only(made, ids)
    _quantize(made)
    return made


def _score_only(generator: Any, ids: torch.Tensor) -> None:
    """Let a drafter score only these tokens of the target."""
    config, vocabulary = generator.config, getattr(generator, "vocabulary", None)
    if getattr(vocabulary, "target_ids", None) is not None:
        raise config.fail(
            "draft_vocabulary", "cannot be used: the head has a draft vocabulary in its file. Leave it out."
        )
    if getattr(config, "learn", False):
        raise config.fail("draft_vocabulary", "cannot be combined with 'learn', which trains all rows of the head.")
    if not isinstance(generator, GrowsDrafts):
        raise config.fail(
            "draft_vocabulary", "is for drafters that score the target's tokens, which this one does not."
        )
    fail = functools.partial(config.fail, "draft_vocabulary")
    generator.score_only(functools.cache(lambda head: rows_of(head, ids, fail)))
    generator.vocabulary = DraftVocabulary(generator.target.vocab_size, ids.to(device_and_dtype(generator.target)[0]))


def _quantize(generator: CandidateGenerator) -> None:
    """Quantize a head's weights if its configuration says so; the loaded weights are dropped. Every linear layer of the head is
    quantized, its own language-model head included: draft logits need not be exact. Modules shared with the target are not changed."""
    config = generator.config
    if not isinstance(config, HeadConfig) or config.quantization is None or not isinstance(generator, GrowsDrafts):
        return
    shared, modules = set(generator.target.model.modules()), generator.modules()
    inner = {part for module in modules for part in module.modules() if part is not module}
    for module in modules:
        if module not in shared | inner:
            quantize_for_good(module, config.quantization, shared, quantizes_natively(config))


def _check_size(config: SpeculativeConfig, target: PackedModel) -> None:
    size, ranks = config.draft_tensor_parallel_size, target.ranks
    if size in (None, 1):
        return
    if ranks is None:
        _say_once(
            f"draft_tensor_parallel_size={size} has no effect: the target is not sharded, so its drafter is not sharded either."
        )
    elif size != ranks.size:
        raise config.fail(
            "draft_tensor_parallel_size",
            f"is {size}, and the target has {ranks.size} ranks: it can be 1 (a whole drafter on every rank) or {ranks.size}.",
        )
    elif config.method != "draft_model":
        _say_once(
            f"draft_tensor_parallel_size={size} has no effect: every rank holds a whole drafter of method {config.method!r}."
        )


@functools.cache  # once per process
def _say_once(what: str) -> None:
    logger.warning("%s", what)


# ---- what a method from outside this package must keep to; its errors name the method ---------------------------------


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
            result = call(*args)
        except _PASSED_ON:
            raise
        except Exception as error:
            raise MethodError(f"{where} raised {type(error).__name__}: {error}. {CONTRACTS[name]}.") from error
        if name == "propose" and (problem := _problem(generator, result, *args)):
            raise MethodError(f"{where} {problem}. {CONTRACTS[name]}.")
        return result

    return checked


def _problem(generator: CandidateGenerator, trees: Any, sequences: list[Sequence], limits: list[int]) -> str | None:
    """What is wrong with a proposal; None if it may be verified."""
    if not isinstance(trees, DraftTrees):
        return f"returned {type(trees).__name__}"
    tokens, device = trees.tokens, generator.target.device
    if len(trees.lengths) != len(sequences):
        return f"returned {len(trees.lengths)} rows for {len(sequences)} sequences"
    if tokens.dim() != 2 or tokens.dtype != torch.long or tokens.device != device:
        return f"returned tokens of shape {list(tokens.shape)}, {tokens.dtype}, on {tokens.device}, not int64 [B, N] on {device}"
    try:
        trees.check()
    except ValueError as error:
        return f"returned trees that are none: {error}"
    for row, (depth, limit) in enumerate(zip(trees.row_depths, limits, strict=True)):
        if depth > limit:
            return f"drafted {depth} tokens for row {row}, whose limit is {limit}"
    if max(trees.lengths, default=0) > generator.max_draft_nodes:
        return (
            f"drafted {max(trees.lengths)} nodes for a row, more than its max_draft_nodes, {generator.max_draft_nodes}"
        )
    size = generator.target.vocab_size
    drafted = tokens[torch.from_numpy(trees.valid)] if device.type == "cpu" else tokens[:0]  # elsewhere it would wait
    if ((drafted < 0) | (drafted >= size)).any():
        return f"drafted ids that are not among the target's {size}"
    return None
