"""Continuous batching: `LLM`, the engine that it runs, and the HTTP server."""

from .engine.params import SamplingParams
from .engine.request import CompletionOutput, Logprob, RequestOutput
from .engine.structured import StructuredOutputsParams
from .llm import LLM

__all__ = ["LLM", "CompletionOutput", "Logprob", "RequestOutput", "SamplingParams", "StructuredOutputsParams"]
