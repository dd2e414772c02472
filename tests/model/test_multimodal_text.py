"""Models with a vision tower on text prompts: generate() hands on empty image inputs, which mean nothing."""

import pytest
import torch
import transformers
from families import VOCAB, make, perturbed
from multimodal import HYBRID, MULTIMODAL, build_multimodal, token_types
from oracle import ragged
from recurrent_families import drawn
from transformers.cache_utils import Cache

import hf_specdec
from hf_specdec.core.errors import UnsupportedModel

CONFIGS = {
    "ngram": {"method": "ngram", "prompt_lookup_min": 1, "prompt_lookup_max": 3},
    "early exit": {"method": "draft_model", "early_exit": 2, "branching_factors": [2, 2, 1]},
    "chain": {"method": "draft_model", "num_speculative_tokens": 3},
    "tree": {"method": "draft_model", "branching_factors": [3, 2, 1]},
}
QUICK = {"gemma3", "llava", "mistral3", "qwen2_vl", "paligemma2"}


@pytest.fixture(
    scope="module",
    params=[pytest.param(each, marks=() if each in QUICK else pytest.mark.slow) for each in (*MULTIMODAL, HYBRID)],
)
def model(request):
    if request.param == HYBRID and not hasattr(Cache, "get_conv_state"):
        pytest.skip("needs transformers 5.23, as the model does")
    made = build_multimodal(request.param)
    return drawn(made) if request.param == HYBRID else made


def prompts(lengths=(13, 7, 10, 1, 2)):
    inputs = ragged(list(lengths), vocab_size=100)
    assert VOCAB > 100, "no prompt holds an image token"
    return inputs


@pytest.fixture(scope="module")
def references(model):
    """Five rows and one, and what the model writes after them."""
    batches = (prompts(), prompts([9]))
    return [(inputs, model.generate(**inputs, max_new_tokens=16, do_sample=False)) for inputs in batches]


@pytest.mark.parametrize("method", CONFIGS)
def test_text_prompts(model, references, method):
    """Five rows and one; drafts of a model of the same class that is a little different. Also with the token types that say "text" of
    every token, where the model takes such."""
    if method == "early exit" and model.config.model_type == HYBRID:
        pytest.skip("refused for models with recurrent layers (test_recurrent.py)")
    drafter = {"assistant_model": perturbed(model, 0.05)} if method in ("chain", "tree") else {}
    for inputs, plain in references:
        assert len(set(plain[:, -16:].flatten().tolist())) > len(plain), "a reference that says something"
        if token_types(model) is not None and method == "ngram" and model.config.model_type != "paligemma":
            inputs = {**inputs, token_types(model): torch.zeros_like(inputs["input_ids"])}
        call = {"max_new_tokens": 16, "do_sample": False, "return_dict_in_generate": True, **drafter}
        output = model.generate(**inputs, **call, speculative_config=CONFIGS[method])
        assert torch.equal(output.sequences, plain)
        assert not drafter or output.speculation.num_accepted_tokens > 0
    hf_specdec.release(model)


def test_token_types_that_are_embedded():
    """GPT-2 adds an embedding of type 0: zeros are not nothing there."""
    model = make("GPT-2")
    inputs = prompts()
    inputs["token_type_ids"] = torch.zeros_like(inputs["input_ids"])
    with pytest.raises(UnsupportedModel, match="token_type_ids"):
        model.generate(**inputs, max_new_tokens=4, speculative_config=CONFIGS["ngram"])


@pytest.mark.parametrize("family", ["Bert", "Electra", "Ernie"])
def test_types_of_zeros_are_the_default_of_berts_relatives(family):
    config, kind = (
        getattr(transformers, f"{family}Config"),
        getattr(transformers, "BertLMHeadModel" if family == "Bert" else f"{family}ForCausalLM"),
    )
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64}
    model = kind(
        config(vocab_size=100, is_decoder=True, pad_token_id=0, eos_token_id=None, initializer_range=0.3, **sizes)
    ).eval()
    ids = torch.tensor([[4, 5, 6, 4, 5, 6, 4, 5]])
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "max_new_tokens": 8, "do_sample": False}
    zeros = {"token_type_ids": torch.zeros_like(ids)}
    wanted = model.generate(**inputs, **zeros)
    assert model.generate(**inputs, **zeros, speculative_config={"method": "ngram"}).tolist() == wanted.tolist()
    with pytest.raises(UnsupportedModel, match="token_type_ids"):
        model.generate(**inputs, token_type_ids=torch.ones_like(ids), speculative_config={"method": "ngram"})
