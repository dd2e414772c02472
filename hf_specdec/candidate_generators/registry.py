"""The registry of methods: `register`, and how methods in this package and in others are found."""

from __future__ import annotations

import functools
import importlib
import logging
import pkgutil
import threading
from collections.abc import Callable
from importlib.metadata import EntryPoint, entry_points
from typing import TYPE_CHECKING, Any, TypeVar

from ..config import SpeculativeConfig, SpeculativeConfigError
from .checkpoints.quantization import quantize_head
from .contract import hold_to_contract

if TYPE_CHECKING:
    from ..model.packed_model import PackedModel
    from .base import CandidateGenerator, DrafterContext

    Maker = Callable[[SpeculativeConfig, PackedModel, DrafterContext | None], CandidateGenerator]
_Made = TypeVar("_Made", bound=Callable)
logger = logging.getLogger(__name__)

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
    """The name of the method whose generator is the class at "package.module:Class".

    Raises:
        SpeculativeConfigError: it cannot be imported, or is not a registered generator.
    """
    module_name, _, class_name = path.partition(":")
    try:
        module = importlib.import_module(module_name)
    except Exception as error:  # whatever a user's module raises while it is imported
        raise SpeculativeConfigError(
            f"speculative_config['method'] is {path!r}, but {module_name!r} cannot be imported: "
            f"{type(error).__name__}: {error}."
        ) from error
    found = getattr(module, class_name, None)
    name = getattr(getattr(found, "config_class", None), "name", None)
    if name is None or _GENERATORS.get(name) is not found:
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
    made = generator_class(config.method)(config, target, context)
    hold_to_contract(made)
    deepest = max(made.taps.layers, default=0)
    if deepest > target.config.num_hidden_layers:
        count = target.config.num_hidden_layers
        raise config.fail(
            "model", f"reads hidden states after layer {deepest} of the target, which has {count} layers."
        )
    quantize_head(made)
    return made


def _check_size(config: SpeculativeConfig, target: PackedModel) -> None:
    size, ranks = config.draft_tensor_parallel_size, target.ranks
    if size in (None, 1):
        return None
    if ranks is None:
        return _say_once(
            f"draft_tensor_parallel_size={size} has no effect: the target is not sharded, so its drafter is not sharded either."
        )
    if size != ranks.size:
        raise config.fail(
            "draft_tensor_parallel_size",
            f"is {size}, and the target has {ranks.size} ranks: it can be 1 (a whole drafter on every rank) or {ranks.size}.",
        )
    if config.method != "draft_model":
        _say_once(
            f"draft_tensor_parallel_size={size} has no effect: every rank holds a whole drafter of method {config.method!r}."
        )
    return None


@functools.cache  # once per process
def _say_once(what: str) -> None:
    logger.warning("%s", what)
