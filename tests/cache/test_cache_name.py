"""transformers 5.24 renamed the KV cache, an argument of every forward and of generate(): both names work, ours is the newer one."""

import inspect
import warnings

import pytest
import torch
from oracle import ragged
from transformers import DynamicCache
from transformers.models.llama.modeling_llama import LlamaAttention

import hf_specdec
from hf_specdec.core.names import CACHE, cache_argument

NGRAM = {"method": "ngram", "prompt_lookup_min": 1, "prompt_lookup_max": 3}
BOTH_NAMES = ["past_key_values"] if CACHE == "past_key_values" else ["past_key_values", "cache"]
HEADS = ["eagle", "eagle3", "mtp", "mlp_speculator", "medusa", "hydra", "dflash"]


def test_the_name_is_that_of_this_transformers():
    assert CACHE in inspect.signature(LlamaAttention.forward).parameters
    assert cache_argument(inspect.signature(LlamaAttention.forward).parameters) == CACHE


@pytest.mark.parametrize("name", ["cache", "past_key_values", "cache_params"])
def test_the_name_of_a_repository_s_own_code(name):
    assert cache_argument(["input_ids", name]) == name


def test_a_forward_that_names_no_cache():
    assert cache_argument(["input_ids", "kwargs"]) == CACHE


@pytest.mark.parametrize("name", BOTH_NAMES)
@pytest.mark.parametrize("config", [{"method": "none"}, NGRAM], ids=["none", "ngram"])
def test_a_cache_to_continue_from_by_both_names(model, name, config):
    inputs = ragged([7, 7])
    plain = model.generate(**inputs, max_new_tokens=12)
    cache = DynamicCache()
    first = model.generate(
        **inputs, max_new_tokens=5, speculative_config=config, return_dict_in_generate=True, **{name: cache}
    )
    assert getattr(first, name) is cache and cache.get_seq_length() == 11
    mask = torch.ones_like(first.sequences)
    text = model.generate(
        first.sequences, attention_mask=mask, max_new_tokens=7, speculative_config=config, **{name: cache}
    )
    assert torch.equal(text, plain)


@pytest.mark.parametrize("native", [True, False], ids=["native", "torch"])
@pytest.mark.parametrize("head", HEADS)
def test_no_call_of_ours_uses_a_deprecated_name(head, native):
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(hf_specdec.bundled("tiny"))
    ids = torch.arange(20, 40)[None]
    arguments = {"attention_mask": torch.ones_like(ids), "max_new_tokens": 12, "do_sample": False}
    plain = model.generate(ids, **arguments)
    config = {"model": f"tiny-{head}", "native": native}
    with warnings.catch_warnings():
        warnings.simplefilter("error", FutureWarning)
        warnings.simplefilter("error", DeprecationWarning)
        assert torch.equal(model.generate(ids, **arguments, speculative_config=config), plain)
