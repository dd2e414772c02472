"""Continuous batching on the decoder: `LLM`, and the engine under it."""

from .llm import LLM
from .outputs import CompletionOutput, Logprob, RequestOutput
from .params import SamplingParams
from .structured import StructuredOutputsParams

__all__ = ["LLM", "CompletionOutput", "Logprob", "RequestOutput", "SamplingParams", "StructuredOutputsParams"]
