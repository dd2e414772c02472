"""EAGLE-1 and EAGLE-2 (Li et al. 2024), HASS: a head of one decoder layer continues the target's last hidden states."""

from .generator import EagleConfig, EagleGenerator
from .head import EagleHead

__all__ = ["EagleConfig", "EagleGenerator", "EagleHead"]
