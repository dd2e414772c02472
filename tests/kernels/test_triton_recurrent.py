"""Kernels of layers with a state: equal to their definitions over chains and trees, and the definitions to transformers' functions."""

import importlib
import sys

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from paths import ROOT
from recurrent_families import make, perturbed
from transformers.cache_utils import Cache
from triton_interpreter import DEVICE, needs_triton

from hf_specdec.kernels.recurrent import Walk

sys.path.insert(0, str(ROOT / "benchmarks"))
from gpu_sections import recurrent_rules as definitions

pytestmark = pytest.mark.skipif(not hasattr(Cache, "get_conv_state"), reason="the definitions are those of 5.23")
DTYPES = {torch.float32: 2e-5, torch.float16: 3e-3, torch.bfloat16: 2e-2}
CUT_OFF = 4 if DEVICE == "cpu" else 1  # the interpreter cuts off where a GPU rounds to bfloat16
WALKS = {"num_lines": st.integers(1, 4), "tokens": st.integers(1, 7), "shape": st.sampled_from(["chain", "tree"])}


def close(found, wanted, bound):
    found, wanted = found.double(), wanted.double()
    return bool((found - wanted).norm() <= bound * wanted.norm() + 1e-7)


def random_walk(num_lines, tokens, shape, generator):
    """(walk, number of places in its pool): some lines begin later or end earlier, some states are not kept."""

    def draw(low, high):
        return int(torch.randint(low, high, (1,), generator=generator))

    parents, saved = torch.full((num_lines, tokens), -2), torch.full((num_lines, tokens), -1)
    into, num_saved, free = (
        torch.full((num_lines, tokens), -1),
        0,
        torch.randperm(num_lines * tokens + 3, generator=generator),
    )
    for line in range(num_lines):
        own = [column for column in range(tokens) if draw(0, 5)] or [0]
        for i, column in enumerate(own):
            chosen = i - 1 if shape == "chain" else draw(-1, i)
            parents[line, column] = -1 if chosen < 0 else own[chosen]
            into[line, column] = free[line * tokens + column] if draw(0, 4) else -1
            if chosen >= 0 and chosen != i - 1 and saved[line, own[chosen]] < 0:
                saved[line, own[chosen]] = num_saved
                num_saved += 1
    walk = Walk(*(each.to(DEVICE, torch.int32) for each in (parents, into, saved)), num_saved=num_saved)
    return walk, num_lines * tokens + 3


def pools_of(places, *shape, dtype=torch.float32):
    pool = torch.full((places, *shape), 7.0, dtype=dtype, device=DEVICE)
    return pool, pool.clone()


@needs_triton
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@settings(max_examples=6, deadline=None, derandomize=True)
@given(
    **WALKS,
    sizes=st.sampled_from([(1, 1, 8, 8), (2, 4, 32, 16), (3, 3, 12, 20), (1, 2, 128, 40)]),
    per_channel=st.booleans(),
    seed=st.integers(0, 2**16),
)
def test_gated_delta(dtype, num_lines, tokens, shape, sizes, per_channel, seed):
    from hf_specdec.kernels.recurrent.triton import gated_delta

    (key_heads, heads, width, value_width), generator = sizes, torch.Generator().manual_seed(seed)

    def draw(*shape):
        return torch.randn(num_lines, tokens, *shape, generator=generator).to(DEVICE, dtype)

    walk, places = random_walk(num_lines, tokens, shape, generator)
    decay = -draw(heads, width).float().exp() if per_channel else -draw(heads).float().exp()
    query, key = draw(key_heads, width), draw(key_heads, width)
    inputs = (query, key, draw(heads, value_width), decay, draw(heads).sigmoid())
    before = torch.randn(num_lines, heads, width, value_width, generator=generator).to(DEVICE)
    pool, expected_pool = pools_of(places, heads, width, value_width)
    expected = definitions.lines(definitions.gated_delta_step, inputs, before, walk, expected_pool)
    found = gated_delta(inputs, before, walk, pool)
    assert found.dtype == dtype and found.shape == expected.shape
    assert close(found, expected, DTYPES[dtype]) and close(pool, expected_pool, 2e-6)


@needs_triton
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@settings(max_examples=6, deadline=None, derandomize=True)
@given(
    **WALKS,
    sizes=st.sampled_from([(1, 1, 8, 8), (4, 2, 16, 32), (3, 1, 20, 12), (2, 2, 40, 128)]),
    float32_skip=st.booleans(),
    seed=st.integers(0, 2**16),
)
def test_mamba2(dtype, num_lines, tokens, shape, sizes, float32_skip, seed):
    from hf_specdec.kernels.recurrent.triton import mamba2

    (heads, groups, width, size), generator = sizes, torch.Generator().manual_seed(seed)

    def draw(*shape):
        return torch.randn(num_lines, tokens, *shape, generator=generator).to(DEVICE, dtype)

    walk, places = random_walk(num_lines, tokens, shape, generator)
    inputs = (draw(heads, width), 4 * draw(heads), draw(groups, size), draw(groups, size))
    rate, skip, bias = torch.randn(3, heads, generator=generator).to(DEVICE)
    constants = (-rate.exp(), skip if float32_skip else skip.to(dtype), bias.to(dtype))
    before = torch.randn(num_lines, heads, width, size, generator=generator).to(DEVICE)
    pool, expected_pool = pools_of(places, heads, width, size)
    expected = definitions.lines(
        lambda token, state: definitions.mamba2_step(token, constants, state), inputs, before, walk, expected_pool
    )
    found = mamba2(inputs, constants, before, walk, pool)
    assert found.dtype == dtype and found.shape == expected.shape
    bound = DTYPES[dtype] * (CUT_OFF if dtype == torch.bfloat16 else 1)
    assert close(found, expected, bound) and close(pool, expected_pool, 2e-6 if dtype == torch.float32 else bound / 2)


@needs_triton
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@settings(max_examples=6, deadline=None, derandomize=True)
@given(
    num_lines=st.integers(1, 3),
    tokens=st.integers(1, 6),
    channels=st.sampled_from([1, 24, 300]),
    size=st.integers(2, 5),
    biased=st.booleans(),
    silu=st.booleans(),
    seed=st.integers(0, 2**16),
)
def test_convolution(dtype, num_lines, tokens, channels, size, biased, silu, seed):
    from hf_specdec.kernels.recurrent.triton import convolution

    generator = torch.Generator().manual_seed(seed)

    def draw(*shape):
        return torch.randn(*shape, generator=generator).to(DEVICE, dtype)

    x = draw(num_lines, channels, size + tokens)
    windows = torch.randint(0, size + tokens, (num_lines, tokens, size), generator=generator)
    into = torch.randperm(num_lines * tokens + 2, generator=generator)[: num_lines * tokens].view(num_lines, tokens)
    into = torch.where(torch.rand(into.shape, generator=generator) < 0.7, into, -1)
    windows, into = (each.to(DEVICE, torch.int32) for each in (windows, into))
    pool, expected_pool = pools_of(num_lines * tokens + 2, channels, size, dtype=dtype)
    own = (draw(channels, size), draw(channels) if biased else None, silu, into)
    expected = definitions.convolution(x, windows, *own, expected_pool)
    found = convolution(x, windows, *own, pool)
    assert found.dtype == dtype and close(found, expected, DTYPES[dtype])
    assert torch.equal(pool, expected_pool)


# ---- the definitions, and what a module computes --------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    ("name", "function", "per_channel"),
    [
        ("qwen3_5", "torch_recurrent_gated_delta_rule", False), ("olmo_hybrid", "torch_recurrent_gated_delta_rule", False),
        ("kimi_linear", "recurrent_kimi_delta_attention", True),
    ],
)  # fmt: skip
def test_the_definition_of_delta_rules_is_transformers(name, function, per_channel, dtype):
    generator = torch.Generator().manual_seed(0)
    module = importlib.import_module(f"transformers.models.{name}.modeling_{name}")
    key_heads, heads = (2, 2) if per_channel else (2, 4)

    def draw(*shape):
        return torch.randn(3, *shape, generator=generator).to(dtype)

    decay = -draw(heads, *([8] if per_channel else [])).float().exp()
    inputs = (draw(key_heads, 8), draw(key_heads, 8), draw(heads, 12), decay, draw(heads).sigmoid())
    state = torch.randn(3, heads, 8, 12, generator=generator)
    query, key, value, g, beta = (each[:, None] for each in inputs)
    expected, after = getattr(module, function)(
        query, key, value, g=g, beta=beta, initial_state=state, output_final_state=True, use_qk_l2norm_in_kernel=True
    )
    found, own_after = definitions.gated_delta_step(inputs, state)
    assert close(found, expected[:, 0], DTYPES[dtype]) and close(own_after, after, 1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", ["nemotron_h", "granitemoehybrid", "bamba", "falcon_h1", "zamba2"])
def test_the_definition_of_mamba2_is_transformers(name, dtype):
    """In bfloat16 too: its products are rounded at the same places."""
    generator = torch.Generator().manual_seed(0)
    update = importlib.import_module(f"transformers.models.{name}.modeling_{name}").mamba2_selective_state_update
    x, dt, b, c = (torch.randn(3, *each, generator=generator).to(dtype) for each in ((4, 8), (4,), (2, 16), (2, 16)))
    rate, skip, bias = torch.randn(3, 4, generator=generator)
    constants = (-rate.exp(), skip.to(dtype), bias.to(dtype))
    state = torch.randn(3, 4, 8, 16, generator=generator)
    found, after = definitions.mamba2_step((x, dt, b, c), constants, state.clone())
    wide = constants[0][:, None, None].expand(-1, 8, 16), *(each[:, None].expand(-1, 8) for each in constants[1:])
    expected = update(
        state, x, dt[..., None].expand(-1, -1, 8), wide[0], b, c, wide[1], z=None, dt_bias=wide[2], dt_softplus=True
    )
    assert close(after, state, 1e-6)
    assert close(found, expected, 1e-6 if dtype == torch.float32 else 4e-3)


# ---- whole texts ------------------------------------------------------------------------------------------------------------

DRAFTED = {
    "kept chain": {"num_speculative_tokens": 3, "recurrent_states": "kept"},
    "replayed chain": {"num_speculative_tokens": 3, "recurrent_states": "replayed"},
    "kept tree": {"branching_factors": [2, 2], "recurrent_states": "kept"},
    "replayed tree": {"branching_factors": [2, 2], "recurrent_states": "replayed"},
}
DEFAULT = {("Qwen3-Next", "replayed tree")}
TEXTS = [
    pytest.param(name, config, marks=() if (name, config) in DEFAULT else pytest.mark.slow)
    for name in ("Qwen3-Next", "Nemotron-H", "Kimi-Linear", "LFM2", "Falcon-H1", "Jamba")
    for config in DRAFTED
]


@needs_triton
@pytest.mark.parametrize(("name", "config"), TEXTS)
def test_greedy_text_with_kernels(name, config, monkeypatch):
    """Rows of unlike lengths whose drafts are accepted in part: the text of plain generate()."""
    monkeypatch.setenv("HF_SPECDEC_KERNELS", "triton")
    target = make(name).to(DEVICE)
    drafter, new = perturbed(target), 6
    torch.manual_seed(1)
    ids = torch.randint(5, 120, (2, 6)).to(DEVICE)
    mask = torch.ones_like(ids)
    mask[1, :4] = ids[1, :4] = 0
    options = {"attention_mask": mask, "do_sample": False, "max_new_tokens": new, "pad_token_id": 0}
    expected = target.generate(ids, **options)
    from hf_specdec.kernels.recurrent import triton as kernels

    calls = []
    for each in ("gated_delta", "mamba2", "convolution"):
        kernel = getattr(kernels, each)
        monkeypatch.setattr(kernels, each, lambda *a, each=each, kernel=kernel: (calls.append(each), kernel(*a))[1])
    given = {"method": "draft_model", **DRAFTED[config]}
    out = target.generate(
        ids, **options, assistant_model=drafter, speculative_config=given, return_dict_in_generate=True
    )
    assert torch.equal(out.sequences, expected)
    assert 1 < out.speculation.mean_accepted_length < 4
    rule = {"Qwen3-Next": "gated_delta", "Kimi-Linear": "gated_delta", "Nemotron-H": "mamba2", "Falcon-H1": "mamba2"}
    assert set(calls) == {"convolution"} | ({rule[name]} if name in rule else set())
