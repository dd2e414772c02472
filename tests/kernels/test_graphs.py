"""Steps in buckets of static buffers give what steps as they come give; capturing is played by calling again in Python."""

from types import SimpleNamespace

import pytest
import torch
from families import make
from hypothesis import given, settings
from hypothesis import strategies as st
from replayed_graphs import CaptureInPython, graphs_in_python  # noqa: F401
from test_triton_generate import CONFIGS, decode, pair  # noqa: F401
from triton_interpreter import needs_triton

import hf_specdec
from hf_specdec.kernels.attention.inputs import InputSizes
from hf_specdec.model import captures as capturing
from hf_specdec.model.captures import Captures
from hf_specdec.model.graphs import bucket_of


@pytest.fixture
def captures(monkeypatch, pair, graphs_in_python):  # noqa: F811
    """`cuda_graphs` runs the Triton kernels; everything that holds captures is listed."""
    monkeypatch.setenv("HF_SPECDEC_KERNELS", "triton")
    hf_specdec.release(pair[0])
    yield graphs_in_python
    hf_specdec.release(pair[0])


@needs_triton
@pytest.mark.parametrize(
    "name", [*(pytest.param(name, marks=pytest.mark.slow) for name in ("chain", "tree")), "dynamic tree"]
)
def test_generate(pair, captures, name):  # noqa: F811
    """Layers run as they are; test_layers_of_captured_steps has traced ones."""
    plain = decode(pair, None, do_sample=False)
    out = decode(pair, {**CONFIGS[name], "cuda_graphs": True, "compile": False}, do_sample=False)
    assert torch.equal(out.sequences, plain.sequences)
    assert len(captures) == 3  # target, drafter, its loop
    assert all(1 <= each.capture.count <= 4 and not each.refused for each in captures)


@needs_triton
@pytest.mark.parametrize(
    ("name", "rule"),
    [("chain", "coupled"), ("tree", "rejection"), ("dynamic tree", "coupled")],
)
@pytest.mark.slow  # tests/candidate_generators/test_draft_loop.py has such rounds with the definitions
def test_generate_sampled(pair, captures, monkeypatch, name, rule):  # noqa: F811
    """Drawn drafts in captured rounds: the tokens and the acceptance of the definitions without graphs."""
    config = {**CONFIGS[name], "rejection_sample_method": rule, "seed": 4}
    arguments = {"do_sample": True, "temperature": 0.8, "top_k": 0, "top_p": 0.9}
    monkeypatch.setenv("HF_SPECDEC_KERNELS", "reference")
    expected = decode(pair, config, **arguments)
    hf_specdec.release(pair[0])
    monkeypatch.setenv("HF_SPECDEC_KERNELS", "triton")
    out = decode(pair, {**config, "cuda_graphs": True}, **arguments)
    assert torch.equal(out.sequences, expected.sequences)
    assert out.speculation["num_accepted_tokens"] == expected.speculation["num_accepted_tokens"] > 0
    assert len(captures) == 3
    assert all(each.capture.count >= 1 and not each.refused for each in captures)


@needs_triton
def test_a_model_that_cannot_be_captured_runs_without(pair, captures, caplog):  # noqa: F811
    def fails(self, function):
        raise RuntimeError("operation not permitted when stream is capturing")

    plain = decode(pair, None, do_sample=False)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(CaptureInPython, "__call__", fails)
        out = decode(pair, {**CONFIGS["chain"], "cuda_graphs": True}, do_sample=False)
    assert torch.equal(out.sequences, plain.sequences)
    assert caplog.text.count("runs without CUDA graphs: operation not permitted") == 3  # once each


@settings(max_examples=200, deadline=None, derandomize=True)
@given(
    counts=st.lists(st.integers(1, 40), min_size=1, max_size=70), blocks=st.integers(1, 3000), words=st.integers(0, 5)
)
def test_buckets_hold_what_they_are_for(counts, blocks, words):
    needed = InputSizes(len(counts), sum(counts), max(counts), blocks, words)
    bucket = bucket_of(needed)
    for name in ("num_rows", "num_tokens", "max_query_length", "max_blocks", "num_words"):
        assert getattr(bucket, name) >= getattr(needed, name)
    assert bucket.num_rows <= (2 if needed.num_rows <= 8 else 1.5) * needed.num_rows
    assert bucket.num_tokens <= (2 if needed.num_tokens <= 32 else 1.25) * needed.num_tokens
    assert (bucket.num_words == 0) == (words == 0)
    assert bucket_of(bucket) == bucket


def test_a_batch_whose_rows_end_one_by_one_needs_few_graphs():
    buckets = {bucket_of(InputSizes(rows, 3 * rows, 4, 16, 0)) for rows in range(1, 129)}
    assert len(buckets) <= 32  # by eights and powers of two it was more, and each one took memory of its own


def test_asking_for_graphs_without_a_gpu_is_one_clear_error(tiny_model):
    ids = torch.ones(1, 4, dtype=torch.long)
    with pytest.raises(ValueError, match=r"'cuda_graphs' needs .* CUDA device"):
        tiny_model.generate(ids, max_new_tokens=2, speculative_config={"method": "ngram", "cuda_graphs": True})


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_graphs_share_the_memory_of_their_outputs():
    """Many graphs need the memory of one, and an output stays readable for as long as it is held."""
    found, weight = Captures("a model", list), torch.ones(1024, 1024, device="cuda")

    def get(rows):
        x = torch.full((rows, 1024), float(rows), device="cuda")
        return found.get(rows, (), lambda: (x, lambda: SimpleNamespace(logits=x @ weight).logits))

    get(4096)[2]()
    torch.cuda.synchronize()
    before = torch.cuda.memory_reserved()
    for rows in range(4095, 4085, -1):
        _, output, replay = get(rows)
        replay()
        assert output.shape == (rows, 1024) and output[-1, -1] == rows * 1024
    assert (
        torch.cuda.memory_reserved() - before < 10 * 2**24 + 2 * 2**24
    )  # the inputs, which `get` holds, and little more
    found.clear()
    assert output.sum() == rows * 1024 * 1024 * rows


def test_mixtures_of_experts_that_wait_are_captured_only_when_asked(monkeypatch):
    monkeypatch.setattr(capturing, "capture_obstacle", lambda model: None)
    for family, wanted in (("Llama", True), ("Qwen3-MoE", False), ("gpt-oss", False)):  # in float32
        model = SimpleNamespace(module=make(family), device=torch.device("cpu"))
        assert capturing.uses_graphs(None, model) is wanted
        assert capturing.uses_graphs(True, model) is True and capturing.uses_graphs(False, model) is False
