"""Temperature, top-k, top-p, min-p and Gumbel noise on rows of logits that differ in their parameters.

Operations over logits [R, F, V]: F rows of logits for each of R rows. `rows` int64 [R] says which of the B rows of the parameters
they belong to; None: all, in order.
"""

from __future__ import annotations

import torch

from ..dispatch import operation, uses_native, uses_triton
from . import reference

apply_parameters = operation(reference.apply_parameters)
noisy_scores = operation(reference.noisy_scores)
choices = operation(reference.choices, native=True)


def is_fused(device: torch.device, chooses: bool) -> bool:
    """True if kernels apply sampling parameters while they read the logits, instead of the rows' logits processors. `chooses`: only
    `choices` are asked for."""
    return uses_triton(device) or (chooses and uses_native(device))
