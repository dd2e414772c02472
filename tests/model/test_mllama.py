"""Mllama (Llama 3.2 Vision): layers that attend to the prompt's images alone. What follows equals plain generate() token for token."""

import copy
import logging

import pytest
import torch
from families import VOCAB, perturbed
from mllama import ALONE, RAGGED, build_mllama, eagle3_head, needs_image_layers, prompts
from multimodal import GREEDY, METHODS, eagle_head
from oracle import assert_clean, ragged
from recurrent_families import WrongAt, WrongAtInTrees
from replayed_graphs import defined_attention, graphs_in_python  # noqa: F401
from transformers import DynamicCache

import hf_specdec
from hf_specdec import integration
from hf_specdec.candidate_generators import parse_config
from hf_specdec.core.errors import UnsupportedModel
from hf_specdec.core.names import CACHE
from hf_specdec.core.output import Taps
from hf_specdec.decoding import SpeculativeDecoder
from hf_specdec.kernels.native import library
from hf_specdec.model import architectures
from hf_specdec.model import prompt as prompt_module
from hf_specdec.model.architectures import tapped
from hf_specdec.model.native import NativeRunner
from hf_specdec.model.prepare import prepare

pytestmark = needs_image_layers
NGRAM = {**METHODS["ngram"], "num_speculative_tokens": 3}


@pytest.fixture(scope="module")
def model():
    return build_mllama()


@pytest.mark.parametrize("given", [RAGGED, ALONE], ids=["ragged", "alone"])
def test_images(model, given):
    inputs = prompts(*given)
    plain = model.generate(**inputs, **GREEDY)
    other = prompts(*given, seed=3)
    changed = [not torch.equal(*rows) for rows in zip(model.generate(**other, **GREEDY), plain, strict=True)]
    assert changed == [bool(images) for images in given[0]]
    for name, config in METHODS.items():
        assert torch.equal(model.generate(**inputs, **GREEDY, speculative_config=config), plain), name
    draft = perturbed(copy.deepcopy(model), 0.02)
    for more in ({}, {"branching_factors": [2, 2, 1]}):
        config = {"method": "draft_model", **more}
        output = model.generate(**inputs, **GREEDY, speculative_config=config, assistant_model=draft)
        assert torch.equal(output, plain)
    for text in ([9], [13, 7, 10]):  # text alone, as before
        inputs = ragged(text, 100)
        plain = model.generate(**inputs, **GREEDY)
        assert torch.equal(model.generate(**inputs, **GREEDY, speculative_config=NGRAM), plain)
    assert_clean(model)
    hf_specdec.release(model)


def test_the_mask_of_the_last_token_decides(model):
    """Here it hides one of two images, and one tile of the other; a prompt without a mask sees all tiles."""
    inputs, texts = prompts([[2, 3], [4, 1]], [9, 12]), []
    last = inputs["cross_attention_mask"].clone()
    last[0, -1, 0], last[1, -1, 0, 2:] = 0, 0
    for mask in (inputs["cross_attention_mask"], last, torch.zeros_like(last), None):
        call = {**inputs, "cross_attention_mask": mask, **GREEDY}
        texts.append(model.generate(**call))
        assert torch.equal(model.generate(**call, speculative_config=NGRAM), texts[-1])
    assert all(not torch.equal(texts[0], text) for text in texts[1:])


@pytest.mark.parametrize("drafter", [WrongAt, WrongAtInTrees])
def test_rejections_at_every_position(model, drafter, monkeypatch):
    inputs = prompts([[1, 3], [], [2], [4]], [9, 7, 12, 5])
    longer = model.generate(**inputs, **{**GREEDY, "max_new_tokens": 21})
    seen = longer.where(longer < VOCAB, 0)  # by drafters
    WrongAt.texts = [
        row[kept.bool().nonzero()[0, 0] :].tolist() for row, kept in zip(seen, inputs["attention_mask"], strict=True)
    ]
    decoder = SpeculativeDecoder(drafter(parse_config(NGRAM), prepare(model)))
    monkeypatch.setattr(integration, "get_decoder", lambda *_: decoder)
    out = model.generate(**inputs, **GREEDY, speculative_config=NGRAM, return_dict_in_generate=True)
    assert torch.equal(out.sequences, longer[:, : out.sequences.shape[1]])
    depths = out.speculation.acceptance_per_position
    assert len(depths) == 3 and 0 < depths[2] < depths[0] < 1
    assert decoder.cache.cross is None or not decoder.cache.cross.tables


def test_copies_and_samples(model):
    inputs = prompts(*RAGGED)
    call = {**inputs, "max_new_tokens": 12, "do_sample": True, "temperature": 0.9, "num_return_sequences": 2}
    texts = [
        model.generate(**call, speculative_config={**METHODS[name], "seed": 5})
        for name in ("none", "ngram", "token_recycling", "tree")
    ]
    assert all(torch.equal(texts[0], text) for text in texts[1:])
    assert not torch.equal(model.generate(**call, speculative_config={**NGRAM, "seed": 6}), texts[0])


def test_rows_that_give_way_keep_their_images(model):
    inputs = prompts(*RAGGED)
    plain = model.generate(**inputs, **GREEDY)
    for config in (
        {**NGRAM, "block_size": 4, "num_blocks": 9},
        {"method": "none", "async_scheduling": True},
        {**NGRAM, "native": False},
    ):
        assert torch.equal(model.generate(**inputs, **GREEDY, speculative_config=config), plain)


def test_hidden_states_and_heads_that_read_them(model, tmp_path):
    inputs = prompts(*RAGGED)
    wanted = {"return_dict_in_generate": True, "output_hidden_states": True, "output_logits": True}
    plain = model.generate(**inputs, **GREEDY, **wanted)
    ours = model.generate(**inputs, **GREEDY, **wanted, speculative_config=NGRAM)
    assert torch.equal(ours.sequences, plain.sequences)
    for step, expected in zip(ours.hidden_states, plain.hidden_states, strict=True):
        real = slice(None) if step[-1].shape[1] == 1 else inputs["attention_mask"].bool()
        torch.testing.assert_close(step[-1][real], expected[-1][real], rtol=1e-3, atol=1e-3)
    config = {"method": "eagle", "model": str(eagle_head(tmp_path)), "num_speculative_tokens": 3}
    assert torch.equal(model.generate(**inputs, **GREEDY, speculative_config=config), plain.sequences)


def test_taps_after_layers_that_text_skips(model, tmp_path):
    """Their states are those before them, with images not; heads read both, also in one batch."""
    changed = []
    for inputs in (prompts(*ALONE), ragged([9], 100)):
        with tapped(model, Taps(layers=(1, 2, 4))) as states:
            model(**inputs)
        changed.append(not torch.equal(states[1], states[2]))
        assert not torch.equal(states[2], states[4])
    assert changed == [True, False]
    config = {"method": "eagle3", "model": eagle3_head(tmp_path), "num_speculative_tokens": 3}
    for inputs in (ragged([9, 5], 100), prompts(*RAGGED)):
        plain = model.generate(**inputs, **GREEDY)
        for more in ({}, {"branching_factors": [2, 2, 1]}):
            assert torch.equal(model.generate(**inputs, **GREEDY, speculative_config={**config, **more}), plain)
    hf_specdec.release(model)


@pytest.mark.skipif(library() is None, reason="the native library is not compiled")
def test_no_program_runs_rows_with_images(model, monkeypatch):
    """A native program is traced over text, without these layers; text still runs as one."""
    hf_specdec.release(model)
    ran, run = [], NativeRunner.run

    def note(self, rows, cache, tapped=True):
        output = run(self, rows, cache, tapped)
        ran.append((output is not None, any(cache.holds_source(row.seq_id) for row in rows)))
        return output

    monkeypatch.setattr(NativeRunner, "run", note)
    for inputs in (prompts(*RAGGED), ragged([9], 100)):
        plain = model.generate(**inputs, **GREEDY)
        for native in (True, None):
            assert torch.equal(
                model.generate(**inputs, **GREEDY, speculative_config={**NGRAM, "native": native}),
                plain,
            )
    assert set(ran) == {(True, False)}
    hf_specdec.release(model)


@pytest.mark.long
def test_steps_with_images_are_not_captured(model, graphs_in_python, defined_attention):  # noqa: F811
    for inputs in (ragged([9, 5], 100), prompts(*RAGGED)):
        plain = model.generate(**inputs, **GREEDY)
        for name in ("ngram", "tree", "self_window"):
            config = {**METHODS[name], "cuda_graphs": True}
            assert torch.equal(model.generate(**inputs, **GREEDY, speculative_config=config), plain), name
    assert any(len(each) for each in graphs_in_python) and not any(each.refused for each in graphs_in_python)
    hf_specdec.release(model)


def test_without_the_images_the_check_of_the_next_step_fails(model, monkeypatch):
    hf_specdec.release(model)
    monkeypatch.setattr(prompt_module, "image_keys", lambda *_: None)
    with pytest.raises(UnsupportedModel, match="does not continue this prompt from token ids"):
        model.generate(**prompts(*ALONE), **GREEDY, speculative_config=NGRAM)
    hf_specdec.release(model)


def test_caches(model, caplog):
    """None is passed in or out with images, whose keys would be lost."""
    inputs, text = prompts(*ALONE), ragged([15], 100)
    with pytest.raises(UnsupportedModel, match="keeps keys of images apart"):
        model.generate(**inputs, **GREEDY, **{CACHE: DynamicCache()}, speculative_config=NGRAM)
    cache = DynamicCache()
    model.generate(**inputs, max_new_tokens=1, **{CACHE: cache})
    with pytest.raises(UnsupportedModel, match="keeps keys of images apart"):
        model.generate(**text, **GREEDY, **{CACHE: cache}, speculative_config=NGRAM)
    with caplog.at_level(logging.WARNING):
        output = model.generate(**inputs, **GREEDY, speculative_config=NGRAM, return_dict_in_generate=True)
    assert output.get(CACHE) is None
    assert "The output has no cache" in caplog.text
    texts = []
    for config in ({}, {"speculative_config": NGRAM}):
        cache = DynamicCache()
        model.generate(**ragged([9], 100), max_new_tokens=6, do_sample=False, **config, **{CACHE: cache})
        texts.append(model.generate(**text, **GREEDY, **config, **{CACHE: cache}))
    assert torch.equal(*texts)


def test_states_of_images_are_refused(model):
    """They would be given in every step."""
    with pytest.raises(UnsupportedModel, match="gets the states of images or their mask in cross_attention_states"):
        model.generate(
            **ragged([9], 100),
            cross_attention_states=torch.ones(1, 3, 48),
            **GREEDY,
            speculative_config=NGRAM,
        )


def test_gathered_keys(model, monkeypatch):
    """As a model attends whose attention cannot read pages."""
    hf_specdec.release(model)
    monkeypatch.setattr(architectures, "reads_pages", lambda _: False)
    assert prepare(model).gather
    for inputs in (prompts(*RAGGED), ragged([9, 5], 100)):
        plain = model.generate(**inputs, **GREEDY)
        for name in ("ngram", "tree"):
            assert torch.equal(model.generate(**inputs, **GREEDY, speculative_config=METHODS[name]), plain), name
    hf_specdec.release(model)
