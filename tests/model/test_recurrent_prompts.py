"""Prompts that a model with recurrent layers reads itself, with images or as embeddings: its states after them are taken over."""

import inspect

import pytest
import recurrent_families
import torch
from multimodal import HYBRID, build_multimodal, image_prompts
from oracle import assert_clean
from recurrent_families import FAMILIES, WrongAt, make
from test_recurrent import METHODS, NEW, AtStep, batch, plain
from transformers import StoppingCriteriaList
from transformers.cache_utils import Cache

import hf_specdec
from hf_specdec import integration
from hf_specdec.candidate_generators import parse_config
from hf_specdec.core.errors import UnsupportedModel
from hf_specdec.core.names import CACHE
from hf_specdec.decoding import SpeculativeDecoder
from hf_specdec.model.prepare import ModelOptions, prepare
from hf_specdec.model.recurrent import families

pytestmark = pytest.mark.skipif(
    not hasattr(Cache, "get_conv_state"), reason="needs transformers 5.23, as the models do"
)


@pytest.fixture(scope="module")
def with_vision():
    model = build_multimodal(HYBRID)
    recurrent_families.drawn(model)
    yield model
    hf_specdec.release(model)


@pytest.mark.long
@pytest.mark.parametrize("states", ["kept", "replayed"])
def test_prompts_with_images(states, with_vision):
    """Two, no and one image in a batch: the states after the prompts are the model's own."""
    inputs = image_prompts(with_vision, [2, 0, 1], [9, 7, 12])
    expected = plain(with_vision, inputs)
    other = plain(with_vision, image_prompts(with_vision, [2, 0, 1], [9, 7, 12], seed=3))
    assert (other != expected)[:, -NEW:].any(1).tolist() == [True, False, True]
    assert len(set(expected[0, -NEW:].tolist())) > NEW // 3
    accepted = 0
    for config in (METHODS["ngram"], METHODS["token_recycling"], {**METHODS["token_recycling"], "use_tree": False}):
        config = {**config, "recurrent_states": states}
        out = plain(with_vision, inputs, speculative_config=config, return_dict_in_generate=True)
        assert torch.equal(out.sequences, expected)
        accepted += out.speculation.num_accepted_tokens
    assert accepted
    sampled = [
        plain(
            with_vision,
            inputs,
            do_sample=True,
            speculative_config={**METHODS[name], "seed": 5, "recurrent_states": states},
        )
        for name in ("ngram", "token_recycling")
    ]
    assert torch.equal(*sampled) and not torch.equal(sampled[0], expected)
    longer = {**inputs, "input_ids": out.sequences, "attention_mask": torch.ones_like(out.sequences)}
    with pytest.raises((UnsupportedModel, ValueError), match=CACHE):
        plain(with_vision, longer, 4, speculative_config=config, **{CACHE: out.past_key_values})
    assert_clean(with_vision)


@pytest.mark.parametrize("states", ["kept", "replayed"])
def test_prompts_that_end_in_an_image(states, with_vision):
    """The axes of the text's positions differ; the attention layers between recurrent ones see it."""
    inputs = image_prompts(with_vision, [1, 2], [9, 4], end=True)
    expected = plain(with_vision, inputs)
    other = plain(with_vision, image_prompts(with_vision, [1, 2], [9, 4], end=True, seed=3))
    assert (other != expected)[:, -NEW:].any(1).all()
    for method in ("ngram", "token_recycling"):
        config = {**METHODS[method], "recurrent_states": states}
        assert torch.equal(plain(with_vision, inputs, speculative_config=config), expected)
    assert_clean(with_vision)


@pytest.mark.parametrize(
    "name", ["Qwen3-Next", *(pytest.param(n, marks=pytest.mark.slow) for n in FAMILIES if n != "Qwen3-Next")]
)
def test_prompts_of_embeddings(name):
    model = make(name)
    if "inputs_embeds" not in inspect.signature(model.prepare_inputs_for_generation).parameters:
        pytest.skip("transformers does not generate from embeddings with this class")
    ids = batch((9, 9))["input_ids"]
    inputs = {"inputs_embeds": model.get_input_embeddings()(ids), "attention_mask": torch.ones_like(ids)}
    expected, config = plain(model, inputs), METHODS["token_recycling"]
    refuses = families.FAMILIES[FAMILIES[name][0]].steps or name in ("Mamba", "Mamba-2", "FalconMamba")
    if refuses:  # without keys nothing counts an embedding's tokens, nor with states of our own
        with pytest.raises(UnsupportedModel, match=r"pass input_ids|only prompts of token ids"):
            plain(model, inputs, speculative_config=config)
    else:
        assert torch.equal(plain(model, inputs, speculative_config=config), expected)


@pytest.mark.parametrize("states", ["kept", "replayed"])
@pytest.mark.parametrize("method", ["ngram", "token_recycling"])
def test_rows_with_images_that_do_not_fit_together(method, states, with_vision, monkeypatch):
    """A row that gives way keeps its states: nothing of an image is read again as ids."""
    inputs = image_prompts(with_vision, [2, 0, 1], [9, 14, 12])
    expected = plain(with_vision, inputs)
    blocks = -(-(inputs["input_ids"].shape[1] + NEW) // 4) + 2
    preempt, preempted = SpeculativeDecoder.preempt, []
    monkeypatch.setattr(
        SpeculativeDecoder, "preempt", lambda self, seq: preempted.append(seq.num_generated) or preempt(self, seq)
    )
    config = {**METHODS[method], "recurrent_states": states, "block_size": 4, "num_blocks": blocks}
    for options in ({}, {"return_dict_in_generate": True}):
        out = plain(with_vision, inputs, speculative_config=config, **options)
        assert torch.equal(getattr(out, "sequences", out), expected)
    assert max(preempted) > 0
    assert_clean(with_vision)


@pytest.mark.parametrize("states", ["kept", "replayed"])
def test_states_of_a_batch_with_images_that_a_criterion_ends(states, with_vision, monkeypatch):
    """A row that was ahead begins again where the model had read its image, so that the returned states are plain generate()'s."""
    inputs = image_prompts(with_vision, [2, 0, 1], [9, 7, 12])
    length = inputs["input_ids"].shape[1]
    options = {"return_dict_in_generate": True, "stopping_criteria": StoppingCriteriaList([AtStep(length + 9)])}
    expected = plain(with_vision, inputs, **options)
    longer = plain(with_vision, inputs, NEW + 5)
    WrongAt.texts = [
        ids[length - int(mask.sum()) :].tolist() for ids, mask in zip(longer, inputs["attention_mask"], strict=True)
    ]
    config = {"method": "ngram", "num_speculative_tokens": 3}
    packed = prepare(with_vision, ModelOptions(recurrent_states=states))
    decoder = SpeculativeDecoder(WrongAt(parse_config(config), packed))
    monkeypatch.setattr(integration, "get_decoder", lambda *_: decoder)
    again, read = [], SpeculativeDecoder.read_again
    monkeypatch.setattr(
        SpeculativeDecoder, "read_again", lambda self, seq, n: again.append(seq.row) or read(self, seq, n)
    )
    out = plain(with_vision, inputs, speculative_config=config, **options)
    assert torch.equal(out.sequences, expected.sequences)
    assert 0 in again or 2 in again  # a row with an image
    compared = 0
    for own, theirs in zip(out.past_key_values.layers, expected.past_key_values.layers, strict=True):
        if getattr(theirs, "conv_states", None) is not None and theirs.conv_states[0] is not None:
            torch.testing.assert_close(own.conv_states[0], theirs.conv_states[0], rtol=1e-3, atol=2e-4)
            torch.testing.assert_close(own.recurrent_states[0], theirs.recurrent_states[0], rtol=1e-3, atol=2e-4)
            compared += 1
        else:
            torch.testing.assert_close(own.keys[0], theirs.keys[0], rtol=1e-3, atol=2e-4)  # a row without padding
    assert compared == 2
