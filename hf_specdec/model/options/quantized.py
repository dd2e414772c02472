"""Linear layers with int8 or int4 weights, quantized by torchao. Activations are not quantized.

On a CPU the native library computes with them, in an order of its own (`native_weights.py`); elsewhere torchao does.

A decoding step reads every weight once, so smaller weights save time and memory. A user's model is only borrowed: its layers
have quantized weights while `active()` and their own weights otherwise, so both are in memory. Drafters that we loaded are
quantized permanently. Embeddings and the output layer are not quantized, as in transformers' TorchAoConfig.
"""

from __future__ import annotations

import contextlib
import logging
import weakref
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import nn

from ...core.errors import UnsupportedModel
from ...kernels.dispatch import uses_native
from ..sharding import is_sharded, local, sharded_forward, weight_of
from ..threads import OwnParameters, replaced_values
from .fingerprints import fingerprints
from .native_weights import native_weight

logger = logging.getLogger(__name__)

_GROUPS = (128, 64, 32)  # number of inputs that share a scale: the first of these that divides a layer's inputs
_INT4_OUTPUTS = 16  # torch's int4 product on a CPU needs a multiple of this many outputs
_INT4_CAPABILITY = (8, 0)  # minimum compute capability of a CUDA device: tensor cores for bfloat16
_INSTALL = "pip install 'hf-specdec[gpu]'"

_quantized_for_good = weakref.WeakKeyDictionary[nn.Module, str]()
_shared = weakref.WeakKeyDictionary[nn.Module, "weakref.WeakValueDictionary[tuple[str, bool], QuantizedLinears]"]()


class QuantizedLinears:
    """Quantized copies of the weights of a module's linear layers, used instead of the originals while `active()`.

    Args:
        kind: "wint8" (a scale per output) or "wint4" (a scale and a zero point per output and group of up to 128 inputs).
        kept: layers not to quantize, besides the output embeddings and layers that share their weight with an embedding.
        native: on a CPU, let the native library compute with the quantized weights where it can; False: torchao does.

    Attributes:
        bytes_before, bytes_after: bytes of all weights of the module, each counted once, without and with quantization.

    Raises:
        ImportError: torchao is missing.
        UnsupportedModel: this kind does not support the module's device or dtype, or no layer can be quantized.
    """

    def __init__(self, module: nn.Module, kind: str, kept: Iterable[nn.Module] = (), native: bool = True):
        self.kind, self._native = kind, native
        self._module = weakref.ref(module)
        self._kept = weakref.WeakSet(kept)
        self._copies = weakref.WeakKeyDictionary[nn.Linear, nn.Parameter]()
        self._made_from = weakref.WeakKeyDictionary[nn.Linear, tuple]()
        try:
            import torchao.quantization  # noqa: F401
        except ImportError as error:
            raise ImportError(f"{kind!r} weights need torchao: {_INSTALL}") from error
        linears = list(self._linears(module))
        made = {linear for linear, _ in self.copies()}
        skipped = [linear for linear in linears if linear not in made]
        name = type(module).__name__
        if len(skipped) == len(linears):
            why = "it has no plain linear layer"
            if linears:
                why = f"none of its {len(linears)} linear layers has a suitable shape: {_needed(kind, linears[0])}"
            raise UnsupportedModel(f"{kind!r} cannot quantize {name}: {why}. Leave the key out.")
        if skipped:
            logger.warning(
                "%s: %d of %d linear layers are not quantized: %s.",
                name, len(skipped), len(linears), _needed(kind, skipped[0]),
            )  # fmt: skip
        self.bytes_before = num_bytes(module)
        with self.active():
            self.bytes_after = num_bytes(module)
        logger.info(
            "%s: with %d linear layers in %s all weights take %.1f MiB instead of %.1f MiB.",
            name, len(linears) - len(skipped), kind, self.bytes_after / 2**20, self.bytes_before / 2**20,
        )  # fmt: skip

    def active(self) -> contextlib.AbstractContextManager[None]:
        """Inside the context, for this thread, the layers have quantized weights. Weights that have changed are quantized again.

        To find changes, all weights are read: a write may leave no other trace (see fingerprints.py).
        """
        return replaced_values(
            (vars(linear), "_parameters", OwnParameters(linear._parameters, {"weight": copy}))
            for linear, copy in self.copies()
        )

    def copies(self) -> list[tuple[nn.Linear, nn.Parameter]]:
        """The quantized layers, each with its up-to-date quantized weight. Raises UnsupportedModel: weights are offloaded, or this kind
        does not support their device or dtype."""
        module = self._module()
        assert module is not None
        linears = list(self._linears(module))
        if any(linear.weight.device.type == "meta" for linear in linears):
            raise UnsupportedModel(f"{self.kind!r} cannot quantize weights that are offloaded. Leave the key out.")
        copied = []
        for linear, contents in zip(linears, fingerprints([weight_of(linear) for linear in linears]), strict=True):
            weight = weight_of(linear)
            made_from = contents, weight.shape, weight.dtype, weight.device
            if self._made_from.get(linear) != made_from:
                self._copies.pop(linear, None)
                config = _config(self.kind, weight)
                if config is not None:
                    self._copies[linear] = self._stored(linear, _quantize(weight, config))
                self._made_from[linear] = made_from
            if linear in self._copies:
                copied.append((linear, self._copies[linear]))
        return copied

    def _stored(self, linear: nn.Linear, weight: nn.Parameter) -> nn.Parameter:
        """torchao's weight, or in its place the same weight in the native library's order."""
        serves = self._native and uses_native(weight.device) and not is_sharded(linear)
        packed = native_weight(weight) if serves else None
        return weight if packed is None else packed

    def _linears(self, module: Any) -> Iterator[nn.Linear]:
        """The layers to quantize: plain `nn.Linear` (no subclass) with ordinary floating-point weights, or a shard of them."""
        embeddings = {id(m.weight) for m in module.modules() if isinstance(m, nn.Embedding)}
        output = module.get_output_embeddings() if hasattr(module, "get_output_embeddings") else None
        for inner in module.modules():
            if type(inner) is not nn.Linear or not inner.weight.is_floating_point():
                continue
            plain = type(inner.weight) is nn.Parameter or (is_sharded(inner) and sharded_forward(inner) is not None)
            if plain and inner is not output and inner not in self._kept and id(inner.weight) not in embeddings:
                yield inner


def quantized_linears(module: nn.Module, kind: str, native: bool = True) -> QuantizedLinears:
    """A module's quantized copies, shared by all callers. Args and errors: see `QuantizedLinears`."""
    by_kind = _shared.setdefault(module, weakref.WeakValueDictionary())
    linears = by_kind.get((kind, native))
    if linears is None:
        linears = by_kind[kind, native] = QuantizedLinears(module, kind, native=native)
    return linears


def quantize_for_good(module: nn.Module, kind: str, kept: Iterable[nn.Module] = (), native: bool = True) -> None:
    """Quantize a module that we own, and drop its original weights. Does nothing the second time.

    Args and errors: see `QuantizedLinears`; also ValueError if the module is already quantized as another kind.
    """
    before = _quantized_for_good.get(module)
    if before is None:
        for linear, copy in QuantizedLinears(module, kind, kept, native).copies():
            linear.weight = copy
        _quantized_for_good[module] = kind
    elif before != kind:
        raise ValueError(f"{type(module).__name__} has {before!r} weights already, not {kind!r}.")


def quantizes_natively(options: Any) -> bool:
    """True if the keys of a configuration, or a model's options, allow the native library to compute with quantized weights: compilers and
    graphs can use only torchao's."""
    return options.native is not False and not options.compile and not options.cuda_graphs


def num_bytes(module: nn.Module) -> int:
    """Bytes of a module's parameters and buffers, each counted once; of quantized ones, the bytes they are stored in."""
    return sum(map(_stored_bytes, [*module.parameters(), *module.buffers()]))


def _stored_bytes(tensor: torch.Tensor) -> int:
    tensor = local(tensor)
    if not hasattr(tensor, "__tensor_flatten__"):
        return tensor.nbytes
    names, _ = tensor.__tensor_flatten__()  # pyright: ignore[reportAttributeAccessIssue]
    return sum(_stored_bytes(getattr(tensor, name)) for name in names)


# ---- torchao --------------------------------------------------------------------------------------------------------


def _quantize(weight: torch.Tensor, config: Any) -> nn.Parameter:
    """torchao's quantized version of a weight [out, in], made in a temporary layer, because torchao marks the layers it quantizes."""
    from torchao.quantization import quantize_

    layer = nn.Linear(weight.shape[1], weight.shape[0], bias=False, device="meta")
    layer.weight = nn.Parameter(weight.detach(), requires_grad=False)
    quantize_(layer, config)
    return layer.weight


def _config(kind: str, weight: torch.Tensor) -> Any | None:
    """torchao's configuration for one weight; None if its shape cannot be quantized. Leaves inductor's settings unchanged."""
    from torchao.quantization import Int4WeightOnlyConfig, Int8WeightOnlyConfig, PerGroup, PerRow

    device, (outputs, inputs) = weight.device, weight.shape
    group = next((size for size in _GROUPS if inputs % size == 0), None)
    if kind == "wint8":
        if weight.dtype != torch.float16:
            return Int8WeightOnlyConfig(granularity=PerRow(), set_inductor_config=False)
        # With a scale per row, torchao sums products with the 8-bit integers before it scales, which overflows float16. With
        # a scale per group it does not.
        smaller = next((size for size in _GROUPS if inputs % size == 0 and size < inputs), None)
        return smaller and Int8WeightOnlyConfig(granularity=PerGroup(smaller), set_inductor_config=False)
    if device.type == "cpu":
        if group is None or outputs % _INT4_OUTPUTS:
            return None
        try:  # the stock configuration has no packing for CPUs
            from torchao.prototype.quantization.int4 import PrototypeInt4WeightOnlyConfig
        except ImportError as error:
            raise ImportError(
                f"'wint4' weights on a CPU need a torchao that supports them, such as 0.18: {_INSTALL}"
            ) from error
        return PrototypeInt4WeightOnlyConfig(group_size=group, set_inductor_config=False)
    has_product = device.type == "cuda" and torch.cuda.get_device_capability(device) >= _INT4_CAPABILITY
    if weight.dtype != torch.bfloat16 or not has_product:
        raise UnsupportedModel(
            f"'wint4' runs on CPUs and, in bfloat16, on CUDA devices of compute capability 8.0 or higher; these weights are "
            f"{weight.dtype} on {device}. Load the model with dtype=torch.bfloat16, use 'wint8', or leave the key out."
        )
    # Of torchao's int4 packings, this one has its product for few rows in torch itself.
    return group and Int4WeightOnlyConfig(
        group_size=group,
        int4_packing_format="tile_packed_to_4d",  # pyright: ignore[reportArgumentType]
        set_inductor_config=False,
    )


def _needed(kind: str, linear: nn.Linear) -> str:
    """Say why a layer cannot be quantized."""
    needs = f"inputs in multiples of {_GROUPS[-1]}"
    if kind == "wint8":
        needs += f", more than {_GROUPS[-1]}"
    elif linear.weight.device.type == "cpu":
        needs += f" and outputs in multiples of {_INT4_OUTPUTS}"
    return f"{kind} in {linear.weight.dtype} needs {needs}, not {linear.in_features} and {linear.out_features}"
