"""The attention function that we register with transformers as "hf_specdec": it reads the pages of a packed batch."""

from __future__ import annotations

import contextlib
import copyreg
import functools
import threading
from collections.abc import Iterator
from typing import Any

import torch
from transformers import AttentionInterface, PreTrainedConfig
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

from ..cache.paged_layer import tokens_first
from ..core.names import ATTENTION_NAME
from ..kernels.attention.inputs import window_parts
from .architectures import layer_window
from .latent import attend_latent
from .options.compiled import TRACED, traced_attention
from .packed_batch import PackedBatch
from .segments import attend_segments


def paged_attention_forward(
    module, query, key, value, attention_mask, scaling=None, dropout=0.0, specdec=None, **kwargs
):
    """Attend to the pages of the packed batch `specdec`; without it, plain sdpa. Arguments as transformers passes them.

    Returns: ([1, T, H, Dv], None) from query [1, H, T, D] and key, value [1, Hk, T, ..], which are in the cache already.
    """
    if specdec is TRACED:
        return traced_attention(query, key, value, scaling=scaling, **kwargs), None
    specdec = vars(_here).pop("batch", None) or specdec
    if specdec is None:
        return sdpa_attention_forward(
            module, query, key, value, attention_mask, scaling=scaling, dropout=dropout, **kwargs
        )
    batch: PackedBatch = specdec
    batch.attention_calls += 1
    layer = batch.cache.layers[module.layer_idx]
    is_latent = hasattr(module, "expand_kv")
    # JetMoE repeats its keys per expert after they were cached.
    if not is_latent and key.shape[1] != layer.keys.shape[1]:
        raise RuntimeError(f"attention reads {key.shape[1]} key heads, and the cache holds {layer.keys.shape[1]}")
    if "sliding_window" in kwargs:
        window = kwargs["sliding_window"]
    else:
        known = batch.cache.windows  # by layer, because every layer asks in every step
        if module.layer_idx not in known:
            known[module.layer_idx] = layer_window(module)
        window = known[module.layer_idx]
    if batch.cache.window is not None:
        window = min(window, window_parts(batch.cache.window)[0]) if window else batch.cache.window
    scaling = query.shape[-1] ** -0.5 if scaling is None else scaling
    padding = 0 if is_latent else key.shape[3] - layer.keys.shape[2]  # Moonshine pads its heads after they were cached
    query = query[..., :-padding] if padding else query
    attend, packed = batch.on(query.device).attend, tokens_first(query)
    if batch.invariant is not None:
        attend = batch.invariant.direct()(attend)
    options = {"window": window, "softcap": kwargs.get("softcap"), "sinks": kwargs.get("s_aux"), **layer.quantized}
    if callable(biases := kwargs.get("position_bias")):  # of T5; a tensor of zeros where it attends to the source
        options["biases"] = biases
    if layer.segment is not None:
        out = attend_segments(module, packed, layer, batch, scaling, window, kwargs.get("s_aux"))
    elif is_latent:
        out = attend_latent(module, packed, layer, batch, attend, scaling, kwargs.get("indices"), **options)
    else:
        out = attend(packed, layer.keys, layer.values, batch, scaling, **options)
    if padding:
        out = torch.nn.functional.pad(out, (0, padding))
    return out[None].contiguous(), None  # as transformers' own functions: layers reshape it, and some take views


# For this thread, `batch`: what the next call of our attention reads, whatever it is given; `rests`: see `own_attention`.
_here = threading.local()


def attend_next_to(batch: PackedBatch | None) -> None:
    """Let this thread's next call of our attention read another batch than it is given. None: let it not."""
    _here.batch = batch


_lock = threading.Lock()
# By id of a configuration: the threads in which it names our attention function.
_owners: dict[int, list[int]] = {}


@contextlib.contextmanager
def replaced_attention(configs: list[PreTrainedConfig]) -> Iterator[None]:
    """Inside the context, modules with these configurations attend with our function in this thread, and with their own in others.

    A thread may be anywhere in a forward, so no value that it reads may change: the configurations answer by thread.
    """
    thread = threading.get_ident()
    with _lock:
        for config in configs:
            if id(config) not in _owners:
                config.__class__ = _by_thread(type(config))  # pyright: ignore[reportAttributeAccessIssue]
            _owners.setdefault(id(config), []).append(thread)
    try:
        yield
    finally:
        with _lock:
            for config in configs:
                _owners[id(config)].remove(thread)
                if not _owners[id(config)]:
                    del _owners[id(config)]
                    config.__class__ = type(config).__base__  # pyright: ignore[reportAttributeAccessIssue]


@contextlib.contextmanager
def own_attention() -> Iterator[None]:
    """Inside the context, the modules of `replaced_attention` attend with their own functions in this thread, too."""
    before, _here.rests = getattr(_here, "rests", False), True
    try:
        yield
    finally:
        _here.rests = before


@functools.cache
def _by_thread(kind: type[PreTrainedConfig]) -> type[PreTrainedConfig]:
    """A class of configurations that name our attention function in the thread that owns them. Copies are of the class `kind`."""

    def implementation(self: PreTrainedConfig) -> str | None:
        # Layers are traced for us alone, and the tracer does not know threads.
        ours = torch.compiler.is_compiling() or (
            threading.get_ident() in _owners.get(id(self), ()) and not getattr(_here, "rests", False)
        )
        return ATTENTION_NAME if ours else self._attn_implementation_internal

    def chosen(self: PreTrainedConfig) -> str | None:
        try:
            return vars(self)["_attn_implementation_internal"]
        except KeyError as error:  # one that is being made: transformers asks with a default
            raise AttributeError(*error.args) from error

    def choose(self: PreTrainedConfig, value: str | None) -> None:
        if value != ATTENTION_NAME:  # a model that is made from the configuration writes what it has read
            vars(self)["_attn_implementation_internal"] = value

    def reduce(self: PreTrainedConfig, protocol: Any) -> tuple:
        _, _, *state = kind.__reduce_ex__(self, 2)
        return copyreg._reconstructor, (kind, object, None), *state  # type: ignore[attr-defined]

    attributes = {
        "_attn_implementation": property(implementation, kind._attn_implementation.fset),  # type: ignore[attr-defined]
        "_attn_implementation_internal": property(chosen, choose),
        "__reduce_ex__": reduce,
        "__module__": kind.__module__,
    }
    return type(kind.__name__, (kind,), attributes)


AttentionInterface.register(ATTENTION_NAME, paged_attention_forward)
AttentionMaskInterface.register(ATTENTION_NAME, sdpa_mask)
