"""Models with a vision tower on text prompts: generate() hands on empty image inputs, which mean nothing."""

import pytest
import torch
from families import VOCAB, make
from multimodal import MULTIMODAL, build_multimodal, token_types
from oracle import ragged

import hf_specdec
from hf_specdec.core.errors import UnsupportedModel

CONFIGS = {
    "ngram": {"method": "ngram", "prompt_lookup_min": 1, "prompt_lookup_max": 3},
    "tree": {"method": "draft_model", "early_exit": 2, "branching_factors": [2, 2, 1]},
}
QUICK = {"gemma3", "llava", "mistral3", "qwen2_vl", "paligemma2"}


@pytest.fixture(
    scope="module", params=[pytest.param(each, marks=() if each in QUICK else pytest.mark.slow) for each in MULTIMODAL]
)
def model(request):
    return build_multimodal(request.param)


def prompts():
    inputs = ragged([13, 7, 10], vocab_size=100)
    assert VOCAB > 100, "no prompt holds an image token"
    return inputs


@pytest.mark.parametrize("method", CONFIGS)
def test_text_prompts(model, method):
    """Also with the token types that say "text" of every token, where the model takes such."""
    inputs = prompts()
    plain = model.generate(**inputs, max_new_tokens=16, do_sample=False)
    assert len(set(plain[:, 13:].flatten().tolist())) > 6, "a reference that says something"
    if token_types(model) is not None and method == "ngram" and model.config.model_type != "paligemma":
        inputs[token_types(model)] = torch.zeros_like(inputs["input_ids"])
    output = model.generate(**inputs, max_new_tokens=16, do_sample=False, speculative_config=CONFIGS[method])
    assert torch.equal(output, plain)
    hf_specdec.release(model)


def test_token_types_that_are_embedded():
    """GPT-2 adds an embedding of type 0: zeros are not nothing there."""
    model = make("GPT-2")
    inputs = prompts()
    inputs["token_type_ids"] = torch.zeros_like(inputs["input_ids"])
    with pytest.raises(UnsupportedModel, match="token_type_ids"):
        model.generate(**inputs, max_new_tokens=4, speculative_config=CONFIGS["ngram"])
