"""Continuous batching: `LLM`, the engine that it runs, and the HTTP server."""

from typing import TYPE_CHECKING

from ..lazy_names import lazy_names
from .engine.outputs import CompletionOutput, Logprob, RequestOutput
from .engine.params import SamplingParams
from .engine.structured import StructuredOutputsParams

if TYPE_CHECKING:
    from .llm import LLM

__all__ = ["LLM", "CompletionOutput", "Logprob", "RequestOutput", "SamplingParams", "StructuredOutputsParams"]

__getattr__ = lazy_names(__name__, {".llm": ["LLM"]})  # the HTTP side loads no engine
