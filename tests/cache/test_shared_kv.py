"""Layers that read another layer's keys and values (Gemma 3n, Gemma 4), and layers that recompute their activations."""

import pytest
import torch
from families import VOCAB, WINDOW, build
from oracle import ragged, tiny_llama
from transformers import DynamicCache

import hf_specdec
from hf_specdec.core.names import CACHE

NGRAM = {"method": "ngram", "prompt_lookup_min": 1, "prompt_lookup_max": 3}
TREE = {"method": "draft_model", "branching_factors": [2, 2, 1]}
_COMMON = {
    "num_hidden_layers": 4, "num_kv_shared_layers": 2, "sliding_window": WINDOW, "hidden_size_per_layer_input": 8,
    "layer_types": ["sliding_attention", "full_attention"] * 2, "vocab_size_per_layer_input": VOCAB,
}  # fmt: skip
MODELS = {
    "gemma3n_text": {**_COMMON, "laurel_rank": 8, "altup_num_inputs": 2, "activation_sparsity_pattern": [0.0] * 4},
    "gemma4_text": {**_COMMON, "global_head_dim": 12},
}


@pytest.fixture(scope="module", params=MODELS)
def model(request):
    return build(request.param, **MODELS[request.param])


@pytest.mark.parametrize("config", [NGRAM, TREE], ids=["ngram", "tree"])
def test_everything_that_can_be_returned(model, config):
    """Tokens, hidden states and the cache are those of plain `generate()`; the cache is filled in the same layers."""
    inputs = ragged([13, 7, 10], vocab_size=VOCAB)
    arguments = {
        "max_new_tokens": 16,
        "do_sample": False,
        "return_dict_in_generate": True,
        "output_hidden_states": True,
    }
    drafter = {} if config is NGRAM else {"assistant_model": build("llama", seed=1)}
    plain = model.generate(**inputs, **arguments)
    ours = model.generate(**inputs, **arguments, **drafter, speculative_config=config)
    assert torch.equal(ours.sequences, plain.sequences)
    real = inputs["attention_mask"].bool()
    for ours_of_step, plain_of_step in zip(ours.hidden_states, plain.hidden_states, strict=True):
        for a, b in zip(ours_of_step, plain_of_step, strict=True):
            assert a.shape == b.shape
            if a.shape[-2] > 1:  # the prompt's, of which ours has zeros at padding
                a, b = a[..., real, :], b[..., real, :]
            torch.testing.assert_close(a, b, atol=1e-3, rtol=1e-3)
    assert len(ours.past_key_values.layers) == len(plain.past_key_values.layers)
    for a, b in zip(ours.past_key_values.layers, plain.past_key_values.layers, strict=True):
        assert (getattr(a, "keys", None) is None) == (getattr(b, "keys", None) is None)
    hf_specdec.release(model)


def test_going_on_from_a_cache(model):
    inputs, cache = ragged([13], vocab_size=VOCAB), DynamicCache()
    text = model.generate(**inputs, max_new_tokens=8, **{CACHE: cache}, speculative_config=NGRAM)
    assert len(cache.layers) == 2, "the others read these"
    more = torch.cat([text, torch.tensor([[5, 6, 7]])], dim=1)
    plain = model.generate(more, max_new_tokens=8)
    assert torch.equal(model.generate(more, max_new_tokens=8, **{CACHE: cache}, speculative_config=NGRAM), plain)
    assert cache.get_seq_length() == plain.shape[1] - 1


def test_no_layer_recomputes_while_it_generates():
    """In training with gradient checkpointing, which stays on. (Plain `generate()` has no cache there and writes other text.)"""
    model, inputs = tiny_llama(), ragged([9, 6])
    expected = model.generate(**inputs, max_new_tokens=12)
    model.train()
    model.gradient_checkpointing_enable()
    for config in (NGRAM, {"method": "draft_model", "early_exit": 2, "branching_factors": [2, 1]}):
        assert torch.equal(model.generate(**inputs, max_new_tokens=12, speculative_config=config), expected)
    assert all(layer.gradient_checkpointing for layer in model.model.layers)
