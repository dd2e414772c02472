"""Speculative decoding for Hugging Face transformers: `model.generate(..., speculative_config={"method": "ngram"})`."""

import logging
from typing import TYPE_CHECKING

from .bundled import bundled, bundled_names, resolve_model
from .config import SpeculativeConfig, SpeculativeConfigError
from .lazy_names import lazy_names
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

# `import hf_specdec` loads no more than the plugin.
__getattr__ = lazy_names(
    __name__,
    {
        ".serve": ["LLM"],
        ".serve.engine.params": ["SamplingParams"],
        ".serve.engine.structured": ["StructuredOutputsParams"],
        ".candidate_generators": ["CandidateGenerator", "available_methods", "parse_config", "register"],
        ".candidate_generators.base": ["DrafterContext"],
        ".core.draft_trees": ["DraftTrees"],
        ".core.output": ["PackedOutput", "Taps"],
        ".core.outcome": ["StepOutcome"],
        ".core.sequence": ["Sequence"],
        ".model.packed_model": ["PackedModel"],
        ".assisted": ["assisted_loop"],
    },
)


# transformers imports torchao wherever it is installed, needed or not: both then warn of what does not concern the user.
FOREIGN_LOGGERS = [logging.getLogger(name) for name in ("torchao", "torch.utils._pytree")]
for _logger in FOREIGN_LOGGERS:
    _logger.setLevel(logging.ERROR)
install()
