"""Traced layers whose graphs are rewritten compute what the layers compute, and the rewriting finds what it is for."""

import copy

import pytest
import torch
from families import make_for_pages
from torch import fx

from hf_specdec.runtime import compiled
from hf_specdec.runtime.compiled import rewritten

ALL = {"rms_norm", "linears", "linear_and_residual", "gated_linear", "attend_rotating"}
FAMILIES = {
    "Llama": ALL,
    "Mistral": ALL,
    "Qwen2": ALL,  # biases
    "Qwen3": ALL,  # norms of queries and keys
    "SmolLM3": ALL | {"attend"},  # layers without positions
    "StarCoder2": {"linears", "linear_and_residual", "attend_rotating"},  # no gated unit
    "Gemma2": {"linears", "attend_rotating"},  # norms behind the layers, and another activation
    "Phi3": {
        "rms_norm",
        "linears",
        "linear_and_residual",
        "attend",
    },  # one weight for both halves of the unit, part of a head rotated
}


@pytest.fixture
def graphs(monkeypatch):
    """The rewritten graphs of all that is compiled, run as they are."""
    made = []

    def backend(graph: fx.GraphModule, inputs):
        made.append(rewritten(graph))
        return made[-1].forward

    monkeypatch.setattr(compiled.CompiledLayers.__init__, "__defaults__", (backend,))
    return made


def operators(graphs) -> set[str]:
    names = (str(node.target) for graph in graphs for node in graph.graph.nodes if node.op == "call_function")
    return {name.split(".")[1] for name in names if name.startswith("hf_specdec.")}


@pytest.mark.parametrize("family", FAMILIES)
def test_output_is_the_same(family, tiny_tokenizer, graphs):
    model = make_for_pages(family)
    prompts = {"input_ids": torch.tensor([[5, 6, 7, 8, 9, 6, 7, 8], [3, 4, 3, 4, 3, 4, 3, 4]])}
    options = {"max_new_tokens": 16, "do_sample": False}
    plain = model.generate(**prompts, **options)
    config = {"method": "ngram", "compile": True}
    assert torch.equal(model.generate(**prompts, **options, speculative_config=config), plain)
    assert operators(graphs) == FAMILIES[family]


def test_what_was_rewritten_is_gone(tiny_model, tiny_tokenizer, graphs):
    model = copy.deepcopy(tiny_model)
    inputs = tiny_tokenizer(["Tom has 3 apples and", "The"], return_tensors="pt", padding=True)
    plain = model.generate(**inputs, max_new_tokens=20, do_sample=False)
    config = {"method": "eagle3", "model": "tiny-eagle3", "top_k": 2, "total_tokens": 8, "depth": 3, "compile": True}
    found = model.generate(**inputs, max_new_tokens=20, do_sample=False, speculative_config=config)
    assert torch.equal(found, plain)
    left = (torch.cat, torch._C._nn.linear, torch.nn.functional.silu)
    assert graphs and not [node for graph in graphs for node in graph.graph.nodes if node.target in left]


def traced(function, *inputs):
    """What dynamo traces of a function, rewritten, and what it returns."""
    found = []

    def backend(graph, _):
        found.append(rewritten(graph))
        return graph.forward

    torch._dynamo.reset()
    return torch.compile(function, backend=backend)(*inputs), found[0]


def test_what_changes_tensors_is_left_alone():
    """Graphs stand before functionalization: nothing in them says that a change is of use."""

    def masked(scores, index):
        mask = torch.zeros_like(scores)
        mask.scatter_(1, index, 1)
        return scores.masked_fill(~mask.bool(), 0)

    scores, index = torch.randn(2, 8), torch.tensor([[1, 2], [0, 7]])
    assert torch.equal(traced(masked, scores, index)[0], masked(scores, index))

    def added(x, weight):
        x = x * 1
        before = torch.nn.functional.linear(x, weight)
        x += 1
        return before + x, torch.nn.functional.linear(x, weight)

    x, weight = torch.randn(2, 8), torch.randn(8, 8)
    found, graph = traced(added, x, weight)
    assert not operators([graph])
    assert all(torch.equal(a, b) for a, b in zip(found, added(x, weight), strict=True))


def test_operators_that_end_in_an_underscore_change_nothing():
    def block(x, weight, mask):
        return torch.nn.functional.linear(x, weight).masked_fill(mask & (x > 0), 0)

    x, weight, mask = torch.randn(8, 8), torch.randn(8, 8), torch.rand(8, 8) > 0.5
    found, graph = traced(block, x, weight, mask)
    assert operators([graph]) == {"linears"} and torch.equal(found, block(x, weight, mask))


@pytest.mark.parametrize("layer", [torch.bfloat16, torch.float32])
def test_residuals_of_another_dtype_are_added_outside(layer):
    def block(x, weight, residual):
        return residual + torch.nn.functional.linear(x, weight)

    x, weight = torch.randn(2, 8).to(layer), torch.randn(8, 8).to(layer)
    residual = torch.randn(2, 8).to(torch.float32 if layer == torch.bfloat16 else torch.bfloat16)
    found, graph = traced(block, x, weight, residual)
    assert operators([graph]) == {"linears"} and torch.equal(found, block(x, weight, residual))


def test_layers_under_autocast_are_left_alone():
    def block(x, weight):
        with torch.autocast("cpu", torch.bfloat16):
            return torch.nn.functional.linear(x, weight)

    x, weight = torch.randn(2, 8), torch.randn(8, 8)
    found, graph = traced(block, x, weight)
    assert not operators([graph]) and torch.equal(found, block(x, weight))
