"""CUDA graphs on a CPU: what would be captured runs again in Python, attention by its definition over the static buffers."""

import contextlib
import dataclasses
import functools
import itertools

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from hf_specdec.kernels import attention
from hf_specdec.kernels.attention import reference
from hf_specdec.kernels.attention import triton as attention_kernels
from hf_specdec.kernels.attention.inputs import Window
from hf_specdec.kernels.cache import reference as cache_reference
from hf_specdec.kernels.random_bits import reference as random_bits
from hf_specdec.model import captures
from hf_specdec.model.options import compiled

_aten = torch.ops.aten
# What waits for the device, or makes a shape of what is on it.
_WAITS = {
    _aten._local_scalar_dense.default, _aten.nonzero.default, _aten.masked_select.default, _aten.equal.default,
    _aten.is_nonzero.default, _aten.repeat_interleave.Tensor, _aten._unique2.default, _aten.unique_dim.default,
    _aten.unique_consecutive.default, _aten.bincount.default,
}  # fmt: skip
_FROM_HOST = ["tensor", "from_numpy", "as_tensor", "asarray"]
_OF_TENSORS = [
    "item",
    "tolist",
    "numpy",
    "cpu",
    "__bool__",
    "__int__",
    "__float__",
    "__index__",
    "__array__",
    "new_tensor",
]
_on_host = []  # not empty: a stand-in for a kernel runs, which may do on the host what it likes


class _NoHost(TorchDispatchMode):
    """Refuses operations that a CUDA graph cannot hold."""

    @classmethod
    def is_infra_mode(cls):
        """Dynamo would trace nothing inside a mode of users'."""
        return True

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        masked = func in (_aten.index.Tensor, _aten.index_put.default, _aten.index_put_.default) and any(
            each is not None and each.dtype in (torch.bool, torch.uint8) for each in args[1]
        )
        if not _on_host and (func in _WAITS or masked):
            raise RuntimeError(f"operation not permitted when stream is capturing: {func}")
        return func(*args, **(kwargs or {}))


@contextlib.contextmanager
def as_if_captured():
    """No tensor's values reach the host, none come from there: what capturing a graph on a GPU would refuse.

    On a CPU copies between devices cannot be seen: `to` is refused only where it names the CPU, indices that are lists are not.
    """

    def refusing(name, original):
        @functools.wraps(original)
        def call(*args, **kwargs):
            if not _on_host:
                raise RuntimeError(f"operation not permitted when stream is capturing: {name}")
            return original(*args, **kwargs)

        return call

    def staying(original):
        refused = refusing("to", original)

        @functools.wraps(original)
        def call(tensor, *args, **kwargs):
            leaves = any(isinstance(each, str) and each == "cpu" for each in (*args, *kwargs.values()))
            return (refused if leaves else original)(tensor, *args, **kwargs)

        return call

    replaced = {(torch, name): refusing(name, getattr(torch, name)) for name in _FROM_HOST}
    replaced |= {(torch.Tensor, name): refusing(name, getattr(torch.Tensor, name)) for name in _OF_TENSORS}
    replaced[torch.Tensor, "to"] = staying(torch.Tensor.to)
    replaced[random_bits, "on_host"] = lambda device: False
    with _in_place(replaced), _NoHost():
        yield


@contextlib.contextmanager
def _in_place(replaced):
    """Attributes by (owner, name). What was inherited is so again afterwards: a method of its own changes what C sees in a type."""
    before = {(owner, name): vars(owner).get(name) for owner, name in replaced}
    for (owner, name), value in replaced.items():
        setattr(owner, name, value)
    try:
        yield
    finally:
        for (owner, name), value in before.items():
            if value is None:
                delattr(owner, name)
            else:
                setattr(owner, name, value)


def stands_for_a_kernel(function):
    """What it does is one launch on a GPU."""

    @functools.wraps(function)
    def call(*args, **kwargs):
        _on_host.append(function)
        try:
            return function(*args, **kwargs)
        finally:
            _on_host.pop()

    return call


class CaptureInPython:
    """Replaying runs the same once more and writes into the first run's outputs, as a graph does, and over those of all other graphs,
    which share their memory.

    Attributes:
        count: functions captured.
    """

    def __init__(self):
        self.count, self.outputs = 0, []

    def forget(self):
        """A new memory pool."""
        self.outputs = []

    def __call__(self, function):
        self.count += 1
        function()  # a graph's warm-up may prepare on the host what stays
        with as_if_captured():
            out = function()

        def replay():
            for other in self.outputs:
                overwrite(other if other is not out else ())
            with as_if_captured():
                again = function()
            for kept, new in zip(tensors_of(out), tensors_of(again), strict=True):
                kept.copy_(new)

        self.outputs.append(out)
        overwrite(out)  # capturing computes nothing
        return out, replay


def overwrite(output):
    """What nobody may read."""
    for tensor in tensors_of(output):
        tensor.fill_(float("nan") if tensor.is_floating_point() else -1)


def tensors_of(output):
    """Every tensor of a forward's or a round's output."""
    if torch.is_tensor(output):
        return [output]
    found = (
        output if isinstance(output, tuple) else [getattr(output, field.name) for field in dataclasses.fields(output)]
    )
    return [t for each in found for t in (each.values() if isinstance(each, dict) else [each]) if torch.is_tensor(t)]


@stands_for_a_kernel
def attention_by_definition(query, key_pool, value_pool, inputs, scaling, *, window=None, softcap=None, sinks=None):
    """`reference.paged_attention` of what AttentionInputs say. Tokens in no row get NaN: nobody may read them."""
    starts, rows, masks = inputs.query_starts.tolist(), [], []
    group = query.shape[1] // key_pool.shape[1]
    for row, (start, end) in enumerate(itertools.pairwise(starts)):
        if start == end:
            continue
        assert end - start <= inputs.max_query_length
        length, index = int(inputs.key_lengths[row]), torch.arange(int(inputs.key_lengths[row]))
        slots = (
            inputs.block_tables[row].long()[index // inputs.block_size] * inputs.block_size + index % inputs.block_size
        )
        rows.append(reference.AttentionRow(start, end, length, -1, slots))
        allowed = index <= torch.arange(length - end + start, length)[:, None]
        key_positions = index.clone()
        region = 0 if inputs.visibility is None else int(inputs.region_lengths[row])
        if region:
            bits = (inputs.visibility[start:end, :, None] >> torch.arange(32)).flatten(1)[:, :region] & 1
            allowed = torch.cat([torch.ones(end - start, length - region, dtype=torch.bool), bits > 0], dim=1)
            key_positions[length - region :] = inputs.region_positions[row, :region]
        if window is not None:
            size, kept = window if isinstance(window, Window) else (window, 0)
            allowed &= (inputs.positions[start:end, None] - key_positions < size) | (key_positions < kept)
        assert allowed.any(1).all()
        masks.append(
            torch.zeros(allowed.shape, dtype=query.dtype).masked_fill_(~allowed, float("-inf")).repeat(group, 1)
        )
    found = reference.paged_attention(query[: starts[-1]], key_pool, value_pool, rows, masks, scaling, softcap, sinks)
    return torch.cat([found, found.new_full((len(query) - len(found), *found.shape[1:]), float("nan"))])


_WRITE = cache_reference.write_keys_values


@stands_for_a_kernel
def write_by_definition(keys, values, key_pool, value_pool, slots, scales=None):
    """As the kernel: tokens with a negative slot are not written."""
    there = slots >= 0
    assert len(slots[there].unique()) == int(there.sum())
    _WRITE(keys[there], values[there], key_pool, value_pool, slots[there], scales)


_SERVES = compiled.RewrittenLayers.serves


@pytest.fixture
def rewritten_graphs(graphs_in_python, defined_attention, monkeypatch):
    """Layers of captured steps are traced and rewritten, too; yields the list of their graphs, and those who made them."""
    made, makers = [], []
    backend, original = compiled.rewriting, compiled.RewrittenLayers.__init__

    def listing(graph, inputs):
        run = backend(graph, inputs)
        made.append(graph)
        return run

    def listed(self, model, attention):
        original(self, model, attention, listing)
        makers.append(self)

    monkeypatch.setattr(compiled.RewrittenLayers, "serves", _SERVES)
    monkeypatch.setattr(compiled.RewrittenLayers, "__init__", listed)
    with torch._dynamo.config.patch(fail_on_recompile_limit_hit=True):
        yield made, makers


@pytest.fixture
def graphs_in_python(monkeypatch):
    """`cuda_graphs` works on the CPU; yields a list of everything that holds captures from now on. Layers are not traced."""
    made, original = [], captures.Captures.__init__

    def listed(self, *args, **kwargs):
        original(self, *args, **kwargs)
        made.append(self)

    monkeypatch.setattr(compiled.RewrittenLayers, "serves", lambda *args: False)  # tracing takes seconds
    monkeypatch.setattr(captures.Captures, "__init__", listed)
    monkeypatch.setattr(captures, "CudaGraphCapture", CaptureInPython)
    monkeypatch.setattr(captures, "capture_obstacle", lambda model: None)
    return made


@pytest.fixture
def defined_attention(monkeypatch):
    """Attention and writing keys by their definitions, from what the Triton kernels would read."""
    monkeypatch.setattr(attention.attend, "on", lambda device, native: attention_kernels.attend)
    monkeypatch.setattr(attention_kernels, "paged_attention", attention_by_definition)
    monkeypatch.setattr(cache_reference, "write_keys_values", write_by_definition)
