"""Reading a target's checkpoint for transformers' layers: experts are stacked."""

from __future__ import annotations

import re
from functools import cached_property

import torch

from ..checkpoints.files import Checkpoint

_EXPERT = re.compile(r"(?P<experts>.+\.experts)\.(?P<i>\d+)\.(?P<part>gate_proj|up_proj|down_proj|w[123])\.weight")
_PARTS = {"w1": "gate_proj", "w2": "down_proj", "w3": "up_proj"}


class TargetTensors(Checkpoint):
    """Tensors of a checkpoint under the names and shapes of transformers' layers.

    * Quantized weights are dequantized to `dtype`.
    * Matrices `experts.{i}.gate_proj`, `.up_proj`, `.down_proj` become the tensors named in `stacked`: `experts.gate_up_proj`
      [E, 2 I, H] or `experts.up_proj` [E, I, H], and `experts.down_proj` [E, H, I].

    Args:
        source: the checkpoint; only its `wanted` tensors are used.
        dtype: of quantized weights.
        nothing: the error if there are no such tensors.
    """

    def __init__(self, source: Checkpoint, dtype: torch.dtype, stacked: set[str], nothing: str):
        super().__init__(source.folder, source.name, source.wanted, nothing)
        self.dtype, self.stacked = dtype, stacked

    @cached_property
    def stacks(self) -> dict[str, list[list[str]]]:
        """By stacked name: for each expert, the stored matrices to concatenate in its slice."""
        matrices: dict[str, dict[int, dict[str, str]]] = {}
        if self.stacked:
            for name in super().names():
                match = _EXPERT.fullmatch(name)
                if match:
                    parts = matrices.setdefault(match["experts"], {}).setdefault(int(match["i"]), {})
                    parts[_PARTS.get(match["part"], match["part"])] = name
        stacks: dict[str, list[list[str]]] = {}
        for experts, parts in matrices.items():
            for stacked in sorted(self.stacked):
                wanted, rows = ("gate_proj", "up_proj") if stacked == "gate_up_proj" else (stacked,), []
                for i in range(max(parts) + 1):
                    missing = [part for part in wanted if part not in parts.get(i, {})]
                    if missing:
                        raise self.error(f"misses {experts}.{i}.{missing[0]}.weight, one of {max(parts) + 1} experts.")
                    rows.append([parts[i][part] for part in wanted])
                stacks[f"{experts}.{stacked}"] = rows
        return stacks

    def names(self) -> list[str]:
        inside = {name for rows in self.stacks.values() for row in rows for name in row}
        return [name for name in super().names() if name not in inside] + list(self.stacks)

    def __contains__(self, name: str) -> bool:
        return name in self.names()

    def shape(self, name: str) -> tuple[int, ...]:
        """A tensor's shape, without reading it. Raises CheckpointError: the experts' matrices differ in shape."""
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
        return value.to(self.dtype) if name in self.quantized else value
