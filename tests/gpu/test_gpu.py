"""On a GPU: `generate()` gives what it gives on the CPU, for every method that the bundled target has (issue 5, point 4)."""

import importlib.util
import sys

import pytest
import torch
from paths import ROOT

import hf_specdec

sys.path.insert(0, str(ROOT / "benchmarks"))
sys.path.insert(0, str(ROOT / "recipes" / "tiny"))

from acceptance import CONFIGS
from gpu_sections.budget import Budget
from gpu_sections.context import Context, kernels
from gpu_sections.equality import RULES, Pair

METHODS = [(method, shape) for method, shapes in CONFIGS.items() for shape in shapes]
needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


@pytest.fixture(scope="module")
def pair():
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    return Pair.make(Context(device, False, Budget(600)), 24)


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("keys", [{"cuda_graphs": False}, {"cuda_graphs": True}], ids=["eager", "graphs"])
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize(("method", "shape"), METHODS)
def test_the_gpu_writes_what_the_cpu_writes(pair, method, shape, rule, keys):
    if method == "suffix" and importlib.util.find_spec("arctic_inference") is None:
        pytest.skip("suffix needs arctic-inference")
    config = CONFIGS[method][shape]
    with kernels("reference"):
        wanted, _ = pair.generate(pair.cpu, config, rule)
    with kernels("triton"):
        ours, drafted = pair.generate(pair.other, {**config, **keys}, rule)
    assert pair.differences(ours, wanted, rule)[0] == 0
    assert drafted > 0


@pytest.mark.parametrize("rule", RULES)
def test_differences_and_ties(pair, rule):
    """How the comparison above judges, on the CPU: another text is wrong, two equally good tokens are a tie."""
    with kernels("reference"):
        wanted, _ = pair.generate(pair.cpu, CONFIGS["ngram"]["chain"], rule)
    assert pair.differences(wanted, wanted, rule) == (0, 0)
    other = wanted.clone()
    other[1, -3] = (other[1, -3] + 1) % 4096
    assert pair.differences(other, wanted, rule) == (1, 0)
    hf_specdec.release(pair.cpu)
    head = pair.cpu.get_output_embeddings()
    before = head.weight.data.clone()
    try:  # its embeddings, too; so the texts are no longer the model's, but both tokens now score alike
        head.weight.data[other[1, -3]] = head.weight.data[wanted[1, -3]]
        assert pair.differences(other, wanted, "greedy") == (0, 1)
    finally:
        head.weight.data.copy_(before)
