"""EAGLE-3 (Li et al. 2025): a head drafts from hidden states of three of the target's layers."""

from .generator import Eagle3Config, Eagle3Generator
from .head import Eagle3Head

__all__ = ["Eagle3Config", "Eagle3Generator", "Eagle3Head"]
