"""Traced layers whose graphs are rewritten compute what the layers compute, and the rewriting finds what it is for."""

import copy

import pytest
import torch
from families import make
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
    model = make(family)
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
