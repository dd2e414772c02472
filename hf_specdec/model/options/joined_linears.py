"""Linear layers that other products serve than their own, while a model is active; those of one input share one product."""

from __future__ import annotations

import abc
import contextlib
import weakref
from collections.abc import Callable, Collection, Iterator, Sequence

import torch
import torch.nn.functional as F
from torch import nn

from .fingerprints import fingerprints

# Siblings of these names are as a rule fed one tensor; then one product serves them all. Checked at every call.
_SAME_INPUT = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))


class Product(abc.ABC):
    """What serves one or several layers: longer runs of memory, fewer calls.

    Args:
        linears: layers with the same number of inputs, all with biases or none.

    Attributes:
        copies: it computes with copies of the weights, which `copy_weights` makes. A write to the weights leaves them stale, so
            their contents are compared before the copies are used (see `JoinedLinears.refresh`).
        copied_from: fingerprints of what was copied; None: nothing yet.
        alone: it serves one layer.
        latest: (input, its version, outputs per layer) of the last product, until the last layer has fetched its own.
        fed_apart: a layer came with another input than the first; from then on each computes its own.
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
        """Whether it is faster than the layers' own products for so many rows [..., K]."""

    def copy_weights(self, linears: Sequence[nn.Linear]) -> None:
        """Take the copies anew. Only called where `copies` is set."""
        raise TypeError(f"{type(self).__name__} holds no copies.")

    def is_made_for(self, linears: Sequence[nn.Linear]) -> bool:
        """Whether this was made for just these layers with weights where they are now."""
        return self.places == [_place(linear) for linear in linears]

    def part(self, x: torch.Tensor, index: int) -> torch.Tensor | None:
        """Output of layer `index` of several, computed for all when the first asks; None: fed apart."""
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
    """A model's layers served by products, applied while `active()`.

    Args:
        product: makes what serves layers that are fed together.
        is_served: whether it can serve a module, which is then an `nn.Linear`.
        left_out: modules whose layers are left as they are.
    """

    def __init__(
        self,
        model: nn.Module,
        product: Callable[[list[nn.Linear]], Product],
        is_served: Callable[[nn.Module], bool],
        left_out: Collection[nn.Module] = (),
    ):
        self._make, self._is_served = product, is_served
        self._products = weakref.WeakKeyDictionary[nn.Linear, Product]()  # by the first of their layers
        self._fed_apart = weakref.WeakSet[nn.Linear]()
        self._left_out = weakref.WeakSet(inner for module in left_out for inner in module.modules())
        self._model = weakref.ref(model)
        self._in_use: list[tuple[Product, list[nn.Linear]]] = []
        self.is_fresh = False  # the copies have been compared with the weights since `active()` was entered

    @contextlib.contextmanager
    def active(self) -> Iterator[None]:
        """Inside, the layers use their products, with the weights that the layers have when the first product is used."""
        model = self._model()
        assert model is not None
        self.is_fresh = False
        try:
            for linears in self._fed_together(model):
                product = self._product(linears)
                self._in_use.append((product, linears))
                for index, linear in enumerate(linears):
                    # A method: by its function dynamo knows that all layers' are alike, objects are traced one by one.
                    joined = _JoinedForward(self, linear, product, index)
                    linear.forward = joined.forward  # pyright: ignore[reportAttributeAccessIssue]
            yield
        finally:
            for _, linears in self._in_use:
                for linear in linears:
                    vars(linear).pop("forward", None)
            self._in_use.clear()

    def refresh(self) -> None:
        """Compare what the products copied with the weights as they are, byte for byte; copy what differs."""
        copied = [(product, linears) for product, linears in self._in_use if product.copies]
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
        if product is None or not product.is_made_for(linears):
            product = self._products[first] = self._make(linears)
        return product

    def _fed_together(self, model: nn.Module) -> Iterator[list[nn.Linear]]:
        """The layers that are served, those that share their input together."""
        for parent in model.modules():
            if parent in self._left_out:
                continue
            served = {name: child for name, child in parent.named_children() if self._is_served(child)}
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
        kinds = {(linear.in_features, linear.weight.dtype, linear.bias is None) for linear in linears}
        return len(kinds) == 1 and not any(linear in self._fed_apart for linear in linears)


class _JoinedForward:
    """`forward` of one layer: input [..., in] → [..., out]."""

    def __init__(self, owner: JoinedLinears, linear: nn.Linear, product: Product, index: int):
        self.owner = owner
        self.weight = linear.weight.detach()
        self.bias = None if linear.bias is None else linear.bias.detach()
        self.product, self.index = product, index

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Of the layer."""
        product = self.product
        # A layer that is traced is shown the product as such: it is put together with others there.
        if torch.compiler.is_compiling() or not product.serves(x):
            return F.linear(x, self.weight, self.bias)
        if product.copies and not self.owner.is_fresh:
            self.owner.refresh()
        if product.alone:
            return product(x)[0]
        out = None if product.fed_apart else product.part(x, self.index)
        return F.linear(x, self.weight, self.bias) if out is None else out


def is_untouched(module: nn.Module) -> bool:
    """An `nn.Linear` as it was made: no subclass (quantized, LoRA), no replaced forward, ordinary weights."""
    return type(module) is nn.Linear and "forward" not in vars(module) and type(module.weight) is nn.Parameter


def _tensors(linear: nn.Linear) -> list[torch.Tensor]:
    return [each for each in (linear.weight, linear.bias) if each is not None]


def _place(linear: nn.Linear) -> list:
    """Where the weights are, and what the tensors there look like."""
    return [(each.data_ptr(), each.shape, each.stride(), each.dtype, each.device) for each in _tensors(linear)]
