"""Linear layers for steps of few rows on a GPU: `kernels.linear` in place of cuBLAS, without a second copy of the weights."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import TypeGuard

import torch
from torch import nn

from ...kernels import linear as ops
from ...kernels.dispatch import uses_triton
from ..sharding import bias_of, weight_of
from .joined_linears import JoinedLinears, Product, is_untouched

_LEAST_WEIGHTS = 1024 * 1024  # smaller weights are read in the time of a launch


class FewRowsProduct(Product):
    """The product of several layers in one launch, which reads their own weights."""

    def __init__(self, linears: Sequence[nn.Linear]):
        super().__init__(linears)
        self.weights = [weight_of(linear).detach() for linear in linears]
        biases = [bias.detach() for bias in map(bias_of, linears) if bias is not None]
        self.biases = biases or None

    def __call__(self, x: torch.Tensor) -> Sequence[torch.Tensor]:
        """Outputs [..., N_i] of every layer for x [..., K]."""
        return ops.linears(x, self.weights, self.biases)

    def serves(self, x: torch.Tensor) -> bool:
        """True for the few rows [..., K] of a decoding step, not for a prompt."""
        return x.dtype == self.weights[0].dtype and x.numel() <= ops.MOST_ROWS * x.shape[-1]


def _is_large(module: nn.Module) -> TypeGuard[nn.Linear]:
    """True for an unmodified linear layer on a GPU whose weights take longer to read than a launch."""
    if not is_untouched(module):
        return False
    weight = weight_of(module)
    return (
        weight.device.type == "cuda"
        and weight.dtype in (torch.bfloat16, torch.float16)
        and weight.numel() >= _LEAST_WEIGHTS
        and weight.is_contiguous()
    )


def few_row_linears(model: nn.Module, left_out: Collection[nn.Module] = ()) -> JoinedLinears | None:
    """A model's large linear layers, computed by our kernel for few rows; None where the kernel cannot run.

    Only for captured forwards: launched one by one, our kernel costs the host more than cuBLAS.

    Args:
        left_out: modules whose layers are not changed.
    """
    parameter = next(model.parameters(), None)
    if parameter is None or not uses_triton(parameter.device):
        return None
    return JoinedLinears(model, FewRowsProduct, _is_large, left_out)
