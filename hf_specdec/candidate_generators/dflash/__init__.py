"""DFlash, DSpark and Domino: one forward of a small drafter fills a whole block of draft tokens."""

from .generator import DFlashConfig, DFlashGenerator
from .head import DFlashDrafter

__all__ = ["DFlashConfig", "DFlashDrafter", "DFlashGenerator"]
