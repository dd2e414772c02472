"""MLP speculators (Wertheimer et al. 2024): IBM's accelerators and Snowflake's Arctic speculators."""

from .config import ArcticConfig, MLPSpeculatorConfig
from .generator import ArcticGenerator, MLPSpeculatorGenerator
from .head import LSTMSpeculator, SumSpeculator

__all__ = [
    "ArcticConfig",
    "ArcticGenerator",
    "LSTMSpeculator",
    "MLPSpeculatorConfig",
    "MLPSpeculatorGenerator",
    "SumSpeculator",
]
