"""install()/uninstall(): `speculative_config=` on every `GenerationMixin.generate()`, as a registered generation mode.

What the mode needs is imported by the first call that uses it (`integration.py`), so that `import hf_specdec` is quick.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from typing import TYPE_CHECKING, Any

import transformers.generation.utils as generation_utils
from transformers.generation import GenerationConfig, GenerationMixin
from transformers.generation.continuous_batching import ContinuousMixin

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from .config import SpeculativeConfig

MODE = "specdec"
_METHOD = "_specdec_decoding"

_lock = threading.RLock()
_originals: dict[str, Any] = {}  # transformers' own functions, while ours replace them
_installed = False
_explicit_calls = 0  # running calls of our generate(), which need the plugin until they return


def install() -> None:
    """Make `speculative_config=` an argument of every `generate()`. Idempotent; `import hf_specdec` calls it."""
    global _installed
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
    from .integration import release

    release(model)


def _patch() -> None:
    if _originals:
        return
    _originals["mode"] = GenerationConfig.get_generation_mode
    _originals["validate"] = GenerationMixin._validate_generation_mode
    GenerationConfig.speculative_config = _CarriedConfig()  # accepted as argument, in configs, in request bodies
    GenerationConfig.get_generation_mode = _get_generation_mode
    GenerationMixin._validate_generation_mode = _validate_generation_mode
    GenerationMixin.generate_batch = _generate_batch
    setattr(GenerationMixin, _METHOD, _specdec_decoding)
    generation_utils.GENERATION_MODES_MAPPING[MODE] = _METHOD


def _unpatch() -> None:
    if not _originals:
        return
    GenerationConfig.get_generation_mode = _originals.pop("mode")
    GenerationMixin._validate_generation_mode = _originals.pop("validate")
    del GenerationConfig.speculative_config, GenerationMixin.generate_batch
    delattr(GenerationMixin, _METHOD)
    del generation_utils.GENERATION_MODES_MAPPING[MODE]


@contextlib.contextmanager
def _patched():
    """Patched while inside. On exit unpatched again, unless the plugin was installed."""
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
    own = getattr(
        type(model), "generate", None
    )  # the instance may carry a repository's custom_generate, which calls this function
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


@functools.wraps(ContinuousMixin.generate_batch)
def _generate_batch(self, inputs, generation_config=None, *args, **kwargs):
    carried = (generation_config or self.generation_config).speculative_config
    if kwargs.get("speculative_config", carried) is not None:
        raise ValueError(
            "speculative_config cannot be combined with transformers' continuous batching (generate_batch, "
            "cache_implementation='paged'): pass the batch to generate()."
        )
    return ContinuousMixin.generate_batch(self, inputs, generation_config, *args, **kwargs)


def _specdec_decoding(self: PreTrainedModel, *args, inputs_tensor: Any = None, **kwargs) -> Any:
    """`generate()` calls it instead of `_sample`, and with `inputs_tensor` because this argument is named."""
    from .integration import specdec_decoding

    return specdec_decoding(self, *args, inputs_tensor=inputs_tensor, **kwargs)
