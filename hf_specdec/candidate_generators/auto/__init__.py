"""Method `auto`: finds what can draft for a target, and lets measurements choose among it at every step."""

from .config import AutoConfig
from .generator import AutoGenerator, ChoosingGenerator

__all__ = ["AutoConfig", "AutoGenerator", "ChoosingGenerator"]
