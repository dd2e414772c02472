"""JoinedLinears: replaces a model's linear layers by faster products while it is active. Layers of one input share a product."""

from __future__ import annotations

import abc
import contextlib
import weakref
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any, TypeGuard

import torch
import torch.nn.functional as F
from torch import nn

from ...kernels import linear as ops
from ...kernels.dispatch import uses_triton
from ..architectures import all_modules
from ..sharding import bias_of, is_sharded, sharded_forward, weight_of
from ..structure import place_of
from .fingerprints import fingerprints

# Sibling layers of these names usually have the same input; then one product serves them all. Every call checks the input.
_SAME_INPUT = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))


class Product(abc.ABC):
    """Computes the outputs of one layer, or of several layers with the same input in one call.

    Args:
        linears: layers with the same number of inputs, all with biases or all without.

    Attributes:
        copies: it computes with copies of the weights, made by its `copy_weights(linears)`. Writes to the weights make the copies stale,
            so the contents are compared before the copies are used (see `JoinedLinears.refresh`).
        copied_from: fingerprints of the copied weights; None: nothing is copied yet.
        alone: it serves one layer.
        latest: (input, its version, outputs per layer) of the last call, until the last layer has taken its output.
        fed_apart: a layer's input differed from the first layer's; from then on each layer computes its own product.
    """

    copies = False

    def __init__(self, linears: Sequence[nn.Linear]):
        self.alone = len(linears) == 1
        self.last = len(linears) - 1
        self.places = [_place(linear) for linear in linears]
        self.copied_from: list[bytes] | None = None
        self.latest: tuple[torch.Tensor, int | None, Sequence[torch.Tensor]] | None = None
        self.fed_apart = False

    @abc.abstractmethod
    def __call__(self, x: torch.Tensor) -> Sequence[torch.Tensor]:
        """Outputs [..., N_i] of every layer for x [..., K]."""

    @abc.abstractmethod
    def serves(self, x: torch.Tensor) -> bool:
        """True if it is faster than the layers' own products for the number of rows in x [..., K]."""

    def part(self, x: torch.Tensor, index: int) -> torch.Tensor | None:
        """The output of layer `index`. The first layer's call computes all; None if this layer's input is not the first's."""
        version = None if x.is_inference() else x._version
        if index == 0:
            outputs = self(x)
            self.latest = x, version, outputs
            return outputs[0]
        latest = self.latest
        if latest is None or latest[0] is not x or latest[1] != version:
            self.fed_apart, self.latest = True, None
            return None
        if index == self.last:
            self.latest = None
        return latest[2][index]


class JoinedLinears:
    """Replaces the forwards of a model's linear layers by products while `active()`.

    Args:
        product: makes the product of layers that share an input.
        is_served: True for modules that such a product can serve; these are `nn.Linear`.
        left_out: modules whose layers are not changed.
    """

    def __init__(
        self,
        model: nn.Module,
        product: Callable[[list[nn.Linear]], Product],
        is_served: Callable[[nn.Module], bool],
        left_out: Collection[nn.Module] = (),
    ):
        self._make, self._is_served = product, is_served
        self._products = weakref.WeakKeyDictionary[nn.Linear, Product]()  # keyed by each product's first layer
        self._fed_apart = weakref.WeakSet[nn.Linear]()
        self._left_out = weakref.WeakSet(inner for module in left_out for inner in module.modules())
        self._model = weakref.ref(model)
        self._in_use: list[tuple[Product, list[nn.Linear]]] = []
        self._replaced: list[tuple[nn.Linear, Any]] = []  # layers, and the forward that each had of its own
        self.is_fresh = False  # True: the copies have been compared with the weights since `active()` was entered

    @contextlib.contextmanager
    def active(self) -> Iterator[None]:
        """Inside the context, the layers use their products. Copies hold the weights as they were when the first product was used."""
        model = self._model()
        assert model is not None
        self.is_fresh = False
        try:
            for linears in self._fed_together(model):
                product = self._product(linears)
                self._in_use.append((product, linears))
                for index, linear in enumerate(linears):
                    # A bound method, because dynamo shares traces by function; it would trace callable objects one by one.
                    joined = _JoinedForward(self, linear, product, index)
                    sharded = sharded_forward(linear)
                    forward = joined.forward if sharded is None else sharded(joined.forward)
                    self._replaced.append((linear, vars(linear).get("forward")))
                    linear.forward = forward  # pyright: ignore[reportAttributeAccessIssue]
            yield
        finally:
            for linear, own in self._replaced:
                del linear.forward
                if own is not None:
                    vars(linear)["forward"] = own
            self._in_use.clear()
            self._replaced.clear()

    def refresh(self) -> None:
        """Compare the contents of the copied weights with the layers' weights, by hash, and copy those that differ."""
        copied: list[tuple[Any, list[nn.Linear]]] = [(product, own) for product, own in self._in_use if product.copies]
        groups = [[tensor for linear in linears for tensor in _tensors(linear)] for _, linears in copied]
        found = iter(fingerprints([tensor for tensors in groups for tensor in tensors]))
        for (product, linears), tensors in zip(copied, groups, strict=True):
            contents = [next(found) for _ in tensors]
            if product.copied_from != contents:
                product.copy_weights(linears)
                product.copied_from = contents
        self.is_fresh = True

    def _product(self, linears: list[nn.Linear]) -> Product:
        first = linears[0]
        product = self._products.get(first)
        if product is None or product.places != [_place(linear) for linear in linears]:  # weights may have moved
            product = self._products[first] = self._make(linears)
        return product

    def _fed_together(self, model: nn.Module) -> Iterator[list[nn.Linear]]:
        """Groups of layers that are served: layers that share their input, and single layers."""
        for parent in all_modules(model):
            if self._left_out and parent in self._left_out:
                continue
            served: dict[str, Any] = {
                name: child for name, child in parent._modules.items() if child is not None and self._is_served(child)
            }
            for names in _SAME_INPUT:
                linears = [served[name] for name in names if name in served]
                if len(linears) == len(names) and self._can_join(linears):
                    yield linears
                    for name in names:
                        del served[name]
            for linear in served.values():
                yield [linear]

    def _can_join(self, linears: list[nn.Linear]) -> bool:
        product = self._products.get(linears[0])
        if product is not None and product.fed_apart:
            self._fed_apart.update(linears)
        kinds = {(linear.in_features, linear.weight.dtype, bias_of(linear) is None) for linear in linears}
        return len(kinds) == 1 and not any(linear in self._fed_apart for linear in linears)


class _JoinedForward:
    """The `forward` that replaces a layer's own."""

    def __init__(self, owner: JoinedLinears, linear: nn.Linear, product: Product, index: int):
        self.owner, self.product, self.index = owner, product, index
        (self.weight,), biases = joined_parameters([linear])
        self.bias = None if biases is None else biases[0]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The layer's output [..., out] for input x [..., in]."""
        product = self.product
        # Tracing must see a plain linear layer: the rewriting of traced graphs joins layers itself.
        if torch.compiler.is_compiling() or not product.serves(x):
            return F.linear(x, self.weight, self.bias)
        if product.copies and not self.owner.is_fresh:
            self.owner.refresh()
        if product.alone:
            return product(x)[0]
        out = None if product.fed_apart else product.part(x, self.index)
        return F.linear(x, self.weight, self.bias) if out is None else out


def is_untouched(module: nn.Module) -> TypeGuard[nn.Linear]:
    """True for an unmodified `nn.Linear`: no subclass (quantized, LoRA), no replaced forward, ordinary weights, or a shard of them."""
    if type(module) is not nn.Linear:
        return False
    if "forward" in vars(module):
        return is_sharded(module) and sharded_forward(module) is not None
    return type(module.weight) is nn.Parameter


def _tensors(linear: nn.Linear) -> list[torch.Tensor]:
    return [each for each in (weight_of(linear), bias_of(linear)) if each is not None]


def joined_parameters(linears: Sequence[nn.Linear]) -> tuple[list[torch.Tensor], list[torch.Tensor] | None]:
    """The layers' weights, and their biases (None: they have none), detached."""
    biases = [bias.detach() for bias in map(bias_of, linears) if bias is not None]
    return [weight_of(linear).detach() for linear in linears], biases or None


def _place(linear: nn.Linear) -> list:
    return [place_of(each) for each in _tensors(linear)]


# ---- few rows on a GPU: `kernels.linear` in place of cuBLAS, without a second copy of the weights ----

_LEAST_WEIGHTS = 1024 * 1024  # smaller weights are read in the time of a launch


class FewRowsProduct(Product):
    """The product of several layers in one launch, which reads their own weights."""

    def __init__(self, linears: Sequence[nn.Linear]):
        super().__init__(linears)
        self.weights, self.biases = joined_parameters(linears)

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
    served = weight.device.type == "cuda" and weight.dtype in (torch.bfloat16, torch.float16) and weight.is_contiguous()
    return served and weight.numel() >= _LEAST_WEIGHTS


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
