"""Decoder layers as traced graphs: norms, rotary embeddings and MLPs become few kernels, attention stays ours.

Each decoder layer's `forward` is compiled, not the whole model: all layers of a kind share one compilation, which takes
seconds instead of minutes, and what happens between layers (taps, early exit) is not affected. Writing the cache and
attending are one opaque operator in it, so that a layer is one graph. That operator finds the batch and the layer in
`_running`, not among its arguments: those differ from call to call, and every difference would be compiled anew.

Two uses. With `compile` layers go through inductor, everywhere. Without it, in steps that are captured as CUDA graphs, they are
traced and rewritten only: of the usual layer nothing is left then for inductor to fuse, and tracing takes a second, not ten.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import types
import weakref
from collections.abc import Callable, Iterator
from typing import Any, TypeGuard, TypeVar

import torch
from torch import fx, nn
from torch._dynamo.exc import FailOnRecompileLimitHit, TorchDynamoException
from transformers import PreTrainedModel

from ...core.errors import UnsupportedModel
from ...kernels.dispatch import runs_rewritten_layers
from .. import architectures
from .rewriting import join_norms, put_together, rotate_with_attention, without_dropout, works_in_place
from .sparse_blocks import SparseBlocks

logger = logging.getLogger(__name__)

_NO_WINDOW, _WINDOW_OF_LAYER = -1, -2  # operators take integers


class Traced:
    """Stands for a batch while a layer is traced, and for its cache: keys and values pass through it unwritten."""

    def update(self, key_states, value_states, layer_idx, *args, **kwargs):
        """The new states: the attention operator writes them."""
        return key_states, value_states


TRACED = Traced()


class _Running(threading.local):
    """What the layer that runs in this thread attends with.

    Attributes:
        attention: as transformers' attention interface calls it.
        module: an attention module of the layer.
        index: of the layer's pools.
        batch: whose forward is running.
    """

    attention: Callable
    module: nn.Module | None
    index: int
    batch: Any


_running = _Running()


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
    """Our attention in a layer that is traced: query [1, H, T, D], key and value [1, Hk, T, D] → [1, T, H, Dv]."""
    window = kwargs.get("sliding_window", _WINDOW_OF_LAYER)
    return _attend(query, key, value, s_aux, scaling, softcap, _NO_WINDOW if window is None else window)


def rewritten(graph: fx.GraphModule) -> fx.GraphModule:
    """A traced layer's graph with what our kernels do in fewer launches; it is changed in place. Graphs that change tensors are
    left as they are."""
    if works_in_place(graph):
        return graph
    graph = rotate_with_attention(without_dropout(graph), _attend._opoverload, _attend_rotating._opoverload)
    graph = put_together(join_norms(graph))
    graph.graph.lint()
    graph.recompile()
    return graph


def inductor_after_rewriting(graph: fx.GraphModule, inputs: list[torch.Tensor]) -> Callable:
    """Inductor behind `rewritten`: a backend of torch.compile."""
    from torch._inductor.compile_fx import compile_fx

    return compile_fx(rewritten(graph), inputs)


def rewriting(graph: fx.GraphModule, inputs: list[torch.Tensor]) -> Callable:
    """`rewritten`, run operation by operation: a backend of torch.compile.

    Raises:
        RuntimeError: the graph changes tensors, so it would run as the layer does.
    """
    if works_in_place(graph):
        raise RuntimeError("the layer changes tensors in place")
    return rewritten(graph).forward


class TracedLayers:
    """The decoder layers of a model or head, traced when they are first run, in place of their own forwards while `active()`.

    Every kind of layer is traced for one token and for any number of tokens.

    Args:
        model: attends through our registered attention.
        attention: that attention.
        backend: of torch.compile.
    """

    whole = False  # layers that are no single graph are errors

    def __init__(self, model: nn.Module, attention: Callable, backend: str | Callable):
        self.attention, self.backend = attention, backend
        self._model = weakref.ref(model)
        self._functions: dict[Any, Callable] = {}  # by the class's own forward

    @contextlib.contextmanager
    def active(self) -> Iterator[None]:
        """Inside, the layers run traced."""
        model = self._model()
        assert model is not None
        replaced = []
        try:
            for index, layer in _layers_in(model):
                if "forward" not in vars(layer):  # else it is wrapped (accelerate's hooks) or traced already
                    layer.forward = self._forward_of(layer, index)
                    replaced.append(layer)
            yield
        finally:
            for layer in replaced:
                del layer.forward

    def serves(self, batch: Any, layer: nn.Module) -> bool:
        """Whether a layer runs traced in the forward of a batch."""
        return True

    def _forward_of(self, layer: nn.Module, index: int) -> Callable:
        own, compiled = layer.forward, self._compiled(type(layer).forward)
        modules = (each for each in layer.modules() if hasattr(each, "layer_idx") and hasattr(each, "config"))
        module = next(modules, layer)

        def forward(*args, **kwargs):
            batch = kwargs.get("specdec")
            if batch is None or not self.serves(batch, layer):  # None: somebody calls the model itself
                return own(*args, **kwargs)
            traced = [TRACED if each is batch.cache else each for each in args]
            named = {key: TRACED if each is batch.cache else each for key, each in kwargs.items()} | {"specdec": TRACED}
            _running.attention, _running.module, _running.index, _running.batch = self.attention, module, index, batch
            try:
                out = compiled(layer, *traced, **named)
                return self.checked(layer, out, batch, lambda: own(*args, **kwargs), args, kwargs)
            except (RuntimeError, FailOnRecompileLimitHit) as error:
                if not is_of_tracing(error):
                    raise
                self.refuse(layer, error)
                return own(*args, **kwargs)  # had it run untraced, it would write the same keys again
            finally:
                _running.batch = _running.module = None  # nothing of a model's outlives its call

        return forward

    def checked(self, layer: nn.Module, out: Any, batch: Any, own: Callable[[], Any], args: tuple, kwargs: dict) -> Any:
        """What a traced layer returned, or what it should have: what its own forward returns of these arguments."""
        return out

    def refuse(self, layer: nn.Module, error: Exception) -> None:
        """A layer could not be traced: raise the error, or have layers of its class run as they are."""
        raise error

    def _compiled(self, forward: Any) -> Callable:
        if forward not in self._functions:
            traced = torch.compile(_own_copy(forward), dynamic=True, fullgraph=self.whole, backend=self.backend)

            def call(*args, **kwargs):
                # Else epsilons and scales are made tensors at every call, and numbers of them again.
                with torch._dynamo.config.patch(specialize_float=True):
                    return traced(*args, **kwargs)

            self._functions[forward] = call
        return self._functions[forward]


class CompiledLayers(TracedLayers):
    """Layers that inductor compiles, after `rewritten` where Triton's kernels run.

    Args:
        backend: another one (tests).

    Raises:
        UnsupportedModel: there is no C++ compiler for a model on a CPU.
    """

    def __init__(self, model: PreTrainedModel, attention: Callable, backend: str | Callable | None = None):
        if backend is None:
            check_compiler(model.device)
            backend = inductor_after_rewriting if runs_rewritten_layers(model.device) else "inductor"
        super().__init__(model, attention, backend)


class RewrittenLayers(TracedLayers):
    """Layers that are traced and rewritten in forwards that are captured, and run as they are in all others.

    So tracing is paid where a step is captured, and what it costs the host per call is never paid again. What a new graph
    returns first is compared with what the layer returns; if it is something else, there is a warning. Such layers, and those
    that are no single graph or change tensors, run as they are in captured forwards, too.
    """

    whole = True

    def __init__(self, model: nn.Module, attention: Callable, backend: Callable = rewriting):
        super().__init__(model, attention, self._trace)
        self._rewrite = backend
        self._is_new = False  # a graph has been made and not been compared
        self._blocks = SparseBlocks()
        self.refused: dict[type[nn.Module], str] = {}  # classes of layers that run as they are, and why

    def _trace(self, graph: fx.GraphModule, inputs: list[torch.Tensor]) -> Callable:
        run = self._rewrite(graph, inputs)
        self._is_new = True
        return run

    @contextlib.contextmanager
    def active(self) -> Iterator[None]:
        """As for all; mixtures of experts are one operator."""
        model = self._model()
        assert model is not None
        with self._blocks.opaque([layer for _, layer in _layers_in(model)]), super().active():
            yield

    def serves(self, batch: Any, layer: nn.Module) -> bool:
        """In captured batches, but those of deterministic models: each of their operations has to be seen."""
        captured = batch.captured and batch.invariant is None
        return captured and type(layer) not in self.refused and self._blocks.ready(layer)

    def checked(self, layer: nn.Module, out: Any, batch: Any, own: Callable[[], Any], args: tuple, kwargs: dict) -> Any:
        """As for all; a graph is made before it is captured, and only then compared."""
        if not self._is_new or (torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()):
            return out
        self._is_new = False
        expected = own()
        states = _states(expected)
        given = (each for each in (*args, *kwargs.values()) if torch.is_tensor(each) and each.shape == states.shape)
        before = next(given, torch.zeros_like(states))
        error = deviation(_states(out), states, before, int(batch.inputs.query_starts[-1]))
        if error <= 1:
            return out
        name = type(layer).__name__
        self.refused[type(layer)] = (
            f"its rewritten graph computes something else ({error:.1f} times what rounding may do)"
        )
        logger.warning("%s is captured as it is: %s. Please report it.", name, self.refused[type(layer)])
        return expected

    def refuse(self, layer: nn.Module, error: Exception) -> None:
        """Layers of this class run as they are from now on."""
        reason = " ".join(str(error).split("\n")[:2])  # a backend's error has its message in the second line
        self.refused[type(layer)] = reason
        logger.info("%s is captured as it is, without our kernels for whole layers: %s", type(layer).__name__, reason)


class _Indexed(nn.Module):
    layer_idx: int


def _states(out: Any) -> torch.Tensor:
    """Hidden states [1, T, H] of what a layer returned."""
    return out if torch.is_tensor(out) else out[0]


def deviation(found: torch.Tensor, expected: torch.Tensor, before: torch.Tensor, num_tokens: int) -> float:
    """How far a layer's output is from what is expected, over what roundings of sums in another order may do.

    What the layer adds to the residual stream is the measure, as it can be small beside it; of the stream itself the last bits.

    Args:
        found, expected, before: [1, T, H] after the layer and before it.
        num_tokens: those that count; what follows them belongs to no row.
    """
    eps = torch.finfo(expected.dtype).eps
    found, expected, before = (each[0, :num_tokens].double() for each in (found, expected, before))
    known = expected.isfinite().all(1)  # a capture's warm-up may meet keys that were never written
    found, expected, before = found[known], expected[known], before[known]
    added = expected - before
    allowed = max(16 * eps, 1e-3) * added.norm() + 0.05 * eps * expected.norm()
    difference = (found - expected).norm()
    return float(difference / allowed) if difference else 0.0


def _layers_in(model: nn.Module) -> list[tuple[int, nn.Module]]:
    """Decoder layers, with the index of the pools that each attends to."""
    if isinstance(model, PreTrainedModel):
        return list(enumerate(architectures.decoder_layers(model)))
    return [(child.layer_idx, layer) for layer in model.modules() for child in layer.children() if _is_innermost(child)]


def _is_innermost(module: nn.Module) -> TypeGuard[_Indexed]:
    """Whether a module knows its pools' index and nothing in it does: attention, not a layer that is told it too."""
    return [each for each in module.modules() if hasattr(each, "layer_idx")] == [module]


_shared = weakref.WeakKeyDictionary[nn.Module, dict[type[TracedLayers], "weakref.ref[TracedLayers]"]]()
_Layers = TypeVar("_Layers", bound=TracedLayers)


def layers_of(model: nn.Module, attention: Callable, kind: type[_Layers]) -> _Layers:
    """The traced layers of a model or head, of one kind, the same for all who hold them. Args, errors: as for that kind."""
    kinds = _shared.setdefault(model, {})
    reference = kinds.get(kind)
    found = None if reference is None else reference()
    if not isinstance(found, kind):
        make: Any = kind
        found = make(model, attention)
        kinds[kind] = weakref.ref(found)
    return found


def is_of_tracing(error: Exception) -> bool:
    """Whether dynamo gave up, or was switched off: what it then says of `fullgraph` has no class of its own."""
    switched_off = type(error) is RuntimeError and "fullgraph=True" in str(error)
    return switched_off or isinstance(error, (TorchDynamoException, FailOnRecompileLimitHit))


def _own_copy(function: types.FunctionType) -> types.FunctionType:
    """The same function with code of its own: what dynamo compiles is kept, counted and limited per code object, and
    several models of a class would use up the limit together."""
    copy = types.FunctionType(
        function.__code__.replace(),
        function.__globals__,
        function.__name__,
        function.__defaults__,
        function.__closure__,
    )
    copy.__kwdefaults__ = function.__kwdefaults__
    return copy


def check_compiler(device: torch.device) -> None:
    """Raise UnsupportedModel where inductor would find no C++ compiler, which it needs for CPUs (CUDA needs Triton)."""
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
