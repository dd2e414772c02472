"""Continuous batching: `LLM`, the engine that it runs, and the HTTP server."""

from .llm import LLM
from .outputs import CompletionOutput, Logprob, RequestOutput
from .params import SamplingParams
from .structured import StructuredOutputsParams

__all__ = ["LLM", "CompletionOutput", "Logprob", "RequestOutput", "SamplingParams", "StructuredOutputsParams"]
