"""Weights that a file stores quantized are dequantized when they are read: compressed-tensors, FP8, AWQ, GPTQ and bitsandbytes."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from typing import Any, Protocol

import torch

_AWQ_ORDER = [0, 4, 1, 5, 2, 6, 3, 7]  # the field of 4 bits that holds the i-th of eight columns
_FP8_BLOCK = (128, 128)  # DeepSeek-V3's, if config.json gives none
_FP4_BLOCK = 32  # columns that share a factor
_FP4 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)  # magnitudes of the codes 0 to 7 (e2m1); the fourth bit is the sign
# Scales of activations and caches, which weights do not need.
_BESIDE = re.compile(r"\.((input|output|activation|[kvq])_(scale|zero_point|global_scale)(_inv)?|weight_format)$")

_SIGN = re.compile(r"scale|packed|qweight|absmax|_blocks")  # in names of tensors that only quantized weights have


class Stored(Protocol):
    """What is needed of a `files.Checkpoint`, where these are documented."""

    files: Any  # a dict by the tensors' names, computed once

    def section(self, key: str) -> dict[str, Any]: ...
    def stored_shape(self, name: str) -> tuple[int, ...]: ...
    def stored(self, name: str) -> torch.Tensor: ...
    def error(self, what: str) -> Exception: ...


class QuantizedWeight:
    """A weight that a file stores in parts.

    Args:
        roles: what the parts' names may have after the module's name.
        shape: of the weight.
        compute: the weight in float32, from the stored parts by role.

    Attributes:
        parts: names of the stored tensors.
    """

    def __init__(
        self, checkpoint: Stored, module: str, roles: str, shape: tuple[int, ...], compute: Callable[..., torch.Tensor]
    ):  # fmt: skip
        self.checkpoint, self.name, self.shape, self.compute = checkpoint, f"{module}.weight", shape, compute
        self._by_role = {role: f"{module}.{role}" for role in roles.split() if f"{module}.{role}" in checkpoint.files}
        self.parts = set(self._by_role.values())

    def read(self) -> torch.Tensor:
        """The weight in float32."""
        return self.compute({role: self.checkpoint.stored(name) for role, name in self._by_role.items()})


def quantized_weights(checkpoint: Stored) -> dict[str, QuantizedWeight]:
    """The quantized weights of a checkpoint by name, as its quantization_config says. Raises CheckpointError: they are in a form that is
    not known here."""
    config = checkpoint.section("quantization_config") or checkpoint.section("compression_config")
    method = config.get("quant_method") or ("compressed-tensors" if "config_groups" in config else None)
    if method is None and any(name.endswith(".weight_scale_inv") for name in checkpoint.files):
        method = "fp8"  # a part of a checkpoint, without its configuration
    if method is None or (method not in _READERS and not any(map(_SIGN.search, checkpoint.files))):
        return {}  # a head in plain numbers may have its target's configuration
    if method not in _READERS:
        known = ", ".join(_READERS)
        raise checkpoint.error(f"is quantized by {method!r}; {known} are supported: use the original weights.")
    weights = {weight.name: weight for weight in _READERS[method](checkpoint, config)}
    for name in checkpoint.files:
        of = f"{name.rpartition('.')[0]}.weight"
        if _BESIDE.search(name) and of in weights:
            weights[of].parts.add(name)
    return weights


def _modules(checkpoint: Stored, ending: str) -> list[str]:
    """Names of the modules that have a tensor with this ending."""
    return [name.removesuffix(ending) for name in checkpoint.files if name.endswith(ending)]


# ---- one function per method -----------------------------------------------------------------------------------------


def _fp8(checkpoint: Stored, config: dict[str, Any]) -> Iterator[QuantizedWeight]:
    """DeepSeek-V3's: a factor for each block of a matrix in float8. In DeepSeek-V4's files these are `scale`, and experts are in float4."""
    high, wide = config.get("weight_block_size") or _FP8_BLOCK
    for role in ("weight_scale_inv", "scale"):
        for module in _modules(checkpoint, f".{role}"):
            name, its_scale = f"{module}.weight", f"{module}.{role}"
            if name not in checkpoint.files:
                raise checkpoint.error(f"has {its_scale} and no {name}.")
            shape, scales = checkpoint.stored_shape(name), checkpoint.stored_shape(its_scale)
            blocks = tuple(-(-size // block) for size, block in zip(shape, (high, wide), strict=False))
            if is_packed := scales == (shape[0], -(-2 * shape[-1] // _FP4_BLOCK)) and scales != blocks:
                shape = shape[0], 2 * shape[1]
            elif scales not in (blocks, (), (1,)):
                raise checkpoint.error(
                    f"{its_scale} has shape {list(scales)}; a matrix {list(shape)} in blocks of {high} x {wide} has {list(blocks)}."
                )
            block = (1, _FP4_BLOCK) if is_packed else (high, wide)

            def read(stored: dict[str, torch.Tensor], role=role, block=block, is_packed=is_packed) -> torch.Tensor:
                values = float4(stored["weight"]) if is_packed else stored["weight"]
                return scaled(values, stored[role], None, block)

            yield QuantizedWeight(checkpoint, module, f"weight {role}", shape, read)


def _compressed(checkpoint: Stored, config: dict[str, Any]) -> Iterator[QuantizedWeight]:
    """compressed-tensors: integers of 8 bits or float8 as they are, integers of fewer bits packed in integers of 32."""
    roles = "weight weight_packed weight_scale weight_zero_point weight_g_idx weight_shape"
    for module in _modules(checkpoint, ".weight_scale"):
        form = _form(checkpoint, config, module)
        bits, kind = form.get("num_bits", 8), form.get("type", "int")
        packed = f"{module}.weight_packed" in checkpoint.files
        if bits not in (4, 8) or (packed and kind != "int"):
            raise checkpoint.error(
                f"{module} is quantized to {kind}{bits}, which is not supported: use the original weights."
            )
        if packed:
            shape = tuple(checkpoint.stored(f"{module}.weight_shape").tolist())
        else:
            shape = checkpoint.stored_shape(f"{module}.weight")
        size = form.get("group_size") if form.get("strategy") in ("group", "tensor_group") else None
        block = tuple(form.get("block_structure") or (1, size or shape[-1]))

        def read(stored: dict[str, torch.Tensor], bits=bits, shape=shape, block=block) -> torch.Tensor:
            zero, half = stored.get("weight_zero_point"), 2 ** (bits - 1)
            if "weight_packed" not in stored:
                return scaled(stored["weight"], stored["weight_scale"], zero, block, stored.get("weight_g_idx"))
            values = unpacked(stored["weight_packed"], bits, 1)[:, : shape[1]] - half
            if zero is not None:
                zero = unpacked(zero, bits, 0)[: shape[0]] - half
            return scaled(values, stored["weight_scale"], zero, block, stored.get("weight_g_idx"))

        yield QuantizedWeight(checkpoint, module, roles, shape, read)


def _form(checkpoint: Stored, config: dict[str, Any], module: str) -> dict[str, Any]:
    """How compressed-tensors quantized a module's weight: that of the group that names it, by pattern, by name or by its class."""
    groups = [group for group in (config.get("config_groups") or {}).values() if isinstance(group.get("weights"), dict)]
    for group in groups:
        for target in group.get("targets") or []:
            if re.match(target[3:], module) if target.startswith("re:") else f".{module}".endswith(f".{target}"):
                return group["weights"]
    by_class = [group["weights"] for group in groups if "Linear" in (group.get("targets") or [])]
    if len(by_class) != 1:
        raise checkpoint.error(f"has {module}.weight_scale, and no group of its quantization_config names this module.")
    return by_class[0]


def _awq(checkpoint: Stored, config: dict[str, Any]) -> Iterator[QuantizedWeight]:
    """AWQ of version "gemm": 4 bits, packed along the outputs in an order of its own."""
    form = config.get("bits", 4), str(config.get("version", "gemm")).lower()
    modules = _modules(checkpoint, ".qweight")
    if modules and form != (4, "gemm"):
        raise checkpoint.error(f"is quantized by AWQ with bits, version = {form}; only {(4, 'gemm')} is supported.")
    for module in modules:
        inputs, outputs = checkpoint.stored_shape(f"{module}.qweight")

        def read(stored: dict[str, torch.Tensor]) -> torch.Tensor:
            values, zero = (
                unpacked(stored[role], 4, 1).unflatten(1, (-1, 8))[:, :, _AWQ_ORDER].flatten(1)
                for role in ("qweight", "qzeros")
            )
            return scaled(values.T, stored["scales"].T, zero.T, (1, len(values) // len(zero)))

        yield QuantizedWeight(checkpoint, module, "qweight qzeros scales", (8 * outputs, inputs), read)


def _gptq(checkpoint: Stored, config: dict[str, Any]) -> Iterator[QuantizedWeight]:
    """GPTQ: packed along the inputs; in the first version of the format, zero points are stored less one."""
    bits, less = config.get("bits") or 0, int(config.get("checkpoint_format", "gptq") != "gptq_v2")
    modules = _modules(checkpoint, ".qweight")
    if modules and bits not in (2, 4, 8):
        raise checkpoint.error(
            f"is quantized by GPTQ with bits = {bits!r}; 2, 4 and 8 are supported: use the original weights."
        )
    for module in modules:
        rows, outputs = checkpoint.stored_shape(f"{module}.qweight")

        def read(stored: dict[str, torch.Tensor]) -> torch.Tensor:
            values, zero = unpacked(stored["qweight"], bits, 0), unpacked(stored["qzeros"], bits, 1) + less
            group = stored.get("g_idx")
            return scaled(values.T, stored["scales"].T, zero.T, (1, len(values) // len(zero)), group)

        yield QuantizedWeight(checkpoint, module, "qweight qzeros scales g_idx", (outputs, rows * 32 // bits), read)


def _bitsandbytes(checkpoint: Stored, config: dict[str, Any]) -> Iterator[QuantizedWeight]:
    """bitsandbytes: rows of int8 with their greatest magnitudes, or blocks of 4-bit codes with theirs, which may be quantized too."""
    for module in _modules(checkpoint, ".SCB"):

        def read_rows(stored: dict[str, torch.Tensor]) -> torch.Tensor:
            return stored["weight"].to(torch.float32) * stored["SCB"].view(-1, 1) / 127.0

        yield QuantizedWeight(checkpoint, module, "weight SCB", checkpoint.stored_shape(f"{module}.weight"), read_rows)
    for kind in ("nf4", "fp4"):
        ending = f"weight.quant_state.bitsandbytes__{kind}"
        roles = f"weight weight.absmax weight.quant_map weight.nested_absmax weight.nested_quant_map {ending}"
        for module in _modules(checkpoint, f".{ending}"):
            state = json.loads(bytes(checkpoint.stored(f"{module}.{ending}").tolist()))

            def read_blocks(stored: dict[str, torch.Tensor], state: dict[str, Any] = state) -> torch.Tensor:
                greatest = stored["weight.absmax"]
                if "weight.nested_absmax" in stored:
                    nested = stored["weight.nested_absmax"].repeat_interleave(state["nested_blocksize"])[
                        : len(greatest)
                    ]
                    greatest = stored["weight.nested_quant_map"][greatest.long()] * nested + state["nested_offset"]
                packed = stored["weight"].flatten()
                codes = torch.stack([packed >> 4, packed & 15], dim=1).flatten()
                values = stored["weight.quant_map"][codes.long()]
                return (values * greatest.repeat_interleave(state["blocksize"])[: len(values)]).view(state["shape"])

            yield QuantizedWeight(checkpoint, module, roles, tuple(state["shape"]), read_blocks)


_READERS = {
    "compressed-tensors": _compressed, "fp8": _fp8, "awq": _awq, "gptq": _gptq, "bitsandbytes": _bitsandbytes,
}  # fmt: skip


# ---- arithmetic ------------------------------------------------------------------------------------------------------


def unpacked(packed: torch.Tensor, bits: int, dim: int) -> torch.Tensor:
    """Unsigned integers of `bits` bits that are packed along a dimension of a matrix of int32, the lowest bits first."""
    fields = (packed[..., None] >> torch.arange(0, 32, bits, dtype=torch.int32)) & (2**bits - 1)  # [m, n, 32 / bits]
    return fields.flatten(1) if dim == 1 else fields.transpose(1, 2).flatten(0, 1)


def float4(packed: torch.Tensor) -> torch.Tensor:
    """Values [m, 2 n] in float32 of pairs of codes in bytes [m, n], the low half first."""
    codes = packed.view(torch.uint8)
    pairs = torch.stack([codes & 15, codes >> 4], dim=-1).flatten(1)
    return torch.tensor([*_FP4, *(-value for value in _FP4)])[pairs.long()]


def scaled(
    values: torch.Tensor, scale: torch.Tensor, zero: torch.Tensor | None, block: tuple[int, int], group: torch.Tensor | None = None
) -> torch.Tensor:  # fmt: skip
    """(values - zero) * scale, in float32.

    Args:
        values: [m, n].
        scale, zero: one for all, [m or 1], or [m / block rows, n / block columns].
        group: int [n], the column of `scale` for each column of values; None: blocks are in order.
    """
    rows, columns = values.shape

    def spread(factors: torch.Tensor) -> torch.Tensor:
        factors = factors.to(torch.float32)
        factors = factors.view(-1, 1) if factors.dim() < 2 else factors
        high = 1 if len(factors) in (1, rows) else block[0]
        factors = factors.repeat_interleave(high, 0)[:rows]
        if factors.shape[1] == 1:
            return factors
        return factors.repeat_interleave(block[1], 1)[:, :columns] if group is None else factors[:, group.long()]

    out = values.to(torch.float32)
    return (out if zero is None else out - spread(zero)) * spread(scale)
