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
    assert bucket.num_rows < 2 * needed.num_rows + 1 and bucket.num_tokens <= 4 * needed.num_tokens
    assert (bucket.num_words == 0) == (words == 0)
    assert bucket_of(bucket) == bucket


def test_asking_for_graphs_without_a_gpu_is_one_clear_error(tiny_model):
    ids = torch.ones(1, 4, dtype=torch.long)
    with pytest.raises(ValueError, match=r"'cuda_graphs' needs .* CUDA device"):
        tiny_model.generate(ids, max_new_tokens=2, speculative_config={"method": "ngram", "cuda_graphs": True})


class Once:
    """Runs a function when it is captured."""

    def forget(self):
        pass

    def __call__(self, function):
        return function(), lambda: None


def test_the_graph_used_longest_ago_makes_room(monkeypatch):
    monkeypatch.setattr("hf_specdec.model.captures.MOST_BYTES", 100)
    made = []
    monkeypatch.setattr(capturing, "CudaGraphCapture", Once)
    found = Captures("a model", list)

    def get(key):
        def function():
            made.append(key)
            return SimpleNamespace(logits=torch.zeros(10), layers={1: torch.zeros(2)}, hidden_states=None)  # 48 bytes

        return found.get(key, (), lambda: (None, function))

    for key in "abacabc":
        assert get(key) is not None
    assert made == ["a", "b", "c", "b", "c"] and len(found) == 2
    monkeypatch.setattr("hf_specdec.model.captures.MOST_BYTES", 1)
    assert get("d") is not None and len(found) == 1  # the one in use stays


def test_mixtures_of_experts_that_wait_are_captured_only_when_asked(monkeypatch):
    monkeypatch.setattr(capturing, "capture_obstacle", lambda model: None)
    for family, wanted in (("Llama", True), ("Qwen3-MoE", False), ("gpt-oss", False)):  # in float32
        model = SimpleNamespace(module=make(family), device=torch.device("cpu"))
        assert capturing.uses_graphs(None, model) is wanted
        assert capturing.uses_graphs(True, model) is True and capturing.uses_graphs(False, model) is False
