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
    from types import ModuleType

    from transformers import GenerationConfig, PreTrainedModel

    from .config import SpeculativeConfig

MODE = "specdec"
_METHOD = "_specdec_decoding"
_CONFIGURATION = "transformers.generation.configuration_utils"
_GENERATION = "transformers.generation.utils"

_lock = threading.RLock()
_originals: dict[str, Any] = {}  # transformers' own functions, while ours replace them
_installed = False
_explicit_calls = 0  # running calls of our generate(), which need the plugin until they return


def install() -> None:
    """Make `speculative_config=` an argument of every `generate()`. Idempotent; `import hf_specdec` calls it."""
    global _installed
    _wait_for_imports()
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


# ---- patching transformers ------------------------------------------------------------------------------------------


def _patch_configuration(module: ModuleType) -> None:
    config = module.GenerationConfig
    _originals["mode"] = config.get_generation_mode
    config.speculative_config = _CarriedConfig()  # accepted as argument, in configs, in request bodies
    config.get_generation_mode = _get_generation_mode


def _unpatch_configuration(module: ModuleType) -> None:
    module.GenerationConfig.get_generation_mode = _originals.pop("mode")
    del module.GenerationConfig.speculative_config


def _patch_generation(module: ModuleType) -> None:
    mixin = module.GenerationMixin
    _originals["validate"] = mixin._validate_generation_mode
    mixin._validate_generation_mode = _validate_generation_mode
    mixin.generate_batch = _refusing(mixin.generate_batch)
    setattr(mixin, _METHOD, _specdec_decoding)
    module.GENERATION_MODES_MAPPING[MODE] = _METHOD


def _unpatch_generation(module: ModuleType) -> None:
    module.GenerationMixin._validate_generation_mode = _originals.pop("validate")
    del module.GenerationMixin.generate_batch  # transformers' own is inherited
    delattr(module.GenerationMixin, _METHOD)
    del module.GENERATION_MODES_MAPPING[MODE]


# By module: the key that `_originals` has while the module is patched, and the functions that patch and unpatch it.
_PATCHES = {
    _CONFIGURATION: ("mode", _patch_configuration, _unpatch_configuration),
    _GENERATION: ("validate", _patch_generation, _unpatch_generation),
}


class _PatchAfterImport(importlib.abc.MetaPathFinder):
    """Finds the modules of `_PATCHES` as the other finders do, and patches each module once its code has run."""

    def find_spec(self, fullname, path, target=None):
        """The spec of a module to patch, whose loader patches it; None for other modules. See `importlib.abc.MetaPathFinder`."""
        if fullname not in _PATCHES:
            return None
        others = (finder for finder in sys.meta_path if finder is not self)
        found = (finder.find_spec(fullname, path, target) for finder in others)
        spec = next((spec for spec in found if spec is not None), None)
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def exec_module(module: ModuleType) -> None:
                execute(module)
                with _lock:
                    if self in sys.meta_path and module.__name__ == fullname:  # some loaders serve many modules
                        _PATCHES[fullname][1](module)

            setattr(spec.loader, "exec_module", exec_module)  # noqa: B010 (a method, to a type checker)
        return spec


_finder = _PatchAfterImport()


def _wait_for_imports() -> None:
    """Wait until no other thread is importing a module to patch. Call without `_lock`, because such an import may wait for it."""
    for name in _PATCHES:
        if name in sys.modules:
            importlib.import_module(name)


def _patch() -> None:
    if _finder not in sys.meta_path:
        sys.meta_path.insert(0, _finder)
    for name, (key, patch, _) in _PATCHES.items():
        if key not in _originals and name in sys.modules:
            patch(sys.modules[name])


def _unpatch() -> None:
    if _finder in sys.meta_path:
        sys.meta_path.remove(_finder)
    for name, (key, _, unpatch) in _PATCHES.items():
        if key in _originals:
            unpatch(sys.modules[name])


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
    own = getattr(type(model), "generate", None)
    call = model.generate if own is None else functools.partial(own, model)
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


# ---- the generation mode --------------------------------------------------------------------------------------------


class _Mode(str):
    """MODE, with the call's parsed configuration: `generate()` hands the mode on to `_validate_generation_mode`."""

    config: SpeculativeConfig

    def __new__(cls, config: SpeculativeConfig) -> _Mode:
        mode = super().__new__(cls, MODE)
        mode.config = config
        return mode


def _get_generation_mode(self: GenerationConfig, assistant_model: PreTrainedModel | None = None):
    mode = _originals["mode"](self, assistant_model)
    # transformers gives an assistant model a copy of this config, marked `is_assistant`.
    if self.speculative_config is None or getattr(self, "is_assistant", False):
        return mode
    from .integration import checked_config

    return _Mode(checked_config(self, mode))


def _validate_generation_mode(self, generation_mode, generation_config, generation_mode_kwargs):
    if generation_mode != MODE:
        return _originals["validate"](self, generation_mode, generation_config, generation_mode_kwargs)
    from .integration import check_call

    return check_call(self, generation_mode.config, generation_config, generation_mode_kwargs.get("assistant_model"))


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
