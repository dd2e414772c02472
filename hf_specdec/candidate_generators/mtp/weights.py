"""Reading a target's checkpoint for transformers' layers: FP8 blocks are dequantized, experts are stacked."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import cached_property

import torch

from ..checkpoints.files import Checkpoint, CheckpointError

_SCALE = "_scale_inv"  # suffix of a weight's scales: float32, one factor per block
_EXPERT = re.compile(r"(?P<experts>.+\.experts)\.(?P<i>\d+)\.(?P<part>gate_proj|up_proj|down_proj)\.weight")


class TargetTensors(Checkpoint):
    """Tensors of a checkpoint under the names and shapes of transformers' layers.

    * A float8 matrix with block scales (`weight` and `weight_scale_inv`, DeepSeek-V3's 128 x 128 blocks) becomes one
      tensor in `dtype`: each value times its block's factor.
    * With `stacks_experts`, matrices `experts.{i}.gate_proj`, `.up_proj`, `.down_proj` become two tensors, `experts.gate_up_proj`
      [E, 2 I, H] and `experts.down_proj` [E, H, I].

    Args:
        source: the checkpoint; only its `wanted` tensors are used.
        dtype: for tensors stored as float8.
        nothing: the error if there are no such tensors.
    """

    def __init__(self, source: Checkpoint, dtype: torch.dtype, stacks_experts: bool, nothing: str):
        super().__init__(source.folder, source.name, source.wanted, nothing)
        self.dtype, self.stacks_experts = dtype, stacks_experts

    @cached_property
    def scales(self) -> set[str]:
        """Names of the tensors that are block scales."""
        return {name for name in self.files if name.endswith(_SCALE) and name.removesuffix(_SCALE) in self.files}

    @cached_property
    def stacks(self) -> dict[str, list[list[str]]]:
        """By stacked name: for each expert, the stored matrices to concatenate in its slice."""
        matrices: dict[str, dict[int, dict[str, str]]] = {}
        if self.stacks_experts:
            for name in self.files:
                match = _EXPERT.fullmatch(name)
                if match:
                    matrices.setdefault(match["experts"], {}).setdefault(int(match["i"]), {})[match["part"]] = name
        stacks: dict[str, list[list[str]]] = {}
        for experts, parts in matrices.items():
            for stacked, wanted in (("gate_up_proj", ("gate_proj", "up_proj")), ("down_proj", ("down_proj",))):
                rows = []
                for i in range(max(parts) + 1):
                    missing = [part for part in wanted if part not in parts.get(i, {})]
                    if missing:
                        raise self.error(f"misses {experts}.{i}.{missing[0]}.weight, one of {max(parts) + 1} experts.")
                    rows.append([parts[i][part] for part in wanted])
                stacks[f"{experts}.{stacked}"] = rows
        return stacks

    def names(self) -> list[str]:
        inside = {name for rows in self.stacks.values() for row in rows for name in row}
        return [name for name in self.files if name not in inside and name not in self.scales] + list(self.stacks)

    def __contains__(self, name: str) -> bool:
        return name in self.names()

    def shape(self, name: str) -> tuple[int, ...]:
        """A tensor's shape, without reading it.

        Raises:
            CheckpointError: the experts' matrices differ in shape.
        """
        if name not in self.stacks:
            return super().shape(name)
        rows = self.stacks[name]
        first = super().shape(rows[0][0])
        for row in rows:
            for part in row:
                if super().shape(part) != first:
                    raise self.error(f"{part} has shape {list(super().shape(part))}, {rows[0][0]} has {list(first)}.")
        return (len(rows), len(rows[0]) * first[0], *first[1:])

    def tensor(self, name: str) -> torch.Tensor:
        if name not in self.stacks:
            return self._plain(name)
        rows = self.stacks[name]
        first = self._plain(rows[0][0])
        out = first.new_empty(self.shape(name))
        for slice_, row in zip(out, rows, strict=True):
            for place, part in zip(slice_.chunk(len(row)), row, strict=True):
                place.copy_(self._plain(part))
        return out

    def _plain(self, name: str) -> torch.Tensor:
        value = super().tensor(name)
        scale = name + _SCALE
        if scale in self.scales:
            return dequantized(value, super().tensor(scale), self._block_size(), self.dtype, name, self.error)
        if value.is_floating_point() and value.element_size() == 1:
            raise self.error(
                f"{name} is {value.dtype} and has no {name.rpartition('.')[2]}{_SCALE}: its scale is unknown."
            )
        return value

    def _block_size(self) -> tuple[int, int]:
        quantization = self.config.get("quantization_config") or {}
        rows, columns = quantization.get("weight_block_size") or (128, 128)
        return int(rows), int(columns)


def dequantized(
    value: torch.Tensor,
    scale: torch.Tensor,
    block: tuple[int, int],
    dtype: torch.dtype,
    name: str,
    error: Callable[[str], CheckpointError],
) -> torch.Tensor:
    """A matrix [m, n] in `dtype`: each block of `value` times its factor in `scale` [ceil(m / block), ceil(n / block)].

    Raises:
        CheckpointError: `scale` does not fit the matrix.
    """
    (rows, columns), (high, wide) = value.shape, block
    blocks = (-(-rows // high), -(-columns // wide))
    if tuple(scale.shape) != blocks:
        raise error(
            f"{name}{_SCALE} has shape {list(scale.shape)}; a matrix {list(value.shape)} in blocks of {high} x {wide} has "
            f"{list(blocks)}."
        )
    out = torch.empty(rows, columns, dtype=dtype)
    for i, factors in enumerate(scale.to(torch.float32)):  # a strip of blocks at a time: one float32 copy of the strip
        strip = slice(i * high, min((i + 1) * high, rows))
        out[strip] = (value[strip].to(torch.float32) * factors.repeat_interleave(wide)[:columns]).to(dtype)
    return out
