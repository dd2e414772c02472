"""Speculative decoding for Hugging Face transformers: `model.generate(..., speculative_config={"method": "ngram"})`."""

import importlib
import logging
from typing import TYPE_CHECKING, Any

from .bundled import bundled, bundled_names, resolve_model
from .config import SpeculativeConfig, SpeculativeConfigError
from .plugin import generate, install, release, uninstall

if TYPE_CHECKING:
    from .assisted import assisted_loop
    from .candidate_generators import CandidateGenerator, available_methods, parse_config, register
    from .candidate_generators.base import DrafterContext
    from .core.draft_trees import DraftTrees
    from .core.outcome import StepOutcome
    from .core.output import PackedOutput, Taps
    from .core.sequence import Sequence
    from .model.packed_model import PackedModel
    from .serve import LLM, SamplingParams, StructuredOutputsParams

__version__ = "0.2.0"

__all__ = [
    "LLM",
    "CandidateGenerator",
    "DraftTrees",
    "DrafterContext",
    "PackedModel",
    "PackedOutput",
    "SamplingParams",
    "Sequence",
    "SpeculativeConfig",
    "SpeculativeConfigError",
    "StepOutcome",
    "StructuredOutputsParams",
    "Taps",
    "assisted_loop",
    "available_methods",
    "bundled",
    "bundled_names",
    "generate",
    "install",
    "parse_config",
    "register",
    "release",
    "resolve_model",
    "uninstall",
]

# Imported when they are first asked for: `import hf_specdec` loads no more than the plugin.
_MODULE_OF = {
    "LLM": ".serve",
    "SamplingParams": ".serve.engine.params",
    "StructuredOutputsParams": ".serve.engine.structured",
    "CandidateGenerator": ".candidate_generators",
    "available_methods": ".candidate_generators",
    "parse_config": ".candidate_generators",
    "register": ".candidate_generators",
    "DrafterContext": ".candidate_generators.base",
    "DraftTrees": ".core.draft_trees",
    "PackedModel": ".model.packed_model",
    "PackedOutput": ".core.output",
    "Sequence": ".core.sequence",
    "StepOutcome": ".core.outcome",
    "Taps": ".core.output",
    "assisted_loop": ".assisted",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(importlib.import_module(_MODULE_OF[name], __name__), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


# transformers imports torchao wherever it is installed, needed or not: both then warn of what does not concern the user.
FOREIGN_LOGGERS = [logging.getLogger(name) for name in ("torchao", "torch.utils._pytree")]
for _logger in FOREIGN_LOGGERS:
    _logger.setLevel(logging.ERROR)
install()
