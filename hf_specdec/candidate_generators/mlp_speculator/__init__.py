"""MLP speculators (Wertheimer et al. 2024): IBM's accelerators and Snowflake's Arctic speculators."""

from .generator import ArcticConfig, MLPSpeculatorConfig, MLPSpeculatorGenerator
from .head import LSTMSpeculator, SumSpeculator

__all__ = [
    "ArcticConfig",
    "LSTMSpeculator",
    "MLPSpeculatorConfig",
    "MLPSpeculatorGenerator",
    "SumSpeculator",
]
