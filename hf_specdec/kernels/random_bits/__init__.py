"""Counter-based random numbers (Philox4x32-10): the same on every device. Inside kernels, see `triton.py`."""

from .reference import ACCEPT_STREAM, DRAFT_STREAM, RESIDUAL_STREAM, TOKEN_STREAM, gumbel, noisy_argmax, uniform

__all__ = ["ACCEPT_STREAM", "DRAFT_STREAM", "RESIDUAL_STREAM", "TOKEN_STREAM", "gumbel", "noisy_argmax", "uniform"]
