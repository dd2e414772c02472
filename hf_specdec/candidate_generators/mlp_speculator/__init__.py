"""MLP speculators (Wertheimer et al. 2024): IBM's accelerators and Snowflake's Arctic speculators."""

from .generator import ArcticConfig, MLPSpeculatorConfig, MLPSpeculatorGenerator

__all__ = ["ArcticConfig", "MLPSpeculatorConfig", "MLPSpeculatorGenerator"]
