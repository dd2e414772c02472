"""Multi-token prediction (MTP): the modules that target checkpoints bring along draft for their own model."""

from .generator import MtpConfig, MtpGenerator
from .head import MtpModule

__all__ = ["MtpConfig", "MtpGenerator", "MtpModule"]
