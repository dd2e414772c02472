"""A smaller language model drafts (Leviathan et al. 2023; Chen et al. 2023), in chains or trees."""

from .config import DraftModelConfig
from .generator import DraftModelGenerator

__all__ = ["DraftModelConfig", "DraftModelGenerator"]
