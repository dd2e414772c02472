"""Records what a model's forward computes, operator by operator, as a `Tape`."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from ...core.dispatch_mode import ExclusiveMode
from ...kernels.attention import attention_for
from ...kernels.cache import write_keys_values
from ...kernels.linear.quantized import Layout
from ...kernels.native import Operation, Rows
from ..options.native_weights import NativeWeight
from ..options.native_weights import product as quantized_product
from ..packed_batch import PackedBatch
from .lowering import lower
from .tape import NotLowered, Place, Step, Table, Tape, Value

aten = torch.ops.aten
# These give Python a number that depends on tensors, so another batch might take another path through the model's code.
_TELLS_PYTHON = {aten._local_scalar_dense.default, aten.equal.default, aten.nonzero.default}
_ROTARY = ("RotaryEmbedding", "RotaryPositions")  # in the names of modules whose outputs depend on positions alone


class Recorder(ExclusiveMode):
    """Inside the context, operators of this thread are recorded.

    A tensor that the library cannot compute has no `Value`. That is an error only if a result depends on the tensor.

    Args:
        modules: whose weights the forward reads.
        batch: the packed batch that it reads; None: it reads only features.
        features: [T, F], passed to each call; None: the forward reads none.
    """

    def __init__(
        self, modules: list[nn.Module], tape: Tape, batch: PackedBatch | None, features: torch.Tensor | None = None
    ):
        super().__init__()
        self.modules, self.tape, self.batch = modules, tape, batch
        self.values: dict[int, Value] = {}  # by id of the tensor
        self.kept: list[torch.Tensor] = []  # keeps the tensors alive, so that their ids are not reused
        self.reasons: dict[int, str] = {}  # why a tensor has no value
        self.pools: dict[int, tuple[int, int, int, int]] = {}  # by layer: key heads, width, value heads, width
        self.problem: str | None = None
        self._paused = 0
        tensors = [each for inner in modules for each in (*inner._parameters.values(), *inner._buffers.values())]
        self._own = {id(each) for each in tensors}
        self._panels = {id(each.panels) for each in tensors if isinstance(each, NativeWeight)}
        if features is not None:
            self._follow(features, tape.features(features.shape[1], features.dtype))
        if batch is None:
            return
        for kind, ids in enumerate((batch.input_ids, batch.position_ids)):
            shadow = torch.empty_strided(ids.shape, (ids.shape[1], 1), device="meta", dtype=ids.dtype)
            self._follow(ids, Value(None, shadow, Rows.TOKENS, kind))

    def _follow(self, tensor: torch.Tensor, value: Value | None, reason: str = "") -> None:
        self.kept.append(tensor)
        if value is None:
            self.reasons.setdefault(id(tensor), reason)
        else:
            self.values[id(tensor)] = value

    def value_of(self, tensor: torch.Tensor) -> Value:
        """The value of a tensor.

        Raises:
            NotLowered: it has none; the message says why.
        """
        if id(tensor) in self.values:
            return self.values[id(tensor)]
        if id(tensor) in self._own:
            return self.tape.weight(tensor)
        raise NotLowered(self.reasons.get(id(tensor), "a tensor that is made inside the forward"))

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Inside the context, operators run unrecorded."""
        self._paused += 1
        try:
            yield
        finally:
            self._paused -= 1

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if self._paused:
            return result
        if func in _TELLS_PYTHON:
            self.problem = self.problem or f"Python code that depends on tensors ({func})"
        elif func._schema.is_mutable:
            self.problem = self.problem or f"a change in place ({func})"
        else:
            self._record(func, args, kwargs, result)
        return result

    def _record(self, func: Any, args: tuple, kwargs: dict, result: Any) -> None:
        results = (
            [result] if isinstance(result, torch.Tensor) else list(result) if isinstance(result, (tuple, list)) else []
        )
        if func == aten.lift_fresh.default and result.dim() == 0 and result.is_floating_point():
            return self._follow(result, self.tape.weight(result))  # a number; the tape keeps the tensor
        try:
            values = self._lowered(func, args, kwargs, result)
        except NotLowered as error:
            for each in results:
                if isinstance(each, torch.Tensor):
                    self._follow(each, None, str(error))
            return None
        for each, value in zip(results, values if isinstance(values, list) else [values], strict=True):
            if isinstance(each, torch.Tensor):
                self._follow(each, value, f"an unused result of {func}")
        return None

    def _lowered(self, func: Any, args: tuple, kwargs: dict, result: Any) -> Any:
        """The values of the results of an operator."""
        if func == aten.index.Tensor or func == aten.index_select.default:
            return self._selected(func, args, result)
        if func == quantized_product:
            return self._multiplied(*args, result)
        own = tuple(self._translated(each) for each in args)
        options = {name: each for name, each in kwargs.items() if not isinstance(each, torch.Tensor)}
        if len(options) != len(kwargs):
            raise NotLowered(str(func))
        return lower(self.tape, func, own, options, result)

    def _translated(self, each: Any) -> Any:
        """An argument with values in place of its tensors."""
        if isinstance(each, torch.Tensor):
            return self.value_of(each)
        return [self._translated(inner) for inner in each] if isinstance(each, (list, tuple)) else each

    def _selected(self, func: Any, args: tuple, result: torch.Tensor) -> Value:
        if func == aten.index.Tensor:
            found = [(dim, index) for dim, index in enumerate(args[1]) if index is not None]
        else:
            found = [(args[1], args[2])]
        ((dim, index),) = found if len(found) == 1 else (((0, None)),)
        if self.batch is None or index is None or index is not self.batch.logit_index:
            raise NotLowered("an index other than that of the wanted logits")
        return self.tape.selected(self.value_of(args[0]), dim, result.shape)

    def _multiplied(
        self, x: torch.Tensor, panels: torch.Tensor, bias: torch.Tensor | None, bits: int, group: int, outputs: int, scales: torch.dtype,
        result: torch.Tensor,
    ) -> Value:  # fmt: skip
        """A product with quantized weights."""
        if id(panels) not in self._panels:
            raise NotLowered("a product with quantized weights that are made inside the forward")
        added = None if bias is None else self.value_of(bias)
        own = Layout(bits, group, outputs, x.shape[1], scales)
        return self.tape.quantized_linear(self.value_of(x), panels, own, added, result.shape, result.dtype)

    # ---- operations that the cache and the attention function call while recording -----------------------------------

    def write(
        self, keys: torch.Tensor, values: torch.Tensor, key_pool: torch.Tensor, value_pool: torch.Tensor, slots: Any
    ) -> None:
        """Write keys and values [T, heads, width] to their slots, and record it."""
        with self.paused():
            write_keys_values(keys, values, key_pool, value_pool, slots)
        layer = self._layer_of(key_pool)
        sizes = (*key_pool.shape[1:], *value_pool.shape[1:])
        if sizes[0] != sizes[2] or not (key_pool.is_contiguous() and value_pool.is_contiguous()):
            raise NotLowered("pools with different numbers of heads")
        if not keys.dtype == values.dtype == key_pool.dtype == value_pool.dtype:
            raise NotLowered("keys in another dtype than their pool")
        self.pools[layer] = sizes
        self.tape.steps.append(
            Step(
                Operation.WRITE, Rows.TOKENS, (1, 1, 1), a=self.tape.heads(self.value_of(keys)),
                b=self.tape.heads(self.value_of(values)), attention=self._attention(layer),
            )
        )  # fmt: skip

    def attend(self, query, key_pool, value_pool, batch, scaling, *, window, softcap, sinks) -> torch.Tensor:
        """Attend, and record it. Arguments as `kernels.attention.Attend`."""
        with self.paused():
            attend = attention_for(query.device, with_native=False)
            out = attend(query, key_pool, value_pool, batch, scaling, window=window, softcap=softcap, sinks=sinks)
        layer = self._layer_of(key_pool)
        if layer not in self.pools:
            raise NotLowered("attention to keys that were not written by the same layer")
        value = self.tape.new(out.shape, out.dtype, Rows.TOKENS)
        own = self._attention(layer) | {"heads": query.shape[1], "window": window or 0}
        bias = None
        if sinks is not None:
            weight = self.value_of(sinks)
            if weight.rows != Rows.ONE or weight.shadow.stride() != (1,):
                raise NotLowered("sinks that are not a vector of weights")
            assert weight.register
            bias = Place(weight.register, weight.shadow.storage_offset())
        assert value.register
        self.tape.steps.append(
            Step(
                Operation.ATTEND, Rows.TOKENS, (1, 1, 1), Place(value.register), self.tape.heads(self.value_of(query)), None, bias,
                scalar=scaling, scalar2=softcap or 0.0, attention=own,
            )
        )  # fmt: skip
        self._follow(out, value)
        return out

    def _attention(self, layer: int) -> dict[str, int]:
        heads, width, _, value_width = self.pools[layer]
        return {"layer": layer, "kv_heads": heads, "width": width, "value_width": value_width}

    def _layer_of(self, key_pool: torch.Tensor) -> int:
        assert self.batch is not None
        layers = self.batch.cache.layers
        return next(i for i, layer in enumerate(layers) if layer.is_initialized and layer.keys is key_pool)

    # ---- rotary modules ---------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def angles_by_position(self) -> Iterator[None]:
        """Inside the context, the outputs of rotary modules are recorded as rows of tables that the same module computes by position."""
        handles = []
        for module in self.modules:
            if any(name in type(module).__name__ for name in _ROTARY):
                handles.append(module.register_forward_pre_hook(self._enter_rotary, with_kwargs=True, prepend=True))
                handles.append(module.register_forward_hook(self._leave_rotary, with_kwargs=True))
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _enter_rotary(self, module: nn.Module, args: tuple, kwargs: dict) -> None:
        self._paused += 1

    def _leave_rotary(self, module: nn.Module, args: tuple, kwargs: dict, output: Any) -> None:
        self._paused -= 1
        assert self.batch is not None
        own = self.batch.position_ids
        known = [
            each is own or (torch.is_tensor(each) and _same_memory(each, own)) for each in (*args, *kwargs.values())
        ]
        outputs = output if isinstance(output, tuple) else (output,)
        if sum(known) != 1 or any(
            each.dim() != 3 or each.shape[1] != own.shape[1] or each.shape[0] != 1 for each in outputs
        ):
            return

        given = [
            None if is_ours else _first(each) for is_ours, each in zip(known, (*args, *kwargs.values()), strict=True)
        ]
        rows = _by_position(weakref.ref(module), given, len(args), list(kwargs))
        with self.paused():
            computed = rows(int(own.max()) + 1)
            equal = [torch.equal(each[0], table[own[0]]) for each, table in zip(outputs, computed, strict=True)]
        for part, (each, is_equal) in enumerate(zip(outputs, equal, strict=True)):
            if is_equal:
                self._follow(each, self.tape.looked_up(Table(rows, part), each))


def _by_position(module: Any, given: list[Any], num_args: int, names: list[str]) -> Callable[[int], list[torch.Tensor]]:
    """A function that calls a rotary module (by weak reference) for positions 0 .. n - 1, which stand for None in `given`: its outputs
    [n, R]."""

    def rows(count: int) -> list[torch.Tensor]:
        values = [torch.arange(count)[None] if each is None else each for each in given]
        found = module()(*values[:num_args], **dict(zip(names, values[num_args:], strict=True)))
        found = found if isinstance(found, tuple) else (found,)
        return [each[0].contiguous() for each in found]

    return rows


def _same_memory(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.data_ptr() == b.data_ptr() and a.shape == b.shape and a.dtype == b.dtype


def _first(each: Any) -> Any:
    """One element of the hidden states given to a rotary module, which uses only their dtype and device."""
    return each[:, :1].clone() if torch.is_tensor(each) and each.dim() == 3 else each
