"""Traced layers whose graphs are rewritten compute what the layers compute, and the rewriting finds what it is for."""

import copy
import gc
import types
import weakref
from types import SimpleNamespace

import pytest
import torch
from families import make, make_for_pages, perturbed
from replayed_graphs import defined_attention, graphs_in_python, rewritten_graphs  # noqa: F401
from torch import fx
from transformers import AutoModelForCausalLM
from transformers.models.llama import modeling_llama

import hf_specdec
from hf_specdec.model import prepare as preparing
from hf_specdec.model.options import compiled
from hf_specdec.model.options.compiled import SparseBlock, rewritten
from hf_specdec.model.options.prepacked import prepack

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


@pytest.mark.parametrize(
    "family",
    [
        pytest.param(
            f, marks=pytest.mark.slow if f in ("Gemma2", "Phi3", "Qwen2", "Qwen3", "Mistral", "StarCoder2") else ()
        )
        for f in FAMILIES
    ],
)
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


# ---- steps that are captured, without `compile` ---------------------------------------------------------------------

GRAPHS = {"method": "ngram", "num_speculative_tokens": 3, "cuda_graphs": True}
IDS = torch.tensor([[5, 6, 7, 8, 9, 6, 7, 8], [3, 4, 3, 4, 3, 4, 3, 4]])


def check_plain(model, config, captures, **kwargs):
    """The text of plain generate(), and nothing that could not be captured."""
    options = {"max_new_tokens": 16, "do_sample": False}
    plain = model.generate(IDS, **options)
    assert torch.equal(model.generate(IDS, **options, speculative_config=config, **kwargs), plain)
    assert captures and not any(each.refused for each in captures)
    hf_specdec.release(model)


@pytest.mark.parametrize(
    "family",
    [
        "Llama",
        "Gemma2",
        "Phi3",
        *(pytest.param(each, marks=pytest.mark.slow) for each in ("Qwen2", "Qwen3", "StarCoder2")),
    ],
)
def test_layers_of_captured_steps(family, rewritten_graphs, graphs_in_python):  # noqa: F811
    """They are rewritten by default."""
    found, makers = rewritten_graphs
    check_plain(make_for_pages(family), GRAPHS, graphs_in_python)
    assert operators(found) == FAMILIES[family]
    assert [each.refused for each in makers] == [{}]


@pytest.mark.long
def test_layers_whose_products_are_replaced(rewritten_graphs, graphs_in_python, monkeypatch):  # noqa: F811
    """Where linear layers are served by other products, traced layers see their weights, all layers in the same graphs."""
    made = []
    monkeypatch.setattr(
        preparing, "few_row_linears", lambda model, left_out: made.append(prepack(model, True)) or made[0]
    )
    model = make("Llama", num_hidden_layers=12, hidden_size=512, intermediate_size=1024)
    check_plain(model, GRAPHS, graphs_in_python)
    assert made and operators(rewritten_graphs[0]) == ALL and len(rewritten_graphs[0]) <= 2
    assert rewritten_graphs[1][0].refused == {}


@pytest.mark.long
def test_draft_models_of_captured_rounds(rewritten_graphs, graphs_in_python):  # noqa: F811
    model = make("Llama")
    config = {"method": "draft_model", "num_speculative_tokens": 3, "cuda_graphs": True}
    check_plain(model, config, graphs_in_python, assistant_model=perturbed(model, 0.02))
    assert len(graphs_in_python) == 3 and len(rewritten_graphs[1]) == 2
    assert operators(rewritten_graphs[0]) == ALL


HEADS = {
    "chain": {"method": "eagle3", "model": "tiny-eagle3", "num_speculative_tokens": 3},
    "dynamic tree": {"method": "eagle3", "model": "tiny-eagle3", "top_k": 2, "total_tokens": 8, "depth": 3},
    "eagle": {"method": "eagle", "model": "tiny-eagle", "num_speculative_tokens": 3},
    "mtp": {"method": "mtp", "model": "tiny-mtp", "num_speculative_tokens": 3},
    "dflash": {"method": "dflash", "model": "tiny-dflash", "num_speculative_tokens": 3},
}


@pytest.mark.long
@pytest.mark.parametrize(
    "name",
    [
        "chain",
        *(pytest.param(each, marks=pytest.mark.slow) for each in HEADS if each != "chain"),
    ],
)
def test_layers_of_heads(name, tiny_model, tiny_tokenizer, rewritten_graphs, graphs_in_python):  # noqa: F811
    """They draft what they drafted: the texts are plain generate()'s, as many tokens are accepted."""
    config = HEADS[name]
    # Not a copy of the shared model: calls that want hidden states leave transformers' hooks on it, which dynamo does not trace.
    model = AutoModelForCausalLM.from_pretrained(hf_specdec.bundled("tiny"), dtype=torch.float32).eval()
    inputs = tiny_tokenizer(["Tom has 3 apples and", "The"], return_tensors="pt", padding=True)
    options = {**inputs, "max_new_tokens": 24, "do_sample": False, "return_dict_in_generate": True}
    plain = model.generate(**options).sequences
    outs = []
    for compile in (False, None):
        outs.append(model.generate(**options, speculative_config=config | {"cuda_graphs": True, "compile": compile}))
        assert bool(rewritten_graphs[1]) == (compile is None)
        hf_specdec.release(model)
    assert all(torch.equal(out.sequences, plain) for out in outs)
    assert outs[0].speculation["mean_accepted_length"] == outs[1].speculation["mean_accepted_length"]
    assert graphs_in_python and not any(each.refused for each in graphs_in_python)
    _, (target, head) = rewritten_graphs
    assert target.refused == head.refused == {} and operators(rewritten_graphs[0]) == ALL


@pytest.mark.parametrize(
    ("family", "wanted"), [("Qwen3-MoE", ALL - {"gated_linear"}), ("gpt-oss", {"linears", "linear_and_residual"})]
)
def test_mixtures_of_experts_are_one_operator(family, wanted, rewritten_graphs, graphs_in_python):  # noqa: F811
    """They change tensors in place; what is around them is rewritten. One family's blocks return a tensor, the other's two."""
    check_plain(make_for_pages(family), GRAPHS, graphs_in_python)
    assert operators(rewritten_graphs[0]) >= wanted | {"sparse_block"}
    assert [each.refused for each in rewritten_graphs[1]] == [{}] and len(rewritten_graphs[0]) <= 4


def test_layers_are_shared_until_something_that_they_call_is_replaced(monkeypatch):
    model = make("Llama")
    first = compiled.layers_of(model, None, compiled.RewrittenLayers)
    assert compiled.layers_of(model, None, compiled.RewrittenLayers) is first
    call = modeling_llama.LlamaMLP.__call__
    monkeypatch.setattr(modeling_llama.LlamaMLP, "__call__", lambda self, x: call(self, x) * 2)
    assert compiled.layers_of(model, None, compiled.RewrittenLayers) is not first


def test_blocks_stay_opaque_until_the_first_who_asked_leaves():
    model, batch = make("Qwen3-MoE"), SimpleNamespace(captured=True, invariant=None)
    layers, layer = compiled.RewrittenLayers(model, None), model.model.layers[0]
    assert layers.serves(batch, layer)
    with layers.active():
        assert not layers.serves(batch, layer)
        with layers.active():
            layer.mlp(torch.randn(1, 3, 48))
        assert layers.serves(batch, layer) and isinstance(layer.mlp.forward.__self__, SparseBlock)
    assert "forward" not in vars(layer.mlp)


def test_layers_that_change_tensors_are_captured_as_they_are(rewritten_graphs, graphs_in_python, caplog, monkeypatch):  # noqa: F811
    """Here experts that are not hidden."""
    monkeypatch.setattr(compiled.RewrittenLayers, "active", compiled.CompiledLayers.active)
    caplog.set_level("INFO", "hf_specdec")
    check_plain(make_for_pages("Qwen3-MoE"), GRAPHS, graphs_in_python)
    ((name, reason),) = rewritten_graphs[1][0].refused.items()
    assert name.__name__ == "Qwen3MoeDecoderLayer" and "modifies tensors in place" in reason
    assert caplog.text.count("is captured without rewriting") == 1


@pytest.mark.parametrize("family", [pytest.param("Llama", marks=pytest.mark.slow), "Qwen3-MoE"])
def test_nothing_keeps_a_model_that_was_traced(family, rewritten_graphs, graphs_in_python):  # noqa: F811
    model = make(family)
    model.generate(IDS, max_new_tokens=8, do_sample=False, speculative_config=GRAPHS)
    parts = [weakref.ref(each) for each in model.modules()]
    assert rewritten_graphs[0]
    del model
    for made in (*rewritten_graphs, graphs_in_python):
        made.clear()
    gc.collect()
    assert not [each for each in parts if each() is not None]


def test_layers_that_were_rewritten_wrongly(rewritten_graphs, graphs_in_python, caplog, monkeypatch):  # noqa: F811
    """They are found when their graph is made, and run as they are."""
    rewrite = compiled.RewrittenLayers._trace

    def wrong(self, graph, inputs):
        run = rewrite(self, graph, inputs)
        return lambda *args: [each * 1.01 if torch.is_tensor(each) else each for each in run(*args)]

    monkeypatch.setattr(compiled.RewrittenLayers, "_trace", wrong)
    check_plain(make("Llama"), GRAPHS, graphs_in_python)
    ((name, reason),) = rewritten_graphs[1][0].refused.items()
    assert name.__name__ == "LlamaDecoderLayer" and "computes other values" in reason
    assert caplog.text.count("Please report it") == 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_deviation(dtype):
    """Sums in another order are no deviation, wrong ones are, also where a layer adds little to the stream."""
    generator = torch.Generator().manual_seed(0)
    before = torch.randn(1, 8, 256, generator=generator, dtype=torch.float64)
    weight = torch.randn(256, 256, generator=generator, dtype=torch.float64) / 16
    for size in (1.0, 0.02, 0.0):
        added = size * before @ weight
        expected, stream = (before + added).to(dtype), before.to(dtype)
        rounded = (before + added * (1 + torch.finfo(dtype).eps * torch.randn(added.shape, generator=generator))).to(
            dtype
        )
        assert compiled.deviation(expected, expected, stream, 8) == 0
        assert compiled.deviation(rounded, expected, stream, 8) <= 1
        if size:
            assert compiled.deviation((before + 1.5 * added).to(dtype), expected, stream, 8) > 1
            swapped = (before + added.roll(1, 2)).to(dtype)
            assert compiled.deviation(swapped, expected, stream, 8) > 1
    torn = expected.clone()
    torn[:, 5:] = float("nan")
    assert compiled.deviation(torn, expected, stream, 5) == 0  # nobody's tokens
    assert not compiled.deviation(torn, expected, stream, 8) <= 1
    assert compiled.deviation(expected, torn, stream, 8) == 0  # nothing to compare with


def test_layers_that_dynamo_cannot_trace_are_captured_as_they_are(rewritten_graphs, graphs_in_python):  # noqa: F811
    model = make("Llama")
    for layer in model.model.layers:
        layer.mlp.register_forward_hook(torch._dynamo.disable(lambda module, args, output: output))
    check_plain(model, GRAPHS, graphs_in_python)
    assert [len(each.refused) for each in rewritten_graphs[1]] == [1]


@pytest.mark.filterwarnings("ignore")
def test_where_dynamo_is_switched_off(rewritten_graphs, graphs_in_python):  # noqa: F811
    with torch._dynamo.config.patch(disable=True):
        check_plain(make("Llama"), GRAPHS, graphs_in_python)
    assert not rewritten_graphs[0]


@pytest.mark.parametrize(
    "keys", [{"cuda_graphs": False}, {"compile": False}, {"target_quantization": "wint8"}], ids=str
)
def test_what_is_not_traced(keys, rewritten_graphs, graphs_in_python, request):  # noqa: F811
    """Forwards that are not captured, and those that other keys are about."""
    if keys.get("cuda_graphs") is False:
        request.getfixturevalue("monkeypatch").undo()  # by definition there would be no attention without graphs
    model = make("Llama")
    model.generate(IDS, max_new_tokens=4, do_sample=False, speculative_config=GRAPHS | keys)
    hf_specdec.release(model)
    assert not rewritten_graphs[0] and not rewritten_graphs[1]


@pytest.mark.parametrize(
    ("captured", "invariant", "serves"), [(True, None, True), (False, None, False), (True, "ops", False)]
)
def test_batches_whose_layers_are_rewritten(captured, invariant, serves):
    """Captured ones, but of deterministic models: a drafter that exits early runs the layers of its target."""
    model = make("Llama")
    layers = compiled.RewrittenLayers(model, None)
    batch = types.SimpleNamespace(captured=captured, invariant=invariant)
    assert layers.serves(batch, model.model.layers[0]) == serves
