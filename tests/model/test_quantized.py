"""Quantized weights: the output is the quantized target's own, drafters' weights change nothing, nothing of ours is left behind."""

import copy
import gc
import logging
import sys

import pytest
import torch
from families import make
from replayed_graphs import defined_attention, graphs_in_python  # noqa: F401
from test_compiled import counter  # noqa: F401
from torch import nn

import hf_specdec
from hf_specdec.candidate_generators import parse_config
from hf_specdec.config import SpeculativeConfigError
from hf_specdec.core.errors import UnsupportedModel
from hf_specdec.integration import get_decoder
from hf_specdec.kernels.native import library
from hf_specdec.model.options.prepacked import packs_bfloat16
from hf_specdec.model.options.quantized import QuantizedLinears, num_bytes, quantize_for_good
from hf_specdec.model.prepare import ModelOptions, prepare

pytest.importorskip("torchao")

PROMPTS = ["Tom has 3 apples and buys 4 more. How many", "def add(a, b):"]
KINDS = ("wint8", "wint4")
BY_TORCHAO = {"wint8": "Int8Tensor", "wint4": "Int4OpaqueTensor"}
STORED = BY_TORCHAO if library() is None else dict.fromkeys(KINDS, "NativeWeight")  # classes of quantized weights
WIDE = {"hidden_size": 64, "intermediate_size": 160, "head_dim": 16}  # what groups of 64 and 32 divide


def torchao_config(kind, group=32):
    from torchao.prototype.quantization.int4 import PrototypeInt4WeightOnlyConfig
    from torchao.quantization import Int8WeightOnlyConfig

    if kind == "wint8":
        return Int8WeightOnlyConfig(set_inductor_config=False)
    return PrototypeInt4WeightOnlyConfig(group_size=group, set_inductor_config=False)


def quantized_copy(model, kind):
    """A copy whose decoder layers torchao has quantized by itself."""
    from torchao.quantization import quantize_

    other = copy.deepcopy(model)
    for linear in (m for m in other.model.layers.modules() if type(m) is nn.Linear):
        quantize_(linear, torchao_config(kind, next(size for size in (128, 64, 32) if linear.in_features % size == 0)))
    return other


def generate(model, tokenizer=None, tokens=12, **kwargs):
    if tokenizer is None:
        inputs = {"input_ids": torch.tensor([[5, 6, 7, 5, 6, 8], [9, 5, 6, 7, 9, 5]])}
    else:
        inputs = tokenizer(PROMPTS, return_tensors="pt", padding=True)
    return model.generate(**inputs, max_new_tokens=tokens, do_sample=False, **kwargs)


@pytest.fixture(params=KINDS)
def small(request):
    """A small target of its own, and the kind to quantize it to."""
    return make("Llama", **WIDE), request.param


@pytest.fixture
def model(tiny_model):
    return copy.deepcopy(tiny_model)


# ---- the target -----------------------------------------------------------------------------------------------------


def test_text_is_that_of_the_quantized_target(small):
    model, kind = small
    wanted = generate(quantized_copy(model, kind), tokens=24)
    before = generate(model, tokens=24)
    weights = {name: (id(p), p._version) for name, p in model.named_parameters()}
    for config in ({"method": "none"}, {"method": "ngram"}, {"method": "draft_model", "early_exit": 2}):
        found = generate(model, tokens=24, speculative_config=config | {"target_quantization": kind})
        assert torch.equal(found, wanted)
    assert {name: (id(p), p._version) for name, p in model.named_parameters()} == weights
    assert not any("extra_repr" in vars(m) or "forward" in vars(m) for m in model.modules())
    assert torch.equal(generate(model, tokens=24), before)
    assert not torch.equal(before, wanted)  # or else the test could not fail


@pytest.mark.parametrize("how", ["compile", "cuda_graphs"])
def test_compiled_or_in_graphs(small, counter, graphs_in_python, defined_attention, how):  # noqa: F811
    model, kind = small
    config = {"method": "ngram", "target_quantization": kind, how: True}
    assert torch.equal(generate(model, speculative_config=config), generate(quantized_copy(model, kind)))
    if how == "compile":
        assert counter.frame_count in (1, 2)
    else:
        assert [each.refused for each in graphs_in_python] == [False] and graphs_in_python[0].capture.count
    hf_specdec.release(model)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_text_with_torchaos_own_products(small, dtype):
    """Without the native library torchao's weights and products are used."""
    model, kind = small
    model = model.to(dtype)
    wanted = generate(quantized_copy(model, kind), tokens=24)
    config = {"method": "ngram", "target_quantization": kind, "native": False}
    assert torch.equal(generate(model, tokens=24, speculative_config=config), wanted) or dtype != torch.float32
    packed = get_decoder(model, parse_config(config)).target
    with packed.active():
        kinds = {type(m.weight).__name__ for m in model.model.layers.modules() if type(m) is nn.Linear}
    assert packed.native is None and kinds == {BY_TORCHAO[kind]}
    hf_specdec.release(model)


def test_bundled_target_and_tree(model, tiny_tokenizer):
    wanted = generate(quantized_copy(model, "wint8"), tiny_tokenizer, tokens=24)
    config = {
        "method": "draft_model",
        "model": "tiny-draft",
        "branching_factors": [2, 2, 1],
        "target_quantization": "wint8",
    }
    assert torch.equal(generate(model, tiny_tokenizer, tokens=24, speculative_config=config), wanted)


def test_same_as_transformers_own_configuration(tiny_tokenizer):
    """Same layers, same weights: a model loaded with TorchAoConfig gives the same text, with speculation too."""
    from transformers import AutoModelForCausalLM, TorchAoConfig

    name = hf_specdec.bundled("tiny")
    plain = AutoModelForCausalLM.from_pretrained(name, dtype=torch.float32).eval()
    loaded = AutoModelForCausalLM.from_pretrained(
        name, dtype=torch.float32, quantization_config=TorchAoConfig(torchao_config("wint8"))
    ).eval()
    wanted = generate(loaded, tiny_tokenizer, tokens=24)
    draft = {"method": "draft_model", "model": "tiny-draft"}
    assert torch.equal(generate(loaded, tiny_tokenizer, tokens=24, speculative_config=draft), wanted)
    quantized = draft | {"target_quantization": "wint8"}
    assert torch.equal(generate(plain, tiny_tokenizer, tokens=24, speculative_config=quantized), wanted)
    assert num_bytes(loaded) == QuantizedLinears(plain, "wint8", native=False).bytes_after < num_bytes(plain)
    with pytest.raises(UnsupportedModel, match="no plain linear layer"):
        generate(loaded, tiny_tokenizer, speculative_config=quantized)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kind", KINDS)
@torch.no_grad()
def test_error_and_bytes_of_one_layer(kind, dtype):
    module = nn.Sequential(nn.Linear(256, 64)).to(dtype)
    own = module[0].weight
    quantized = QuantizedLinears(module, kind)
    x = torch.randn(3, 256).to(dtype)
    wanted = module(x).float()
    with quantized.active():
        error = (module(x).float() - wanted).norm() / wanted.norm()
        stored = num_bytes(module)
    assert module[0].weight is own
    assert 0 < error < (0.02 if kind == "wint8" else 0.15)
    assert quantized.bytes_before == num_bytes(module) and quantized.bytes_after == stored
    assert stored < quantized.bytes_before * ({"wint8": 1.2, "wint4": 0.85}[kind] / dtype.itemsize)


@torch.no_grad()
def test_float16_does_not_overflow():
    """torchao's product with one scale per output adds up integers, which float16 holds up to 65504."""
    module = nn.Sequential(nn.Linear(1024, 16, bias=False)).half()
    module[0].weight.fill_(0.01)
    x = torch.full((1, 1024), 4.0, dtype=torch.float16)
    with QuantizedLinears(module, "wint8").active():
        torch.testing.assert_close(module(x), torch.full((1, 16), 40.96, dtype=torch.float16), rtol=1e-2, atol=0)


def test_which_layers():
    """Linear layers; not the output layer, nor one whose weight is the embeddings'."""
    for tied in (False, True):
        model = make("Llama", **WIDE, tie_word_embeddings=tied)
        with QuantizedLinears(model, "wint8").active():
            kinds = {name: type(m.weight).__name__ for name, m in model.named_modules() if isinstance(m, nn.Linear)}
            assert type(model.get_input_embeddings().weight) is nn.Parameter
        assert kinds.pop("lm_head") == "Parameter" and set(kinds.values()) == {STORED["wint8"]} and len(kinds) == 3 * 7


@pytest.mark.parametrize("way", [lambda weight: weight, lambda weight: weight.data], ids=["in place", "through data"])
def test_changed_weights_are_quantized_again(way):
    module = nn.Sequential(nn.Linear(64, 16, bias=False))
    quantized, x = QuantizedLinears(module, "wint8"), torch.randn(1, 64)
    with torch.no_grad():
        way(module[0].weight).mul_(-2)
        wanted = module(x)
        with quantized.active():
            torch.testing.assert_close(module(x), wanted, rtol=0.05, atol=0.02)


def test_restored_after_an_error(small):
    model, kind = small
    weights = [id(p) for p in model.parameters()]

    def fails(*args):
        raise RuntimeError("stop here")

    with pytest.raises(RuntimeError, match="stop here"):
        config = {"method": "ngram", "target_quantization": kind}
        generate(model, speculative_config=config, logits_processor=[fails])
    assert [id(p) for p in model.parameters()] == weights


def quantized_of(packed):
    """The quantized layers that are swapped in while a model is active; None if there are none."""
    return next((each for each in packed.active_options if isinstance(each, QuantizedLinears)), None)


def test_configurations_share_the_copies():
    """Two drafters for a target: it is quantized once; with the last decoder the copies go."""
    import weakref

    model = make("Llama", **WIDE)
    first, second = (
        get_decoder(model, parse_config({"method": method, "target_quantization": "wint8"})).target
        for method in ("ngram", "none")
    )
    assert first is not second and quantized_of(first) is quantized_of(second)
    gone = weakref.ref(quantized_of(first))
    del first, second
    hf_specdec.release(model)
    gc.collect()
    assert gone() is None


def test_with_packed_weights():
    """What is not quantized is packed still: with bfloat16 on a CPU the output layer."""
    model = make("Llama", **WIDE).bfloat16()
    packed = prepare(model, ModelOptions(prepack_weights=True, quantization="wint8"))
    with packed.active():
        assert [name for name, m in model.named_modules() if "forward" in vars(m)] == (
            ["lm_head"] if torch.backends.mkldnn.is_available() and packs_bfloat16() else []
        )


# ---- drafters -------------------------------------------------------------------------------------------------------

HEADS = ("eagle", "eagle3", "mtp", "dflash", "medusa", "hydra", "mlp_speculator")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("method", HEADS)
def test_a_quantized_head_changes_no_output(tiny_model, tiny_tokenizer, method, kind):
    plain = generate(tiny_model, tiny_tokenizer)
    config = {"method": method, "model": f"tiny-{method}", "num_speculative_tokens": 3} | {"quantization": kind}
    assert torch.equal(generate(tiny_model, tiny_tokenizer, speculative_config=config), plain)
    head = get_decoder(tiny_model, parse_config(config)).generator
    own = [m for each in head.modules() for m in each.modules() if m not in set(tiny_model.modules())]
    kinds = {type(m.weight).__name__ for m in own if type(m) is nn.Linear}
    assert kinds == {STORED[kind]}
    assert all(type(p) is nn.Parameter for p in tiny_model.parameters())
    unquantized = get_decoder(tiny_model, parse_config({k: v for k, v in config.items() if k != "quantization"}))
    assert all(
        type(m.weight) is nn.Parameter
        for each in unquantized.generator.modules()
        for m in each.modules()
        if type(m) is nn.Linear
    )
    hf_specdec.release(tiny_model)


@pytest.mark.parametrize("kind", KINDS)
def test_a_quantized_draft_model_changes_no_output(kind):
    """One that is handed over is lent to us; what it drafts is what a quantized one drafts."""
    target, drafter = make("Llama", **WIDE), make("Llama", seed=1, **WIDE)
    weights = [id(p) for p in drafter.parameters()]
    plain = generate(target)
    config = {"method": "draft_model", "quantization": kind}
    assert torch.equal(generate(target, assistant_model=drafter, speculative_config=config), plain)
    assert [id(p) for p in drafter.parameters()] == weights


def test_a_draft_model_we_loaded_is_quantized_for_good(tiny_model, tiny_tokenizer):
    plain = generate(tiny_model, tiny_tokenizer)
    config = {"method": "draft_model", "model": "tiny-draft", "quantization": "wint8"}
    for tokens in (3, 4):  # two decoders, one drafter
        each = config | {"num_speculative_tokens": tokens}
        assert torch.equal(generate(tiny_model, tiny_tokenizer, speculative_config=each), plain)
        drafter = get_decoder(tiny_model, parse_config(each)).generator.drafter
        assert (
            quantized_of(drafter) is None and type(drafter.model.model.layers[0].mlp.up_proj.weight) is not nn.Parameter
        )
    hf_specdec.release(tiny_model)


def test_part_of_a_hybrid(tiny_model, tiny_tokenizer):
    plain = generate(tiny_model, tiny_tokenizer)
    head = {"method": "eagle", "model": "tiny-eagle", "quantization": "wint8"}
    config = {"method": "hybrid", "first": {"method": "ngram"}, "second": head}
    assert torch.equal(generate(tiny_model, tiny_tokenizer, speculative_config=config), plain)
    part = get_decoder(tiny_model, parse_config(config)).generator.second
    assert type(part.head.module.fc.weight) is not nn.Parameter
    hf_specdec.release(tiny_model)


# ---- refusals -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (
            {"method": "ngram", "quantization": "wint8"},
            r"'quantization'\] of method 'ngram' is for drafters with weights",
        ),
        (
            {"method": "draft_model", "quantization": "int8"},
            "must be one of 'wint8', 'wint4', not 'int8'.*did you mean",
        ),
        (
            {"method": "none", "target_quantization": 8},
            "'target_quantization'.* must be one of 'wint8', 'wint4', not 8",
        ),
        (
            {"method": "none", "target_quantization": "wint8", "deterministic": True},
            "'target_quantization'.*cannot be combined",
        ),
        (
            {
                "method": "hybrid",
                "first": {"method": "ngram", "target_quantization": "wint8"},
                "second": {"method": "ngram"},
            },
            "move it there",
        ),
    ],
)
def test_bad_configurations(config, message):
    with pytest.raises(SpeculativeConfigError, match=message):
        parse_config(config)


def test_the_target_as_its_own_drafter_is_refused(tiny_model):
    config = {"method": "draft_model", "early_exit": 2, "quantization": "wint8"}
    with pytest.raises(SpeculativeConfigError, match=r"the target drafts for itself. Use 'target_quantization'"):
        generate(tiny_model, speculative_config=config)


def test_layers_of_other_shapes_stay_as_they_are(caplog):
    module = nn.ModuleList([nn.Linear(64, 16), nn.Linear(40, 16), nn.Linear(64, 24)])
    with caplog.at_level(logging.WARNING, logger="hf_specdec"):
        quantized = QuantizedLinears(module, "wint4")
    assert [linear for linear, _ in quantized.copies()] == [module[0]]
    assert caplog.text.count("2 of 3 linear layers are not quantized") == 1
    with pytest.raises(
        UnsupportedModel,
        match=r"none of its 2 linear layers .* multiples of 32 and outputs in multiples of 16, not 40 and 16",
    ):
        QuantizedLinears(module[1:], "wint4")
    with pytest.raises(UnsupportedModel, match="inputs in multiples of 32, more than 32, not 32 and 16"):
        QuantizedLinears(nn.ModuleList([nn.Linear(32, 16, dtype=torch.float16)]), "wint8")


def test_two_kinds_for_good_are_refused():
    module = nn.Sequential(nn.Linear(64, 16))
    quantize_for_good(module, "wint8")
    quantize_for_good(module, "wint8")
    with pytest.raises(ValueError, match="has 'wint8' weights already, not 'wint4'"):
        quantize_for_good(module, "wint4")


def test_offloaded_weights_are_refused():
    with pytest.raises(UnsupportedModel, match="offloaded"):
        QuantizedLinears(nn.Sequential(nn.Linear(64, 16, device="meta")), "wint8")


@pytest.mark.parametrize("capability", [(7, 5), (9, 0)])
def test_int4_on_cuda(monkeypatch, capability):
    """By torchao's configuration for one layer: which packing, and which devices and dtypes are refused."""
    from hf_specdec.model.options import quantized

    class Weight:
        device, shape, dtype = torch.device("cuda:0"), (64, 192), torch.bfloat16

    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    if capability < (8, 0):
        with pytest.raises(UnsupportedModel, match=r"compute capability 8.0"):
            quantized._config("wint4", Weight())
        return
    config = quantized._config("wint4", Weight())
    assert (config.group_size, config.int4_packing_format, config.set_inductor_config) == (
        64,
        "tile_packed_to_4d",
        False,
    )
    Weight.dtype = torch.float16
    with pytest.raises(UnsupportedModel, match=r"dtype=torch.bfloat16"):
        quantized._config("wint4", Weight())


def test_without_torchao_it_is_one_clear_error(monkeypatch):
    for name in [name for name in sys.modules if name.split(".")[0] == "torchao"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "torchao", None)
    with pytest.raises(ImportError, match=r"'wint8' weights need torchao: pip install 'hf-specdec\[gpu\]'"):
        generate(make("Llama", **WIDE), speculative_config={"method": "none", "target_quantization": "wint8"})


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("kind", KINDS)
def test_on_a_gpu(kind):
    model = make("Llama", **WIDE).to("cuda", torch.bfloat16)
    config = {"method": "ngram", "target_quantization": kind}
    ids = torch.tensor([[5, 6, 7, 5, 6]], device="cuda")
    plain = model.generate(ids, max_new_tokens=8, do_sample=False, speculative_config=config | {"method": "none"})
    assert torch.equal(model.generate(ids, max_new_tokens=8, do_sample=False, speculative_config=config), plain)
