"""Forwards of many families as CUDA graphs: nothing in them waits for the device or comes from the host."""

import pytest
import torch
from combinations import every_second
from families import FAMILIES, make, make_for_pages, perturbed
from replayed_graphs import as_if_captured, defined_attention, graphs_in_python  # noqa: F401

import hf_specdec
from hf_specdec.model import architectures, captures

GATHERED = {
    "Falcon",
    "Falcon ALiBi",
    "MPT",
    "BLOOM",
    "StableLM",
    "GPT-Neo",
    "XGLM",
    "Llama4",
    "RoFormer",
    "Doge",
}  # `cuda_graphs` refuses them, and says so


@pytest.mark.parametrize("family", every_second(name for name in FAMILIES if name not in GATHERED))
def test_family(family, graphs_in_python, defined_attention, caplog):  # noqa: F811
    """A target and a drafter of the family, and the drafter's loop: captured, and the text of plain generate()."""
    model = make_for_pages(family)
    torch.manual_seed(0)
    ids = torch.randint(1, 128, (2, 9))
    plain = model.generate(ids, max_new_tokens=12, do_sample=False)
    config = {"method": "draft_model", "num_speculative_tokens": 3, "cuda_graphs": True}
    out = model.generate(
        ids, max_new_tokens=12, do_sample=False, speculative_config=config, assistant_model=perturbed(model, 0.02)
    )
    hf_specdec.release(model)
    assert torch.equal(out, plain)
    assert len(graphs_in_python) == 3
    assert not any(each.refused for each in graphs_in_python), caplog.text
    assert all(each.capture.count for each in graphs_in_python)


@pytest.mark.parametrize("drafter_too", [True, False])
def test_graphs_are_the_default(graphs_in_python, defined_attention, monkeypatch, drafter_too):  # noqa: F811
    """Where only the target can, its drafter runs without, and drafting rounds do, too."""
    model = make("Llama")
    drafter = perturbed(model, 0.02)
    ids = torch.randint(1, 128, (2, 9))
    arguments = {
        "assistant_model": drafter,
        "speculative_config": {"method": "draft_model", "num_speculative_tokens": 3},
    }
    plain = model.generate(ids, max_new_tokens=12, do_sample=False)
    if drafter_too:
        monkeypatch.setattr(captures, "capture_obstacle", lambda packed: None)
        assert torch.equal(model.generate(ids, max_new_tokens=12, do_sample=False, **arguments), plain)
        assert [len(each) > 0 for each in graphs_in_python] == [True] * 3  # target, drafter, its rounds
        return
    monkeypatch.undo()  # by definition there would be no attention without graphs
    monkeypatch.setattr(captures, "capture_obstacle", lambda packed: "no")
    assert torch.equal(model.generate(ids, max_new_tokens=12, do_sample=False, **arguments), plain)
    made = [entry.decoder for entry in hf_specdec.integration._kept(model).entries]
    assert all(each.target.graphs is None and each.generator.rounds is None for each in made)


@pytest.mark.parametrize(
    ("family", "dtype", "how", "capability", "waits"),
    [
        ("Llama", torch.float32, None, (8, 0), False),
        ("Qwen3-MoE", torch.bfloat16, None, (9, 0), False),  # transformers' own choice: "grouped_mm"
        ("Qwen3-MoE", torch.bfloat16, None, (10, 0), False),
        ("Qwen3-MoE", torch.bfloat16, None, (8, 0), True),  # torch copies the groups' ends to the host there
        ("Qwen3-MoE", torch.float32, None, (9, 0), True),  # and here
        ("Qwen3-MoE", torch.bfloat16, "eager", (9, 0), True),
        ("Qwen3-MoE", torch.float32, "batched_mm", (8, 0), False),
        ("gpt-oss", torch.bfloat16, "grouped_mm", (9, 0), False),
    ],
)
def test_which_experts_wait(family, dtype, how, capability, waits, monkeypatch):
    """Only they keep a model from being captured by default."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    model = make(family).to(dtype)
    if how is not None:
        model.set_experts_implementation(how)
    assert captures.experts_wait(model, torch.device("cuda")) == waits


def test_experts_of_a_list_wait():
    """Experts that are modules of their own, as older models have them: a loop."""
    module = torch.nn.Module()
    module.experts = torch.nn.ModuleList([torch.nn.Linear(2, 2, dtype=torch.bfloat16)])
    assert captures.experts_wait(module, torch.device("cuda"))


@pytest.mark.parametrize("family", ["Qwen3-MoE", "gpt-oss"])
@pytest.mark.parametrize(("how", "captured"), [("batched_mm", True), ("grouped_mm", True), ("eager", False)])
def test_mixtures_of_experts(family, how, captured, graphs_in_python, defined_attention, caplog):  # noqa: F811
    """Experts that never ask the host are captured; with those that do, steps run as they are, and one warning says why."""
    model = make(family)
    model.set_experts_implementation(how)
    ids = torch.randint(1, 128, (2, 9), generator=torch.Generator().manual_seed(0))
    plain = model.generate(ids, max_new_tokens=12, do_sample=False)
    config = {"method": "ngram", "num_speculative_tokens": 3, "cuda_graphs": True}
    out = model.generate(ids, max_new_tokens=12, do_sample=False, speculative_config=config)
    hf_specdec.release(model)
    assert torch.equal(out, plain)
    assert [each.refused for each in graphs_in_python] == [not captured]
    assert caplog.text.count("runs without CUDA graphs") == (not captured)


@pytest.mark.parametrize(("dtype", "captured"), [(torch.bfloat16, True), (torch.float32, False)])
def test_mixtures_of_experts_by_default(dtype, captured, graphs_in_python, defined_attention, monkeypatch):  # noqa: F811
    """On a Hopper GPU transformers' own choice of experts waits for nothing in bfloat16, and does in float32."""
    monkeypatch.setattr(captures, "capture_obstacle", lambda packed: None)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    model = make("Qwen3-MoE").to(dtype)
    config = {"method": "none", "prepack_weights": False}  # in bfloat16 not every CPU can
    model.generate(torch.arange(1, 10)[None], max_new_tokens=4, do_sample=False, speculative_config=config)
    (entry,) = hf_specdec.integration._kept(model).entries
    assert (entry.decoder.target.graphs is not None) == captured
    assert any(len(each) for each in graphs_in_python) == captured


def test_inference_mode_leaves_nothing_behind(graphs_in_python, defined_attention):  # noqa: F811
    """Buffers and pools that a call in inference mode left are good for a call outside, and the other way round."""
    model = make("Llama")
    ids = torch.randint(1, 128, (2, 9))
    config = {"method": "ngram", "num_speculative_tokens": 3, "cuda_graphs": True}
    plain = model.generate(ids, max_new_tokens=12, do_sample=False)
    for inference in (True, False, True):
        with torch.inference_mode(inference):
            found = model.generate(ids, max_new_tokens=12, do_sample=False, speculative_config=config)
        assert torch.equal(found, plain)
    assert len(graphs_in_python) == 1 and len(graphs_in_python[0])


def test_the_others_read_no_pages():
    assert {name for name in FAMILIES if not architectures.reads_pages(make_for_pages(name))} == GATHERED


@pytest.mark.parametrize(
    "function",
    [
        lambda x: x.sum().item(),
        lambda x: x.tolist(),
        lambda x: x if x.sum() > 0 else -x,
        lambda x: x[x > 0],
        lambda x: x.nonzero(),
        lambda x: x + torch.tensor([1.0, 2.0]),
        lambda x: x + x.new_tensor([1.0, 2.0]),
        lambda x: x.to("cpu"),
        lambda x: torch.repeat_interleave(x, torch.ones(2, dtype=torch.long)),
    ],
)
def test_what_a_graph_cannot_hold_is_refused(function):
    x = torch.ones(2)
    function(x)
    with as_if_captured(), pytest.raises(RuntimeError, match="not permitted"):
        function(x)
    with as_if_captured():
        assert torch.where(x > 0, x, -x)[torch.arange(2)].shape == (2,)


def test_tensors_are_afterwards_what_they_were():
    before = dict(vars(torch.Tensor))
    with as_if_captured(), pytest.raises(RuntimeError):
        torch.ones(2).tolist()
    assert dict(vars(torch.Tensor)) == before
    assert torch.tensor([torch.tensor(1), torch.tensor(2)]).tolist() == [1, 2]
