"""Linear layers on a CPU with weights in oneDNN's own blocked layout, packed once instead of at every call.

What inductor's freezing does for a compiled model, without compiling (docs/performance.md has the measurements). Costs a
second copy of the weights. Results differ from `torch.nn.functional.linear` by float rounding only.
"""

from __future__ import annotations

import contextlib
import logging
import os
import weakref
from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import nn

logger = logging.getLogger(__name__)

_ROWS = 8  # the number of rows the layout is chosen for; it serves any other
# Where packing pays, measured: bf16 always; float32 from four rows on and for weights that do not fit the L2 cache.
_FLOAT32_ROWS = 4
_FLOAT32_WEIGHTS = 512 * 512
_MEMORY_SHARE = 0.25  # of the machine's free memory, at most, for the second copy


class PrepackedLinears:
    """The packed weights of a model's plain `nn.Linear` layers, applied while `active()`."""

    def __init__(self, model: nn.Module):
        self._layers = weakref.WeakKeyDictionary[nn.Linear, _PackedForward]()
        self._model = weakref.ref(model)

    @contextlib.contextmanager
    def active(self) -> Iterator[None]:
        """Inside, the layers use packed weights; layers whose weights have changed since are packed again."""
        model = self._model()
        assert model is not None
        replaced = []
        try:
            for module in model.modules():
                if _is_plain(module):
                    packed = self._layers.get(module)
                    if packed is None or not packed.is_current(module):
                        packed = self._layers[module] = _PackedForward(module)
                    module.forward = packed
                    replaced.append(module)
            yield
        finally:
            for module in replaced:
                del module.forward


class _PackedForward:
    """`forward` of one layer: input [..., in] → [..., out]."""

    def __init__(self, linear: nn.Linear):
        self.weight = torch.ops.mkldnn._reorder_linear_weight(linear.weight.detach(), _ROWS)
        self.plain_weight = linear.weight.detach()
        self.bias = None if linear.bias is None else linear.bias.detach()
        self.is_bfloat16 = linear.weight.dtype == torch.bfloat16
        self.made_from = _fingerprint(linear)
        self.linear = torch.ops.mkldnn._linear_pointwise

    def is_current(self, linear: nn.Linear) -> bool:
        """Whether the layer still has the weights this was packed from."""
        return self.made_from == _fingerprint(linear)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        rows = x.numel() // x.shape[-1]
        if not self.is_bfloat16 and rows < _FLOAT32_ROWS:
            return F.linear(x, self.plain_weight, self.bias)
        # One bf16 row takes a matrix-vector path that is slower than two rows through the matrix units.
        if self.is_bfloat16 and rows == 1:
            both = self.linear(x.reshape(1, -1).expand(2, -1).contiguous(), self.weight, self.bias, "none", [], "")
            return both[:1].reshape(*x.shape[:-1], -1)
        return self.linear(x, self.weight, self.bias, "none", [], "")


def _is_plain(module: nn.Module) -> bool:
    """An untouched `nn.Linear` on the CPU that packing speeds up: no subclass (quantized, LoRA), no replaced forward."""
    return (
        type(module) is nn.Linear
        and "forward" not in vars(module)
        and type(module.weight) is nn.Parameter
        and module.weight.device.type == "cpu"
        and (
            module.weight.dtype == torch.bfloat16
            or (module.weight.dtype == torch.float32 and module.weight.numel() >= _FLOAT32_WEIGHTS)
        )
    )


def _fingerprint(linear: nn.Linear) -> tuple:
    bias = linear.bias
    return linear.weight.data_ptr(), linear.weight._version, None if bias is None else (bias.data_ptr(), bias._version)


def prepack(model: nn.Module, wanted: bool | None) -> PrepackedLinears | None:
    """Prepacked layers for a model, or None where they cannot help.

    Args:
        wanted: True: pack if at all possible; False: never; None: if the copy is small beside the machine's free memory.
    """
    if wanted is False or not torch.backends.mkldnn.is_available():
        return None
    num_bytes = sum(m.weight.nbytes for m in model.modules() if _is_plain(m))
    if num_bytes == 0:
        return None
    free = _free_memory()
    if wanted is None and (free is None or num_bytes > _MEMORY_SHARE * free):
        logger.info(
            "Weights are not prepacked: a second copy of %.1f GiB would be large beside the free memory.",
            num_bytes / 2**30,
        )
        return None
    return PrepackedLinears(model)


def _free_memory() -> int | None:
    try:
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, ValueError, OSError):  # not on this platform
        return None
