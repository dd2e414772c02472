"""Linear layers on a CPU with weights in oneDNN's own blocked layout, packed once instead of at every call.

What inductor's freezing does for a compiled model, without compiling (docs/performance.md has the measurements). Costs a
second copy of the weights. Layers that are fed the same tensor (queries, keys and values) share one product. Results
differ from `torch.nn.functional.linear` by float rounding only.
"""

from __future__ import annotations

import contextlib
import logging
import os
import weakref
from collections.abc import Iterator
from typing import TypeGuard

import torch
import torch.nn.functional as F
from torch import nn

logger = logging.getLogger(__name__)

_ROWS = 8  # the number of rows the layout is chosen for; it serves any other
# Where packing pays, measured: bf16 always; float32 from four rows on and for weights that do not fit the L2 cache.
_FLOAT32_ROWS = 4
_FLOAT32_WEIGHTS = 512 * 512
# Siblings of these names are as a rule fed one tensor; then one product serves them all. Checked at every call.
_SAME_INPUT = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))
_MEMORY_SHARE = 0.25  # of the machine's free memory, at most, for the second copy


class PrepackedLinears:
    """The packed weights of a model's plain `nn.Linear` layers, applied while `active()`."""

    def __init__(self, model: nn.Module):
        self._products = weakref.WeakKeyDictionary[nn.Linear, _Product]()  # by the first of their layers
        self._fed_apart = weakref.WeakSet[nn.Linear]()
        self._model = weakref.ref(model)

    @contextlib.contextmanager
    def active(self) -> Iterator[None]:
        """Inside, the layers use packed weights; layers whose weights have changed since are packed again."""
        model = self._model()
        assert model is not None
        replaced = []
        try:
            for linears in self._fed_together(model):
                product = self._product(linears)
                for index, linear in enumerate(linears):
                    linear.forward = _PackedForward(linear, product, index)  # pyright: ignore[reportAttributeAccessIssue]
                    replaced.append(linear)
            yield
        finally:
            for linear in replaced:
                del linear.forward

    def _product(self, linears: list[nn.Linear]) -> _Product:
        first = linears[0]
        product = self._products.get(first)
        if product is None or not product.is_current(linears):
            product = self._products[first] = _Product(linears)
        return product

    def _fed_together(self, model: nn.Module) -> Iterator[list[nn.Linear]]:
        """The plain layers, those that share their input together."""
        for parent in model.modules():
            plain = {name: child for name, child in parent.named_children() if _is_plain(child)}
            for names in _SAME_INPUT:
                linears = [plain[name] for name in names if name in plain]
                if len(linears) == len(names) and self._can_join(linears):
                    yield linears
                    for name in names:
                        del plain[name]
            for linear in plain.values():
                yield [linear]

    def _can_join(self, linears: list[nn.Linear]) -> bool:
        product = self._products.get(linears[0])
        if product is not None and product.fed_apart:
            self._fed_apart.update(linears)
        kinds = {(linear.in_features, linear.weight.dtype, linear.bias is None) for linear in linears}
        return len(kinds) == 1 and not any(linear in self._fed_apart for linear in linears)


class _Product:
    """One or several layers' weights in one packed matrix: longer runs of memory, fewer calls.

    Attributes:
        sizes: outputs of each layer.
        latest: (input, its version, outputs per layer) of the last product, until the last layer has fetched its own.
        fed_apart: a layer came with another input than the first; from then on each computes its own.
    """

    def __init__(self, linears: list[nn.Linear]):
        weights = [linear.weight.detach() for linear in linears]
        self.sizes = [weight.shape[0] for weight in weights]
        self.weight = torch.ops.mkldnn._reorder_linear_weight(_join(weights), _ROWS)
        biases = [linear.bias.detach() for linear in linears if linear.bias is not None]
        self.bias = _join(biases) if biases else None
        self.made_from = [_fingerprint(linear) for linear in linears]
        self.latest: tuple[torch.Tensor, int | None, tuple[torch.Tensor, ...]] | None = None
        self.fed_apart = False
        self.linear = torch.ops.mkldnn._linear_pointwise.default

    def is_current(self, linears: list[nn.Linear]) -> bool:
        """Whether this was packed from just these layers with the weights they have now."""
        return self.made_from == [_fingerprint(linear) for linear in linears]

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x, self.weight, self.bias, "none", [], "")

    def part(self, x: torch.Tensor, index: int) -> torch.Tensor | None:
        """Output of layer `index` of several (a view), computed for all when the first asks; None: fed apart."""
        version = None if x.is_inference() else x._version
        if index == 0:
            outputs = self(x).split(self.sizes, dim=-1)
            self.latest = x, version, outputs
            return outputs[0]
        latest = self.latest
        if latest is None or latest[0] is not x or latest[1] != version:
            self.fed_apart, self.latest = True, None
            return None
        if index == len(self.sizes) - 1:
            self.latest = None
        return latest[2][index]


class _PackedForward:
    """`forward` of one layer: input [..., in] → [..., out]."""

    def __init__(self, linear: nn.Linear, product: _Product, index: int):
        self.weight = linear.weight.detach()
        self.bias = None if linear.bias is None else linear.bias.detach()
        self.product, self.index = product, index
        self.alone = len(product.sizes) == 1
        self.min_rows = 0 if linear.weight.dtype == torch.bfloat16 else _FLOAT32_ROWS

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        if self.min_rows and x.numel() < self.min_rows * x.shape[-1]:
            return F.linear(x, self.weight, self.bias)
        if self.alone:
            return self.product(x)
        out = None if self.product.fed_apart else self.product.part(x, self.index)
        return F.linear(x, self.weight, self.bias) if out is None else out


def _join(tensors: list[torch.Tensor]) -> torch.Tensor:
    return tensors[0] if len(tensors) == 1 else torch.cat(tensors)


def _is_plain(module: nn.Module) -> TypeGuard[nn.Linear]:
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
