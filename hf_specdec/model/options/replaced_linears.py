"""ReplacedLinears: replaces a model's linear layers by faster products while it is active."""

from __future__ import annotations

import abc
import contextlib
import weakref
from collections.abc import Callable, Collection, Iterator
from typing import Any, TypeGuard

import torch
import torch.nn.functional as F
from torch import nn

from ...kernels import linear as ops
from ...kernels.dispatch import uses_native, uses_triton
from ...kernels.linear import native
from ...kernels.linear.quantized import MOST_TOKENS
from ...kernels.native import TYPES
from ..architectures import all_modules
from ..sharding import bias_of, is_sharded, sharded_forward, weight_of
from ..structure import place_of
from ..threads import replaced_values
from .fingerprints import fingerprints


class Product(abc.ABC):
    """Computes the output of a linear layer.

    Attributes:
        copies: it computes with copies of the parameters, made by its `copy(weight, bias)`. Writes to the parameters make the copies stale,
            so the contents are compared before the copies are used (see `ReplacedLinears.refresh`).
        copied_from: fingerprints of the copied parameters; None: nothing is copied yet.
    """

    copies = False
    copied_from: list[bytes] | None = None

    def __init__(self, linear: nn.Linear):
        self.place = _place(linear)

    @abc.abstractmethod
    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """The output [..., N] for x [..., K]."""

    @abc.abstractmethod
    def serves(self, x: torch.Tensor) -> bool:
        """True if it is faster than the layer's own product for the number of rows in x [..., K]."""


class ReplacedLinears:
    """Replaces the forwards of a model's linear layers by products while `active()`.

    Args:
        product: makes the product of a layer.
        is_served: True for modules that such a product can serve; these are `nn.Linear`.
        left_out: modules whose layers are not changed.
    """

    def __init__(
        self,
        model: nn.Module,
        product: Callable[[nn.Linear], Product],
        is_served: Callable[[nn.Module], TypeGuard[nn.Linear]],
        left_out: Collection[nn.Module] = (),
    ):
        self._make, self._is_served = product, is_served
        self._products = weakref.WeakKeyDictionary[nn.Linear, Product]()
        self._left_out = weakref.WeakSet(inner for module in left_out for inner in module.modules())
        self._model = weakref.ref(model)
        self._replaced: list[nn.Linear] = []
        self.is_fresh = False  # True: the copies have been compared with the weights since `active()` was entered

    @contextlib.contextmanager
    def active(self) -> Iterator[None]:
        """Inside the context, the layers use their products. Copies hold the weights as they were when the first product was used."""
        model = self._model()
        assert model is not None
        self.is_fresh = False
        modules = (module for module in all_modules(model) if module not in self._left_out)
        self._replaced = [module for module in modules if self._is_served(module)]
        try:
            with replaced_values((vars(linear), "forward", self._forward_of(linear)) for linear in self._replaced):
                yield
        finally:
            self._replaced = []  # the model belongs to others

    def _forward_of(self, linear: nn.Linear) -> Callable:
        # A bound method, because dynamo shares traces by function; it would trace callable objects one by one.
        forward, sharded = _ReplacedForward(self, linear, self._product(linear)).forward, sharded_forward(linear)
        return forward if sharded is None else sharded(forward)

    def refresh(self) -> None:
        """Compare the contents of the copied parameters with the layers' own, by hash, and copy those that differ."""
        hashes = iter(fingerprints([tensor for linear in self._replaced for tensor in _tensors(linear)]))
        for linear in self._replaced:
            product: Any = self._products[linear]
            contents = [next(hashes) for _ in _tensors(linear)]
            if product.copied_from != contents:
                product.copy(*parameters_of(linear))
                product.copied_from = contents
        self.is_fresh = True

    def forget(self) -> None:
        """Free the copies. Call outside `active()`."""
        self._products.clear()

    def _product(self, linear: nn.Linear) -> Product:
        product = self._products.get(linear)
        if product is None or product.place != _place(linear):  # weights may have moved
            product = self._products[linear] = self._make(linear)
        return product


class _ReplacedForward:
    """The `forward` that replaces a layer's own."""

    def __init__(self, owner: ReplacedLinears, linear: nn.Linear, product: Product):
        self.owner, self.product = owner, product
        self.weight, self.bias = parameters_of(linear)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The layer's output [..., out] for input x [..., in]."""
        # Tracing must see a plain linear layer: the rewriting of traced graphs joins layers itself.
        if torch.compiler.is_compiling() or not self.product.serves(x):
            return F.linear(x, self.weight, self.bias)
        if self.product.copies and not self.owner.is_fresh:
            self.owner.refresh()
        return self.product(x)


def is_untouched(module: nn.Module) -> TypeGuard[nn.Linear]:
    """True for an unmodified `nn.Linear`: no subclass (quantized, LoRA), no replaced forward, ordinary weights, or a shard of them."""
    if type(module) is not nn.Linear:
        return False
    if "forward" in vars(module):
        return is_sharded(module) and sharded_forward(module) is not None
    return type(module.weight) is nn.Parameter


def _tensors(linear: nn.Linear) -> list[torch.Tensor]:
    return [tensor for tensor in (weight_of(linear), bias_of(linear)) if tensor is not None]


def parameters_of(linear: nn.Linear) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The layer's weight and bias, detached."""
    bias = bias_of(linear)
    return weight_of(linear).detach(), None if bias is None else bias.detach()


def _place(linear: nn.Linear) -> list:
    return [place_of(tensor) for tensor in _tensors(linear)]


# ---- few rows on a GPU: `kernels.linear` in place of cuBLAS, without a second copy of the weights ----

_LEAST_WEIGHTS = 1024 * 1024  # smaller weights are read in the time of a launch


class FewRowsProduct(Product):
    """The product of a layer with few rows, which reads the layer's own weight."""

    def __init__(self, linear: nn.Linear):
        super().__init__(linear)
        self.weight, self.bias = parameters_of(linear)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return ops.linears(x, [self.weight], None if self.bias is None else [self.bias])[0]

    def serves(self, x: torch.Tensor) -> bool:
        """True for the few rows [..., K] of a decoding step, not for a prompt."""
        return x.dtype == self.weight.dtype and x.numel() <= ops.MOST_ROWS * x.shape[-1]


def _is_large(module: nn.Module) -> TypeGuard[nn.Linear]:
    """True for an unmodified linear layer on a GPU whose weights take longer to read than a launch."""
    if not is_untouched(module):
        return False
    weight = weight_of(module)
    served = weight.device.type == "cuda" and weight.dtype in (torch.bfloat16, torch.float16) and weight.is_contiguous()
    return served and weight.numel() >= _LEAST_WEIGHTS


def few_row_linears(model: nn.Module, left_out: Collection[nn.Module] = ()) -> ReplacedLinears | None:
    """A model's large linear layers, computed by our kernel for few rows; None where the kernel cannot run.

    Only for captured forwards: launched one by one, our kernel costs the host more than cuBLAS.
    """
    parameter = next(model.parameters(), None)
    if parameter is None or not uses_triton(parameter.device):
        return None
    return ReplacedLinears(model, FewRowsProduct, _is_large, left_out)


# ---- few rows on a CPU: the native library in place of torch, without a second copy of the weights ----


class NativeProduct(FewRowsProduct):
    """As its base, in the native library."""

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return native.linear(x, self.weight, self.bias)

    def serves(self, x: torch.Tensor) -> bool:
        return x.dtype == self.weight.dtype and x.numel() <= MOST_TOKENS * x.shape[-1]


def _is_read(module: nn.Module) -> TypeGuard[nn.Linear]:
    """True for an unmodified linear layer whose parameters the library can read."""
    if not is_untouched(module) or is_sharded(module):
        return False
    tensors = _tensors(module)
    return all(part.dtype in TYPES and part.is_contiguous() and part.dtype == tensors[0].dtype for part in tensors)


def native_linears(model: nn.Module) -> ReplacedLinears | None:
    """A model's linear layers, computed by the native library for few rows; None where it cannot run."""
    parameter = next(model.parameters(), None)
    if parameter is None or not uses_native(parameter.device):
        return None
    return ReplacedLinears(model, NativeProduct, _is_read)
