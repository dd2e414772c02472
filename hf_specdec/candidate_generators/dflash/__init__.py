"""DFlash, DSpark and Domino: one forward of a small drafter fills a whole block of draft tokens."""

from .config import DFlashConfig
from .generator import DFlashGenerator
from .head import DFlashDrafter

__all__ = ["DFlashConfig", "DFlashDrafter", "DFlashGenerator"]
