"""Records what a forward computes as a `Tape`: `TapeRecorder` sees torch's operators, and `lower` says how each becomes operations."""

from __future__ import annotations

import contextlib
import sys
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from ...cache import PagedStaticCache
from ...core.dispatch_mode import ExclusiveMode
from ...kernels.attention import attention_for
from ...kernels.attention.inputs import window_parts
from ...kernels.cache import write_keys_values
from ...kernels.linear.quantized import WeightLayout
from ...kernels.native import Operation, Rows
from ..adapters import Change
from ..options.native_weights import NativeWeight
from ..options.native_weights import product as quantized_product
from ..packed_batch import PackedBatch
from ..threads import for_this_thread
from .lowering import aten, lower
from .tape import NotLowered, Place, Register, Table, Tape, Value, refuse_if

# These give Python a number that depends on tensors, so another batch might take another path through the model's code.
_TELLS_PYTHON = {aten._local_scalar_dense.default, aten.equal.default, aten.nonzero.default}
_ROTARY = ("RotaryEmbedding", "RotaryPositions")  # in the names of modules whose outputs depend on positions alone


def is_rotary(module: nn.Module) -> bool:
    """True for a module whose outputs depend on positions alone."""
    return any(name in type(module).__name__ for name in _ROTARY)


class TapeRecorder(ExclusiveMode):
    """Inside the context, operators of this thread are recorded.

    A tensor that the library cannot compute has no `Value`. That is an error only if a result depends on the tensor.

    Args:
        modules: whose weights the forward reads.
        called: modules that the program calls as they are.
        batch: the packed batch that it reads; None: it reads only features.
        features: [T, F], passed to each call; None: the forward reads none.
    """

    def __init__(
        self,
        modules: list[nn.Module],
        called: list[nn.Module],
        tape: Tape,
        batch: PackedBatch | None,
        features: torch.Tensor | None = None,
    ):
        super().__init__()
        self.modules, self.called, self.tape, self.batch = modules, called, tape, batch
        self.values: dict[int, Value] = {}  # by id of the tensor
        self.kept: list[torch.Tensor] = []  # keeps the tensors alive, so that their ids are not reused
        self.reasons: dict[int, str] = {}  # why a tensor has no value
        # by layer, those of sources after the text's: key heads, width, value heads, width
        self.pools: dict[int, tuple[int, ...]] = {}
        self.problem: str | None = None
        self._paused, self._traces = 0, []
        self._changes = [module for module in modules if isinstance(module, Change)]
        tensors = [tensor for inner in modules for tensor in (*inner._parameters.values(), *inner._buffers.values())]
        self._own = {id(tensor) for tensor in tensors}
        self._panels = {id(tensor.panels) for tensor in tensors if isinstance(tensor, NativeWeight)}
        if features is not None:
            self._follow(features, tape.features(features.shape[1], features.dtype))
        if batch is None:
            return
        for kind, ids in enumerate((batch.input_ids, batch.position_ids)):
            shadow = torch.empty_strided(ids.shape, (ids.shape[1], 1), device="meta", dtype=ids.dtype)
            self._follow(ids, Value(Register(ids.dtype, 1, ids=kind), shadow, Rows.TOKENS))

    def _follow(self, tensor: torch.Tensor, value: Value | None, reason: str = "") -> None:
        self.kept.append(tensor)
        if value is None:
            self.reasons.setdefault(id(tensor), reason)
        else:
            self.values[id(tensor)] = value

    def value_of(self, tensor: torch.Tensor) -> Value:
        """The value of a tensor. Raises NotLowered: it has none; the message says why."""
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
        results: list[Any] = list(result) if isinstance(result, (tuple, list)) else [result]
        reason = f"an unused result of {func}"
        try:
            values = self._lowered(func, args, kwargs, result)
        except NotLowered as error:
            values, reason = [None] * len(results), str(error)
        for tensor, value in zip(results, values if isinstance(values, list) else [values], strict=True):
            if isinstance(tensor, torch.Tensor):
                self._follow(tensor, value, reason)

    def _lowered(self, func: Any, args: tuple, kwargs: dict, result: Any) -> Any:
        """The values of the results of an operator."""
        if func == aten.lift_fresh.default and result.dim() == 0 and result.is_floating_point():
            return self.tape.weight(result)  # a number; the tape keeps the tensor
        if func == aten.index.Tensor or func == aten.index_select.default:
            return self._selected(func, args, result)
        if func == quantized_product:
            return self._multiplied(args, result)
        values = tuple(self._translated(arg) for arg in args)
        options = {name: option for name, option in kwargs.items() if not isinstance(option, torch.Tensor)}
        refuse_if(len(options) != len(kwargs), str(func))
        return lower(self.tape, func, values, options, result)

    def _translated(self, arg: Any) -> Any:
        """An argument with values in place of its tensors."""
        if isinstance(arg, torch.Tensor):
            return self.value_of(arg)
        return [self._translated(inner) for inner in arg] if isinstance(arg, (list, tuple)) else arg

    def _selected(self, func: Any, args: tuple, result: torch.Tensor) -> Value:
        """Rows of a table by ids or positions, or the tokens whose logits are wanted."""
        places = [args[1:]]
        if func == aten.index.Tensor:
            places = [(dim, index) for dim, index in enumerate(args[1]) if index is not None]
        wanted = None if self.batch is None else self.batch.logit_index
        dim, index = places[0]
        if len(places) == 1 and dim == 0 and id(args[0]) in self._own:
            return self.tape.embedding(self.value_of(args[0]), self.value_of(index), result.shape)
        if wanted is None or len(places) != 1 or index is not wanted:
            raise NotLowered("an index other than that of the wanted logits")
        return self.tape.selected(self.value_of(args[0]), dim, result.shape)

    def _multiplied(self, args: tuple, result: torch.Tensor) -> Value:
        x, panels, bias, bits, group, outputs, scales = args
        refuse_if(id(panels) not in self._panels, "a product with quantized weights that are made inside the forward")
        added = None if bias is None else self.value_of(bias)
        layout = WeightLayout(bits, group, outputs, x.shape[1], scales)
        return self.tape.quantized_linear(self.value_of(x), panels, layout, added, result.shape, result.dtype)

    # ---- operations that the cache and the attention function call while recording -----------------------------------

    def write(
        self, keys: torch.Tensor, values: torch.Tensor, key_pool: torch.Tensor, value_pool: torch.Tensor, slots: Any
    ) -> None:
        """Write keys and values [T, heads, width] to their slots, and record it."""
        with self.paused():
            write_keys_values(keys, values, key_pool, value_pool, slots)
        assert self.batch is not None
        layer = self._layer_of(key_pool, self.batch.cache)
        if not keys.dtype == values.dtype == key_pool.dtype == value_pool.dtype:
            raise NotLowered("keys in another dtype than their pool")
        self.pools[layer] = self._sizes(key_pool, value_pool)
        places = (self.tape.heads(self.value_of(states)) for states in (keys, values))
        self.tape.add(Operation.WRITE, Rows.TOKENS, (1, 1, 1), None, *places, fields=self._attention(layer))

    def attend(
        self, query, key_pool, value_pool, batch, scaling, *, window, softcap, sinks, biases=None
    ) -> torch.Tensor:
        """Attend, and record it. Arguments as those of what `attention_for` returns."""
        with self.paused():
            attend = attention_for(query.device, with_native=False)
            options = {"window": window, "softcap": softcap, "sinks": sinks}
            out = attend(query, key_pool, value_pool, batch, scaling, **options, biases=biases)
        assert self.batch is not None
        layer = self._layer_of(key_pool, batch.cache)
        if of_source := batch is not self.batch:
            layer += len(self.batch.cache.layers)
            self.pools[layer] = self._sizes(key_pool, value_pool)
        refuse_if(layer not in self.pools, "attention to keys that were not written by the same layer")
        value = self.tape.new(out.shape, out.dtype, Rows.TOKENS)
        size, kept = window_parts(window)
        fields = self._attention(layer) | {"heads": query.shape[1], "window": size, "kept": kept}
        sink = None
        if sinks is not None:
            weight = self.value_of(sinks)
            refuse_if(not weight.is_vector, "sinks that are not a vector of weights")
            sink = weight.place()
        added = None
        if biases is not None:
            table = Table(lambda count: [biases(count).to(query.dtype)], 0)
            added = Place(Register(query.dtype, query.shape[1], table=table))
        places = value.place(), self.tape.heads(self.value_of(query)), added, sink
        options = {"kind": int(of_source), "scalar": scaling, "scalar2": softcap or 0.0}
        self.tape.add(Operation.ATTEND, Rows.TOKENS, (1, 1, 1), *places, **options, fields=fields)
        self._follow(out, value)
        return out

    def _attention(self, layer: int) -> dict[str, int]:
        heads, width, _, value_width = self.pools[layer]
        return {"layer": layer, "kv_heads": heads, "width": width, "value_width": value_width}

    @staticmethod
    def _sizes(key_pool: torch.Tensor, value_pool: torch.Tensor) -> tuple[int, ...]:
        sizes = (*key_pool.shape[1:], *value_pool.shape[1:])
        if sizes[0] != sizes[2] or not (key_pool.is_contiguous() and value_pool.is_contiguous()):
            raise NotLowered("pools with different numbers of heads")
        return sizes

    @staticmethod
    def _layer_of(key_pool: torch.Tensor, cache: PagedStaticCache) -> int:
        layers: list[Any] = cache.layers
        return next(i for i, layer in enumerate(layers) if layer.is_initialized and layer.keys is key_pool)

    # ---- modules whose operators are not recorded -------------------------------------------------------------------

    @contextlib.contextmanager
    def whole_modules(self) -> Iterator[None]:
        """Inside the context, the outputs of rotary modules are recorded as rows of tables that the same module computes by position, and
        the modules in `called` as calls of them."""
        rotary = [module for module in self.modules if is_rotary(module)]
        with contextlib.ExitStack() as stack:
            for then, modules in ((self._leave_rotary, rotary), (self._leave_called, self.called)):
                for module in modules:
                    enter, leave = (for_this_thread(hook, lambda *_: None) for hook in (self._enter, then))
                    stack.enter_context(module.register_forward_pre_hook(enter, with_kwargs=True, prepend=True))
                    stack.enter_context(module.register_forward_hook(leave, with_kwargs=True))
            yield

    def _enter(self, module: nn.Module, args: tuple, kwargs: dict) -> None:
        self._paused += 1
        self._traces.append(sys.gettrace())
        sys.settrace(None)  # what its code looks up is not taken for granted: the module itself is called

    def _leave(self) -> None:
        sys.settrace(self._traces.pop())
        self._paused -= 1

    def _leave_called(self, module: nn.Module, args: tuple, kwargs: dict, output: Any) -> None:
        self._leave()
        if isinstance(module, Change):
            x, base = map(self.value_of, args)
            if not self.tape.adapted(self._changes.index(module), x, base):
                change = self.tape.called(module, x, output.shape, output.dtype)
                base = self.tape.binary("add", base, change, output.shape, output.dtype)
            self._follow(output, base)
            return
        if len(args) != 1 or kwargs or not all(isinstance(tensor, torch.Tensor) for tensor in (args[0], output)):
            raise NotLowered(f"its {type(module).__name__} is called with other than one tensor")
        self._follow(output, self.tape.called(module, self.value_of(args[0]), output.shape, output.dtype))

    def _leave_rotary(self, module: nn.Module, args: tuple, kwargs: dict, output: Any) -> None:
        self._leave()
        assert self.batch is not None
        positions = self.batch.position_ids
        given = [*args, *kwargs.values()]
        place = positions.data_ptr(), positions.shape, positions.dtype
        known = [torch.is_tensor(value) and (value.data_ptr(), value.shape, value.dtype) == place for value in given]
        outputs = output if isinstance(output, tuple) else (output,)
        if sum(known) != 1 or any(
            angles.dim() != 3 or angles.shape[:2] != (1, positions.shape[1]) for angles in outputs
        ):
            return
        # Of hidden states, the module uses only dtype and device: one element is enough.
        given = [value[:, :1].clone() if torch.is_tensor(value) and value.dim() == 3 else value for value in given]
        given = [None if is_ours else value for is_ours, value in zip(known, given, strict=True)]
        rows = _by_position(weakref.ref(module), given, len(args), list(kwargs))
        with self.paused():
            computed = rows(int(positions.max()) + 1)
            equal = [
                torch.equal(angles[0], table[positions[0]]) for angles, table in zip(outputs, computed, strict=True)
            ]
        for part, (angles, is_equal) in enumerate(zip(outputs, equal, strict=True)):
            if is_equal:
                self._follow(angles, self.tape.looked_up(Table(rows, part), angles))


def _by_position(module: Any, given: list[Any], num_args: int, names: list[str]) -> Callable[[int], list[torch.Tensor]]:
    """A function that calls a rotary module, held weakly, for positions 0 .. n - 1 (None in `given`): outputs [n, R]."""

    def rows(count: int) -> list[torch.Tensor]:
        values = [torch.arange(count)[None] if value is None else value for value in given]
        outputs = module()(*values[:num_args], **dict(zip(names, values[num_args:], strict=True)))
        outputs = outputs if isinstance(outputs, tuple) else (outputs,)
        return [angles[0].contiguous() for angles in outputs]

    return rows
