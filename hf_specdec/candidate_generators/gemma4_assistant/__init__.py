"""Gemma 4 assistants: drafters whose layers attend to the target's own keys and values."""

from .generator import Gemma4AssistantConfig, Gemma4AssistantGenerator

__all__ = ["Gemma4AssistantConfig", "Gemma4AssistantGenerator"]
