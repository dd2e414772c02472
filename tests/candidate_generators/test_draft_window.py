"""`draft_window`: drafters see the last tokens only, as formulas with that window say, and no text changes."""

import dataclasses

import helpers_dflash
import pytest
import test_eagle as eagle
import test_eagle3 as eagle3
import test_mtp as mtp
import torch
from families import make as make_family
from helpers_drafters import assert_refused, kept_proposals
from helpers_eagle import check_against, recorded, scripted
from helpers_eagle3 import LAYOUTS, SCRIPT, PlainEagle3, write
from helpers_mtp import PlainMtp, check_logits, store
from oracle import VOCAB, ragged, tiny_llama
from replayed_graphs import defined_attention, graphs_in_python  # noqa: F401

import hf_specdec
from hf_specdec import integration
from hf_specdec.candidate_generators import parse_config
from hf_specdec.candidate_generators.eagle import EagleGenerator
from hf_specdec.candidate_generators.eagle3 import Eagle3Generator

WINDOW = 4


def recorded_run(model, generator, config, script):
    """What a generator did on a ragged batch; drafts are accepted up to places where the target is on its own."""
    call = {**ragged([6, 13, 2, 9]), "max_new_tokens": 16, "logits_processor": scripted(*script)}
    plain = model.generate(**call)
    with recorded(generator) as recording:
        assert torch.equal(model.generate(**call, speculative_config=config), plain)
    return recording


@pytest.mark.parametrize(("layout", "shape"), [("vicuna", "chain"), ("two layers", "dynamic"), ("llama3", "static")])
def test_eagle(tmp_path, model, layout, shape):
    tensors, folder = eagle.write(tmp_path, layout)
    config = {"method": "eagle", "model": folder, "draft_window": WINDOW, **eagle.SHAPES[shape]}
    recording = recorded_run(model, EagleGenerator, config, [])
    plain = eagle.PlainEagle(tensors, model, window=WINDOW, **eagle.LAYOUTS[layout][4])
    check_against(plain, recording, model)


def check_eagle3(tmp_path, model, layout, window, seen, **more):
    tensors, folder = write(tmp_path, layout)
    config = {"method": "eagle3", "model": folder, "draft_window": window, **more}
    recording = recorded_run(model, Eagle3Generator, config, [SCRIPT])
    known = LAYOUTS[layout]
    known = dataclasses.replace(known, plain=known.plain | {"window": seen})
    check_against(PlainEagle3(tensors, model, known), recording, model)


@pytest.mark.parametrize(
    ("layout", "window", "seen", "shape"),
    [
        ("yuhuili", WINDOW, WINDOW, "chain"), ("yuhuili", WINDOW, WINDOW, "dynamic"), ("p-eagle", WINDOW, WINDOW, "chain"),
        ("sliding window", 3, 3, "static"), ("sliding window", 9, 5, "chain"), ("speculators, sliding window", 2, 2, "chain"),
    ],
)  # fmt: skip
def test_eagle3(tmp_path, model, layout, window, seen, shape):
    """Also where the file has a window: the smaller one counts."""
    check_eagle3(tmp_path, model, layout, window, seen, **eagle3.SHAPES[shape])


def test_in_graphs(tmp_path, model, graphs_in_python, defined_attention):  # noqa: F811
    check_eagle3(tmp_path, model, "p-eagle", WINDOW, WINDOW, num_speculative_tokens=4, cuda_graphs=True)
    assert any(each.name == "Eagle3Head" and each.capture.count for each in graphs_in_python if not each.refused)
    hf_specdec.release(model)


@pytest.mark.parametrize(("name", "modules"), [("DeepSeek-V3", 2), ("MiMo", 1), ("MiMo-V2", 1)])
def test_mtp(tmp_path, name, modules):
    """Over gathered keys, over pages, and with a window in the target's configuration."""
    stored = store(tmp_path, name, modules)
    recording = mtp.drafted(stored.model, {**mtp.SHAPES["static"], "draft_window": WINDOW})
    stored.kind = dataclasses.replace(stored.kind, window=WINDOW)
    check_logits(PlainMtp(stored), recording, stored.model)


@pytest.mark.parametrize("causal", [True, False])
def test_dflash(tmp_path, monkeypatch, causal):
    target = tiny_llama()
    made = helpers_dflash.make(tmp_path, target, causal=causal)
    sees = helpers_dflash.Reference.sees
    monkeypatch.setattr(
        helpers_dflash.Reference, "sees",
        lambda self, layer, query, key, anchor: sees(self, layer, query, key, anchor) and query - key < WINDOW,
    )  # fmt: skip
    helpers_dflash.compare(target, made, {"draft_window": WINDOW}, ragged([6, 12]), slots=made.options["block"])


def test_draft_model_drafts_as_with_that_window_in_its_file(tmp_path, model):
    """A Mistral drafter: its own window, or ours; and a window that no text fills changes nothing."""
    drafter, call = make_family("Mistral", vocab_size=VOCAB), {**ragged([6, 13, 2, 9]), "max_new_tokens": 16}
    plain, drafts = model.generate(**call), {}
    for own in (WINDOW, None):
        drafter.config.sliding_window = own
        drafter.save_pretrained(tmp_path / str(own))
    for own, ours in ((WINDOW, None), (None, WINDOW), (None, None), (None, 1000)):
        config = {
            "method": "draft_model",
            "model": str(tmp_path / str(own)),
            "draft_window": ours,
            "top_k": 2,
            "depth": 3,
        }
        kept = kept_proposals(integration.get_decoder(model, parse_config(config)).generator)
        assert torch.equal(model.generate(**call, speculative_config=config), plain)
        drafts[own, ours] = [(trees.tokens.tolist(), trees.parent_index.tolist()) for trees in kept]
        hf_specdec.release(model)
    assert drafts[WINDOW, None] == drafts[None, WINDOW] != drafts[None, None] == drafts[None, 1000]


def test_drafters_without_keys_have_no_window(tiny_model):
    for name in ("tiny-medusa", "tiny-mlp_speculator"):
        assert_refused(tiny_model, {"model": name, "draft_window": 8}, "'draft_window'.*keys and values of their own")
    assert_refused(tiny_model, {"model": "tiny-eagle", "draft_window": 0}, "integer of at least 1")
