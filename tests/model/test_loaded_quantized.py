"""Targets that another library has quantized, as transformers loads them. A library that is not installed is left out."""

import importlib
import logging

import pytest
import torch
from helpers_drafters import texts_equal
from oracle import ragged
from transformers import AutoModelForCausalLM, BitsAndBytesConfig, QuantoConfig, TorchAoConfig

import hf_specdec
from hf_specdec.core.errors import UnsupportedModel
from hf_specdec.kernels.native import library
from hf_specdec.model import self_test
from hf_specdec.model.options.quantized import num_bytes
from hf_specdec.model.self_test import rounding_layers

CONFIGS = [
    {"method": "none"},
    {"method": "ngram", "prompt_lookup_min": 1},
    {"method": "draft_model", "model": "tiny-draft", "num_speculative_tokens": 4},
    {"method": "eagle3", "model": "tiny-eagle3", "top_k": 3, "total_tokens": 8},
]


def of_torchao(name):
    return lambda: TorchAoConfig(getattr(importlib.import_module("torchao.quantization"), name)())


# How they are loaded, and whether their layers round what they read: not at all, every token alone, or by all tokens.
KINDS = {
    "torchao int8": ("torchao", of_torchao("Int8WeightOnlyConfig"), None),
    "torchao int8, dynamic": ("torchao", of_torchao("Int8DynamicActivationInt8WeightConfig"), "alone"),
    "bitsandbytes int8": ("bitsandbytes", lambda: BitsAndBytesConfig(load_in_8bit=True), "together"),
    "bitsandbytes nf4": (
        "bitsandbytes",
        lambda: BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.float32),
        "alone",  # its kernel for CPUs computes in bfloat16
    ),
    "HQQ int4": ("hqq", None, None),
    "quanto int8": ("optimum.quanto", lambda: QuantoConfig("int8"), None),
    "quanto int4": ("optimum.quanto", lambda: QuantoConfig("int4"), None),
}


@pytest.mark.parametrize("kind", KINDS)
def test_text_is_that_of_the_quantized_model(kind, caplog):
    """In float32: equal where inputs are not rounded; a warning where they are, and a refusal where the other tokens matter."""
    name, config, rounds = KINDS[kind]
    pytest.importorskip(name)
    folder = hf_specdec.bundled("tiny")
    model = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, quantization_config=config and config()
    ).eval()
    if name == "hqq":  # transformers 5.24 cannot
        quantize, base = (importlib.import_module(each) for each in ("hqq.models.hf.base", "hqq.core.quantize"))
        options = base.BaseQuantizeConfig(nbits=4, group_size=64)
        quantize.AutoHQQHFModel.quantize_model(model, options, compute_dtype=torch.float32, device="cpu")
    inputs = ragged([12, 7, 3], vocab_size=4000)
    call = {**inputs, "max_new_tokens": 16, "do_sample": False, "pad_token_id": 0}
    with caplog.at_level(logging.INFO, logger="hf_specdec.model"):
        if rounds == "together":
            with pytest.raises(UnsupportedModel, match="rounds its inputs by all tokens"):
                model.generate(**call, speculative_config=CONFIGS[1])
            return
        plain, size = model.generate(**call), num_bytes(model)
        for config in CONFIGS:
            found = model.generate(**call, speculative_config=config)
            assert rounds or texts_equal(found.tolist(), plain)
    assert (rounds is not None) == any("rounds its inputs" in record.message for record in caplog.records)
    if library() is not None:
        paths = [record.message for record in caplog.records if "in the native library" in record.message]
        assert any("which calls its" in path and f"({name.partition('.')[0]})" in path for path in paths)
    assert num_bytes(model) == size, "memory as loaded"


@pytest.mark.parametrize("kind", ["torchao int8", "torchao int8, dynamic"])
def test_rounding_is_told_apart_in_bfloat16(kind):
    """So that a program of such a model is compared with what its rounding allows."""
    pytest.importorskip("torchao")
    _, config, rounds = KINDS[kind]
    folder = hf_specdec.bundled("tiny")
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16, quantization_config=config()).eval()
    with torch.no_grad():
        assert rounding_layers(model, model.device) == ([], ["Linear (torchao)"] if rounds else [])


@pytest.mark.long
@pytest.mark.parametrize("before", [None, "Int8WeightOnlyConfig"])
def test_weights_that_torchao_quantizes_in_place_are_judged_anew(before, caplog, monkeypatch):
    """The modules stay. Their weights become of another class, or are of that of an earlier model's, which round nothing."""
    quantization = pytest.importorskip("torchao.quantization")
    monkeypatch.setattr(self_test, "_verdicts", {})  # a verdict of an earlier test would warn no more
    call = {**ragged([12, 7, 3], vocab_size=4000), "max_new_tokens": 4, "do_sample": False, "pad_token_id": 0}
    models = [
        AutoModelForCausalLM.from_pretrained(hf_specdec.bundled("tiny"), dtype=torch.float32).eval() for _ in "ab"
    ]
    if before is not None:
        quantization.quantize_(models[0], getattr(quantization, before)())
    for model in models:
        model.generate(**call, speculative_config=CONFIGS[1])
    assert "rounds its inputs" not in caplog.text
    quantization.quantize_(model, quantization.Int8DynamicActivationInt8WeightConfig())
    model.generate(**call, speculative_config=CONFIGS[1])
    assert "rounds its inputs" in caplog.text
