"""Configurations written for vLLM, vLLM-Ascend and FastDeploy, used as they are.

Their names of methods and keys are translated to ours. A key without a meaning here is ignored, with one warning per process.
"""

from __future__ import annotations

import dataclasses
import functools
import logging
import os
import tempfile
from typing import Any

from ..config import SpeculativeConfig, SpeculativeConfigError

logger = logging.getLogger(__name__)

# vLLM names MTP by family; its newer releases rewrite all of these to "mtp".
_MTP_FAMILIES = (
    "deepseek", "mimo", "mimo_v2", "glm4_moe", "glm4_moe_lite", "glm_ocr", "glm5_next", "ernie", "nemotron_h", "exaone_moe",
    "exaone4_5", "qwen3_next", "qwen3_5", "qwen4_exp", "longcat_flash", "bailing_hybrid", "bailing_hybrid_v3", "minimax_m3",
    "kimi_k3", "pangu_ultra_moe", "step3p5", "hy_v3", "hy_v4", "inkling", "dots3_note",
)  # fmt: skip
METHOD_NAMES = {
    **{f"{family}_mtp": "mtp" for family in _MTP_FAMILIES},
    "gemma4_mtp": "gemma4_assistant",
    "dspark": "dflash",
    "ngram_gpu": "ngram",
    "ngram_match": "ngram",  # FastDeploy's internal name
    "naive": "none",  # FastDeploy
}
_NGRAM_MODELS = ("ngram", "[ngram]")
_WITHOUT_MODEL = ("ngram", "suffix", "none", "extract_hidden_states")  # vLLM fills in "model" for these

_CANDIDATES = "a token is never accepted merely because it is among the likeliest; see 'rejection_sample_method'"
# Keys of vLLM, vLLM-Ascend and FastDeploy without a meaning here, by what to use instead, or why.
_IGNORED = {
    "batches are never padded": "disable_padded_drafter_batch",
    "every device has a whole drafter": "use_local_argmax_reduction",
    "drafters are loaded from safetensors or plain pickles, and their repository's code is never run": "code_revision draft_load_config",
    "the drafter's own config.json is read": "draft_model_config",
    "experts run as in transformers": "moe_backend",
    "attention is chosen by the device and the model": "attention_backend index_share_for_mtp_iteration disable_mqa_scorer",
    "'cuda_graphs' says what runs as CUDA graphs": "enforce_eager",
    "a prefix is shared as far as the drafter has read it": "disable_eagle_block_drop",
    "scores are returned where output_scores asks for them": "disable_logprobs",
    "statistics are in the output's .speculation": "disable_log_stats",
    '\'draft_confidence_threshold\' and "num_speculative_tokens": "auto" shorten drafts':
        "enable_adaptive_verification adaptive_verification dspark_draft_topk",
    _CANDIDATES: "max_candidate_len verify_window",
    "it concerns a server's memory and workers":
        "num_gpu_block_expand_ratio num_extra_cache_layer model_type sharing_model prefill_one_step_stop",
    "see 'rejection_sample_method' \"synthetic\"": "benchmark_mode",
}  # fmt: skip
IGNORED_KEYS = {key: why for why, keys in _IGNORED.items() for key in keys.split()}
_FLAGS = (
    "disable_padded_drafter_batch", "enforce_eager", "use_local_argmax_reduction", "disable_eagle_block_drop",
    "use_heterogeneous_vocab", "parallel_drafting", "disable_mqa_scorer", "disable_logprobs", "disable_log_stats",
)  # fmt: skip
_RENAMED = {"max_ngram_size": "prompt_lookup_max", "min_ngram_size": "prompt_lookup_min"}  # FastDeploy
_RULES = {
    "acceptance_method": {"rejection_sampler": "rejection", "typical_acceptance_sampler": "typical"},  # older vLLM
    "verify_strategy": {"target_match": "coupled", "greedy": "greedy", "topp": None},  # FastDeploy
}


def renamed_method(values: dict[str, Any]) -> dict[str, Any]:
    """A copy of the configuration with our name for its method."""
    values = dict(values)
    method, model = values.get("method"), values.get("model")
    if not method and model in _NGRAM_MODELS:
        method = values["method"] = "ngram"
    if method == "custom_class" and isinstance(model, str) and "." in model:  # vLLM's: "package.module.Class"
        del values["model"]
        values["method"] = ":".join(model.rsplit(".", 1))
    elif method == "hybrid_mtp_ngram":  # older FastDeploy
        values.update(method="mtp", mtp_strategy=values.get("mtp_strategy", "with_ngram"))
    elif isinstance(method, str) and method in METHOD_NAMES:
        values["method"] = METHOD_NAMES[method]
    if values.get("method") == "draft_model" and _flag(values, "parallel_drafting"):
        values["method"] = "pard"
    return values


def translated(values: dict[str, Any], methods: dict[str, type[SpeculativeConfig]]) -> dict[str, Any]:
    """The configuration with our names for its keys.

    Args:
        methods: configuration classes by name, `values["method"]` among them.

    Raises:
        SpeculativeConfigError: a translated key has a bad value.
    """
    values = dict(values)
    for key, ours in _RENAMED.items():
        if key in values and ours in values:
            raise SpeculativeConfigError(
                f"speculative_config has both {key!r} and {ours!r}, which are the same: give one."
            )
        if key in values:
            values[ours] = values.pop(key)
    if values["method"] == "mtp":
        values = _translate_strategy(values, methods["hybrid"])
    method = values["method"]
    kinds = {field.name: str(field.type) for field in dataclasses.fields(methods[method])}
    for key in [key for key in values if key in _FLAGS or kinds.get(key, "").startswith("bool")]:
        values[key] = _flag(values, key)
    _translate_rules(values)
    if "parallel_drafting" not in kinds and isinstance(values.get("parallel_drafting"), bool):
        del values["parallel_drafting"]  # the method and the checkpoint imply it
    bridges = isinstance(values.get("use_heterogeneous_vocab"), bool) and values.pop("use_heterogeneous_vocab")
    if bridges and "vocabulary_bridge" in kinds:
        values.setdefault("vocabulary_bridge", "intersection")
    _translate_hidden_states(values, method)
    quantization = values.get("quantization")
    if isinstance(quantization, str):
        values["quantization"] = quantization.lower()  # FastDeploy writes WINT4
    _leave_out(values, kinds, methods)
    return values


def _flag(values: dict[str, Any], key: str) -> Any:
    """A boolean key, which may be given as text. Other values are returned as they are, for the key's own check."""
    value = values.get(key)
    return {"true": True, "false": False}.get(value.lower(), value) if isinstance(value, str) else value


def _translate_strategy(values: dict[str, Any], hybrid: type[SpeculativeConfig]) -> dict[str, Any]:
    """FastDeploy's two strategies of MTP: its layers alone, or continued by n-gram look-up, which is our `hybrid`."""
    strategy, steps = values.pop("mtp_strategy", "default"), values.pop("num_model_steps", None)
    if strategy == "default":
        if steps is not None and (tokens := values.setdefault("num_speculative_tokens", steps)) != steps:
            raise SpeculativeConfigError(
                f"speculative_config['num_model_steps'] is {steps!r}, but num_speculative_tokens is {tokens!r}: make them equal, "
                "or set mtp_strategy 'with_ngram' to continue by n-gram."
            )
        return values
    if strategy != "with_ngram":
        raise SpeculativeConfigError(
            f"speculative_config['mtp_strategy'] must be one of 'default', 'with_ngram', not {strategy!r}."
        )
    if taken := {"first", "second", "strategy"} & values.keys():
        raise SpeculativeConfigError(
            f"speculative_config['mtp_strategy'] 'with_ngram' sets {', '.join(sorted(taken))}: leave that out, or mtp_strategy."
        )
    second = {
        "method": "ngram",
        "prompt_lookup_min": values.pop("prompt_lookup_min", 2),
        "prompt_lookup_max": values.pop("prompt_lookup_max", 5),
    }
    common = {field.name for field in dataclasses.fields(hybrid)}
    first = {"method": "mtp", "num_speculative_tokens": 1 if steps is None else steps}
    first |= {key: values.pop(key) for key in values.keys() - common - {"method"}}
    return {**values, "method": "hybrid", "strategy": "extend", "first": first, "second": second}


def _translate_rules(values: dict[str, Any]) -> None:
    for key, rules in _RULES.items():
        if key not in values:
            continue
        given = values.pop(key)
        if given not in rules:
            raise SpeculativeConfigError(
                f"speculative_config[{key!r}] must be one of {', '.join(rules)}, not {given!r}."
            )
        if rules[given] is None:
            _say(key, f"is {given!r}: {_CANDIDATES}.")
        else:
            values.setdefault("rejection_sample_method", rules[given])
    policy = values.pop("accept_policy", "normal")
    if policy == "normal":
        return
    if policy not in ("accept_all", "reject_all"):
        raise SpeculativeConfigError(
            f"speculative_config['accept_policy'] must be normal, accept_all or reject_all, not {policy!r}."
        )
    tokens = values.setdefault("num_speculative_tokens", 1)  # FastDeploy's default
    accepted = tokens if policy == "accept_all" and isinstance(tokens, int) else 0
    values.update(rejection_sample_method="synthetic", synthetic_acceptance_length=1 + accepted)


def _translate_hidden_states(values: dict[str, Any], method: str) -> None:
    """Read vLLM's layer ids from `draft_model_config`, and choose a default for the folder, which vLLM configures elsewhere."""
    if method != "extract_hidden_states" or "draft_model_config" not in values:
        return
    nested = values.pop("draft_model_config")
    inner = nested.get("hf_config") if isinstance(nested, dict) else None
    ids = inner.get("eagle_aux_hidden_state_layer_ids") if isinstance(inner, dict) else None
    if ids is None:
        raise SpeculativeConfigError(
            "speculative_config['draft_model_config'] of method 'extract_hidden_states' must be {'hf_config': "
            f"{{'eagle_aux_hidden_state_layer_ids': [..]}}}}, not {nested!r}; or give these ids as 'eagle_aux_hidden_state_layer_ids'."
        )
    values.setdefault("eagle_aux_hidden_state_layer_ids", ids)
    if "output_dir" not in values:
        values["output_dir"] = os.path.join(tempfile.gettempdir(), "hidden_states")
        _say("output_dir", f"is not given (vLLM has it in kv_transfer_config): files go to {values['output_dir']}.")


def _leave_out(values: dict[str, Any], kinds: dict[str, str], methods: dict[str, type[SpeculativeConfig]]) -> None:
    """Remove keys without a meaning here, with a warning unless the value is the default."""
    method = values["method"]
    suffix_keys = {field.name for field in dataclasses.fields(methods["suffix"])}
    for key in [key for key in values if key not in kinds]:
        if key in IGNORED_KEYS:
            value = values.pop(key)
            if key in _FLAGS and not isinstance(value, bool) and value is not None:
                raise SpeculativeConfigError(f"speculative_config[{key!r}] must be true or false, not {value!r}.")
            if value is not None and value is not False:
                _say(key, f"means nothing here: {IGNORED_KEYS[key]}.")
        elif key == "model" and method in _WITHOUT_MODEL:
            if values.pop(key) not in (*_NGRAM_MODELS, None):
                _say(key, f"means nothing to method {method!r}, which has no drafter to load.")
        elif method == "mtp" and key in suffix_keys:  # FastDeploy's page on suffix decoding says "mtp"
            del values[key]
            _say(key, "is a key of method 'suffix' and means nothing to 'mtp'.")


@functools.cache  # one warning per process
def _say(key: str, what: str) -> None:
    logger.warning("speculative_config[%r] %s", key, what)
