"""Models with a vision tower on text prompts: generate() hands on empty image inputs, which mean nothing."""

import pytest
import torch
from families import VOCAB, make
from multimodal import MULTIMODAL, build_multimodal
from oracle import ragged

import hf_specdec
from hf_specdec.core.errors import UnsupportedModel

CONFIGS = {
    "ngram": {"method": "ngram", "prompt_lookup_min": 1, "prompt_lookup_max": 3},
    "tree": {"method": "draft_model", "early_exit": 2, "branching_factors": [2, 2, 1]},
}
TOKEN_TYPES = {
    "gemma3": "token_type_ids", "llava": None, "mistral3": None, "qwen2_vl": "mm_token_type_ids", "qwen2_5_vl": "mm_token_type_ids",
}  # fmt: skip


@pytest.fixture(scope="module", params=MULTIMODAL)
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
    if TOKEN_TYPES[model.config.model_type] is not None and method == "ngram":
        inputs[TOKEN_TYPES[model.config.model_type]] = torch.zeros_like(inputs["input_ids"])
    output = model.generate(**inputs, max_new_tokens=16, do_sample=False, speculative_config=CONFIGS[method])
    assert torch.equal(output, plain)
    hf_specdec.release(model)


def test_pixels_are_refused():
    """In one sentence that says what is in the prompt."""
    model = build_multimodal("llava")
    inputs = {"input_ids": torch.tensor([[5, 120, 120, 120, 120, 6]]), "pixel_values": torch.zeros(1, 3, 16, 16)}
    with pytest.raises(UnsupportedModel, match="prompts of text only; this one has images"):
        model.generate(**inputs, max_new_tokens=4, speculative_config=CONFIGS["ngram"])


def test_token_types_that_are_embedded():
    """GPT-2 adds an embedding of type 0: zeros are not nothing there."""
    model = make("GPT-2")
    inputs = prompts()
    inputs["token_type_ids"] = torch.zeros_like(inputs["input_ids"])
    with pytest.raises(UnsupportedModel, match="token_type_ids"):
        model.generate(**inputs, max_new_tokens=4, speculative_config=CONFIGS["ngram"])
