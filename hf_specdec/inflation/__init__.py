"""Making models and heads bigger without changing their outputs: real text and acceptance at the cost of a real model."""

from .head import inflate_eagle3
from .model import PRESETS, inflate
from .tensors import DIMENSIONS

__all__ = ["DIMENSIONS", "PRESETS", "inflate", "inflate_eagle3"]
