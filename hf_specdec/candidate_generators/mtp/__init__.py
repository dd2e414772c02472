"""Multi-token prediction (MTP): the modules that target checkpoints bring along draft for their own model."""

from .config import MtpConfig
from .generator import MtpGenerator
from .head import MtpModule

__all__ = ["MtpConfig", "MtpGenerator", "MtpModule"]
