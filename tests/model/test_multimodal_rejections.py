"""Drafts after images that are wrong at every position in turn, in chains and trees; and determinism of text with such a model."""

import pytest
import torch
from multimodal import HYBRID, MULTIMODAL, build_multimodal, image_prompts
from oracle import ragged
from recurrent_families import WrongAt, WrongAtInTrees, drawn
from transformers.cache_utils import Cache

import hf_specdec
from hf_specdec import integration
from hf_specdec.candidate_generators import parse_config
from hf_specdec.decoding import SpeculativeDecoder
from hf_specdec.model.prepare import prepare

GREEDY = {"max_new_tokens": 16, "do_sample": False}
NGRAM = {"method": "ngram", "num_speculative_tokens": 3}
SAMPLED = ({"method": "none"}, NGRAM, {"method": "token_recycling"}, {"method": "token_recycling", "use_tree": False})
needs_states = pytest.mark.skipif(not hasattr(Cache, "get_conv_state"), reason="needs transformers 5.23")


def families():
    """Every class; those that differ most by default."""
    quick = ("gemma3", "qwen2_5_vl", HYBRID)
    marks = {HYBRID: [needs_states]}
    return [
        pytest.param(each, marks=[*marks.get(each, []), *([] if each in quick else [pytest.mark.slow])])
        for each in (*MULTIMODAL, HYBRID)
    ]


def built(family):
    model = build_multimodal(family)
    return drawn(model) if family == HYBRID else model


@pytest.mark.parametrize("drafter", [WrongAt, WrongAtInTrees])
@pytest.mark.parametrize("family", families())
def test_rejections_at_every_position(family, drafter, monkeypatch):
    """Five rows with two, one or no image; some rounds accept none and some all."""
    model = built(family)
    inputs = image_prompts(model, [2, 0, 1, 1, 0], [9, 7, 12, 4, 13])
    longer = model.generate(**inputs, **{**GREEDY, "max_new_tokens": 21})
    WrongAt.texts = [
        row[kept.bool().nonzero()[0, 0] :].tolist() for row, kept in zip(longer, inputs["attention_mask"], strict=True)
    ]
    packed, config = prepare(model), parse_config(NGRAM)
    decoder = SpeculativeDecoder(drafter(config, packed))
    monkeypatch.setattr(integration, "get_decoder", lambda *_: decoder)
    out = model.generate(**inputs, **GREEDY, speculative_config=NGRAM, return_dict_in_generate=True)
    assert torch.equal(out.sequences, longer[:, : out.sequences.shape[1]])
    depths = out.speculation.acceptance_per_position
    assert len(depths) == 3 and 0 < depths[2] < depths[0] < 1


@pytest.mark.parametrize("family", families())
def test_sampled_text_does_not_depend_on_the_method(family):
    model = built(family)
    inputs = image_prompts(model, [2, 0, 1, 1, 0], [9, 7, 12, 4, 13])
    call = {"max_new_tokens": 12, "do_sample": True, "temperature": 0.9}
    texts = [model.generate(**inputs, **call, speculative_config={**each, "seed": 5}) for each in SAMPLED]
    assert all(torch.equal(texts[0], text) for text in texts[1:])
    other = model.generate(**inputs, **call, speculative_config={**NGRAM, "seed": 6})
    assert not torch.equal(other, texts[0])
    hf_specdec.release(model)


@pytest.mark.long
def test_deterministic_text():
    """In bfloat16: with the key, drafts change nothing."""
    model = build_multimodal("llava").to(torch.bfloat16)
    inputs = ragged([13, 7, 10], vocab_size=100)
    texts = [
        model.generate(**inputs, **GREEDY, speculative_config={**config, "deterministic": True})
        for config in ({"method": "none"}, NGRAM, {"method": "token_recycling"})
    ]
    assert torch.equal(texts[0], texts[1]) and torch.equal(texts[0], texts[2])
    hf_specdec.release(model)
