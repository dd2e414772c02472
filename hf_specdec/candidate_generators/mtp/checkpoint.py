"""MTP modules in targets' checkpoints and in their own: how they are found and loaded; a target's tensors for transformers' layers."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import nn
from transformers import AutoModelForCausalLM

from ...model.packed_head import PackedHead
from ...model.packed_model import PackedModel
from ..checkpoints import target_parts
from ..checkpoints.config import proposed_length
from ..checkpoints.files import Checkpoint, CheckpointError, Plan, counted, load_module, refused_kind, register_format
from ..checkpoints.keys import KIND, LAYERS, Key, Table, integer, one_of
from .head import MtpModule, TargetFamily, module_config
from .layouts import LAYER_NAMES, LAYOUTS, MtpLayout, find_layout, holds_mtp_alone, vocabulary_table

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


register_format(
    "MTP layers without their target (speculators' mtp, or tensors as in a target's checkpoint)",
    "mtp",
    lambda checkpoint: holds_mtp_alone(checkpoint.config, checkpoint.names()),
)


# Of speculators' files. In others, config.json is that of the target, which was built from it.
_TABLE = Table(
    {
        "kind": Key(one_of("mtp"), places=KIND),
        "count": Key(integer(), places=("num_nextn_predict_layers",)),
    }
)


class MtpModules(nn.ModuleList):
    """A list of MTP modules to load at once; errors show this class name."""


@dataclass
class LoadedMtp:
    """Loaded MTP modules, in drafting order.

    Attributes:
        heads: runs each module over packed rows, with its layer of one cache.
        target_ids: int64 [Vd], the target's id of each token of a reduced draft vocabulary; None: it is the whole one.
        proposed_length: the draft length the checkpoint proposes (speculators' format), or None.
    """

    layout: MtpLayout
    heads: list[PackedHead]
    target_ids: torch.Tensor | None
    proposed_length: int | None


def load_mtp(source: Checkpoint, target: PackedModel, prepack_weights: bool | None = None) -> LoadedMtp:
    """Load the MTP modules of a checkpoint, on the target's device and in its dtype. Raises CheckpointError: it has no MTP modules, or
    they do not fit."""
    device, dtype = target_parts.device_and_dtype(target)
    family = _family(source, target)
    with torch.device("meta"):
        layer = family.new_layer(module_config(family.config, 0, "full_attention", sparse=True), 0)
    stacked = {name.rpartition(".")[2] for name in layer.state_dict() if re.search(r"\.experts\.\w+$", name)}
    nothing = (
        "holds no MTP tensors. transformers drops them when it saves a model: name the folder or Hub id of the original "
        "weights as 'model'."
    )
    checkpoint = TargetTensors(source, dtype, stacked, nothing)
    num_layers = target.config.num_hidden_layers
    layout = find_layout(checkpoint.names(), num_layers)
    if layout is None:
        if what := refused_kind(checkpoint):
            raise checkpoint.error(f"{what}, which this method does not run.")
        tried = "; ".join(known.name for known in LAYOUTS)
        some = ", ".join(sorted(checkpoint.names())[:4])
        raise checkpoint.error(f"holds MTP tensors in no known layout ({some}, ..). Tried: {tried}.")
    plan = _planned(checkpoint, layout, num_layers)
    ids, shapes = _own_tables(plan, target)
    if ids is not None and not any(name.endswith(".lm_head.weight") for name in shapes):
        _check_other_head(source, len(ids), target)
    numbers = (int(name.partition(".")[0]) for name in plan.sources if name[0].isdigit())
    count = counted(checkpoint, numbers, "MTP module")
    stated = source.config.get("num_nextn_predict_layers", count)
    if "speculators_model_type" in source.config and stated != count:
        raise checkpoint.error(
            f"config.json has num_nextn_predict_layers = {stated}, but the file has {count} MTP modules."
        )
    with torch.device("meta"):
        modules = []
        for i in range(count):
            tables = {name: shapes.get(f"{i}.{name}.weight") for name in ("embed_tokens", "lm_head")}
            sparse = any(name.startswith(f"{i}.layer.mlp.experts.") for name in plan.sources)
            given = {name: shape for name, shape in tables.items() if shape is not None}
            modules.append(MtpModule(family, layout, i, sparse, given))
        filled = MtpModules(modules)
    _rename_parts(plan, set(filled.state_dict()))
    load_module(filled, plan, device, dtype, family.float32)
    has_own = all(f"{i}.lm_head.weight" in shapes for i in range(count))
    lm_head = target_parts.target_head(target) if has_own else target_parts.shared_head(source, target, ids)
    for module in modules:
        with torch.device(device):
            module.add_rotary(family.rotary)
        module.share(target_parts.target_embeddings(target), lm_head)
    heads = [PackedHead(module, module.config, count, prepack_weights, device, dtype) for module in modules]
    return LoadedMtp(layout, heads, ids, proposed_length(source))


def _check_other_head(source: Checkpoint, size: int, target: PackedModel) -> None:
    """Raise CheckpointError if the file has a head of the draft vocabulary that belongs to no module: the target's rows would be used."""
    whole = Checkpoint(source.folder, source.name)
    if "lm_head.weight" in whole and whole.shape("lm_head.weight")[0] == size < target.vocab_size:
        raise source.error(
            f"lm_head.weight has the {size} tokens of the draft vocabulary (d2t), and belongs to no MTP module: store it under the name "
            "that the module's head has."
        )


def _family(source: Checkpoint, target: PackedModel) -> TargetFamily:
    def error(what: str) -> CheckpointError:
        return source.error(f"holds MTP modules, but {what}")

    kind = source.config.get("speculators_model_type")
    if kind is None:
        return TargetFamily.of(target.model, error)
    if kind != "mtp":
        raise source.error(f"is a speculators checkpoint of type {kind!r}, not of MTP layers.")
    source.wanted = None  # a checkpoint of MTP layers only: load every tensor
    values = source.section(LAYERS)
    stated, num_layers = values.get("num_hidden_layers"), target.config.num_hidden_layers
    if isinstance(stated, int) and stated > num_layers:
        raise source.error(
            f"is for a target of {stated} layers; this one has {num_layers}." + target_parts.trained_for(source)
        )
    config = target_parts.layer_config(source, values)
    replace(_TABLE, class_keys=frozenset(type(config)().to_dict())).read(source)
    target_parts.check_target(source, target, config.hidden_size, config.vocab_size)
    with source.building():
        model = AutoModelForCausalLM.from_config(config)
    return TargetFamily.of(model, error)


def _planned(checkpoint: TargetTensors, layout: MtpLayout, num_layers: int) -> Plan:
    """A plan with the names `{module}.{part}`; shared tensors are assigned to every module."""

    def rename(name: str) -> str | None:
        if (table := vocabulary_table(name)) is not None:
            return table
        if name == "lm_head.weight":  # in a file of one module; a target's is not among the names
            return f"0.{name}"
        place = layout.canonical(name, num_layers)
        if place is None:
            return name  # belongs to no module: reported as unused
        module, canonical = place
        return None if module < 0 else f"{module}.{canonical}"

    plan = Plan(checkpoint, rename)
    modules = {name.partition(".")[0] for name in plan.sources if re.match(r"\d+\.layer\.", name)}
    for name, source in list(plan.sources.items()):
        part = name.partition(".")[2]
        if part.startswith(layout.shared) and layout.shared:
            plan.sources.update({f"{module}.{part}": source for module in modules})
    return plan


def _own_tables(plan: Plan, target: PackedModel) -> tuple[torch.Tensor | None, dict[str, tuple[int, int]]]:
    """The ids of a reduced draft vocabulary (see `mapped_ids`), and the shapes of the stored embeddings and heads that differ from the
    target's. Equal ones are removed from the plan."""
    shapes: dict[str, tuple[int, int]] = {}
    for name in [name for name in plan.sources if name.endswith((".embed_tokens.weight", ".lm_head.weight"))]:
        table = (target_parts.target_embeddings if "embed_tokens" in name else target_parts.target_head)(target).weight
        assert isinstance(table, torch.Tensor)
        shape, is_here = plan.matrix(name), table.device.type != "meta"
        if is_here and shape == table.shape and torch.equal(plan.tensor(name).to(table), table):
            del plan.sources[name]
        else:
            shapes[name] = shape
    sizes = {rows for name, (rows, _) in shapes.items() if name.endswith(".lm_head.weight")}
    ids = target_parts.mapped_ids(plan.checkpoint, plan, target, next(iter(sizes), None))
    for name, (rows, _) in shapes.items():
        if ids is not None and name.endswith(".lm_head.weight"):
            if rows != len(ids):
                raise plan.checkpoint.error(
                    f"{plan.sources[name]} has {rows} tokens; the draft vocabulary has {len(ids)} (d2t)."
                )
            continue
        target_parts.check_vocabulary(plan.checkpoint, target, rows)
        if rows < target.vocab_size:
            raise plan.checkpoint.error(
                f"{plan.sources[name]} has {rows} tokens; the target has {target.vocab_size}, and there is no table d2t. It is for another "
                "target."
            )
    return ids, shapes


def _rename_parts(plan: Plan, expected: set[str]) -> None:
    for name in [name for name in plan.sources if name not in expected]:
        for pattern, replacement in LAYER_NAMES:
            renamed = re.sub(pattern, replacement, name)
            if renamed in expected and renamed not in plan:
                plan.sources[renamed] = plan.sources.pop(name)
                break
