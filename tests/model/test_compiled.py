"""`"compile": true`: what compiled decoder layers compute is what the layers compute, and few graphs are compiled."""

import copy
import os
import subprocess
import sys

import pytest
import torch
from families import make, make_for_pages
from replayed_graphs import defined_attention, graphs_in_python  # noqa: F401
from torch._dynamo.testing import CompileCounter

from hf_specdec.core.errors import UnsupportedModel
from hf_specdec.model.attention import paged_attention_forward
from hf_specdec.model.options import compiled

PROMPTS = ["Tom has 3 apples and buys 4 more. How many", "def add(a, b):", "The", "Once upon a time there was a cat"]
CONFIGS = {
    "chain": {"method": "draft_model", "model": "tiny-draft"},
    "tree": {"method": "draft_model", "model": "tiny-draft", "branching_factors": [2, 2, 1]},
    "dynamic tree": {"method": "draft_model", "model": "tiny-draft", "top_k": 2, "total_tokens": 8, "depth": 3},
    "early exit": {"method": "draft_model", "early_exit": 3},
    "ngram": {"method": "ngram"},
    "head with taps": {"method": "eagle3", "model": "tiny-eagle3"},
}
MOST_GRAPHS = 2  # of one model: for one token, and for any number


@pytest.fixture
def counter(monkeypatch):
    """Layers are traced and guarded as ever, and run by a backend that counts the graphs it is given instead of compiling."""
    made = CompileCounter()
    monkeypatch.setattr(compiled.CompiledLayers.__init__, "__defaults__", (made,))
    with torch._dynamo.config.patch(fail_on_recompile_limit_hit=True):
        yield made


@pytest.fixture
def model(tiny_model):
    """A target of its own, compiled by nobody yet."""
    return copy.deepcopy(tiny_model)


def generate(model, tokenizer, prompts=PROMPTS, tokens=24, **kwargs):
    inputs = tokenizer(prompts, return_tensors="pt", padding=True)
    return model.generate(**inputs, max_new_tokens=tokens, do_sample=False, **kwargs)


def state_of(model):
    kept = {"_hf_specdec"}  # between calls
    return {
        name: sorted(vars(module).keys() - kept) for name, module in model.named_modules()
    }, model.config._attn_implementation


@pytest.mark.parametrize(
    ("name", "rows"),
    [("chain", 4), ("tree", 1), ("head with taps", 4)]
    + [
        pytest.param(*each, marks=pytest.mark.slow)
        for each in (("chain", 1), ("tree", 4), ("dynamic tree", 4), ("early exit", 1), ("ngram", 4))
    ],
)
def test_equals_plain(model, tiny_tokenizer, counter, name, rows):
    plain = generate(model, tiny_tokenizer, PROMPTS[:rows])
    before = state_of(model)
    found = generate(model, tiny_tokenizer, PROMPTS[:rows], speculative_config=CONFIGS[name] | {"compile": True})
    assert torch.equal(found, plain)
    models = 2 if CONFIGS[name].get("model") == "tiny-draft" else 1
    assert 1 <= counter.frame_count <= models * MOST_GRAPHS
    assert state_of(model) == before


def test_ragged_lengths_compile_nothing_new(model, tiny_tokenizer, counter):
    """After one call: other batches, other lengths, other drafters, sizes that equal the model's own."""
    generate(model, tiny_tokenizer, PROMPTS[:1], tokens=8, speculative_config=CONFIGS["ngram"] | {"compile": True})
    warm = counter.frame_count
    assert warm == MOST_GRAPHS
    width, head = model.config.hidden_size, model.config.head_dim
    for length in (1, 2, head + 1, width):
        ids = torch.arange(length)[None] % 1000 + 5
        for config in ({"method": "ngram"}, {"method": "none"}, CONFIGS["early exit"]):
            plain = model.generate(ids, max_new_tokens=5, do_sample=False)
            config = config | {"compile": True}
            assert torch.equal(model.generate(ids, max_new_tokens=5, do_sample=False, speculative_config=config), plain)
    for rows in (2, 3, 4):
        generate(model, tiny_tokenizer, PROMPTS[:rows], speculative_config=CONFIGS["ngram"] | {"compile": True})
    assert counter.frame_count == warm


@pytest.mark.slow
def test_models_of_a_class_do_not_share_a_limit(counter):
    """Dynamo allows eight compilations of a function; five models of a class have ten between them."""
    ids = torch.tensor([[1, 2, 3]])
    models = [make("Llama", seed) for seed in range(5)]
    for model in models:
        plain = model.generate(ids, max_new_tokens=3, do_sample=False)
        config = {"method": "none", "compile": True}
        assert torch.equal(model.generate(ids, max_new_tokens=3, do_sample=False, speculative_config=config), plain)
    assert counter.frame_count == len(models) * MOST_GRAPHS


@pytest.mark.parametrize(
    "family", ["gpt-oss", *(pytest.param(name, marks=pytest.mark.slow) for name in ("Gemma2", "Mistral", "GPT-2"))]
)
def test_windows_sinks_and_softcaps_reach_attention(family, counter):
    model = make_for_pages(family)
    ids = torch.randint(5, 60, (1, 24))
    plain = model.generate(ids, max_new_tokens=16, do_sample=False)
    config = {"method": "ngram", "compile": True}
    assert torch.equal(model.generate(ids, max_new_tokens=16, do_sample=False, speculative_config=config), plain)
    assert 1 <= counter.frame_count <= 2 * MOST_GRAPHS  # layers that see a window and layers that see all


def test_the_model_itself_runs_uncompiled_inside(model, counter):
    layers = compiled.CompiledLayers(model, paged_attention_forward)
    ids = torch.tensor([[1, 2, 3, 4]])
    with torch.no_grad():
        wanted = model(ids).logits
        with layers.active():
            found = model(ids).logits
    assert torch.equal(found, wanted) and counter.frame_count == 0


def test_restored_after_an_error(model, tiny_tokenizer, counter):
    before = state_of(model)

    def fails(*args):
        raise RuntimeError("stop here")

    with pytest.raises(RuntimeError, match="stop here"):
        config = {"method": "ngram", "compile": True}
        generate(model, tiny_tokenizer, speculative_config=config, logits_processor=[fails])
    assert state_of(model) == before


@pytest.mark.usefixtures("defined_attention")
@pytest.mark.parametrize("name", [pytest.param("chain", marks=pytest.mark.slow), "tree"])
def test_compiled_layers_in_graphs(model, tiny_tokenizer, counter, graphs_in_python, name):  # noqa: F811
    """Steps in static buffers (replayed by calling again in Python), the layers of each compiled."""
    plain = generate(model, tiny_tokenizer, PROMPTS[:2], tokens=12)
    config = CONFIGS[name] | {"compile": True, "cuda_graphs": True}
    assert torch.equal(generate(model, tiny_tokenizer, PROMPTS[:2], tokens=12, speculative_config=config), plain)
    assert sum(captures.capture.count for captures in graphs_in_python) and not any(c.refused for c in graphs_in_python)
    assert 2 <= counter.frame_count <= 2 * MOST_GRAPHS


@pytest.mark.skipif(" " in torch.__file__, reason="inductor's own commands do not bear a space in torch's path")
def test_inductor():
    """The same through C++."""
    model, ids = make("Llama"), torch.tensor([[5, 6, 7, 5, 6], [5, 6, 7, 8, 5]])
    plain = model.generate(ids, max_new_tokens=12, do_sample=False)
    config = CONFIGS["ngram"] | {"compile": True}
    assert torch.equal(model.generate(ids, max_new_tokens=12, do_sample=False, speculative_config=config), plain)


@pytest.mark.slow
@pytest.mark.skipif(" " in torch.__file__, reason="inductor's own commands do not bear a space in torch's path")
@pytest.mark.skipif(torch.backends.cpu.get_cpu_capability() != "AVX512", reason="needs two instruction sets")
def test_code_in_inductors_cache_is_for_one_instruction_set(tmp_path):
    """inductor's cache does not tell them apart: code for the other set writes wrong text, or ends the process."""
    for capability in ("avx512", "avx2", "avx512"):
        environment = {**os.environ, "ATEN_CPU_CAPABILITY": capability, "TORCHINDUCTOR_CACHE_DIR": str(tmp_path)}
        command = [sys.executable, "-m", "pytest", "-q", "-n0", "-p", "no:cacheprovider", f"{__file__}::test_inductor"]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
        assert done.returncode == 0 and " passed" in done.stdout, (capability, done.stdout[-2000:])


def test_without_a_compiler_it_is_one_clear_error(model, tiny_tokenizer, monkeypatch):
    from torch._inductor import config

    monkeypatch.setattr(config.cpp, "cxx", ("no-such-compiler",))
    with pytest.raises(UnsupportedModel, match=r"'compile' needs a C\+\+ compiler"):
        generate(model, tiny_tokenizer, speculative_config={"method": "ngram", "compile": True})


def test_models_off_the_attention_interface_are_refused():
    model = make("BLOOM")
    with pytest.raises(UnsupportedModel, match="'compile' needs a model on transformers' attention interface"):
        model.generate(torch.tensor([[1, 2]]), max_new_tokens=2, speculative_config={"method": "none", "compile": True})


@pytest.mark.parametrize("key", ["prepack_weights", "deterministic"])
def test_what_it_cannot_be_combined_with(tiny_model, key):
    with pytest.raises(ValueError, match="cannot be combined with"):
        tiny_model.generate(
            torch.tensor([[1]]), max_new_tokens=2, speculative_config={"method": "none", "compile": True, key: True}
        )


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("cuda_graphs", [False, True])
def test_on_a_gpu(model, tiny_tokenizer, monkeypatch, cuda_graphs):
    monkeypatch.setenv("HF_SPECDEC_KERNELS", "triton")
    model = model.to("cuda")
    inputs = tiny_tokenizer(PROMPTS, return_tensors="pt", padding=True).to("cuda")
    plain = model.generate(**inputs, max_new_tokens=24, do_sample=False)
    config = CONFIGS["ngram"] | {"compile": True, "cuda_graphs": cuda_graphs}
    assert torch.equal(model.generate(**inputs, max_new_tokens=24, do_sample=False, speculative_config=config), plain)
