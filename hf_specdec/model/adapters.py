"""Rows with adapters of their own: PEFT's LoRA layers compute every packed token with the adapter of its row."""

from __future__ import annotations

import contextlib
import functools
import itertools
import sys
import weakref
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn
from transformers import PreTrainedModel

from ..core.errors import UnsupportedModel
from ..core.ranks import ranks_of
from ..core.rows import RowInput
from ..kernels.native import LOW_RANK, TYPES
from ..kernels.transfer import upload
from . import architectures
from .encoder_decoder import family_of
from .latent import is_latent
from .recurrent.families import family_of as recurrent_family_of
from .recurrent.mixers import RecurrentLayers
from .structure import hooks_of
from .threads import for_this_thread, replaced_values

BASE = "__base__"  # PEFT's name for no adapter
_LORA = "peft.tuners.lora.layer"


@dataclass(frozen=True)
class _Groups:
    """Tokens by adapter: `order` int64 [n], those that have one, by adapter; None: they stand so already. `spans`: each adapter's place."""

    order: torch.Tensor | None
    spans: list[tuple[str | None, slice]]


class Bound(NamedTuple):
    """The adapters of a step's rows as a native program reads them: see `Step` in `program.h`."""

    columns: np.ndarray  # int64, addresses of arrays LOW_RANK [layers]
    groups: np.ndarray
    selected_groups: np.ndarray


def lora_layers(model: nn.Module) -> list[Any]:
    """PEFT's LoRA layers of a model."""
    lora: Any = sys.modules.get(_LORA)  # a model without it has no such layer
    return [
        module for module in (architectures.all_modules(model) if lora else ()) if isinstance(module, lora.LoraLayer)
    ]


def have_adapters(rows: list[RowInput]) -> bool:
    """True if some rows have adapters of their own."""
    return any(row.adapter is not None for row in rows)


def is_disabled(model: nn.Module) -> bool:
    """True if PEFT's adapters are switched off: then every row is computed by the base model."""
    return any(layer.disable_adapters for layer in lora_layers(model))


def check_mixed(model: PreTrainedModel, adapters: Collection[str]) -> None:
    """Raise UnsupportedModel unless rows with these adapters, of no adapter, and of the active ones can share a forward."""
    others = {"the model has an encoder": family_of(model), "the model is sharded": ranks_of(model)}
    problem = next((what for what, is_there in others.items() if is_there is not None), None)
    family = recurrent_family_of(model.config.get_text_config(decoder=True))
    mixers = [] if family is None else RecurrentLayers(model, family).mixers
    apart = {id(inner) for mixer in mixers for inner in mixer.modules()}
    for name, layer in model.named_modules():
        problem = problem or _problem(name, layer, adapters)
        if problem is None and hasattr(layer, "lora_A"):
            reads_others = any(part in f".{name}." for part in (".experts.", ".scorer."))
            reads_others = reads_others or (is_latent(model) and name.endswith("kv_b_proj"))
            problem = f"{name} does not read the tokens in their order" if id(layer) in apart or reads_others else None
    if problem is not None:
        raise UnsupportedModel(
            f"Rows of different adapters cannot share a forward of {type(model).__name__}: {problem}."
        )


def _problem(name: str, layer: Any, adapters: Collection[str]) -> str | None:
    """What hinders a layer, in words, from computing each row with its adapter."""
    from peft.tuners.lora.layer import LoraLayer
    from peft.tuners.tuners_utils import BaseTunerLayer  # only a model with such layers comes here
    from peft.utils.other import AuxiliaryTrainingWrapper

    if isinstance(layer, AuxiliaryTrainingWrapper):
        return f"{name} is a whole module for each adapter (modules_to_save or trainable_token_indices)"
    if not isinstance(layer, LoraLayer):
        return f"{name} is a layer of {type(layer).__module__}" if isinstance(layer, BaseTunerLayer) else None
    lora: Any = layer
    variants = [
        type(lora.lora_variant[name]).__name__ for name in {*adapters, *lora.active_adapters} & lora.lora_variant.keys()
    ]
    if lora.merged:
        return f"{name} has merged adapters: call unmerge_adapter() first"
    if variants:
        return f"{name} has a {variants[0]}, which is no ordinary LoRA"
    plain = all(isinstance(layer, nn.Linear) for layer in lora.lora_A.values())
    if not plain or type(lora).__name__ in ("ParamWrapper", "MultiheadAttention"):
        return f"{name} is a LoRA of a {type(lora).__name__}"
    return None


_changes = weakref.WeakKeyDictionary[Any, "Change"]()  # by LoRA layer


class Change(nn.Module):
    """What the adapters of a forward's rows add to a LoRA layer's output: [.., n, out] for x [.., n, in], or for ids [.., n].

    It is a module so that a native program can stand for it, or call it. `number`: a program serves this one alone.
    """

    _next_number = itertools.count().__next__

    def __init__(self, layer: Any, adapters: RowAdapters):
        super().__init__()
        self.layer, self.number = weakref.ref(layer), Change._next_number()
        self.adapters: weakref.ref[Any] = weakref.ref(adapters)  # of the forward that runs, or that ran last

    def forward(self, x: torch.Tensor, output: torch.Tensor | None = None) -> torch.Tensor:
        """The change, or the base layer's `output` with it."""
        change = self._of(x)
        return change if output is None else output + change

    def _of(self, x: torch.Tensor) -> torch.Tensor:
        layer, adapters = self.layer(), self.adapters()
        assert layer is not None and adapters is not None
        base = layer.get_base_layer()
        reads_ids = isinstance(base, nn.Embedding)
        known, of_adapter = (layer.lora_embedding_A, _of_ids) if reads_ids else (layer.lora_A, _of_states)
        states, dtype = (x[..., None], base.weight.dtype) if reads_ids else (x, x.dtype)
        groups, active = adapters.groups(layer, states.shape[:-1], x.device), _active(layer)
        spans = [
            (name, span)
            for group, span in groups.spans
            for name in (active if group is None else [group])
            if name in known
        ]
        order = groups.order if spans else None
        read = states if order is None else states.index_select(-2, order)
        change = read.new_zeros((*read.shape[:-1], layer.out_features), dtype=dtype)
        for name, span in spans:
            change[..., span, :] += of_adapter(layer, name, read[..., span, :])
        if order is None:
            return change
        return change.new_zeros((*states.shape[:-1], layer.out_features)).index_copy_(-2, order, change)


def _of_states(layer: Any, name: str, x: torch.Tensor) -> torch.Tensor:
    """As PEFT's `lora.Linear` computes it: [.., n, out] for x [.., n, in]."""
    down, up = layer.lora_A[name], layer.lora_B[name]
    x = layer._cast_input_dtype(x, down.weight.dtype)
    return up(down(layer.lora_dropout[name](x))) * layer.scaling[name]


def _of_ids(layer: Any, name: str, ids: torch.Tensor) -> torch.Tensor:
    """As PEFT's `lora.Embedding` computes it: [.., n, H] for ids [.., n, 1]."""
    rows, scale = layer._embed(ids[..., 0], layer.lora_embedding_A[name].T), layer._get_embed_scale()
    change = (rows @ layer.lora_embedding_B[name].T) * layer.scaling[name]
    return change if scale is None else change * scale.to(change.dtype)


def _forward(layer: Any, change: Change, x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    """The output of a LoRA layer whose tokens have the adapters of their rows."""
    return change(x, layer.base_layer(x, *args, **kwargs))


def _active(layer: Any) -> list[str]:
    return [] if layer.disable_adapters else layer.active_adapters


def _low_rank(layer: Any, name: str) -> tuple[tuple, Any] | None:
    """What LOW_RANK says of an adapter in a layer, and its weights; None: the library cannot compute it."""
    down, up, dropout = layer.lora_A[name], layer.lora_B[name], layer.lora_dropout[name]
    weights, dtype = [down.weight, up.weight, *([] if up.bias is None else [up.bias])], up.weight.dtype
    plain = type(down) is type(up) is nn.Linear and down.bias is None and name not in layer.lora_variant
    plain = plain and (type(dropout) is nn.Identity or not dropout.training) and dtype in TYPES
    plain = plain and all(
        type(w) is nn.Parameter and w.is_cpu and w.dtype == dtype and w.is_contiguous() for w in weights
    )
    if not plain or (down.in_features, up.out_features) != (layer.in_features, layer.out_features):
        return None
    places = [*(weight.data_ptr() for weight in weights), 0][:3]
    return (*places, up.weight.shape[1], TYPES[dtype], layer.scaling[name]), weights


def _chosen(rows: list[RowInput]) -> list[str | None]:
    return [name for name in dict.fromkeys(row.adapter for row in rows) if name != BASE]


def _sorted(rows: list[RowInput], counts: list[int], chosen: list[str | None]) -> tuple[np.ndarray, np.ndarray]:
    """int64 [n], the tokens that have one of the `chosen` adapters, by adapter; and where each adapter's begin, and the last end."""
    of_tokens = np.repeat([chosen.index(row.adapter) if row.adapter in chosen else -1 for row in rows], counts)
    order = np.flatnonzero(of_tokens >= 0)
    order = order[np.argsort(of_tokens[order], kind="stable")]
    return order, np.searchsorted(of_tokens[order], np.arange(len(chosen) + 1))


class RowAdapters:
    """The LoRA layers of a model, as they are while it is active."""

    def __init__(self, model: PreTrainedModel):
        self._layers = lora_layers(model)
        self.changes = [_changes.setdefault(layer, Change(layer, self)) for layer in self._layers]
        self._head = model.get_output_embeddings()
        self._rows: list[RowInput] | None = []
        self._selects = False
        self._groups: dict[Any, _Groups] = {}
        self._columns: dict[Any, tuple[np.ndarray, Any] | None] = {}

    def modules(self, model: nn.Module) -> list[nn.Module]:
        """The modules of a forward inside `running`: others than those of adapters, without which the layers run, and the `changes`. Hooked
        ones stay."""
        inner = {id(module) for layer in self._layers for module in architectures.all_modules(layer)}
        inner -= {id(module) for layer in self._layers for module in architectures.all_modules(layer.base_layer)}
        kept = [
            m for m in architectures.all_modules(model) if id(m) not in inner or hooks_of(m) or "forward" in vars(m)
        ]
        return [*kept, *self.changes]

    @contextlib.contextmanager
    def running(self, rows: list[RowInput], selects: bool = False) -> Iterator[None]:
        """Inside the context, a layer computes every token of these packed rows with its row's adapter. `selects`: the model's head reads
        only the tokens that need logits."""
        self._rows, self._selects, self._groups = rows, selects, {}
        with self._replaced():
            yield

    @contextlib.contextmanager
    def alone(self, adapter: str | None) -> Iterator[None]:
        """Inside the context, a layer computes all that it reads with this adapter; None: with the active ones."""
        self._rows, self._groups = None, {None: _Groups(None, [(adapter, slice(None))])}
        with self._replaced():
            yield

    def _replaced(self) -> contextlib.AbstractContextManager[None]:
        pairs = list(zip(self._layers, self.changes, strict=True))
        for _, change in pairs:
            change.adapters = weakref.ref(self)
        ours = [functools.partial(_forward, layer, change) for layer, change in pairs]
        return replaced_values(
            (vars(layer), "forward", for_this_thread(forward, layer.forward))
            for layer, forward in zip(self._layers, ours, strict=True)
        )

    def groups(self, layer: Any, shape: torch.Size, device: torch.device) -> _Groups:
        """The tokens of each adapter among those [.., n] that a layer reads. Made once per forward, not per layer."""
        if self._rows is None:
            return self._groups[None]
        selected = self._selects and layer is self._head
        key = selected, device
        counts = [row.logits if selected else row.num_tokens for row in self._rows]
        if shape.numel() != shape[-1] or shape[-1] != sum(counts):
            raise UnsupportedModel(
                f"A LoRA of {type(layer.get_base_layer()).__name__} reads {list(shape)} tokens in a forward over {sum(counts)}, so "
                "their rows are not known: use one adapter at a time."
            )
        if key not in self._groups:
            chosen = _chosen(self._rows)
            order, ends = _sorted(self._rows, counts, chosen)
            in_place = bool((np.diff(order) == 1).all())
            ends += order[0] if in_place and len(order) else 0
            spans = [slice(start, end) for start, end in itertools.pairwise(ends.tolist())]
            self._groups[key] = _Groups(
                None if in_place else upload(order, device), list(zip(chosen, spans, strict=True))
            )
        return self._groups[key]

    def known(self) -> list[str]:
        """The adapters that a native program can compute, wherever they are."""
        names = dict.fromkeys(name for layer in self._layers for name in layer.lora_A)
        return [name for name in names if self._column(name, False) is not None]

    def bound(self, rows: list[RowInput]) -> Bound | None:
        """The adapters of these rows, for a native program; None: the library cannot compute one of them."""
        chosen = _chosen(rows)
        names = [(i, name) for i, given in enumerate(chosen) for name in (self._active if given is None else [given])]
        columns = [self._column(name, chosen[i] is None) for i, name in names]
        known = [column.ctypes.data for column, _ in filter(None, columns)]
        if len(known) < len(columns):
            return None
        groups = []
        for counts in ([row.num_tokens for row in rows], [row.logits for row in rows]):
            order, ends = _sorted(rows, counts, chosen)
            groups.append(np.concatenate([*(ends[i : i + 2] for i, _ in names), order]))
        return Bound(np.array(known, dtype=np.int64), *groups)

    @functools.cached_property
    def are_idle(self) -> bool:
        """True if there are LoRA layers, and all compute what their base layers do in rows without adapters of their own."""
        return bool(self._layers) and not (self._active or any(layer.merged for layer in self._layers))

    @functools.cached_property
    def _active(self) -> list[str]:
        """Adapters that are active in some layer."""
        return list(dict.fromkeys(name for layer in self._layers for name in _active(layer)))

    def _column(self, name: str, if_active: bool) -> tuple[np.ndarray, Any] | None:
        """LOW_RANK [layers] of an adapter, made once, and its weights; None: see `bound`. `if_active`: only where it is active."""
        key = name, if_active
        if key not in self._columns:
            layers = [(i, layer) for i, layer in enumerate(self._layers) if name in layer.lora_A]
            used = [(i, layer) for i, layer in layers if not if_active or name in _active(layer)]
            parts, column = [_low_rank(layer, name) for _, layer in used], np.zeros(len(self._layers), LOW_RANK)
            for (i, _), part in zip(used, parts, strict=True):
                if part is not None:
                    column[i] = part[0]
            self._columns[key] = None if None in parts else (column, parts)
        return self._columns[key]
