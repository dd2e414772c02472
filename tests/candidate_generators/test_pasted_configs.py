"""`speculative_config`s from the pages of vLLM, vLLM-Ascend and FastDeploy, as they stand there, but for paths, layers and the
length of a block."""

import importlib.util
import logging
import re

import pytest
import torch
from oracle import assert_clean, ragged, tiny_llama
from scheduling import make_decoder
from test_config import error

import hf_specdec
from hf_specdec import parse_config
from hf_specdec.candidate_generators import pasted

# The page's configuration → our method. Heads and drafters are bundled ones in place of the page's.
PAGES = {
    "FastDeploy: verify_strategy": (
        {"method": "mtp", "verify_strategy": "greedy", "num_speculative_tokens": 1, "model": "tiny-mtp"}, "mtp"),
    "FastDeploy: accept_policy": (
        {"method": "mtp", "accept_policy": "accept_all", "num_speculative_tokens": 1, "model": "tiny-mtp"}, "mtp"),
    "FastDeploy: MTP": ({"method": "mtp", "num_speculative_tokens": 1, "model": "tiny-mtp"}, "mtp"),
    "FastDeploy: hybrid": (
        {"method": "mtp", "num_model_steps": 2, "mtp_strategy": "with_ngram", "num_speculative_tokens": 5, "model": "tiny-mtp"}, "hybrid"),
    "FastDeploy: n-gram": ({"method": "ngram", "num_speculative_tokens": 1}, "ngram"),
    "FastDeploy: n-gram with a model": ({"method": "ngram", "num_speculative_tokens": 1, "model": "/path/to/mtp_model"}, "ngram"),
    "FastDeploy: suffix keys": (
        {"method": "mtp", "num_speculative_tokens": 4, "suffix_decoding_max_tree_depth": 64, "model": "tiny-mtp",
         "suffix_decoding_max_cached_requests": 10000, "suffix_decoding_max_spec_factor": 1.0,
         "suffix_decoding_min_token_prob": 0.1}, "mtp"),
    "FastDeploy: suffix": (
        {"method": "suffix", "num_speculative_tokens": 4, "suffix_decoding_max_tree_depth": 64,
         "suffix_decoding_max_cached_requests": -1, "suffix_decoding_max_spec_factor": 1.0, "suffix_decoding_min_token_prob": 0.1},
        "suffix"),
    "FastDeploy: naive": ({"method": "naive", "num_speculative_tokens": 1}, "none"),
    "FastDeploy: quantized": ({"method": "mtp", "num_speculative_tokens": 1, "model": "tiny-mtp", "quantization": "WINT8"}, "mtp"),
    "vLLM: n-gram": ({"method": "ngram", "num_speculative_tokens": 5, "prompt_lookup_max": 4}, "ngram"),
    "vLLM: [ngram]": (
        {"model": "[ngram]", "num_speculative_tokens": 5, "prompt_lookup_max": 5, "prompt_lookup_min": 1}, "ngram"),
    "vLLM: draft model": (
        {"model": "tiny-draft", "num_speculative_tokens": 5, "method": "draft_model", "max_model_len": 2048, "enforce_eager": True},
        "draft_model"),
    "vLLM: EAGLE": (
        {"model": "tiny-eagle", "draft_tensor_parallel_size": 1, "num_speculative_tokens": 2, "method": "eagle"}, "eagle"),
    "vLLM: EAGLE-3": (
        {"model": "tiny-eagle3", "draft_tensor_parallel_size": 2, "num_speculative_tokens": 2, "method": "eagle3"}, "eagle3"),
    "vLLM: MLP": (
        {"model": "tiny-mlp_speculator", "draft_tensor_parallel_size": 1, "method": "mlp_speculator", "num_speculative_tokens": 3,
         "disable_logprobs": False, "disable_log_stats": False, "disable_by_batch_size": 30}, "mlp_speculator"),
    "vLLM: batch sizes": (
        {"method": "eagle", "model": "tiny-eagle", "num_speculative_tokens": 3,
         "num_speculative_tokens_per_batch_size": [[1, 64, 3], [65, 128, 1], [129, 512, 0]]}, "eagle"),
    "vLLM: hidden states": (
        {"method": "extract_hidden_states", "num_speculative_tokens": 1,
         "draft_model_config": {"hf_config": {"eagle_aux_hidden_state_layer_ids": [1, 2, 3]}}}, "extract_hidden_states"),
    "vLLM-Ascend: MTP": (
        {"num_speculative_tokens": 2, "method": "mtp", "model": "tiny-mtp", "disable_padded_drafter_batch": False}, "mtp"),
    "vLLM-Ascend: a switch as text": (
        {"num_speculative_tokens": 1, "method": "deepseek_mtp", "model": "tiny-mtp", "disable_padded_drafter_batch": "False"}, "mtp"),
    "vLLM-Ascend: Qwen3-Next": ({"method": "qwen3_next_mtp", "num_speculative_tokens": 2, "model": "tiny-mtp"}, "mtp"),
    "vLLM-Ascend: Ernie": ({"method": "ernie_mtp", "num_speculative_tokens": 1, "model": "tiny-mtp"}, "mtp"),
    "vLLM-Ascend: DFlash": ({"method": "dflash", "model": "tiny-dflash", "num_speculative_tokens": 5}, "dflash"),
    "vLLM-Ascend: DSpark": (
        {"method": "dspark", "model": "tiny-dflash", "num_speculative_tokens": 5, "enforce_eager": True,
         "enable_adaptive_verification": True}, "dflash"),
    "vLLM-Ascend: suffix": ({"method": "suffix", "num_speculative_tokens": 15}, "suffix"),
}  # fmt: skip


@pytest.fixture(autouse=True)
def temporary_folder(tmp_path, monkeypatch):
    monkeypatch.setattr(pasted.tempfile, "gettempdir", lambda: str(tmp_path))
    pasted._say.cache_clear()


@pytest.fixture(scope="module")
def inputs(tiny_tokenizer):
    texts = ["Once upon a time there was a dog. The dog was", "Tell me a story about a dog"]
    return tiny_tokenizer(texts, return_tensors="pt", padding=True, return_token_type_ids=False)


@pytest.fixture(scope="module")
def plain(tiny_model, inputs):
    return tiny_model.generate(**inputs, max_new_tokens=10, do_sample=False)


@pytest.mark.parametrize("name", PAGES)
def test_runs_as_it_stands(tiny_model, inputs, plain, name):
    values, method = PAGES[name]
    if method == "suffix" and importlib.util.find_spec("arctic_inference") is None:
        pytest.skip("needs arctic-inference")
    if "quantization" in values and importlib.util.find_spec("torchao") is None:
        pytest.skip("needs torchao")
    given = str(values)
    config = parse_config(values)
    assert config.method == method and str(values) == given, "the caller's dictionary stays as it is"
    assert parse_config(config.to_dict()) == config
    output = tiny_model.generate(**inputs, max_new_tokens=10, do_sample=False, speculative_config=values)
    if "accept_policy" not in values:  # which ignores the model
        assert torch.equal(output, plain)
    hf_specdec.release(tiny_model)


def test_every_name_of_mtp():
    for family in pasted._MTP_FAMILIES:
        assert parse_config({"method": f"{family}_mtp", "num_speculative_tokens": 3}) == parse_config(
            {"method": "mtp", "num_speculative_tokens": 3}
        )
    assert {"deepseek_mtp", "mimo_mtp", "glm4_moe_mtp", "longcat_flash_mtp", "pangu_ultra_moe_mtp"} <= set(
        pasted.METHOD_NAMES
    )


@pytest.mark.parametrize(
    ("values", "ours"),
    [
        ({"model": "ngram"}, {"method": "ngram"}),
        ({"method": "hybrid_mtp_ngram"}, {"method": "mtp", "mtp_strategy": "with_ngram"}),
        ({"method": "draft_model", "model": "x", "parallel_drafting": "true"}, {"method": "pard", "model": "x"}),
        ({"method": "dflash", "model": "x", "parallel_drafting": True}, {"method": "dflash", "model": "x"}),
        ({"method": "draft_model", "model": "x", "use_heterogeneous_vocab": True},
         {"method": "draft_model", "model": "x", "vocabulary_bridge": "intersection"}),
        ({"method": "ngram", "max_ngram_size": 4, "min_ngram_size": 2},
         {"method": "ngram", "prompt_lookup_max": 4, "prompt_lookup_min": 2}),
        ({"method": "ngram", "verify_strategy": "target_match"}, {"method": "ngram", "rejection_sample_method": "coupled"}),
        ({"method": "ngram", "acceptance_method": "typical_acceptance_sampler"},
         {"method": "ngram", "rejection_sample_method": "typical"}),
        ({"method": "ngram", "rejection_sample_method": "strict"}, {"method": "ngram", "rejection_sample_method": "coupled"}),
        ({"method": "ngram", "rejection_sample_method": "probabilistic"},
         {"method": "ngram", "rejection_sample_method": "rejection"}),
        ({"method": "ngram", "accept_policy": "reject_all", "num_speculative_tokens": 3},
         {"method": "ngram", "num_speculative_tokens": 3, "rejection_sample_method": "synthetic", "synthetic_acceptance_length": 1}),
        ({"method": "ngram", "compile": "False"}, {"method": "ngram", "compile": False}),
    ],
)  # fmt: skip
def test_what_has_a_meaning(values, ours):
    assert parse_config(values) == parse_config(ours)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"method": "deepseek_mpt"}, "Unknown speculative method 'deepseek_mpt' (did you mean 'deepseek_mtp'?)"),
        ({"method": "ngram", "draft_tensor_paralel_size": 1}, "did you mean 'draft_tensor_parallel_size'?"),
        ({"method": "eagle", "disable_by_batchsize": 4}, "did you mean 'disable_by_batch_size'?"),
        (
            {"method": "mtp", "suffix_decoding_max_tree_dept": 4},
            "has no key 'suffix_decoding_max_tree_dept' for method 'mtp'",
        ),
        ({"method": "ngram", "draft_tensor_parallel_size": "two"}, "must be an integer of at least 1, not 'two'"),
        ({"method": "ngram", "disable_padded_drafter_batch": "nay"}, "must be true or false, not 'nay'"),
        ({"method": "ngram", "enforce_eager": 3}, "must be true or false, not 3"),
        ({"method": "ngram", "compile": "nay"}, "must be true or false, not 'nay'"),
        ({"method": "mtp", "verify_strategy": "top"}, "must be one of target_match, greedy, topp, not 'top'"),
        ({"method": "mtp", "accept_policy": "all"}, "must be normal, accept_all or reject_all"),
        (
            {"method": "ngram", "max_ngram_size": 4, "prompt_lookup_max": 4},
            "has both 'max_ngram_size' and 'prompt_lookup_max'",
        ),
        (
            {"method": "extract_hidden_states", "draft_model_config": {"hf_config": {}}},
            "must be {'hf_config': {'eagle_aux",
        ),
        ({"method": "ngram", "disable_by_batch_size": 0}, "must be an integer of at least 1, not 0"),
        ({"method": "ngram", "max_model_len": "2k"}, "must be an integer of at least 1, not '2k'"),
    ],
)
def test_errors_stay_errors(values, message):
    assert message in error(values)


def test_one_warning_a_key(caplog):
    """However often a configuration is read; a value that asks for nothing is passed over in silence."""
    model, inputs = tiny_llama(), ragged([5])
    config = {
        "method": "ngram", "model": "some/model", "enforce_eager": True, "draft_load_config": {"a": 1}, "disable_logprobs": False,
        "draft_tensor_parallel_size": 1, "code_revision": None,
    }  # fmt: skip
    with caplog.at_level(logging.WARNING, logger="hf_specdec"):
        for _ in range(2):
            model.generate(**inputs, max_new_tokens=4, speculative_config=config)
    said = [record.getMessage() for record in caplog.records if "speculative_config" in record.getMessage()]
    assert len(said) == 3
    assert "'model'] means nothing to method 'ngram'" in said[0] or any(
        "'model'] means nothing" in each for each in said
    )
    assert any("'enforce_eager'] means nothing here: 'cuda_graphs' says" in each for each in said)
    assert_clean(model)


def test_a_key_of_kernels_is_told_what_runs_instead(caplog):
    pasted._say.cache_clear()
    config = {"method": "ngram", "moe_backend": "triton", "attention_backend": "FLASH_ATTN"}
    with caplog.at_level(logging.WARNING, logger="hf_specdec"):
        parse_config(config)
    said = {re.search(r"\['(\w+)'\]", each)[1]: each for each in caplog.messages}
    assert "attention" in said["attention_backend"] and "attention" not in said["moe_backend"]
    assert "experts" in said["moe_backend"]


# ---- keys that have a meaning of their own --------------------------------------------------------------------------


@pytest.mark.parametrize(
    "length", [{}, {"num_speculative_tokens": "auto"}, {"num_speculative_tokens_per_batch_size": {"1": 4, "9": 1}}]
)
def test_disable_by_batch_size(length):
    """No drafts where more rows are decoding."""
    decoder = make_decoder(tiny_llama(), {"method": "ngram", "disable_by_batch_size": 2, **length})
    rows = [hf_specdec.core.sequence.Sequence([1, 2, 3], max_length=50) for _ in range(3)]
    for _ in range(3):
        decoder.policy.observe_plain(rows[:2], 0.01)
    assert decoder._draft_limits(rows) == [0, 0, 0]
    assert sum(decoder._draft_limits(rows[:2])) > 0


def drafted(model, inputs, **keys):
    config = {"method": "draft_model", "early_exit": 2, "num_speculative_tokens": 3, **keys}
    output = model.generate(**inputs, max_new_tokens=12, return_dict_in_generate=True, speculative_config=config)
    assert torch.equal(output.sequences, model.generate(**inputs, max_new_tokens=12))
    return output.speculation


def test_drafts_stop_where_they_are_told_to():
    model, inputs = tiny_llama(), ragged([8, 8, 8])
    assert drafted(model, inputs).num_draft_tokens > 0
    assert drafted(model, inputs, disable_by_batch_size=2).num_draft_tokens == 0
    assert drafted(model, inputs, disable_by_batch_size=3) == drafted(model, inputs)
    assert drafted(model, inputs, max_model_len=8).num_draft_tokens == 0
    some = drafted(model, inputs, max_model_len=14).num_draft_tokens
    assert 0 < some < drafted(model, inputs).num_draft_tokens
