"""Products of the native library with 8-bit and 4-bit weights: torchao's numbers bit for bit, right sums, the same bits for any number of
tokens, and steps of a quantized model as one native call."""

import ctypes

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from families import make
from torch import nn

import hf_specdec
from hf_specdec.candidate_generators import parse_config
from hf_specdec.core.rows import RowInput
from hf_specdec.integration import get_decoder
from hf_specdec.kernels.linear.quantized import MOST_TOKENS, WeightLayout, dequantized, linear, pack
from hf_specdec.kernels.native import TYPES, library
from hf_specdec.kernels.native import Linear as Call
from hf_specdec.model.options import native_weights
from hf_specdec.model.options.native_weights import NativeWeight, native_weight
from hf_specdec.model.options.quantized import QuantizedLinears, num_bytes, quantize_for_good
from hf_specdec.model.prepare import ModelOptions, prepare

pytestmark = pytest.mark.skipif(library() is None, reason="the native library is not compiled")
ROWS = [1, 2, 3, 4, 5, 6, 7, 8, 9, 13, 64]
KINDS = ("wint8", "wint4")
# bits, group, outputs, inputs: every group, and remainders of panels, blocks and vectors
LAYOUTS = [
    (8, 0, 5, 7), (8, 0, 37, 1000), (8, 0, 130, 96), (8, 0, 64, 384), (8, 64, 30, 128), (8, 32, 33, 2816), (8, 128, 17, 256),
    (4, 32, 48, 96), (4, 64, 37, 192), (4, 128, 16, 384), (4, 32, 130, 32), (4, 128, 96, 1024),
]  # fmt: skip
WIDE = {"hidden_size": 64, "intermediate_size": 160, "head_dim": 16}


@pytest.fixture(params=["baseline", "avx2", "avx512", "avx512_bf16", "amx_bf16"])
def instruction_set(request):
    """The kernels of one instruction set."""
    loaded = library()
    best = loaded.specdec_instruction_set()
    if not loaded.specdec_use(request.param.encode()):
        pytest.skip(f"this CPU has no {request.param}")
    yield request.param
    loaded.specdec_use(best)


def weights(bits, group, outputs, inputs, scales=torch.float32):
    """Panels of random weights, their layout, and the same weights in float64."""
    generator = torch.Generator().manual_seed(outputs * inputs + group)
    form = WeightLayout(bits, group, outputs, inputs, scales)
    low, high = (-128, 128) if bits == 8 else (0, 16)
    values = torch.randint(low, high, (outputs, inputs), generator=generator)
    scale = (torch.rand(outputs, form.groups, generator=generator) + 0.1).to(scales)
    zero = torch.randn(outputs, form.groups, generator=generator).to(scales) if bits == 4 else None
    known = (values.double() - (8 if bits == 4 else 0)).view(outputs, form.groups, -1) * scale.double()[..., None]
    known = known if zero is None else known + zero.double()[..., None]
    return pack(values, scale, zero, form), form, known.view(outputs, inputs)


@pytest.mark.parametrize("scales", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("dtype", list(TYPES), ids=str)
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_products(instruction_set, layout, dtype, scales):
    """Sums are right to float32's rounding, plus for 16-bit types that of numbers to 15 bits of a block's largest. They have the same bits
    for any number of tokens."""
    panels, form, known = weights(*layout, scales)
    x = torch.randn(max(ROWS), form.inputs, generator=torch.Generator().manual_seed(1)).to(dtype)
    bias = torch.randn(form.outputs, generator=torch.Generator().manual_seed(2)).to(dtype)
    wanted = x.double() @ known.T
    size = x.double().abs() @ known.abs().T
    unit = torch.finfo(dtype).eps / 2
    rounded = 0 if dtype == torch.float32 else 2.0**-15 * x.double().abs().amax(1, keepdim=True) * known.abs().sum(1)
    alone = torch.cat([linear(row[None], panels, form) for row in x])
    assert ((alone.double() - wanted).abs() <= unit * wanted.abs() + 1e-6 * size + rounded).all()
    for rows in ROWS:
        assert torch.equal(linear(x[:rows], panels, form), alone[:rows]), rows
    with_bias = linear(x, panels, form, bias)
    wanted = wanted + bias.double()
    assert ((with_bias.double() - wanted).abs() <= unit * wanted.abs() + 1e-6 * size + 1e-6 + rounded).all()


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_dequantized(instruction_set, layout):
    panels, form, known = weights(*layout)
    for dtype in TYPES:
        found = dequantized(panels, form, dtype).double()
        assert ((found - known).abs() <= torch.finfo(dtype).eps / 2 * known.abs() + 1e-6).all()


def test_rows_that_are_apart_and_threads(instruction_set):
    """Part of wider tensors on both sides, each thread with its share of the outputs."""
    panels, form, _ = weights(4, 32, 130, 96)
    x = torch.randn(5, 100)[:, :96]
    wanted = linear(x.contiguous(), panels, form)
    assert torch.equal(linear(x, panels, form), wanted) and torch.equal(
        linear(x.T.contiguous().T, panels, form), wanted
    )
    out = torch.full((5, 135), -1.0)
    call = Call(
        x.data_ptr(),
        panels.data_ptr(),
        0,
        out.data_ptr(),
        TYPES[x.dtype],
        5,
        130,
        96,
        100,
        0,
        135,
        0,
        4,
        32,
        TYPES[form.scales],
    )
    for threads in (1, 2, 3, 20):
        out[:] = -1
        library().specdec_linear(ctypes.byref(call), threads)
        assert torch.equal(out[:, :130], wanted) and (out[:, 130:] == -1).all()


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("dtype", list(TYPES), ids=str)
def test_numbers_of_very_different_sizes(instruction_set, bits, dtype):
    """Zeros, tiny and huge numbers; and what is not finite makes its token's outputs not a number, no other's."""
    panels, form, known = weights(bits, 32, 16, 64)
    x = torch.randn(6, 64, generator=torch.Generator().manual_seed(3))
    x[0], x[1, 5], x[2] = 0, 300, x[2] * 1e-7
    x = x.to(dtype)
    wanted = x.double() @ known.T
    found = linear(x, panels, form)
    coarse = (
        2.0 ** (-15 if dtype != torch.float32 else -22) * x.double().abs().amax(1, keepdim=True) * known.abs().sum(1)
    )
    least = torch.finfo(dtype).smallest_normal
    assert ((found.double() - wanted).abs() <= torch.finfo(dtype).eps / 2 * wanted.abs() + coarse + least).all()
    assert (found[0] == 0).all()
    for bad in (float("nan"), float("inf")):
        other = x.clone()
        other[3, 7] = bad
        again = linear(other, panels, form)
        assert again[3].isnan().all() and torch.equal(again[:3], found[:3]) and torch.equal(again[4:], found[4:])


def test_layouts_that_the_library_lacks():
    for bits, group, inputs in ((4, 48, 96), (4, 64, 96), (3, 32, 96)):
        with pytest.raises(ValueError, match="groups of"):
            WeightLayout(bits, group, 16, inputs, torch.float32)


# ---- torchao's weights ----------------------------------------------------------------------------------------------


def by_torchao(weight, kind):
    pytest.importorskip("torchao")
    from hf_specdec.model.options.quantized import _config, _quantize

    return _quantize(weight, _config(kind, weight))


@pytest.mark.parametrize("dtype", list(TYPES), ids=str)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shape", [(64, 256), (48, 96), (80, 64), (1024, 384), (176, 128)], ids=str)
@torch.no_grad()
def test_the_same_weights_as_torchaos(kind, dtype, shape):
    """Bit for bit: torchao's product with unit vectors, in float32, gives the weights that it computes with."""
    quantized = by_torchao(torch.randn(shape, generator=torch.Generator().manual_seed(5)).to(dtype), kind)
    ours = native_weight(quantized)
    assert (
        isinstance(ours, NativeWeight)
        and isinstance(ours, nn.Parameter)
        and ours.shape == shape
        and ours.dtype == dtype
    )
    if kind == "wint8":
        assert torch.equal(ours.dequantize(), quantized.dequantize())
    else:
        scales = quantized.scale_and_zero.float()
        group = quantized.block_size[1]
        units, whole = (
            torch.eye(shape[1]),
            torch.stack([torch.ones_like(scales[..., 0]), torch.zeros_like(scales[..., 1])], -1),
        )
        values = torch.ops.aten._weight_int4pack_mm_for_cpu(units, quantized.qdata, group, whole).T  # q - 8
        scale, zero = (each.T.repeat_interleave(group, 1) for each in scales.unbind(-1))
        torch.testing.assert_close(
            ours.dequantize(), (values * scale + zero).to(dtype), rtol=torch.finfo(dtype).eps, atol=1e-7
        )
    x, bias = torch.randn(2, 3, shape[1]).to(dtype), torch.randn(shape[0]).to(dtype)
    bound = {torch.float32: 1e-6, torch.bfloat16: 1e-2, torch.float16: 1e-3}[dtype]
    wanted = F.linear(x, quantized, bias).float()
    for found in (F.linear(x, ours, bias), F.linear(x.repeat(1, MOST_TOKENS, 1), ours, bias)[:, :3]):
        assert found.dtype == dtype and (found.float() - wanted).norm() <= bound * wanted.norm()


def test_weights_that_stay_torchaos(monkeypatch):
    """Other kinds of quantization, and an int4 format that this torch does not have."""
    pytest.importorskip("torchao")
    from torchao.quantization import Int8DynamicActivationInt8WeightConfig

    from hf_specdec.model.options.quantized import _quantize

    weight = torch.randn(64, 64)
    assert native_weight(_quantize(weight, Int8DynamicActivationInt8WeightConfig(set_inductor_config=False))) is None
    assert native_weight(weight) is None
    monkeypatch.setattr(native_weights, "_PACKINGS", [48])
    assert native_weight(by_torchao(weight, "wint4")) is None


def test_other_operators_get_plain_weights():
    weight = native_weight(by_torchao(torch.randn(32, 64), "wint8"))
    plain, x = weight.dequantize(), torch.randn(2, 64)
    assert type(weight + 1) is torch.Tensor and torch.equal(weight + 1, plain + 1)
    assert torch.equal(x @ weight.t(), x @ plain.t())
    assert torch.equal(F.linear(x.double(), weight.double()), F.linear(x.double(), plain.double()))
    own = x.clone().requires_grad_()
    F.linear(own, weight).sum().backward()
    torch.testing.assert_close(own.grad, plain.sum(0).expand(2, -1))
    with pytest.raises(NotImplementedError, match="quantized weights"):
        weight.data.mul_(2)


def test_memory_is_not_more_than_torchaos():
    """A module that is ours keeps one copy of its quantized weights."""
    pytest.importorskip("torchao")
    for kind in KINDS:
        sizes = []
        for native in (False, True):
            module = nn.Sequential(nn.Linear(1024, 256, bias=False)).bfloat16()
            quantize_for_good(module, kind, native=native)
            sizes.append(num_bytes(module))
        assert sizes[1] <= sizes[0] * 1.01 and isinstance(module[0].weight, NativeWeight)


# ---- models ---------------------------------------------------------------------------------------------------------


def steps():
    """Prompts of two rows; then a token and a draft; then a tree."""
    random = np.random.default_rng(0)
    visibility = np.array([[1, 0, 0], [1, 1, 0], [1, 0, 1]], dtype=bool)
    positions = np.array([23, 24, 24])

    def ids(count):
        return random.integers(1, 128, count)

    return [
        [RowInput(0, ids(19), 0), RowInput(1, ids(5), 0, logits=5)],
        [RowInput(0, ids(4), 19, logits=4), RowInput(1, ids(1), 5)],
        [RowInput(0, ids(3), 23, positions, visibility, positions, logits=3)],
    ]


def logits(packed):
    cache = packed.new_cache(num_blocks=20, block_size=4, share_prefixes=False)
    for row in range(2):
        cache.add(row)
        cache.reserve(row, 30)
    with torch.no_grad(), packed.active():
        return [packed.forward(rows, cache).logits for rows in steps()]


@pytest.mark.parametrize("dtype", list(TYPES), ids=str)
@pytest.mark.parametrize("family", ["Llama", "Qwen2", "Gemma2", "OPT"])
@pytest.mark.parametrize("kind", KINDS)
def test_steps_of_a_quantized_model_are_native(kind, family, dtype):
    pytest.importorskip("torchao")
    wide = {"hidden_size": 64, "ffn_dim": 160, "word_embed_proj_dim": 64} if family == "OPT" else WIDE
    model = make(family, **wide).to(dtype)
    native = prepare(model, ModelOptions(quantization=kind))
    found = logits(native)
    assert native.native is not None and native.native.refused is None
    wanted = logits(prepare(model, ModelOptions(quantization=kind, native=False, prepack_weights=False)))
    plain = logits(prepare(model, ModelOptions(native=False, prepack_weights=False)))
    bound = {torch.float32: 2e-5, torch.float16: 2e-2, torch.bfloat16: 0.12}[dtype]
    for ours, own, other in zip(found, wanted, plain, strict=True):
        assert (ours - own).norm() <= bound * own.norm()
        if dtype == torch.float32:
            assert (ours - other).norm() > 10 * bound * own.norm()  # not the unquantized weights


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "config", [{"method": "ngram"}, {"method": "draft_model", "early_exit": 2}], ids=lambda each: each["method"]
)
def test_speculative_text_is_plain_text(kind, config):
    pytest.importorskip("torchao")
    model = make("Llama", **WIDE)
    ids = torch.tensor([[5, 6, 7, 5, 6, 8, 5, 6], [9, 5, 6, 7, 9, 5, 6, 7]])
    texts = [
        model.generate(ids, max_new_tokens=48, do_sample=False, speculative_config=each | {"target_quantization": kind})
        for each in ({"method": "none"}, config, config | {"native": True})
    ]
    assert torch.equal(texts[0], texts[1]) and torch.equal(texts[0], texts[2])
    target = get_decoder(model, parse_config(config | {"target_quantization": kind})).target
    assert target.native.refused is None
    hf_specdec.release(model)


def test_a_changed_model_is_quantized_again_for_its_program():
    pytest.importorskip("torchao")
    model = make("Llama", **WIDE)
    native = prepare(model, ModelOptions(quantization="wint8"))
    before = logits(native)
    model.model.layers[1].mlp.up_proj.weight.data.mul_(1.7)
    found = logits(native)
    wanted = logits(prepare(model, ModelOptions(quantization="wint8", native=False, prepack_weights=False)))
    assert native.native.refused is None
    assert (found[1] - wanted[1]).norm() <= 2e-5 * wanted[1].norm() < (before[1] - wanted[1]).norm()


def test_a_quantized_model_that_is_ours():
    """Its own weights are dropped; both kinds of forwards use the same copy."""
    pytest.importorskip("torchao")
    model = make("Llama", **WIDE)
    native = prepare(model, ModelOptions(quantization="wint8", owned=True))
    linears = [each for each in model.model.layers.modules() if type(each) is nn.Linear]
    assert all(isinstance(each.weight, NativeWeight) for each in linears)
    found = logits(native)
    assert native.native.refused is None and native.active_options == []
    native.native = None
    again = logits(native)
    for ours, own in zip(found, again, strict=True):
        assert (ours - own).norm() <= 2e-5 * own.norm()


@pytest.mark.parametrize("kind", KINDS)
def test_logits_do_not_depend_on_the_batch(kind):
    pytest.importorskip("torchao")
    native = prepare(make("Llama", **WIDE), ModelOptions(quantization=kind))

    def first(batches):
        cache = native.new_cache(num_blocks=20, block_size=4, share_prefixes=False)
        for row in range(2):
            cache.add(row)
            cache.reserve(row, 30)
        with torch.no_grad(), native.active():
            return torch.cat([native.forward(rows, cache).logits for rows in batches])

    batch = steps()[0]
    assert torch.equal(first([batch]), first([[row] for row in batch]))


def test_two_configurations_have_their_own_copies():
    pytest.importorskip("torchao")
    model = make("Llama", **WIDE)
    native, plain = (prepare(model, ModelOptions(quantization="wint4", native=each)) for each in (None, False))
    kinds = []
    for packed in (native, plain):
        with packed.active():
            kinds.append(type(model.model.layers[0].mlp.up_proj.weight).__name__)
    assert kinds == ["NativeWeight", "Int4OpaqueTensor"]
    assert QuantizedLinears(model, "wint4").bytes_after <= QuantizedLinears(model, "wint4", native=False).bytes_after
