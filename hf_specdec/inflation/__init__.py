"""Making models and heads bigger without changing their outputs: real text and acceptance at the cost of a real model."""

from .tensors import DIMENSIONS, PRESETS, inflate, inflate_eagle3

__all__ = ["DIMENSIONS", "PRESETS", "inflate", "inflate_eagle3"]
