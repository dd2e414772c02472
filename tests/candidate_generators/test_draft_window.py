"""`draft_window`, `draft_sinks`: drafters see the last and the first tokens only, as formulas say, and no text changes."""

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
from helpers_speculators import DraftRecorder
from oracle import VOCAB, ragged, tiny_llama
from replayed_graphs import defined_attention, graphs_in_python  # noqa: F401

import hf_specdec
from hf_specdec import integration
from hf_specdec.candidate_generators import parse_config
from hf_specdec.candidate_generators.eagle import EagleGenerator
from hf_specdec.candidate_generators.eagle3 import Eagle3Generator

WINDOW, SINKS = 4, 2


def recorded_run(model, generator, config, script):
    """What a generator did on a ragged batch; drafts are accepted up to places where the target is on its own."""
    call = {**ragged([6, 13, 2, 9]), "max_new_tokens": 16, "logits_processor": scripted(*script)}
    plain = model.generate(**call)
    with recorded(generator) as recording:
        assert torch.equal(model.generate(**call, speculative_config=config), plain)
    return recording


@pytest.mark.parametrize(
    ("layout", "shape", "sinks"),
    [("vicuna", "chain", None), ("two layers", "dynamic", SINKS), ("llama3", "static", None)],
)
def test_eagle(tmp_path, model, layout, shape, sinks):
    tensors, folder = eagle.write(tmp_path, layout)
    config = {"method": "eagle", "model": folder, "draft_window": WINDOW, "draft_sinks": sinks, **eagle.SHAPES[shape]}
    recording = recorded_run(model, EagleGenerator, config, [])
    plain = eagle.PlainEagle(tensors, model, window=WINDOW, **eagle.LAYOUTS[layout][4])
    plain.layers.sinks = sinks or 0
    check_against(plain, recording, model)


def check_eagle3(tmp_path, model, layout, window, seen, sinks=0, seen_sinks=None, **more):
    tensors, folder = write(tmp_path, layout)
    config = {"method": "eagle3", "model": folder, "draft_window": window, "draft_sinks": sinks or None, **more}
    recording = recorded_run(model, Eagle3Generator, config, [SCRIPT])
    known = LAYOUTS[layout]
    known = dataclasses.replace(known, plain=known.plain | {"window": seen})
    plain = PlainEagle3(tensors, model, known)
    plain.layers.sinks = sinks if seen_sinks is None else seen_sinks
    check_against(plain, recording, model)


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


@pytest.mark.parametrize("layout", ["yuhuili", "p-eagle"])
def test_eagle3_sees_the_first_tokens(tmp_path, model, layout):
    check_eagle3(tmp_path, model, layout, WINDOW, WINDOW, SINKS, **eagle3.SHAPES["chain"])


def test_layers_with_a_window_in_the_file_do_not_see_the_first_tokens(tmp_path, model):
    check_eagle3(tmp_path, model, "sliding window", 3, 3, SINKS, seen_sinks=0, **eagle3.SHAPES["chain"])


def test_in_graphs(tmp_path, model, graphs_in_python, defined_attention):  # noqa: F811
    check_eagle3(tmp_path, model, "p-eagle", WINDOW, WINDOW, SINKS, num_speculative_tokens=4, cuda_graphs=True)
    assert any(each.name == "Eagle3Head" and each.capture.count for each in graphs_in_python if not each.refused)
    hf_specdec.release(model)


@pytest.mark.long
@pytest.mark.parametrize(
    ("name", "modules", "sinks"),
    [("DeepSeek-V3", 2, None), ("DeepSeek-V3", 2, SINKS), ("MiMo", 1, SINKS), ("MiMo-V2", 1, None)],
)
def test_mtp(tmp_path, name, modules, sinks):
    """Over gathered keys, over pages, and with a window in the target's configuration."""
    stored = store(tmp_path, name, modules)
    recording = mtp.drafted(stored.model, {**mtp.SHAPES["static"], "draft_window": WINDOW, "draft_sinks": sinks})
    stored.kind = dataclasses.replace(stored.kind, window=WINDOW, sinks=sinks or 0)
    check_logits(PlainMtp(stored), recording, stored.model)


@pytest.mark.parametrize("sinks", [None, SINKS])
@pytest.mark.parametrize("causal", [True, False])
def test_dflash(tmp_path, monkeypatch, causal, sinks):
    target = tiny_llama()
    made = helpers_dflash.make(tmp_path, target, causal=causal)
    sees = helpers_dflash.Reference.sees
    monkeypatch.setattr(
        helpers_dflash.Reference, "sees",
        lambda self, layer, query, key, anchor: (
            sees(self, layer, query, key, anchor) and (query - key < WINDOW or key < (sinks or 0))
        ),
    )  # fmt: skip
    config = {"draft_window": WINDOW, "draft_sinks": sinks}
    helpers_dflash.compare(target, made, config, ragged([6, 12]), slots=made.options["block"])


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


@pytest.mark.parametrize("native", [None, False])
@pytest.mark.parametrize("family", ["Llama", "Falcon"])
def test_a_draft_model_sees_the_first_and_the_last_tokens(tmp_path, model, family, native):
    """Logits of transformers' own forward under that mask; over pages, natively too, and over gathered keys."""
    drafter = make_family(family, vocab_size=VOCAB)
    drafter.save_pretrained(tmp_path)
    config = {"method": "draft_model", "model": str(tmp_path), "num_speculative_tokens": 3, "native": native}
    config |= {"draft_window": WINDOW, "draft_sinks": SINKS}
    recorder = DraftRecorder(integration.get_decoder(model, parse_config(config)).generator)
    model.generate(**ragged([6, 13, 2, 9]), max_new_tokens=10, speculative_config=config)
    for text, path, logits in recorder.seen:
        ids = torch.tensor([[*text, *path]])
        place = torch.arange(ids.shape[1])
        distance = place[:, None] - place
        seen = (distance >= 0) & ((distance < WINDOW) | (place < SINKS))
        mask = torch.zeros(seen.shape).masked_fill_(~seen, float("-inf"))[None, None]
        with torch.no_grad():
            expected = drafter(ids, attention_mask=mask, use_cache=False).logits[0, -1]
        torch.testing.assert_close(logits, expected, atol=1e-4, rtol=1e-4)
    hf_specdec.release(model)


def test_drafters_without_keys_have_no_window(tiny_model):
    for name in ("tiny-medusa", "tiny-mlp_speculator"):
        assert_refused(tiny_model, {"model": name, "draft_window": 8}, "'draft_window'.*keys and values of their own")
    assert_refused(tiny_model, {"model": "tiny-eagle", "draft_window": 0}, "integer of at least 1")
    assert_refused(tiny_model, {"model": "tiny-eagle", "draft_sinks": 2}, "draft_sinks.*: give 'draft_window' too")
