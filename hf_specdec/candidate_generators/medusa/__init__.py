"""Medusa (Cai et al. 2024): one head per depth reads the target's last hidden state; heads do not see drafted tokens."""

from .generator import MedusaConfig, MedusaGenerator
from .head import MedusaHeads

__all__ = ["MedusaConfig", "MedusaGenerator", "MedusaHeads"]
