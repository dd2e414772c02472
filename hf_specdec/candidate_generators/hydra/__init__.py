"""Hydra and Hydra++ (Ankner et al. 2024): Medusa's heads, but each also reads the tokens drafted before it."""

from .config import HydraConfig
from .generator import HydraGenerator, HydraPrefixGenerator
from .head import HydraHeads

__all__ = ["HydraConfig", "HydraGenerator", "HydraHeads", "HydraPrefixGenerator"]
