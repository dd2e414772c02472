"""Prompts that a model with recurrent layers reads itself, with images or as embeddings: its states after them are taken over."""

import inspect

import pytest
import recurrent_families
import torch
from multimodal import HYBRID, build_multimodal, image_prompts
from oracle import assert_clean
from recurrent_families import FAMILIES, make
from test_recurrent import METHODS, NEW, batch, plain
from transformers.cache_utils import Cache

import hf_specdec
from hf_specdec.cache import OutOfBlocks
from hf_specdec.core.errors import UnsupportedModel

pytestmark = pytest.mark.skipif(
    not hasattr(Cache, "get_conv_state"), reason="needs transformers 5.23, as the models do"
)


@pytest.fixture(scope="module")
def with_vision():
    model = build_multimodal(HYBRID)
    recurrent_families.drawn(model)
    yield model
    hf_specdec.release(model)


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
    with pytest.raises((UnsupportedModel, ValueError), match="past_key_values"):
        plain(with_vision, longer, 4, speculative_config=config, past_key_values=out.past_key_values)
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
    expected = plain(model, inputs)
    assert torch.equal(plain(model, inputs, speculative_config=METHODS["token_recycling"]), expected)


def test_a_pool_too_small_for_images_says_so(with_vision):
    """Their states are not kept while a row waits."""
    inputs = image_prompts(with_vision, [2, 1], [9, 12])
    blocks = -(-(inputs["input_ids"].shape[1] + NEW) // 4) + 2
    with pytest.raises(OutOfBlocks):
        plain(with_vision, inputs, speculative_config={"method": "ngram", "block_size": 4, "num_blocks": blocks})
