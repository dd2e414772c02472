"""Steps in buckets of static buffers give what steps as they come give; capturing is played by calling again in Python."""

import dataclasses

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from test_triton_generate import CONFIGS, decode, pair  # noqa: F401
from triton_interpreter import needs_triton, run_interpreted

import hf_specdec
from hf_specdec.kernels.attention_inputs import InputSizes
from hf_specdec.runtime import PackedModel, graphs


def test_in_a_process_of_its_own():
    run_interpreted(__file__)


def again(forward):
    """A capture whose replay runs the same once more and writes into the first run's outputs, as a graph does."""
    out = forward()

    def replay():
        for kept, new in zip(tensors_of(out), tensors_of(forward()), strict=True):
            kept.copy_(new)

    for tensor in tensors_of(out):
        tensor.fill_(float("nan") if tensor.is_floating_point() else -1)  # capturing computes nothing
    return out, replay


def tensors_of(output):
    found = [getattr(output, field.name) for field in dataclasses.fields(output)]
    return [t for each in found for t in (each.values() if isinstance(each, dict) else [each]) if torch.is_tensor(t)]


@pytest.fixture
def runners(monkeypatch, pair):  # noqa: F811
    """Every PackedModel made from now on runs through a GraphRunner; they are listed."""
    made = []
    original = PackedModel.__init__

    def with_graphs(self, *args, **kwargs):
        original(self, *args, **kwargs)
        self.graphs = graphs.GraphRunner(self, capture=again)
        made.append(self.graphs)

    monkeypatch.setenv("HF_SPECDEC_KERNELS", "triton")
    monkeypatch.setattr(PackedModel, "__init__", with_graphs)
    hf_specdec.release(pair[0])
    yield made
    hf_specdec.release(pair[0])


@needs_triton
@pytest.mark.parametrize("name", ["chain", "tree", "dynamic tree"])
def test_generate(pair, runners, name):  # noqa: F811
    plain = decode(pair, None, do_sample=False)
    out = decode(pair, CONFIGS[name], do_sample=False)
    assert torch.equal(out.sequences, plain.sequences)
    assert len(runners) == 2 and all(1 <= len(runner._graphs) <= 4 for runner in runners)
    assert not any(runner._refused for runner in runners)


@needs_triton
def test_a_model_that_cannot_be_captured_runs_without(pair, runners, caplog):  # noqa: F811
    def fails(forward):
        raise RuntimeError("operation not permitted when stream is capturing")

    plain = decode(pair, None, do_sample=False)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(again.__globals__, "again", fails)
        out = decode(pair, CONFIGS["chain"], do_sample=False)
    assert torch.equal(out.sequences, plain.sequences)
    assert caplog.text.count("runs without CUDA graphs: operation not permitted") == 2  # target and drafter, once each


@settings(max_examples=200, deadline=None, derandomize=True)
@given(
    counts=st.lists(st.integers(1, 40), min_size=1, max_size=70), blocks=st.integers(1, 3000), words=st.integers(0, 5)
)
def test_buckets_hold_what_they_are_for(counts, blocks, words):
    needed = InputSizes(len(counts), sum(counts), max(counts), blocks, words)
    bucket = graphs.bucket_of(needed)
    for name in ("num_rows", "num_tokens", "max_query_length", "max_blocks", "num_words"):
        assert getattr(bucket, name) >= getattr(needed, name)
    assert bucket.num_rows < 2 * needed.num_rows + 1 and bucket.num_tokens <= 4 * needed.num_tokens
    assert (bucket.num_words == 0) == (words == 0)
    assert graphs.bucket_of(bucket) == bucket


def test_asking_for_graphs_without_a_gpu_is_one_clear_error(tiny_model):
    ids = torch.ones(1, 4, dtype=torch.long)
    with pytest.raises(ValueError, match=r"'cuda_graphs' needs .* CUDA device"):
        tiny_model.generate(ids, max_new_tokens=2, speculative_config={"method": "ngram", "cuda_graphs": True})
