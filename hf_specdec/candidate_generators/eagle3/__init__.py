"""EAGLE-3 (Li et al. 2025): a head drafts from hidden states of three of the target's layers."""

from .config import Eagle3Config
from .generator import Eagle3Generator
from .head import Eagle3Head
from .p_eagle import PEagleGenerator

__all__ = ["Eagle3Config", "Eagle3Generator", "Eagle3Head", "PEagleGenerator"]
