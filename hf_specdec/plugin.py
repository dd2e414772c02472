"""install()/uninstall(): `speculative_config=` on every `GenerationMixin.generate()`, as a registered generation mode.

`import hf_specdec` loads neither torch nor transformers. transformers' generation code is patched at once if it has been imported, else
as soon as something imports it. The code of the mode itself is imported by the first call that uses it (`integration.py`).
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import importlib.abc
import sys
import threading
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import ModuleType

    from transformers import GenerationConfig, PreTrainedModel

MODE = "specdec"
_METHOD = "_specdec_decoding"
_GENERATION = "transformers.generation.utils"

_lock = threading.RLock()
_originals: dict[str, Any] = {}  # transformers' own functions, by name
_undo: dict[str, list[Callable[[], object]]] = {}  # what restores a module, while ours are in it
_installed = False
_explicit_calls = 0  # running calls of our generate(), which need the plugin until they return


def install() -> None:
    """Make `speculative_config=` an argument of every `generate()`. Idempotent; `import hf_specdec` calls it."""
    global _installed
    # Wait until no other thread is importing a module; without `_lock`, for which that import may wait.
    for name in _REPLACEMENTS:
        if name in sys.modules:
            importlib.import_module(name)
    with _lock:
        _installed = True
        _patch()


def uninstall() -> None:
    """Restore transformers' own functions and drop all decoders."""
    global _installed
    with _lock:
        _installed = False
        if not _explicit_calls:
            _unpatch()
    release()


def release(model: PreTrainedModel | None = None) -> None:
    """Drop what is kept between calls (suffix trees, loaded drafters), for one model or for all."""
    integration = sys.modules.get(f"{__package__}.integration")
    if integration is not None:  # otherwise nothing has been kept yet
        integration.release(model)


def _patch_module(name: str) -> None:
    """Put ours into a module's classes, and note how to undo that."""
    module, undo = sys.modules[name], _undo.setdefault(name, [])
    for owner_name, attribute, ours in _REPLACEMENTS[name]:
        owner = getattr(module, owner_name)
        original = _originals[attribute] = vars(owner).get(attribute)
        undo.append(functools.partial(delattr, owner, attribute))
        if original is not None:
            undo[-1] = functools.partial(setattr, owner, attribute, original)
        setattr(owner, attribute, ours(getattr(owner, attribute, None)))
    if name == _GENERATION:
        module.GENERATION_MODES_MAPPING[MODE] = _METHOD
        undo.append(functools.partial(module.GENERATION_MODES_MAPPING.pop, MODE))


class _PatchAfterImport(importlib.abc.MetaPathFinder):
    """Finds the modules of `_REPLACEMENTS` as the other finders do, and patches each module once its code has run."""

    def find_spec(self, fullname, path, target=None):
        """The spec of a module to patch, whose loader patches it; None for other modules. See `importlib.abc.MetaPathFinder`."""
        if fullname not in _REPLACEMENTS:
            return None
        others = (finder for finder in sys.meta_path if finder is not self)
        specs = (finder.find_spec(fullname, path, target) for finder in others)
        spec = next((spec for spec in specs if spec is not None), None)
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def exec_module(module: ModuleType) -> None:
                execute(module)
                with _lock:
                    if self in sys.meta_path and module.__name__ == fullname:  # some loaders serve many modules
                        _patch_module(fullname)

            setattr(spec.loader, "exec_module", exec_module)  # noqa: B010 (a method, to a type checker)
        return spec


_finder = _PatchAfterImport()


def _patch() -> None:
    if _finder not in sys.meta_path:
        sys.meta_path.insert(0, _finder)
    for name in _REPLACEMENTS:
        if name not in _undo and name in sys.modules:
            _patch_module(name)


def _unpatch() -> None:
    if _finder in sys.meta_path:
        sys.meta_path.remove(_finder)
    for undo in (undo for name in list(_undo) for undo in _undo.pop(name)):
        undo()


@contextlib.contextmanager
def _patched():
    """Patch while inside. On exit undo the patch, unless the plugin is installed."""
    global _explicit_calls
    with _lock:
        _explicit_calls += 1
        _patch()
    try:
        yield
    finally:
        with _lock:
            _explicit_calls -= 1
            if not _installed and not _explicit_calls:
                _unpatch()


def generate(model: PreTrainedModel, *args, speculative_config: Any, **kwargs) -> Any:
    """`model.generate(...)` with speculation, whether or not the plugin is installed.

    Takes and returns what `generate()` does; docs/usage.md explains `speculative_config`.
    """
    # the instance may carry a repository's custom_generate, which calls this function
    asked: Any = model
    method = getattr(type(model), "generate", None)
    call = asked.generate if method is None else functools.partial(method, model)
    with _patched():
        return call(*args, speculative_config=speculative_config, **kwargs)


class _CarriedConfig:
    """`GenerationConfig.speculative_config`, None unless set."""

    def __get__(self, generation_config: GenerationConfig | None, owner: type | None = None) -> Any:
        return None if generation_config is None else vars(generation_config).get("speculative_config")

    def __set__(self, generation_config: GenerationConfig, value: Any) -> None:
        vars(generation_config)["speculative_config"] = value
        if value is not None:
            # Otherwise a config derived from the model's would be derived again when it is loaded, and lose this key.
            generation_config._from_model_config = False


def _choosing(original: Any) -> Any:
    @functools.wraps(original)
    def wrapper(self: GenerationConfig, assistant_model: PreTrainedModel | None = None) -> Any:
        # transformers gives an assistant model a copy of this config, marked `is_assistant`.
        is_ours = vars(self).get("speculative_config") is not None and not getattr(self, "is_assistant", False)
        return MODE if is_ours else original(self, assistant_model)

    return wrapper


def _validating(original: Any) -> Any:
    @functools.wraps(original)
    def wrapper(self, generation_mode, generation_config, generation_mode_kwargs):
        if generation_mode != MODE:
            return original(self, generation_mode, generation_config, generation_mode_kwargs)
        from .integration import check_call

        assistant_model = generation_mode_kwargs.get("assistant_model")
        mode = _originals["get_generation_mode"](generation_config, assistant_model)
        return check_call(self, generation_config, mode, assistant_model)

    return wrapper


def _refusing(generate_batch: Any) -> Any:
    """Wrap transformers' `generate_batch` so that it refuses `speculative_config` with a clear error."""

    @functools.wraps(generate_batch)
    def wrapper(self, inputs, generation_config=None, *args, **kwargs):
        carried = (generation_config or self.generation_config).speculative_config
        if kwargs.get("speculative_config", carried) is not None:
            raise ValueError(
                "speculative_config cannot be combined with transformers' continuous batching (generate_batch, "
                "cache_implementation='paged'): pass the batch to generate()."
            )
        return generate_batch(self, inputs, generation_config, *args, **kwargs)

    return wrapper


def _specdec_decoding(self: PreTrainedModel, *args, inputs_tensor: Any = None, **kwargs) -> Any:
    """`generate()` calls this instead of `_sample`. It passes `inputs_tensor` only to methods that name this parameter."""
    from .integration import specdec_decoding

    return specdec_decoding(self, *args, inputs_tensor=inputs_tensor, **kwargs)


# By module: in a class of it, an attribute, and what makes ours of transformers' own.
_REPLACEMENTS: dict[str, list[tuple[str, str, Callable[[Any], Any]]]] = {
    "transformers.generation.configuration_utils": [
        ("GenerationConfig", "speculative_config", lambda original: _CarriedConfig()),  # an argument, a key of configs
        ("GenerationConfig", "get_generation_mode", _choosing),
    ],
    _GENERATION: [
        ("GenerationMixin", "_validate_generation_mode", _validating),
        ("GenerationMixin", "generate_batch", _refusing),
        ("GenerationMixin", _METHOD, lambda original: _specdec_decoding),
    ],
}
