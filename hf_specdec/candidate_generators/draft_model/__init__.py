"""A smaller language model drafts (Leviathan et al. 2023; Chen et al. 2023), in chains or trees."""

from .generator import DraftModelConfig, DraftModelGenerator

__all__ = ["DraftModelConfig", "DraftModelGenerator"]
