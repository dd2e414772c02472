"""Products of few rows and norms: equal to their definitions, whatever rows and layers are beside."""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from paths import ROOT
from torch import nn
from triton_interpreter import DEVICE, needs_triton

from hf_specdec.kernels import linear as operations
from hf_specdec.kernels.norms import rms_norm
from hf_specdec.model.options.replaced_linears import FewRowsProduct, ReplacedLinears, _is_large, few_row_linears

BOUNDS = {torch.bfloat16: 1e-2, torch.float16: 2e-3}
MOST_ROWS = 16


@pytest.fixture
def linear():
    from hf_specdec.kernels.linear import triton as linear

    assert linear.MOST_ROWS == MOST_ROWS
    return linear


def error(found, wanted):
    return float((found.double() - wanted).norm() / wanted.norm().clamp(min=1e-30))


def draw(*shape, dtype):
    return torch.randn(*shape).to(DEVICE, dtype)


@needs_triton
@pytest.mark.parametrize("dtype", BOUNDS, ids=str)
@settings(max_examples=12, deadline=None, derandomize=True)
@given(
    num_rows=st.integers(1, MOST_ROWS),
    width=st.sampled_from([8, 96, 128, 300, 512]),
    sizes=st.lists(st.sampled_from([1, 16, 40, 64, 130]), min_size=1, max_size=3),
    biased=st.booleans(),
    adds=st.booleans(),
    seed=st.integers(0, 2**16),
)
def test_products(dtype, num_rows, width, sizes, biased, adds, seed):
    from hf_specdec.kernels.linear import triton as linear

    torch.manual_seed(seed)
    x = draw(num_rows, width, dtype=dtype)
    weights = [draw(size, width, dtype=dtype) for size in sizes]
    biases = [draw(size, dtype=dtype) for size in sizes] if biased else None
    residual = draw(num_rows, sizes[0], dtype=dtype) if adds and len(sizes) == 1 else None
    found = linear.linears(x, weights, biases, residual)
    for i, (each, weight) in enumerate(zip(found, weights, strict=True)):
        wanted = x.double() @ weight.double().T + (biases[i].double() if biases else 0)
        wanted = wanted if residual is None else wanted + residual.double()
        assert each.shape == wanted.shape and each.dtype == dtype
        assert error(each, wanted) < BOUNDS[dtype]


@needs_triton
@pytest.mark.parametrize("wide", [False, True])
def test_wide_and_narrow_tiles(linear, wide, monkeypatch):
    monkeypatch.setattr(linear, "_ENOUGH_TILES", 1 if wide else 10**6)
    x, weights = draw(3, 320, dtype=torch.bfloat16), [draw(n, 320, dtype=torch.bfloat16) for n in (128, 48, 64)]
    for found, weight in zip(linear.linears(x, weights), weights, strict=True):
        assert error(found, x.double() @ weight.double().T) < 1e-2


@needs_triton
@pytest.mark.parametrize("dtype", BOUNDS, ids=str)
@pytest.mark.parametrize(("num_rows", "width", "size"), [(1, 128, 64), (5, 200, 40), (16, 256, 33)])
def test_gated_units(linear, dtype, num_rows, width, size):
    torch.manual_seed(0)
    x, gate, up = (draw(n, width, dtype=dtype) for n in (num_rows, size, size))
    wanted = F.silu(x.double() @ gate.double().T) * (x.double() @ up.double().T)
    # Rounded three times, and interpreted bfloat16 is cut off, not rounded.
    assert error(linear.gated_linear(x, gate, up), wanted) < 2 * BOUNDS[dtype]


@needs_triton
def test_a_row_is_the_same_bits_whatever_is_beside_it(linear):
    torch.manual_seed(0)
    x, weights = draw(16, 200, dtype=torch.bfloat16), [draw(48, 200, dtype=torch.bfloat16) for _ in range(2)]
    together = [*linear.linears(x, weights), linear.gated_linear(x, *weights)]
    for row in (0, 7, 15):
        alone = x[row : row + 1].clone()
        own = [*linear.linears(alone, weights), linear.gated_linear(alone, *weights)]
        assert all(torch.equal(a[0], b[row]) for a, b in zip(own, together, strict=True))


@needs_triton
def test_strided_inputs_and_no_rows(linear):
    x = draw(200, 4, dtype=torch.bfloat16).T
    weight = draw(16, 200, dtype=torch.bfloat16)
    assert error(linear.linears(x, [weight])[0], x.double() @ weight.double().T) < 1e-2
    assert linear.linears(x[:0], [weight])[0].shape == (0, 16)
    assert linear.gated_linear(x[:0], weight, weight).shape == (0, 16)


@needs_triton
def test_the_definition_runs_where_the_kernels_cannot(linear, monkeypatch):
    from hf_specdec.kernels.norms import triton as norms

    monkeypatch.setenv("HF_SPECDEC_KERNELS", "triton")
    for kernels, name in ((linear, "linears"), (linear, "gated_linear"), (norms, "rms_norm")):
        monkeypatch.setattr(kernels, name, lambda *args: pytest.fail("the kernel runs"))
    x, weight = (draw(*shape, dtype=torch.bfloat16) for shape in ((2, 8), (4, 8)))
    many = draw(MOST_ROWS + 1, 8, dtype=torch.bfloat16)
    scattered = draw(8, 4, dtype=torch.bfloat16).T
    for inputs, weights in ((many, [weight]), (x, [weight] * 4), (x, [scattered]), (x.float(), [weight.float()])):
        found = operations.linears(inputs, weights)
        assert all(torch.equal(a, F.linear(inputs, b)) for a, b in zip(found, weights, strict=True))
    assert operations.gated_linear(many, weight, weight).shape == (MOST_ROWS + 1, 4)
    for inputs, scale in (
        (x, torch.ones(8)),
        (x.double(), torch.ones(8).double()),
        (torch.ones(1, 16385), torch.ones(16385)),
    ):
        assert rms_norm(inputs.to(DEVICE), scale.to(DEVICE), 1e-5).shape == inputs.shape


class Unit(nn.Module):
    """A gated unit's layers and one that stands alone."""

    def __init__(self):
        super().__init__()
        self.gate_proj, self.up_proj = (nn.Linear(64, 96, bias=False) for _ in range(2))
        self.down_proj = nn.Linear(96, 64)

    def forward(self, x):
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


@needs_triton
@torch.no_grad()
def test_layers_of_a_model_use_them_for_few_rows_only(linear, monkeypatch):
    monkeypatch.setenv("HF_SPECDEC_KERNELS", "triton")
    torch.manual_seed(0)
    unit = Unit().to(DEVICE, torch.bfloat16).eval()
    calls = []
    original = linear.linears
    monkeypatch.setattr(
        linear, "linears", lambda x, weights, *rest: calls.append(len(weights)) or original(x, weights, *rest)
    )
    replaced = ReplacedLinears(unit, FewRowsProduct, lambda module: isinstance(module, nn.Linear))
    for rows, wanted in ((1, [1, 1, 1]), (16, [1, 1, 1]), (17, [])):
        x = draw(1, rows, 64, dtype=torch.bfloat16)
        plain = unit(x)
        with replaced.active():
            found = unit(x)
        assert found.shape == plain.shape and error(found, plain.double()) < 2e-2
        assert calls == wanted
        calls.clear()
    assert not any("forward" in vars(module) for module in unit.modules())


@needs_triton
def test_models_made_in_inference_mode(monkeypatch):
    """Their tensors count no versions."""
    monkeypatch.setenv("HF_SPECDEC_KERNELS", "triton")
    with torch.inference_mode():
        unit = Unit().to(DEVICE, torch.bfloat16)
    replaced = ReplacedLinears(unit, FewRowsProduct, lambda module: isinstance(module, nn.Linear))
    x = draw(1, 3, 64, dtype=torch.bfloat16)
    for _ in range(2):
        with torch.inference_mode(), replaced.active():
            found = unit(x)
    assert error(found, unit(x).double()) < 2e-2


def test_layers_on_a_cpu_and_small_ones_are_left_alone(monkeypatch):
    monkeypatch.delenv("HF_SPECDEC_KERNELS", raising=False)
    assert few_row_linears(Unit()) is None
    assert not _is_large(nn.Linear(8, 8))


@needs_triton
def test_modules_left_out_are_left_alone():
    outer = nn.ModuleDict({"layers": Unit(), "head": nn.Linear(64, 8)})
    replaced = ReplacedLinears(outer, FewRowsProduct, lambda module: isinstance(module, nn.Linear), [outer["layers"]])
    with replaced.active():
        assert [name for name, module in outer.named_modules() if "forward" in vars(module)] == ["head"]


# ---- norms ----------------------------------------------------------------------------------------------------------


@needs_triton
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("shape", [(1, 1, 64), (1, 5, 300), (1, 3, 4, 128), (2, 4096), (0, 64)])
def test_norms(dtype, shape):
    from hf_specdec.kernels.norms.triton import rms_norm

    torch.manual_seed(0)
    x, weight = draw(*shape, dtype=dtype), 1 + draw(shape[-1], dtype=dtype)
    wide = x.double()
    wanted = weight.double() * wide / (wide.pow(2).mean(-1, keepdim=True) + 1e-5).sqrt()
    found = rms_norm(x, weight, 1e-5)
    assert found.shape == x.shape and found.dtype == dtype
    assert error(found, wanted) < (1e-6 if dtype == torch.float32 else BOUNDS[dtype])


# ---- operators of traced layers -------------------------------------------------------------------------------------


@needs_triton
@pytest.mark.parametrize("count", [1, 16, 17])
def test_operators_of_traced_layers(linear, count, monkeypatch):
    """Few rows go to the kernels, more to torch; both give what layers give."""
    from hf_specdec.model.options import rewriting as operators
    from hf_specdec.model.options.rewriting import rms_norm

    monkeypatch.setenv("HF_SPECDEC_KERNELS", "triton")
    calls = []
    for name in ("linears", "gated_linear"):
        original = getattr(linear, name)
        monkeypatch.setattr(linear, name, lambda *args, call=original: calls.append(call) or call(*args))
    torch.manual_seed(0)
    x, gate, up = (draw(*shape, dtype=torch.float16) for shape in ((1, count, 64), (96, 64), (96, 64)))
    bias, square, residual = (
        draw(96, dtype=torch.float16),
        draw(64, 64, dtype=torch.float16),
        draw(1, count, 64, dtype=torch.float16),
    )
    wide = x.double()
    pairs = [
        *zip(
            operators.linears(x, [gate, up], [bias, bias]),
            (wide @ w.double().T + bias.double() for w in (gate, up)),
            strict=True,
        ),
        (operators.gated_linear(x, gate, up), F.silu(wide @ gate.double().T) * (wide @ up.double().T)),
        (operators.linear_and_residual(x, square, None, residual), residual.double() + wide @ square.double().T),
        (rms_norm(x, bias[:64], 1e-5), bias[:64].double() * wide / (wide.pow(2).mean(-1, keepdim=True) + 1e-5).sqrt()),
    ]
    for found, wanted in pairs:
        assert found.shape == wanted.shape and error(found, wanted) < 2 * BOUNDS[torch.float16]
    assert len(calls) == (3 if count <= linear.MOST_ROWS else 0)


@needs_triton
@pytest.mark.skipif(DEVICE != "cpu", reason="about the interpreter")
def test_interpreted_kernels_cannot_be_compiled(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    from kernel_cases.attention import compile_cases
    from kernel_cases.compiling import compile_case

    with pytest.raises(RuntimeError, match="TRITON_INTERPRET"):
        compile_case(compile_cases()[0], 90)
