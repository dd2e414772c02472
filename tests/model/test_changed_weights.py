"""Weights that are changed between two calls count in the second, however they were changed."""

import gc
import weakref

import numpy as np
import peft
import pytest
import torch
from families import make
from torch import nn

import hf_specdec
from hf_specdec.core.rows import RowInput
from hf_specdec.kernels.native import library
from hf_specdec.model.prepare import prepare

PROMPTS = torch.randint(3, 60, (3, 12), generator=torch.Generator().manual_seed(0))
CONFIGS = [{"method": "none"}, {"method": "ngram", "num_speculative_tokens": 4}]


@pytest.fixture
def adapted():
    """A model wide enough for packed weights in float32, with adapters that change its text."""
    torch.manual_seed(0)
    model = make("Llama", hidden_size=512, intermediate_size=768, num_attention_heads=8, num_key_value_heads=8)
    options = peft.LoraConfig(task_type="CAUSAL_LM", r=4, init_lora_weights=False, target_modules="all-linear")
    return peft.get_peft_model(model.float(), options).eval()


def check_equal(model):
    wanted = model.generate(input_ids=PROMPTS, max_new_tokens=16, do_sample=False)
    for config in CONFIGS:
        found = model.generate(
            input_ids=PROMPTS,
            max_new_tokens=16,
            do_sample=False,
            speculative_config={**config, "prepack_weights": True},
        )
        assert found.tolist() == wanted.tolist()
    return wanted


@pytest.mark.long
def test_merged_adapters(adapted):
    with adapted.disable_adapter():
        plain = check_equal(adapted)
    before = check_equal(adapted)
    adapted.merge_adapter()
    check_equal(adapted)
    adapted.unmerge_adapter()
    check_equal(adapted)
    merged = adapted.merge_and_unload()
    check_equal(merged)
    assert before.tolist() != plain.tolist()


def test_writes_that_leave_no_trace(adapted):
    model = adapted.merge_and_unload()
    before = check_equal(model)
    for name, parameter in model.named_parameters():
        if name.endswith("down_proj.weight"):
            parameter.detach().numpy()[:] *= -1
    after = check_equal(model)
    assert before.tolist() != after.tolist()
    hf_specdec.release(model)


@pytest.mark.skipif(library() is None, reason="the native library is not compiled")
def test_a_cache_that_stays_keeps_no_weights_that_were_replaced():
    """A server's cache outlives many of them."""
    model = make("Llama")
    packed, alive = prepare(model), []
    cache = packed.new_cache(num_blocks=4, block_size=16)
    for _ in range(3):
        cache.add(0)
        cache.reserve(0, 5)
        with torch.no_grad(), packed.active():
            packed.forward([RowInput(0, np.arange(3, 8), 0)], cache)
        cache.remove(0)
        alive.append(weakref.ref(model.lm_head.weight))
        model.lm_head.weight = nn.Parameter(model.lm_head.weight.detach().clone())
    assert packed.native is not None and packed.native.refused is None
    gc.collect()
    assert [each() for each in alive[:2]] == [None, None]
