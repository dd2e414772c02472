"""Speculative decoding for Hugging Face transformers: `model.generate(..., speculative_config={"method": "ngram"})`."""

from .foreign_messages import held_back

with held_back():
    from .bundled import bundled, bundled_names, resolve_model
    from .candidate_generators import CandidateGenerator, available_methods, parse_config, register
    from .config import SpeculativeConfig, SpeculativeConfigError
    from .integration import assisted_loop, generate, install, release, uninstall
    from .serve import LLM, SamplingParams

__version__ = "0.1.0"

__all__ = [
    "LLM",
    "CandidateGenerator",
    "SamplingParams",
    "SpeculativeConfig",
    "SpeculativeConfigError",
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
