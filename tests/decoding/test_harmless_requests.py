"""What asks for nothing that speculation cannot do is served as plain `generate()` serves it."""

import copy

import pytest
import torch
from oracle import Recorder, assert_clean, drafter_of, ragged
from transformers import DynamicCache, GenerationConfig, MaxLengthCriteria, StoppingCriteriaList

from hf_specdec.core.names import CACHE

NGRAM = {"method": "ngram", "prompt_lookup_min": 1, "prompt_lookup_max": 3}
CONFIGS = {
    "none": {"method": "none"},
    "ngram": NGRAM,
    "tree": {"method": "draft_model", "branching_factors": [3, 2, 1]},
}


@pytest.fixture(scope="module")
def drafter(model):
    return drafter_of(model)


# ---- caches ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("where", ["argument", "generation_config", "model"])
@pytest.mark.parametrize("kind", ["dynamic", "static", "hybrid", "sliding_window"])
def test_a_cache_that_holds_the_same_numbers(model, where, kind):
    inputs, model = ragged([6, 3]), copy.deepcopy(model)
    plain = model.generate(**inputs, max_new_tokens=6)
    arguments = {"max_new_tokens": 6, "speculative_config": NGRAM}
    if where == "argument":
        arguments["cache_implementation"] = kind
    elif where == "generation_config":
        arguments["generation_config"] = GenerationConfig(cache_implementation=kind, pad_token_id=0)
    else:
        model.generation_config.cache_implementation = kind
    if where != "model" and kind in ("static", "sliding_window"):  # asked for by name, and not given
        with pytest.raises(ValueError, match=f"drop cache_implementation='{kind}'"):
            model.generate(**inputs, **arguments)
        return
    output = model.generate(**inputs, **arguments, return_dict_in_generate=True)
    assert torch.equal(output.sequences, plain)
    assert type(output.past_key_values) is DynamicCache
    assert model.generation_config.cache_implementation == (kind if where == "model" else None)


@pytest.mark.parametrize("kind", ["offloaded", "quantized"])
def test_a_model_that_asks_for_another_cache(model, kind):
    model = copy.deepcopy(model)
    model.generation_config.cache_implementation = kind
    with pytest.raises(
        ValueError, match=r"The model's generation_config has cache_implementation.*or set model.generation_config"
    ):
        model.generate(**ragged([6]), max_new_tokens=4, speculative_config=NGRAM)


# ---- embeddings beside ids ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("config", CONFIGS)
def test_the_ids_own_embeddings(model, drafter, config):
    inputs = ragged([9, 5, 7])
    inputs["inputs_embeds"] = model.get_input_embeddings()(inputs["input_ids"])
    more = {"assistant_model": drafter} if config == "tree" else {}
    plain = model.generate(**inputs, max_new_tokens=12)
    assert torch.equal(model.generate(**inputs, max_new_tokens=12, **more, speculative_config=CONFIGS[config]), plain)


# ---- a cache, and only what follows it ------------------------------------------------------------------------------


def begun(model, lengths, seed=0):
    """A cache of texts, and their mask."""
    inputs = ragged(lengths, seed=seed)
    cache = DynamicCache()
    with torch.no_grad():
        positions = inputs["attention_mask"].cumsum(1).sub(1).clamp(min=0)
        model(**inputs, position_ids=positions, **{CACHE: cache})
    return cache, inputs["attention_mask"]


def following(model, lengths, new_ids):
    """Arguments that go on from a cache with new ids alone."""
    cache, mask = begun(model, lengths)
    whole = torch.cat([mask, torch.ones_like(new_ids)], dim=1)
    return {"input_ids": new_ids, "attention_mask": whole, CACHE: cache}


@pytest.mark.parametrize("lengths", [[20, 20], [20, 13]], ids=["no padding", "padding"])
@pytest.mark.parametrize("config", CONFIGS)
def test_new_ids_alone(model, drafter, config, lengths):
    """Both rows go on alike, though their texts are different."""
    new_ids = ragged([21], seed=3)["input_ids"].expand(2, -1)
    arguments = {
        "max_new_tokens": 14, "do_sample": False, "repetition_penalty": 1.3, "return_dict_in_generate": True,
        "output_hidden_states": True, "output_scores": True,
    }  # fmt: skip
    plain = model.generate(**following(model, lengths, new_ids), **arguments)
    assert not torch.equal(plain.sequences[0], plain.sequences[1])
    more = {"assistant_model": drafter} if config == "tree" else {}
    ours = model.generate(**following(model, lengths, new_ids), **arguments, **more, speculative_config=CONFIGS[config])
    assert torch.equal(ours.sequences, plain.sequences)
    for a, b in zip(ours.scores, plain.scores, strict=True):
        torch.testing.assert_close(a, b, atol=1e-4, rtol=0)
    for step_a, step_b in zip(ours.hidden_states, plain.hidden_states, strict=True):
        for a, b in zip(step_a, step_b, strict=True):
            torch.testing.assert_close(a, b, atol=1e-4, rtol=0)
    real = following(model, lengths, new_ids)["attention_mask"].bool()
    real = torch.cat([real, torch.ones(2, 13, dtype=torch.bool)], dim=1)
    for a, b in zip(ours.past_key_values.layers, plain.past_key_values.layers, strict=True):
        torch.testing.assert_close(a.keys.transpose(1, 2)[real], b.keys.transpose(1, 2)[real], atol=1e-4, rtol=0)
    assert_clean(model)


def test_a_text_of_padding_tokens(model):
    """What stands for ids nobody passed (the padding token) is not taken for a text of such tokens."""
    new_ids = torch.zeros(2, 24, dtype=torch.long)
    new_ids[:, -1] = 5

    def arguments():
        made = following(model, [20, 20], new_ids)
        made["attention_mask"][1, :20] = 0
        return made | {"max_new_tokens": 10, "do_sample": False}

    plain = model.generate(**arguments())
    assert not torch.equal(plain[0], plain[1])
    assert torch.equal(model.generate(**arguments(), speculative_config=NGRAM), plain)


def test_lengths_count_the_new_ids(model):
    """`max_length`, criteria and streamers see what was passed, as in transformers."""
    new_ids = ragged([5], seed=3)["input_ids"]
    streamers = Recorder(), Recorder()
    for limit in (
        {"max_length": 12},
        {"max_new_tokens": 30, "stopping_criteria": StoppingCriteriaList([MaxLengthCriteria(11)])},
    ):
        arguments = [following(model, [20], new_ids) | limit for _ in range(2)]
        plain = model.generate(**arguments[0], streamer=streamers[0])
        ours = model.generate(**arguments[1], streamer=streamers[1], speculative_config=NGRAM)
        assert torch.equal(ours, plain)
        assert all(map(torch.equal, *(each.puts for each in streamers)))
        streamers = Recorder(), Recorder()


def test_rows_of_unknown_text_wait(model):
    """With their keys: nobody could read them again."""
    new_ids = ragged([5], seed=3)["input_ids"].expand(2, -1)
    plain = model.generate(**following(model, [20, 13], new_ids), max_new_tokens=30)
    few = NGRAM | {"num_blocks": 4, "block_size": 16}
    both = following(model, [20, 13], new_ids)
    assert torch.equal(model.generate(**both, max_new_tokens=30, speculative_config=few), plain)
    assert_clean(model)


def test_what_new_ids_alone_cannot_do(model, tmp_path):
    new_ids = ragged([5], seed=3)["input_ids"]
    wrong = following(model, [20], new_ids)
    wrong["attention_mask"] = wrong["attention_mask"][:, 3:]
    with pytest.raises(ValueError, match=r"attention_mask covers 22 tokens and input_ids has 5.*which is 20 tokens"):
        model.generate(**wrong, max_new_tokens=4, speculative_config=NGRAM)
    wrong = following(model, [20], new_ids)
    del wrong["attention_mask"]
    with pytest.raises(ValueError, match="with the attention_mask of the whole"):
        model.generate(**wrong, max_new_tokens=4, speculative_config=NGRAM)
    config = {"method": "extract_hidden_states", "output_dir": str(tmp_path)}
    with pytest.raises(ValueError, match=f"reads hidden states of the whole text, and {CACHE} may hold"):
        model.generate(**following(model, [20], new_ids), max_new_tokens=4, speculative_config=config)
    assert_clean(model)
