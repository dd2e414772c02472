"""With `fla`, `causal_conv1d` and `mamba_ssm` installed transformers' layers call their kernels, which need a GPU. Stand-ins under the
same names and signatures, found by transformers as the real ones are, show that ours call them as plain `generate()` does: the chunk forms,
which here give other numbers than the one-token functions, for prompts only."""

import os
import subprocess
import sys

import pytest
from paths import BUILDERS, ROOT
from transformers.cache_utils import Cache

pytestmark = pytest.mark.skipif(
    not hasattr(Cache, "get_conv_state"), reason="needs transformers 5.23, as the models do"
)
COUNTS = """
from collections import Counter

COUNTS = Counter()
"""
FLA = """
import torch

from counts import COUNTS


def read(q, k, v, g, beta, scale, state, normed):
    if normed:
        q, k = (x * torch.rsqrt((x * x).sum(-1, keepdim=True) + 1e-6) for x in (q, k))
    q, k = (x.float().repeat_interleave(v.shape[2] // x.shape[2], dim=2) for x in (q, k))
    q = q * (q.shape[-1] ** -0.5 if scale is None else scale)
    state = v.new_zeros(v.shape[0], v.shape[2], k.shape[-1], v.shape[-1]).float() if state is None else state.clone()
    out = []
    for t in range(q.shape[1]):
        decay = g[:, t].float().exp()
        state = state * (decay[..., None, None] if decay.dim() == 2 else decay[..., None])
        seen = (state * k[:, t, ..., None]).sum(-2)
        state = state + k[:, t, ..., None] * ((v[:, t] - seen) * beta[:, t, ..., None])[..., None, :]
        out.append((state * q[:, t, ..., None]).sum(-2))
    return torch.stack(out, 1), state


def named(name, other=0.0):
    def function(q, k, v, g=None, beta=None, scale=None, initial_state=None, output_final_state=False,
                 use_qk_l2norm_in_kernel=False, cu_seqlens=None):
        COUNTS[name] += 1
        out, state = read(q, k, v, g, beta, scale, initial_state, use_qk_l2norm_in_kernel)
        return (out * torch.linspace(1, 1 + other, out.shape[-1])).to(v.dtype), state if output_final_state else None

    return function
"""
CONVOLUTION = """
import torch.nn.functional as F

from counts import COUNTS


def causal_conv1d_fn(x, weight, bias=None, seq_idx=None, initial_states=None, return_final_states=False, final_states_out=None,
                     activation=None):
    assert x.stride(2) == 1 or x.stride(1) == 1  # as the kernel wants it
    assert activation in (None, "silu", "swish")
    COUNTS["causal_conv1d_fn"] += 1
    out = F.conv1d(x, weight[:, None], bias, padding=weight.shape[1] - 1, groups=x.shape[1])[..., : x.shape[2]]
    return F.silu(out) if activation else out


def causal_conv1d_update(x, conv_state, weight, bias=None, activation=None, cache_seqlens=None, conv_state_indices=None):
    COUNTS["causal_conv1d_update"] += 1
    x = x if x.dim() == 3 else x[..., None]
    conv_state.copy_(conv_state.roll(-1, 2).index_copy(2, x.new_tensor([conv_state.shape[2] - 1]).long(), x))
    out = (conv_state[..., -weight.shape[1] :] * weight).sum(-1) + (0 if bias is None else bias)
    return (F.silu(out) if activation else out)[..., None]
"""
MAMBA = """
import torch
import torch.nn.functional as F

from counts import COUNTS


def selective_state_update(state, x, dt, A, B, C, D=None, z=None, dt_bias=None, dt_softplus=False, state_batch_indices=None):
    COUNTS["selective_state_update"] += 1
    dt = F.softplus(dt + dt_bias)
    B, C = (each.repeat_interleave(x.shape[1] // each.shape[1], dim=1) for each in (B, C))
    state.copy_(state * (dt[..., None] * A).exp() + (dt * x)[..., None] * B[..., None, :])
    return (state * C[..., None, :]).sum(-1) + D * x


def mamba_chunk_scan_combined(x, dt, A, B, C, chunk_size, D=None, z=None, dt_bias=None, initial_states=None, seq_idx=None,
                              cu_seqlens=None, dt_softplus=False, dt_limit=(0.0, float("inf")), return_final_states=False):
    COUNTS["mamba_chunk_scan_combined"] += 1
    state = x.new_zeros(*x[:, 0].shape, B.shape[-1]) if initial_states is None else initial_states.clone()
    dt = F.softplus(dt + dt_bias).clamp(*dt_limit)
    B, C = (each.repeat_interleave(x.shape[2] // each.shape[2], dim=2) for each in (B, C))
    out = []
    for t in range(x.shape[1]):
        state = state * (dt[:, t] * A).exp()[..., None, None] + (dt[:, t, :, None] * x[:, t])[..., None] * B[:, t, :, None]
        out.append((state * C[:, t, :, None]).sum(-1) + D[:, None] * x[:, t])
    out = torch.stack(out, 1) * torch.linspace(1, 4, x.shape[-1])
    return (out, state) if return_final_states else out
"""
PACKAGES = {
    "counts.py": COUNTS,
    "fla/__init__.py": "",
    "fla/ops/__init__.py": "",
    "fla/ops/rule.py": FLA,
    "fla/ops/gated_delta_rule/__init__.py": (
        "from ..rule import named\nchunk_gated_delta_rule = named('chunk_gated_delta_rule', 3.0)\n"
        "fused_recurrent_gated_delta_rule = named('fused_recurrent_gated_delta_rule')\n"
    ),
    "fla/ops/kda/__init__.py": (
        "from ..rule import named\nchunk_kda = named('chunk_kda', 3.0)\nfused_recurrent_kda = named('fused_recurrent_kda')\n"
    ),
    "causal_conv1d/__init__.py": CONVOLUTION,
    "mamba_ssm/__init__.py": MAMBA,
}
SCRIPT = """
import sys

import torch
from counts import COUNTS
from recurrent_families import make, perturbed

torch.set_num_threads(1)
for name, chunk, one_token in (
    ("Qwen3.5", "chunk_gated_delta_rule", "fused_recurrent_gated_delta_rule"),
    ("Qwen3-Next", "chunk_gated_delta_rule", "fused_recurrent_gated_delta_rule"),
    ("Kimi-Linear", "chunk_kda", "fused_recurrent_kda"),
    ("Granite-hybrid", "mamba_chunk_scan_combined", "selective_state_update"),
):
    model = make(name)
    ids = torch.randint(5, 120, (2, 9), generator=torch.Generator().manual_seed(1))
    call = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "max_new_tokens": 14, "do_sample": False, "pad_token_id": 0}
    expected = model.generate(**call)
    assert COUNTS[chunk] and COUNTS[one_token] and COUNTS["causal_conv1d_fn"] and COUNTS["causal_conv1d_update"], COUNTS
    drafter = perturbed(model)
    for states in ("kept", "replayed"):
        for shape in ({"num_speculative_tokens": 4}, {"branching_factors": [3, 2, 1]}):
            COUNTS.clear()
            config = {"method": "draft_model", "recurrent_states": states, **shape}
            more = {"speculative_config": config, "assistant_model": drafter, "return_dict_in_generate": True}
            out = model.generate(**call, **more)
            assert torch.equal(out.sequences, expected), (name, config)
            assert out.speculation.num_accepted_tokens > 0
            assert COUNTS[chunk] and COUNTS[one_token] and COUNTS["causal_conv1d_fn"], COUNTS
    print(name)
"""


@pytest.mark.slow
def test_kernels_of_other_packages_are_called_as_plain_decoding_calls_them(tmp_path):
    for name, text in PACKAGES.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    folders = (tmp_path, BUILDERS, ROOT)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, folders)), "OMP_NUM_THREADS": "1"}
    ran = subprocess.run([sys.executable, "-c", SCRIPT], env=environment, capture_output=True, text=True, timeout=600)
    assert ran.returncode == 0, ran.stderr[-3000:]
    assert ran.stdout.split("\n")[:4] == ["Qwen3.5", "Qwen3-Next", "Kimi-Linear", "Granite-hybrid"]
