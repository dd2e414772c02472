"""Hydra and Hydra++ (Ankner et al. 2024): Medusa's heads, but each also reads the tokens drafted before it."""

from .generator import HydraConfig, HydraGenerator, HydraPrefixGenerator
from .head import HydraHeads

__all__ = ["HydraConfig", "HydraGenerator", "HydraHeads", "HydraPrefixGenerator"]
