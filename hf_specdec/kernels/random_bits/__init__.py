"""Counter-based random numbers (Philox4x32-10): the same on every device. Inside kernels, see `triton.py`."""

from ..dispatch import operation
from . import reference
from .reference import ACCEPT_STREAM, DRAFT_STREAM, RESIDUAL_STREAM, TOKEN_STREAM, gumbel, uniform

__all__ = ["ACCEPT_STREAM", "DRAFT_STREAM", "RESIDUAL_STREAM", "TOKEN_STREAM", "gumbel", "noisy_argmax", "uniform"]

noisy_argmax = operation(reference.noisy_argmax, serves=lambda *_: False, native=True)  # Triton's kernels contain it
