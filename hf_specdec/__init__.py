"""Speculative decoding for Hugging Face transformers: `model.generate(..., speculative_config={"method": "ngram"})`."""

from .foreign_messages import held_back

with held_back():
    from .assisted import assisted_loop
    from .bundled import bundled, bundled_names, resolve_model
    from .candidate_generators import CandidateGenerator, available_methods, parse_config, register
    from .candidate_generators.base import DrafterContext
    from .config import SpeculativeConfig, SpeculativeConfigError
    from .core.draft_trees import DraftTrees
    from .core.outcome import StepOutcome
    from .core.output import PackedOutput, Taps
    from .core.sequence import Sequence
    from .integration import generate, install, release, uninstall
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

install()
