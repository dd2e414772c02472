"""Decoder layers as traced graphs: norms, rotary embeddings and MLPs become a few kernels; attention stays ours.

Each decoder layer's `forward` is compiled, not the whole model: all layers of a kind share one compilation, which takes
seconds instead of minutes, and code between layers (taps, early exit) is not affected. Writing the cache and attending are
one opaque operator, so that a layer is one graph. The operator finds the batch and the layer in `_running` instead of in its
arguments: these differ from call to call, and every difference would cause a recompilation.

Two uses. With `compile`, layers go through inductor in all forwards. Without it, they are only traced and rewritten, in
forwards that are captured as CUDA graphs: in a usual layer that leaves inductor nothing to fuse, and it takes one second instead of ten.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import types
import weakref
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import torch
from torch import fx, nn
from torch._dynamo.exc import FailOnRecompileLimitHit, TorchDynamoException
from transformers import PreTrainedModel

from ...core.errors import UnsupportedModel
from ...kernels.dispatch import uses_triton
from .. import architectures
from ..structure import forwards_of
from ..threads import replaced_values
from .rewriting import fuse_linears, fuse_norms, fuse_rotation, modifies_in_place, without_dropout

logger = logging.getLogger(__name__)

_NO_WINDOW, _WINDOW_OF_LAYER = -1, -2  # custom operators take integers, not None


class Traced:
    """Placeholder for a batch and its cache while a layer is traced. Keys and values pass through it unwritten."""

    def update(self, key_states, value_states, layer_idx, *args, **kwargs):
        """Return the new states unchanged; the attention operator writes them."""
        return key_states, value_states


TRACED = Traced()


class _RunningLayer(threading.local):
    """The layer and the batch that run in this thread."""

    attention: Callable  # ours, with the signature of transformers' attention interface
    module: nn.Module | None  # the layer's attention module
    index: int  # of the layer's pools in the cache
    batch: Any  # whose forward is running
    block: Any  # the layer's SparseBlock; None: it has none


_running = _RunningLayer()


@torch.library.custom_op(
    "hf_specdec::attend",
    mutates_args=(),
    schema="(Tensor query, Tensor key, Tensor value, Tensor? sinks, float? scaling, float? softcap, int window) -> Tensor",
)
def _attend(query, key, value, sinks, scaling, softcap, window):
    _pools().update(key, value)
    return _attention(query, key, value, sinks, scaling, softcap, window)


@torch.library.custom_op(
    "hf_specdec::attend_rotating",
    mutates_args=(),
    schema="(Tensor query, Tensor key, Tensor value, Tensor cos, Tensor sin, Tensor? sinks, float? scaling, float? softcap, "
    "int window) -> Tensor",
)
def _attend_rotating(query, key, value, cos, sin, sinks, scaling, softcap, window):
    query = _pools().rotate_and_update(query, key, value, cos, sin)
    return _attention(query, key, value, sinks, scaling, softcap, window)


def _pools() -> Any:
    return _running.batch.cache.layers[_running.index]


def _attention(query, key, value, sinks, scaling, softcap, window):
    run = _running
    options = {} if window == _WINDOW_OF_LAYER else {"sliding_window": None if window == _NO_WINDOW else window}
    out, _ = run.attention(
        run.module, query, key, value, None, scaling=scaling, softcap=softcap, s_aux=sinks, specdec=run.batch, **options
    )
    return out.contiguous()


@_attend.register_fake
def _(query, key, value, sinks, scaling, softcap, window):
    return query.new_empty(1, query.shape[2], query.shape[1], value.shape[3])


@_attend_rotating.register_fake
def _(query, key, value, cos, sin, sinks, scaling, softcap, window):
    return query.new_empty(1, query.shape[2], query.shape[1], value.shape[3])


def traced_attention(query, key, value, scaling=None, softcap=None, s_aux=None, **kwargs) -> torch.Tensor:
    """Our attention as one operator of a traced layer: query [1, H, T, D], key and value [1, Hk, T, ..] → [1, T, H, Dv]."""
    window = kwargs.get("sliding_window", _WINDOW_OF_LAYER)
    return _attend(query, key, value, s_aux, scaling, softcap, _NO_WINDOW if window is None else window)


def rewritten(graph: fx.GraphModule) -> fx.GraphModule:
    """Rewrite a traced layer's graph in place so that it uses our fused kernels; returns it. Graphs that modify tensors in
    place are left unchanged."""
    if modifies_in_place(graph):
        return graph
    graph = fuse_rotation(without_dropout(graph), _attend._opoverload, _attend_rotating._opoverload)
    graph = fuse_linears(fuse_norms(graph))
    graph.graph.lint()
    graph.recompile()
    return graph


def inductor_after_rewriting(graph: fx.GraphModule, inputs: list[torch.Tensor]) -> Callable:
    """A backend of torch.compile: `rewritten`, then inductor."""
    from torch._inductor.compile_fx import compile_fx

    return compile_fx(rewritten(graph), inputs)  # pyright: ignore[reportReturnType] (typed more widely)


def inductor_on_a_cpu(graph: fx.GraphModule, inputs: list[torch.Tensor]) -> Callable:
    """torch.compile's inductor, told this processor's vector width: its cache does not tell code for other widths apart."""
    from torch._inductor.compile_fx import compile_fx
    from torch._inductor.cpu_vec_isa import pick_vec_isa

    width = pick_vec_isa().bit_width()
    return compile_fx(graph, inputs, config_patches={"cpp.simdlen": width})  # pyright: ignore[reportReturnType, reportArgumentType]


def rewriting(graph: fx.GraphModule, inputs: list[torch.Tensor]) -> Callable:
    """A backend of torch.compile: `rewritten`, run operation by operation. Raises RuntimeError: the graph modifies tensors in place, so
    it cannot be rewritten."""
    if modifies_in_place(graph):
        raise RuntimeError("the layer modifies tensors in place")
    return rewritten(graph).forward


class CompiledLayers:
    """Traced versions of the forwards of a model's or head's decoder layers, used while `active()`: compiled by inductor, after `rewritten`
    where the Triton kernels run.

    Layers are traced when they first run: every kind of layer once for one token and once for any number of tokens.

    Args:
        model: a model or head that attends through our registered attention.
        attention: our attention function.
        backend: a backend of torch.compile in place of inductor.

    Raises:
        UnsupportedModel: the model is on a CPU and no C++ compiler works.
    """

    whole = False  # True: a layer that is not a single graph is an error

    def __init__(self, model: nn.Module, attention: Callable, backend: str | Callable | None = None):
        if backend is None:
            device = next(model.parameters()).device
            check_compiler(device)
            backend = inductor_after_rewriting if uses_triton(device) else inductor_on_a_cpu
        self.attention, self.backend = attention, backend
        self._model = weakref.ref(model)
        self._functions: dict[Any, Callable] = {}  # compiled functions by the forward of the layer's class
        self._blocks: dict[nn.Module, SparseBlock] = {}  # by layer

    def _layers(self) -> list[tuple[int, nn.Module]]:
        model = self._model()
        assert model is not None
        return _layers_in(model)

    def active(self) -> contextlib.AbstractContextManager[None]:
        """Inside the context, the layers run traced."""
        # A layer with a forward of its own is wrapped (accelerate's hooks) or already traced.
        layers = ((index, layer) for index, layer in self._layers() if "forward" not in vars(layer))
        return replaced_values((vars(layer), "forward", self._forward_of(layer, index)) for index, layer in layers)

    def serves(self, batch: Any, layer: nn.Module) -> bool:
        """True if a layer runs traced in the forward of this batch."""
        return True

    def _forward_of(self, layer: nn.Module, index: int) -> Callable:
        original, compiled = layer.forward, self._compiled(type(layer).forward)
        modules = (module for module in layer.modules() if hasattr(module, "layer_idx") and hasattr(module, "config"))
        module = next(modules, layer)

        def forward(*args, **kwargs):
            batch = kwargs.get("specdec")
            if batch is None or not self.serves(batch, layer):  # None: the caller runs the model directly
                return original(*args, **kwargs)
            traced = [TRACED if arg is batch.cache else arg for arg in args]
            named = {key: TRACED if value is batch.cache else value for key, value in kwargs.items()}
            named["specdec"] = TRACED
            _running.attention, _running.module, _running.index, _running.batch = self.attention, module, index, batch
            _running.block = self._blocks.get(layer)
            try:
                out = compiled(layer, *traced, **named)
                return self.checked(layer, out, batch, lambda: original(*args, **kwargs), args, kwargs)
            except (RuntimeError, FailOnRecompileLimitHit) as error:
                if not is_of_tracing(error):
                    raise
                self.refuse(layer, error)
                return original(*args, **kwargs)  # safe after a partial run: it writes the same keys again
            finally:
                # hold no reference to the model after its call
                _running.batch = _running.module = _running.block = None

        return forward

    def checked(self, layer: nn.Module, out: Any, batch: Any, run: Callable[[], Any], args: tuple, kwargs: dict) -> Any:
        """The output to use: the traced layer's `out`, or the result of `run()`, the layer's own forward, if `out` is wrong.

        Args:
            args, kwargs: the arguments of the call.
        """
        return out

    def refuse(self, layer: nn.Module, error: Exception) -> None:
        """Handle a layer that could not be traced: raise the error, or run layers of its class untraced from now on."""
        raise error

    def _compiled(self, forward: Any) -> Callable:
        if forward not in self._functions:
            traced = torch.compile(_own_copy(forward), dynamic=True, fullgraph=self.whole, backend=self.backend)

            def call(*args, **kwargs):
                # Otherwise every call turns epsilons and scales into tensors and back into numbers.
                with torch._dynamo.config.patch(specialize_float=True):
                    return traced(*args, **kwargs)

            self._functions[forward] = call
        return self._functions[forward]


class RewrittenLayers(CompiledLayers):
    """Layers that are traced and rewritten in captured forwards, and run untraced in all others.

    So the cost of tracing, and the host's extra cost per call, are paid only when a step is captured. The first output of a
    new graph is compared with the layer's own. If they differ, a warning is logged and layers of this class run untraced in
    captured forwards, too. So do layers that are not a single graph or that modify tensors in place.
    """

    whole = True

    def __init__(self, model: nn.Module, attention: Callable, backend: Callable = rewriting):
        super().__init__(model, attention, self._trace)
        self._rewrite = backend
        self._is_new = False  # the latest graph has not been compared yet
        self._num_outputs: dict[type[nn.Module], int] = {}  # by the class of a SparseBlock
        self.refused: dict[type[nn.Module], str] = {}  # layer classes that run untraced, and why

    def _trace(self, graph: fx.GraphModule, inputs: list[torch.Tensor]) -> Callable:
        run = self._rewrite(graph, inputs)
        self._is_new = True
        return run

    @contextlib.contextmanager
    def active(self) -> Iterator[None]:
        """See CompiledLayers; a mixture of experts is traced as one operator, in layers that have exactly one."""
        made: dict[nn.Module, nn.Module] = {}
        try:
            for _, layer in self._layers():
                blocks = [module for module in layer.modules() if "experts" in module._modules]
                # A block whose forward was replaced before is wrapped by other code, or is opaque already.
                if len(blocks) == 1 and "forward" not in vars(blocks[0]):
                    self._blocks[layer] = SparseBlock(blocks[0], self._num_outputs)
                    # A bound method, because dynamo would trace callable objects one by one.
                    blocks[0].forward = self._blocks[layer].forward
                    made[layer] = blocks[0]
            with super().active():
                yield
        finally:
            for layer, block in made.items():
                del self._blocks[layer], block.forward

    def serves(self, batch: Any, layer: nn.Module) -> bool:
        """True in captured batches, except for deterministic models: their dispatch mode must see every operation. A block's number of
        outputs must be known."""
        captured, block = batch.captured and batch.invariant is None, self._blocks.get(layer)
        return captured and type(layer) not in self.refused and (block is None or block.kind in self._num_outputs)

    def checked(self, layer: nn.Module, out: Any, batch: Any, run: Callable[[], Any], args: tuple, kwargs: dict) -> Any:
        """See CompiledLayers. Compares a new graph in the warm-up run before its capture; nothing can be compared during one."""
        if not self._is_new or (torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()):
            return out
        self._is_new = False
        expected = run()
        states = _states(expected)
        inputs = (
            tensor for tensor in (*args, *kwargs.values()) if torch.is_tensor(tensor) and tensor.shape == states.shape
        )
        before = next(inputs, torch.zeros_like(states))
        error = deviation(_states(out), states, before, int(batch.inputs.query_starts[-1]))
        if error <= 1:
            return out
        reason = f"its rewritten graph computes other values ({error:.1f} times the rounding tolerance)"
        self.refused[type(layer)] = reason
        logger.warning("%s is captured without rewriting: %s. Please report it.", type(layer).__name__, reason)
        return expected

    def refuse(self, layer: nn.Module, error: Exception) -> None:
        """Run layers of this class untraced from now on."""
        reason = " ".join(str(error).split("\n")[:2])  # a backend's error has its message in the second line
        self.refused[type(layer)] = reason
        logger.info("%s is captured without rewriting, so without our fused kernels: %s", type(layer).__name__, reason)


def _states(out: Any) -> torch.Tensor:
    return out if torch.is_tensor(out) else out[0]


def deviation(output: torch.Tensor, expected: torch.Tensor, before: torch.Tensor, num_tokens: int) -> float:
    """Distance of a layer's output from the expected one, divided by the tolerance for sums that round in another order.

    The tolerance is relative to what the layer adds to the residual stream, which can be small compared with the stream, plus
    the last bits of the stream itself.

    Args:
        output, expected: [1, T, H], of the layer.
        before: [1, T, H], the layer's input.
        num_tokens: only this many first tokens are compared; later ones belong to no row.
    """
    eps = torch.finfo(expected.dtype).eps
    output, expected, before = (hidden[0, :num_tokens].double() for hidden in (output, expected, before))
    known = expected.isfinite().all(1)  # a capture's warm-up may read keys that were never written
    output, expected, before = output[known], expected[known], before[known]
    added = expected - before
    allowed = max(16 * eps, 1e-3) * added.norm() + 0.05 * eps * expected.norm()
    difference = (output - expected).norm()
    return float(difference / allowed) if difference else 0.0


def _layers_in(model: nn.Module) -> list[tuple[int, nn.Module]]:
    """Decoder layers, each with the index of the pools it attends to."""
    if isinstance(model, PreTrainedModel):
        return list(enumerate(architectures.decoder_layers(model)))
    pairs: list[tuple[Any, nn.Module]] = [(child, layer) for layer in model.modules() for child in layer.children()]
    # The innermost module with a `layer_idx` is the attention module; a layer around it may have one too.
    return [
        (child.layer_idx, layer)
        for child, layer in pairs
        if [module for module in child.modules() if hasattr(module, "layer_idx")] == [child]
    ]


_shared = weakref.WeakKeyDictionary[nn.Module, "weakref.WeakValueDictionary[tuple, CompiledLayers]"]()
_Layers = TypeVar("_Layers", bound="CompiledLayers")


def layers_of(model: nn.Module, attention: Callable, kind: type[_Layers]) -> _Layers:
    """The traced layers of a model or head, of class `kind`, shared by all callers until something that the forward calls is replaced,
    which the tracer may not notice. Args and errors: see `kind`."""
    known, key = _shared.setdefault(model, weakref.WeakValueDictionary()), (kind, forwards_of(model))
    layers: Any = known.get(key)
    if layers is None:
        layers = known[key] = kind(model, attention)
    return layers


def is_of_tracing(error: Exception) -> bool:
    """True if dynamo gave up or is switched off. In the latter case its error is a RuntimeError that names `fullgraph`."""
    switched_off = type(error) is RuntimeError and "fullgraph=True" in str(error)
    return switched_off or isinstance(error, (TorchDynamoException, FailOnRecompileLimitHit))


def _own_copy(function: types.FunctionType) -> types.FunctionType:
    """A copy of a function with its own code object, because Dynamo limits compilations per code object."""
    code, scope = function.__code__.replace(), function.__globals__
    copy = types.FunctionType(code, scope, function.__name__, function.__defaults__, function.__closure__)
    copy.__kwdefaults__ = function.__kwdefaults__
    return copy


def check_compiler(device: torch.device) -> None:
    """Raise UnsupportedModel if inductor would find no C++ compiler, which it needs on CPUs (on CUDA it needs Triton)."""
    if device.type != "cpu":
        return
    from torch._inductor.cpp_builder import get_cpp_compiler
    from torch._inductor.exc import InvalidCxxCompiler

    try:
        get_cpp_compiler()
    except InvalidCxxCompiler as error:
        raise UnsupportedModel(
            f"'compile' needs a C++ compiler for a model on a CPU, and none works here ({error}). Install g++ or clang++, or "
            "leave the key out."
        ) from error


# ---- mixtures of experts, as one opaque operator of a traced layer ----
#
# They modify tensors in place, so a graph that contains their operations could not be rewritten. The operator runs the block's own forward.


@torch.library.custom_op("hf_specdec::sparse_block", mutates_args=(), schema="(Tensor x) -> Tensor")
def _sparse_block(x):
    out = _running.block.original(x)
    return (out if torch.is_tensor(out) else out[0]).contiguous()


@_sparse_block.register_fake
def _(x):
    return x.new_empty(x.shape)


class SparseBlock:
    """Replaces the `forward` of a block, a router with its experts: hidden states [1, T, H] → [1, T, H].

    The block returns this tensor alone or as the first of several outputs.

    Args:
        num_outputs: number of outputs by the block's class, known after its first call; 0: a tensor instead of a tuple.
    """

    def __init__(self, block: nn.Module, num_outputs: dict[type[nn.Module], int]):
        self.original: Callable[..., Any] = block.forward
        self.kind, self.num_outputs = type(block), num_outputs

    def forward(self, hidden_states: torch.Tensor, *args, **kwargs) -> Any:
        """The block's own forward; while a layer is traced, the operator, with None for outputs after the first."""
        if torch.compiler.is_compiling() and not args and not kwargs:
            out, count = _sparse_block(hidden_states), self.num_outputs[self.kind]
            return (out, *[None] * (count - 1)) if count else out
        out = self.original(hidden_states, *args, **kwargs)
        self.num_outputs[self.kind] = 0 if torch.is_tensor(out) else len(out)
        return out
