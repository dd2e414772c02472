"""Linear layers on a CPU with weights in oneDNN's blocked layout, packed once instead of at every call.

Inductor's freezing does the same for a compiled model; this needs no compilation (measurements in benchmarks/LOG.md). It
costs a second copy of the weights and, once per generate() call, a hash of all weights, which takes as long as one step at
batch 1: a write to the weights may leave no other trace. Results differ from `torch.nn.functional.linear` only by float rounding.
"""

from __future__ import annotations

import logging
from typing import TypeGuard

import torch
from torch import nn

from ...cache.memory import free_bytes
from ..sharding import weight_of
from .replaced_linears import Product, ReplacedLinears, is_untouched

logger = logging.getLogger(__name__)

_ROWS = 8  # oneDNN chooses the layout for this number of rows; it works for any number
# Where packing is faster, measured: bf16 always; float32 for as many rows as drafts have, and weights larger than the L2 cache.
_ANY_ROWS = range(1, 1 << 62)
_FLOAT32_ROWS = range(2, 65)
_FLOAT32_WEIGHTS = 512 * 512
_MEMORY_SHARE = 0.25  # by default, the second copy may take this share of the machine's free memory


class PackedProduct(Product):
    """The product of a layer with its packed weight."""

    copies = True

    def __init__(self, linear: nn.Linear):
        super().__init__(linear)
        self.rows = _ANY_ROWS if linear.weight.dtype == torch.bfloat16 else _FLOAT32_ROWS
        self.linear = torch.ops.mkldnn._linear_pointwise.default

    def copy(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        """Copy the parameters, and pack the weight."""
        self.weight = torch.ops.mkldnn._reorder_linear_weight(weight, _ROWS)
        self.bias = None if bias is None else bias.clone()

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x, self.weight, self.bias, "none", [], "")

    def serves(self, x: torch.Tensor) -> bool:
        """True if packing is faster for the number of rows in x [..., K]."""
        return x.numel() // x.shape[-1] in self.rows


def _is_plain(module: nn.Module) -> TypeGuard[nn.Linear]:
    """True for an unmodified linear layer on the CPU that packing speeds up."""
    if not is_untouched(module):
        return False
    weight = weight_of(module)
    if weight.device.type != "cpu":
        return False
    if weight.dtype == torch.bfloat16:
        return packs_bfloat16()
    return weight.dtype == torch.float32 and weight.numel() >= _FLOAT32_WEIGHTS


def packs_bfloat16() -> bool:
    """True if oneDNN has a packed layout for bfloat16 on this CPU, which needs AVX-512 or AVX-NE-CONVERT."""
    return torch.ops.mkldnn._is_mkldnn_bf16_supported()


def prepack(model: nn.Module, wanted: bool | None) -> ReplacedLinears | None:
    """Prepacked layers for a model, or None where they cannot help.

    Args:
        wanted: True: pack if possible; False: never; None: pack if the copy is small compared with the free memory.
    """
    if wanted is False or not torch.backends.mkldnn.is_available():
        return None
    num_bytes = sum(weight_of(m).nbytes for m in model.modules() if _is_plain(m))
    if num_bytes == 0:
        return None
    free = free_bytes(torch.device("cpu"))
    if wanted is None and (free is None or num_bytes > _MEMORY_SHARE * free):
        logger.info(
            "Weights are not prepacked: a second copy of %.1f GiB would take too large a share of the free memory.",
            num_bytes / 2**30,
        )
        return None
    return ReplacedLinears(model, PackedProduct, _is_plain)
