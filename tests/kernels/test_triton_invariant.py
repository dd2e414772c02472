"""Batch-invariant Triton kernels against their definitions, in the interpreter, and a deterministic model on all of them."""

import copy

import numpy as np
import pytest
import test_triton_generate
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from replayed_graphs import graphs_in_python  # noqa: F401
from test_triton_generate import CONFIGS, decode, pair  # noqa: F401
from triton_interpreter import DEVICE, needs_triton

import hf_specdec
from hf_specdec.kernels import invariant
from hf_specdec.kernels.invariant import reference as invariant_reference

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


def random(*shape, dtype=torch.float32, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE, dtype)


def assert_close(out, exact, terms: int):
    eps = torch.finfo(out.dtype).eps
    torch.testing.assert_close(out.double(), exact.double(), rtol=4 * eps, atol=eps * max(terms, 4))


@needs_triton
@pytest.mark.skipif(DEVICE != "cpu", reason="about the interpreter")
def test_the_interpreters_products_have_one_order():
    """Or what follows would test a BLAS: a row's bits are the same at every place of a tile, whatever the processor."""
    import triton
    import triton.language as tl

    @triton.jit
    def tile_product(out, a, b, M: tl.constexpr, K: tl.constexpr, N: tl.constexpr):
        rows, inner, columns = tl.arange(0, M)[:, None], tl.arange(0, K), tl.arange(0, N)[None, :]
        left, right = tl.load(a + rows * K + inner[None, :]), tl.load(b + inner[:, None] * N + columns)
        tl.store(out + rows * N + columns, tl.dot(left, right, input_precision="ieee"))

    a, b = random(16, 32), random(32, 16, seed=1)
    found = []
    for turn in range(16):
        out = torch.empty(16, 16)
        tile_product[(1,)](out, a.roll(turn, 0).contiguous(), b, 16, 32, 16)
        found.append(out.roll(-turn, 0))
    torch.testing.assert_close(found[0], a @ b, rtol=1e-5, atol=1e-5)
    assert all(torch.equal(out, found[0]) for out in found)


@needs_triton
@settings(max_examples=15, deadline=None, derandomize=True)
@given(
    rows=st.integers(0, 100), width=st.integers(1, 300), outputs=st.integers(1, 90), biased=st.booleans(),
    transposed=st.booleans(), dtype=st.sampled_from(list(DTYPES)), seed=st.integers(0, 99),
)  # fmt: skip
def test_linear(rows, width, outputs, biased, transposed, dtype, seed):
    from hf_specdec.kernels.invariant import triton as invariant

    x = random(rows, width, dtype=DTYPES[dtype], seed=seed)
    weight = random(width, outputs, dtype=DTYPES[dtype], seed=seed + 1)
    weight = weight.t().contiguous().t() if transposed else weight
    bias = random(outputs, dtype=DTYPES[dtype]) if biased else None
    out = invariant.linear(x, weight, bias)
    assert_close(out, x.double() @ weight.double() + (0 if bias is None else bias.double()), width)
    assert_close(out, invariant_reference.linear(x, weight, bias), width)
    for first, last in ((0, 1), (rows // 2, rows // 2 + 1), (rows // 3, rows)):
        assert torch.equal(invariant.linear(x[first:last], weight, bias), out[first:last])


@needs_triton
@pytest.mark.parametrize("dtype", DTYPES)
def test_batched_product(dtype):
    from hf_specdec.kernels.invariant import triton as invariant

    x, weights = random(3, 20, 70, dtype=DTYPES[dtype]), random(3, 35, 70, dtype=DTYPES[dtype]).transpose(1, 2)
    out = invariant.batched_product(x, weights)
    assert_close(out, x.double() @ weights.double(), 70)
    assert torch.equal(out[1:2, 4:5], invariant.batched_product(x[1:2, 4:5], weights[1:2]))


@needs_triton
@settings(max_examples=6, deadline=None, derandomize=True)
@given(rows=st.integers(1, 6), width=st.integers(1, 5000), dtype=st.sampled_from(list(DTYPES)), seed=st.integers(0, 99))
def test_row_reductions(rows, width, dtype, seed):
    from hf_specdec.kernels.invariant import triton as invariant

    x = random(rows, width, dtype=DTYPES[dtype], seed=seed)
    wide = x.float()
    torch.testing.assert_close(
        invariant.sum_last(wide), wide.double().sum(-1).float(), rtol=1e-5, atol=1e-5 * width**0.5
    )
    for ours, theirs in (
        (invariant.softmax_last, invariant_reference.softmax_last),
        (invariant.log_softmax_last, invariant_reference.log_softmax_last),
    ):
        for to in (None, torch.float32):
            assert_close(ours(x, to), theirs(x, to), 64)
        assert all(torch.equal(ours(x[i : i + 1])[0], ours(x)[i]) for i in range(rows))
    assert all(torch.equal(invariant.sum_last(wide[i : i + 1])[0], invariant.sum_last(wide)[i]) for i in range(rows))


@needs_triton
def test_the_definition_runs_where_the_kernels_cannot(monkeypatch):
    monkeypatch.setenv("HF_SPECDEC_KERNELS", "triton")
    x, weight = random(2, 3).double(), random(3, 4).double()
    for name, arguments in (("linear", (x, weight)), ("sum_last", (x,)), ("softmax_last", (x,))):
        found = getattr(invariant, name)(*arguments)
        assert torch.equal(found, getattr(invariant_reference, name)(*arguments)) and found.dtype == torch.float64


def one_layer(model):
    """A random model of the same kind."""
    config = copy.deepcopy(model.config)
    config.num_hidden_layers = 1
    return type(model)(config).to(DEVICE, torch.bfloat16).eval()


@needs_triton
@torch.no_grad()
def test_logits_do_not_depend_on_the_batch(pair, monkeypatch):  # noqa: F811
    """The model's own check: token by token against chunks and a tree, all kernels in place."""
    from hf_specdec.kernels.attention import triton as attention
    from hf_specdec.kernels.invariant import triton as invariant
    from hf_specdec.model.options import invariant_check
    from hf_specdec.model.prepare import ModelOptions, prepare

    called = set()
    for module, name in ((attention, "paged_attention"), (invariant, "linear"), (invariant, "sum_last")):
        original = getattr(module, name)
        monkeypatch.setattr(
            module, name, lambda *a, _of=original, _name=name, **k: (called.add(_name), _of(*a, **k))[1]
        )
    monkeypatch.setenv("HF_SPECDEC_KERNELS", "triton")
    monkeypatch.setattr(invariant_check, "_checked", {})
    model = one_layer(pair[0])
    prepare(model, ModelOptions(deterministic=True))
    assert called == {"paged_attention", "linear", "sum_last"}
    assert list(invariant_check._checked.values()) == [""]


@needs_triton
@pytest.mark.slow
def test_generate(pair, monkeypatch):  # noqa: F811
    monkeypatch.setenv("HF_SPECDEC_KERNELS", "triton")
    monkeypatch.setattr(test_triton_generate, "NEW_TOKENS", 4)
    hf_specdec.release(pair[0])
    plain = decode(pair, {"method": "none", "deterministic": True}, do_sample=False)
    out = decode(pair, {**CONFIGS["tree"], "deterministic": True}, do_sample=False)
    hf_specdec.release(pair[0])
    assert torch.equal(out.sequences, plain.sequences) and out.speculation["num_accepted_tokens"] > 0


@needs_triton
@torch.no_grad()
def test_captured_steps(pair, monkeypatch, graphs_in_python):  # noqa: F811
    """The bits of a step in buckets of static buffers are those of the step as it comes: a chain, a tree, a token."""
    from hf_specdec.cache import PagedStaticCache
    from hf_specdec.core.rows import RowInput
    from hf_specdec.model.options import invariant_check
    from hf_specdec.model.prepare import ModelOptions, prepare

    monkeypatch.setenv("HF_SPECDEC_KERNELS", "triton")
    monkeypatch.setattr(invariant_check, "check", lambda packed: None)  # tested above
    model = one_layer(pair[0])
    packed = prepare(model, ModelOptions(deterministic=True, cuda_graphs=True))
    cache = PagedStaticCache(model.config.num_hidden_layers, 16, 4)
    lengths, nodes = (5, 3, 2), (3, 4, 1)
    for row, (length, count) in enumerate(zip(lengths, nodes, strict=True)):
        cache.add(row)
        cache.reserve(row, length + count)
    rows = [RowInput(row, np.arange(1, 1 + length), 0, logits=1) for row, length in enumerate(lengths)]
    graphs = packed.graphs
    with packed.active():
        packed.graphs = None
        packed.forward(rows, cache)
        rows = [
            RowInput(row, np.arange(11, 11 + count), length, logits=count)
            for row, (length, count) in enumerate(zip(lengths, nodes, strict=True))
        ]
        depths = np.array([1, 1, 2, 2])
        ancestors = np.array([[1, 0, 0, 0], [0, 1, 0, 0], [1, 0, 1, 0], [0, 1, 0, 1]], dtype=bool)
        rows[1].positions, rows[1].region_positions = lengths[1] - 1 + depths, lengths[1] - 1 + depths
        rows[1].visibility = ancestors
        expected = packed.forward(rows, cache).logits.clone()
        packed.graphs = graphs
        for _ in range(2):  # captured, and replayed
            found = packed.forward(rows, cache).logits
            assert torch.equal(found, expected)
        assert graphs.captures.capture.count == 1 and not graphs.captures.refused
        (((buffers,), *_),) = graphs.captures._found.values()
        inputs = buffers.batch.inputs  # nodes are rows of their own: gaps between keys would round otherwise on a GPU
        assert inputs.block_size == 1 and inputs.visibility is None and len(inputs.key_lengths) >= 6
        alone = packed.forward(rows[1:2], cache).logits  # another bucket
        assert torch.equal(alone, expected[3:7])
