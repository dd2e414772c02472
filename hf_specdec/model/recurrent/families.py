"""Which model families have layers with a state that we can keep, how they compute, and their states in transformers' own caches.

Plain decoding runs a prompt in a chunk form and every later token with a module's own one-token function. The two differ: in rounding
everywhere, in the products of bfloat16 for Mamba-2, and in the clamp of dt for Nemotron-H and Zamba2. Drafts are therefore read with the
one-token function too.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import transformers
from torch import nn
from transformers import PretrainedConfig, PreTrainedModel
from transformers.cache_utils import Cache

from ...cache.state_pool import KeptStates
from ...core.errors import UnsupportedModel
from ...core.names import CACHE
from ...kernels.recurrent import Walk

Inputs = tuple[torch.Tensor, ...]
OverLines = Callable[[Inputs, torch.Tensor, Walk, torch.Tensor], torch.Tensor]
# Reads n tokens, given their inputs [n, ..], each after its own state [n, ..]: (outputs [n, ..], the states after them). May write
# to the states it is given.
Step = Callable[[Inputs, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]


@dataclass(frozen=True)
class Rule:
    """One kind of recurrence.

    Attributes:
        chunk: name of the module's function over many tokens.
        one_token: name of its function over one token.
        bind: (the one-token function, the arguments of the chunk function) → the tokens' inputs [B, T, ..], and how to read them.
        over_lines: the arguments of the chunk function → our kernel of this rule: (inputs, states before the lines, walk, pool) →
            outputs (see `kernels.recurrent.triton`); None: this rule has no kernel.
        tokens_last: the chunk function returns [B, channels, T]; otherwise [B, T, ..].
        continues: the chunk function can start from a state.
    """

    chunk: str
    one_token: str
    bind: Callable[..., tuple[Inputs, Step]]
    over_lines: Callable[..., OverLines] | None = None
    tokens_last: bool = False
    continues: bool = True


def _delta(one_token, query, key, value, *, g, beta, **_) -> tuple[Inputs, Step]:
    """Gated DeltaNet and Kimi delta attention: query, key, value [B, T, heads, width], state [B, heads, dk, dv]."""

    def step(inputs: Inputs, state: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        q, k, v, decay, rate = (tensor.unsqueeze(1) for tensor in inputs)
        out, state = one_token(
            q, k, v, g=decay, beta=rate, initial_state=state, output_final_state=True, use_qk_l2norm_in_kernel=True
        )
        return out[:, 0], state

    return (query, key, value, g, beta), step


def _mamba2(one_token, x, dt, A, B, C, *, D, dt_bias, **_) -> tuple[Inputs, Step]:
    """Mamba-2: x [B, T, heads, p], dt [B, T, heads], A and D [heads], B and C [B, T, groups, n], state [B, heads, p, n]."""
    width, size = x.shape[-1], B.shape[-1]
    A = A[:, None, None].expand(-1, width, size)
    D, dt_bias = (vector[:, None].expand(-1, width) for vector in (D, dt_bias))

    def step(inputs: Inputs, state: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        own_x, own_dt, own_b, own_c = inputs
        spread = own_dt[..., None].expand(-1, -1, width)
        out = one_token(state, own_x, spread, A, own_b, own_c, D, z=None, dt_bias=dt_bias, dt_softplus=True)
        return out, state

    return (x, dt, B, C), step


def _delta_lines(*_: Any, **__: Any) -> OverLines:
    from ...kernels.recurrent.triton import gated_delta

    return gated_delta


def _mamba2_lines(x, dt, A, B, C, *, D, dt_bias, **_) -> OverLines:
    from ...kernels.recurrent.triton import mamba2

    return lambda inputs, before, walk, pool: mamba2(inputs, (A, D, dt_bias), before, walk, pool)


def _mamba1(one_token, x, dt, A, B, C, *, D, z, delta_bias, **_) -> tuple[Inputs, Step]:
    """Mamba-1: x, dt, z [B, channels, T], A [channels, n], B and C [B, n, T], D [channels], state [B, channels, n]."""
    D = D.to(x.dtype)  # the scan is given a float32 copy

    def step(inputs: Inputs, state: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        own_x, own_dt, own_b, own_c, own_z = inputs
        out = one_token(state, own_x, own_dt, A, own_b, own_c, D, z=own_z, dt_bias=delta_bias, dt_softplus=True)
        return out, state

    return tuple(tensor.transpose(1, 2) for tensor in (x, dt, B, C, z)), step


GATED_DELTA = Rule("torch_chunk_gated_delta_rule", "torch_recurrent_gated_delta_rule", _delta, _delta_lines)
KIMI_DELTA = Rule("chunk_kimi_delta_attention", "recurrent_kimi_delta_attention", _delta, _delta_lines)
MAMBA2 = Rule("mamba2_chunk_scan", "mamba2_selective_state_update", _mamba2, _mamba2_lines)
MAMBA1 = Rule("mamba_selective_scan", "mamba_selective_state_update", _mamba1, tokens_last=True, continues=False)


CONVOLUTION = "causal_conv1d_fn"  # each module's short convolution: channels [B, C, L] → [B, C, L]


@dataclass(frozen=True)
class RecurrentFamily:
    """One family.

    Attributes:
        mixer: class name of the module with a state inside each layer.
        rule: its recurrence; None: it only convolves.
        by_head: its functions are called once for each head, whose states stand one after another in the layer's.
        steps: its modules are run whole, on one token of each row at a time, with all that they put into a cache. `mixer` then names one
            class or several, separated by spaces.
        two_rules: its one-token function and its chunk form give different results, because only the chunk form clamps dt from below.
    """

    mixer: str
    rule: Rule | None
    two_rules: bool = False
    by_head: bool = False
    steps: bool = False


# By model_type of the text configuration. Each of them gave the text of plain generate() (tests/model/test_recurrent.py).
FAMILIES = {
    "qwen3_next": RecurrentFamily("Qwen3NextGatedDeltaNet", GATED_DELTA),
    "qwen3_5_text": RecurrentFamily("Qwen3_5GatedDeltaNet", GATED_DELTA),
    "qwen3_5_moe_text": RecurrentFamily("Qwen3_5MoeGatedDeltaNet", GATED_DELTA),
    "olmo_hybrid": RecurrentFamily("OlmoHybridGatedDeltaNet", GATED_DELTA),
    "kimi_linear": RecurrentFamily("KimiLinearDeltaAttention", KIMI_DELTA),
    "lara_mini": RecurrentFamily("LaraMiniGatedDeltaNet", GATED_DELTA),
    "bailing_hybrid": RecurrentFamily("BailingHybridDeltaAttention", KIMI_DELTA),
    "granitemoehybrid": RecurrentFamily("GraniteMoeHybridMambaLayer", MAMBA2),
    "bamba": RecurrentFamily("BambaMixer", MAMBA2),
    "falcon_h1": RecurrentFamily("FalconH1Mixer", MAMBA2),
    "nemotron_h": RecurrentFamily("NemotronHMamba2Mixer", MAMBA2, two_rules=True),
    "zamba2": RecurrentFamily("Zamba2MambaMixer", MAMBA2, two_rules=True),
    "jamba": RecurrentFamily("JambaMambaMixer", MAMBA1),
    "zamba": RecurrentFamily("ZambaMambaMixer", MAMBA1, by_head=True),
    "mamba2": RecurrentFamily("Mamba2Mixer", MAMBA2),
    "mamba": RecurrentFamily("MambaMixer", MAMBA1),
    "falcon_mamba": RecurrentFamily("FalconMambaMixer", MAMBA1),
    "lfm2": RecurrentFamily("Lfm2ShortConv", None),
    "lfm2_moe": RecurrentFamily("Lfm2MoeShortConv", None),
    "lfm3": RecurrentFamily("Lfm3ShortConv", None),
    "inkling_text": RecurrentFamily("InklingShortConvolution", None, steps=True),
    "inkling2_text": RecurrentFamily("Inkling2ShortConvolution Inkling2DynamicShortConvolution", None, steps=True),
    "inkling2_loop_text": RecurrentFamily(
        "Inkling2LoopShortConvolution Inkling2LoopDynamicShortConvolution", None, steps=True
    ),
    "zaya": RecurrentFamily("ZayaCCAProjection", None, steps=True),
}
_KEYLESS = {"linear_attention", "conv", "mamba", "mlp", "moe"}  # layer types without keys and values


def family_of(config: PretrainedConfig) -> RecurrentFamily | None:
    """The family of a text configuration; None if its layers are not known to have a state."""
    return FAMILIES.get(config.model_type)


def mixers_of(model: PreTrainedModel, family: RecurrentFamily) -> list[nn.Module]:
    """The modules with a state, one per layer that has one. Raises UnsupportedModel: they are not transformers' own, so what they
    compute is unknown; or transformers is too old."""
    mixers = [module for module in model.modules() if type(module).__name__ in family.mixer.split()]
    if mixers and not hasattr(Cache, "get_conv_state"):
        raise UnsupportedModel(
            f"{type(model).__name__} has recurrent layers, whose states transformers {transformers.__version__} keeps in another way: "
            "install transformers 5.23 or newer, or call generate() without speculative_config."
        )
    needed = [] if family.steps else [CONVOLUTION]
    needed += [] if family.rule is None else [family.rule.chunk, family.rule.one_token]
    for module in mixers:
        source = sys.modules[type(module).__module__]
        missing = [name for name in needed if not callable(getattr(source, name, None))]
        if missing or not source.__name__.startswith("transformers."):
            raise UnsupportedModel(
                f"{type(model).__name__} has recurrent layers that are not transformers' own ({type(module).__name__} in "
                f"{source.__name__}), so their states cannot be kept. Call generate() without speculative_config."
            )
    if len({(module.layer_idx, getattr(module, "conv_idx", 0)) for module in mixers}) != len(mixers):
        raise UnsupportedModel(f"{type(model).__name__} uses one recurrent layer twice, which cannot be served.")
    return mixers


def layers_without_keys(config: PretrainedConfig) -> frozenset[int]:
    """Indices of the layers that have no keys and values."""
    if family_of(config) is None:
        return frozenset()
    return frozenset(index for index, kind in enumerate(config.layer_types) if kind in _KEYLESS)


def attends(config: PretrainedConfig) -> bool:
    """True if a layer has keys and values."""
    return len(layers_without_keys(config)) < config.num_hidden_layers


def num_cached(cache: Cache) -> int:
    """Tokens in transformers' cache. Where no layer has keys, nothing counts them: 0. Raises ValueError: such a cache has states."""
    if not cache.layers or any(hasattr(layer, "get_seq_length") for layer in cache.layers):
        return int(cache.get_seq_length())
    if stateful_layers(cache):
        raise ValueError(
            f"{CACHE} has recurrent states and no keys, so its tokens are not counted: pass the whole text without it."
        )
    return 0


def stateful_layers(cache: Cache) -> list[tuple[int, Any]]:
    """The layers of transformers' cache that hold states after some tokens, and their indices."""
    layers = enumerate(cache.layers)
    return [(index, layer) for index, layer in layers if getattr(layer, "has_previous_state", {}).get(0, False)]


def states_of(cache: Cache, row: int) -> KeptStates:
    """Copies of a row's states after all tokens that the cache has seen."""
    kept = KeptStates({}, {})
    for index, layer in stateful_layers(cache):
        kept.conv[index] = layer.conv_states[0][row].clone()
        if layer.recurrent_states[0] is not None:
            kept.recurrent[index] = layer.recurrent_states[0][row].clone()
    return kept
