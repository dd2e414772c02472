"""Making models and heads bigger without changing their outputs: real text and acceptance at the cost of a real model."""

from .head import inflate_eagle3
from .model import PRESETS, inflate
from .tensors import DIMENSIONS, STATE_DIMENSIONS

__all__ = ["DIMENSIONS", "PRESETS", "STATE_DIMENSIONS", "inflate", "inflate_eagle3"]
