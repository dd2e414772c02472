"""SpeculativeConfig and parse_config: every way in, every way out, every error names its key."""

import dataclasses
import json
from pathlib import Path

import pytest

import hf_specdec
from hf_specdec import SpeculativeConfig, SpeculativeConfigError, available_methods, parse_config
from hf_specdec.candidate_generators.registry import generator_class

METHODS = {
    "none": {},
    "ngram": {"prompt_lookup_min": 2, "prompt_lookup_max": 4},
    "suffix": {"suffix_decoding_max_tree_depth": 32, "suffix_decoding_use_tree": True},
    "draft_model": {"model": "tiny-draft", "branching_factors": [3, 2, 1]},
}


def error(value):
    with pytest.raises(SpeculativeConfigError) as caught:
        parse_config(value)
    return str(caught.value)


def test_every_method_is_here():
    assert set(METHODS) <= set(available_methods())
    for name, config_class in available_methods().items():
        assert config_class.name == name and generator_class(name).config_class is config_class


# ---- ways in --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", METHODS)
def test_dict_text_path_and_instance_are_the_same(method, tmp_path):
    values = {"method": method, **METHODS[method], "num_speculative_tokens": 3, "seed": 7}
    config = parse_config(values)
    assert type(config) is available_methods()[method]
    file = tmp_path / "speculative.json"
    file.write_text(json.dumps(values))
    for other in (json.dumps(values), f"  {json.dumps(values)}\n", str(file), file, config):
        assert parse_config(other) == config
    assert parse_config(config) is config
    assert values == {"method": method, **METHODS[method], "num_speculative_tokens": 3, "seed": 7}, (
        "the caller's dict was changed"
    )


def test_a_model_alone_means_draft_model():
    assert parse_config({"model": "tiny-draft"}).method == "draft_model"
    assert parse_config({"method": None, "model": "tiny-draft"}).method == "draft_model"


@pytest.mark.parametrize("name", ["standard", "rejection"])
def test_standard_is_vllms_name_for_rejection(name):
    assert parse_config({"method": "ngram", "rejection_sample_method": name}).rejection_sample_method == "rejection"


def test_defaults():
    assert parse_config({"method": "ngram"}).num_speculative_tokens == 5
    assert parse_config({"method": "suffix"}).num_speculative_tokens == 24  # vLLM: follows the tree depth
    assert parse_config({"method": "suffix", "suffix_decoding_max_tree_depth": 9}).num_speculative_tokens == 9
    assert parse_config({"method": "draft_model", "branching_factors": [2, 1]}).num_speculative_tokens == 2
    ranges = {(): (5, 5), ("min",): (3, 3), ("max",): (3, 3), ("min", "max"): (3, 3)}
    for keys, expected in ranges.items():
        values = {f"prompt_lookup_{key}": 3 for key in keys}
        assert parse_config({"method": "ngram", **values}).ngram_range == expected


# ---- ways out -------------------------------------------------------------------------------------------------------


def variants():
    for method, values in METHODS.items():
        yield {"method": method}
        yield {"method": method, **values}
        yield {"method": method, "num_speculative_tokens": 5}
        yield {"method": method, "num_speculative_tokens": 9, "seed": 2**62, "rejection_sample_method": "standard"}
        yield {"method": method, "block_size": 32, "num_blocks": 100, "prefill_chunk_size": 7}
    yield {"method": "suffix", "num_speculative_tokens": 24}
    yield {"method": "suffix", "num_speculative_tokens": 4, "suffix_decoding_max_tree_depth": 4}
    yield {"method": "suffix", "num_speculative_tokens": 5, "suffix_decoding_max_tree_depth": 4}
    yield {"method": "suffix", "suffix_decoding_max_tree_depth": 5}
    yield {"method": "draft_model", "branching_factors": [1, 2, 3, 4, 5]}
    yield {"method": "draft_model", "early_exit": 2, "draft_sample_method": "greedy"}
    yield {"method": "ngram", "prompt_lookup_min": 1}
    yield {"method": "ngram", "num_speculative_tokens": "auto"}
    yield {"method": "suffix", "num_speculative_tokens": 7, "draft_length": "auto"}
    yield {"method": "draft_model", "num_speculative_tokens_per_batch_size": {"1": 4, "9": 0}}
    yield {"method": "ngram", "rejection_sample_method": "block"}
    yield {"method": "ngram", "rejection_sample_method": "typical", "posterior_threshold": 0.2, "posterior_alpha": 0}
    yield {"method": "ngram", "rejection_sample_method": "synthetic", "synthetic_acceptance_rates": [1, 0.5, 0.5, 0, 0]}
    yield {"method": "suffix", "rejection_sample_method": "synthetic", "synthetic_acceptance_length": 25}
    yield {
        "method": "draft_model", "branching_factors": [2, 2], "rejection_sample_method": "synthetic",
        "synthetic_acceptance_rates": [0.8, 0.1],
    }  # fmt: skip


@pytest.mark.parametrize("values", list(variants()), ids=str)
def test_round_trip(values):
    config = parse_config(values)
    assert parse_config(config.to_dict()) == config
    assert parse_config(config.to_json()) == config
    text = config.to_json()
    assert list(json.loads(text)) == sorted(json.loads(text))
    defaults = parse_config({"method": values["method"]}).to_dict()
    assert defaults == {"method": values["method"]}, "defaults are left out"


NGRAM = {"method": "ngram"}
# What a field means something only together with, and what a method cannot be without.
COMPANIONS = {
    "posterior_threshold": {"rejection_sample_method": "typical"},
    "posterior_alpha": {"rejection_sample_method": "typical"},
    "synthetic_acceptance_rates": {"rejection_sample_method": "synthetic", "num_speculative_tokens": 2},
    "synthetic_acceptance_length": {"rejection_sample_method": "synthetic"},
    "prompt_lookup_max": {"prompt_lookup_min": 1},
    "draft_sinks": {"draft_window": 9},
    "n_candidates": {"top_k_tokens_per_head": [2, 1]},
}
NEEDED = {"hybrid": {"first": NGRAM, "second": {"method": "suffix"}}, "per_request": {"methods": {"it": NGRAM}}}
SAMPLES = {
    "bool": True,
    "int": 17,
    "float": 0.25,
    "str": "some text",
    "list[int]": [2, 1],
    "list[list[int]]": [[0], [1]],
}
SPECIAL = {
    "lookup_corpus": {"faq": "faq.txt"},
    "rejection_sample_method": "rejection", "draft_sample_method": "greedy", "vocabulary_bridge": "text",
    "draft_length": "auto", "num_speculative_tokens_per_batch_size": [[1, 4, 3], [5, 8, 0]],
    "synthetic_acceptance_rates": [0.9, 0.5], "synthetic_acceptance_length": 1.5, "strategy": "extend",
    "first": {"method": "suffix"}, "second": NGRAM, "methods": {"it": NGRAM}, "total_tokens": 5,
    "quantization": "wint8", "target_quantization": "wint4", "recurrent_states": "replayed", "kv_cache_dtype": "int8",
    "prediction": [1, 2],
}  # fmt: skip
SPECIAL_OF = {
    ("lookahead", "num_speculative_tokens"): 3, ("token_recycling", "num_speculative_tokens"): 3,
    ("token_recycling", "use_tree"): False, ("token_recycling", "recycle_prompt"): "logits",
    ("auto", "methods"): [{"method": "ngram", "num_speculative_tokens": 4}],
}  # fmt: skip


INHERITED_AND_REFUSED = {
    ("pard", "early_exit"), ("auto", "draft_length"), ("auto", "num_speculative_tokens_per_batch_size"),
}  # fmt: skip


def fields():
    for method, config_class in available_methods().items():
        yield from (
            (method, field)
            for field in dataclasses.fields(config_class)
            if field.name != "method"
            and (method, field.name) not in INHERITED_AND_REFUSED
            and (field.name != "quantization" or config_class.has_weights)  # likewise
        )


@pytest.mark.parametrize(("method", "field"), list(fields()), ids=lambda each: getattr(each, "name", each))
def test_every_field_survives(method, field):
    """A field added to any method must come back from to_dict(), unless it is a secret."""
    value = SPECIAL_OF.get((method, field.name), SPECIAL.get(field.name))
    if value is None:
        kind = str(field.type).split(" | ")[0]
        value = not field.default if kind == "bool" and field.default is not None else SAMPLES[kind]
    values = {**NEEDED.get(method, {}), "method": method, field.name: value, **COMPANIONS.get(field.name, {})}
    written = parse_config(values).to_dict().get(field.name)
    assert written is None if field.metadata.get("secret") else written == value


def test_every_field_has_help():
    for config_class in available_methods().values():
        for field in dataclasses.fields(config_class):
            assert field.metadata.get("help"), (config_class.__name__, field.name)


# ---- errors ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "meant"), [("ngrams", "ngram"), ("sufix", "suffix"), ("draftmodel", "draft_model"), ("nonw", "none")]
)
def test_unknown_method(given, meant):
    message = error({"method": given})
    assert f"{given!r} (did you mean {meant!r}?)" in message
    assert all(name in message for name in available_methods())


def test_a_method_like_no_other_gets_no_suggestion():
    assert "did you mean" not in error({"method": "qqqq"})


@pytest.mark.parametrize("method", [5, ["ngram"], {"name": "ngram"}, True])
def test_a_method_that_is_no_text(method):
    assert repr(method) in error({"method": method})


@pytest.mark.parametrize("value", [{}, {"method": None}, {"method": ""}, {"num_speculative_tokens": 3}])
def test_no_method(value):
    assert "needs a 'method'" in error(value)


@pytest.mark.parametrize(
    ("method", "key", "meant"),
    [
        ("ngram", "num_speculative_token", "num_speculative_tokens"),
        ("ngram", "prompt_lookup_maximum", "prompt_lookup_max"),
        ("suffix", "suffix_decoding_max_depth", "suffix_decoding_max_tree_depth"),
        ("draft_model", "branching_factor", "branching_factors"),
        ("none", "blocksize", "block_size"),
    ],
)
def test_unknown_key(method, key, meant):
    message = error({"method": method, key: 3})
    assert f"no key {key!r} for method {method!r} (did you mean {meant!r}?)" in message


def test_a_key_of_another_method():
    assert "no key 'prompt_lookup_max' for method 'suffix'" in error({"method": "suffix", "prompt_lookup_max": 3})
    assert "no key 3" in error({"method": "ngram", 3: 4})


NOT_POSITIVE = [0, -1, 2.5, 2.0, "3", True, [3], float("nan")]
BAD = [
    *(
        ("ngram", key, value)
        for key in ("num_speculative_tokens", "block_size", "prefill_chunk_size")
        for value in NOT_POSITIVE
    ),
    *(("none", "num_blocks", value) for value in NOT_POSITIVE),
    *(("ngram", key, value) for key in ("prompt_lookup_min", "prompt_lookup_max") for value in NOT_POSITIVE),
    *(("ngram", "seed", value) for value in (-1, 2**63, 1.5, "1", True)),
    *(("ngram", "rejection_sample_method", value) for value in ("typicl", 5, ["coupled"], True)),
    *(("ngram", "posterior_threshold", value) for value in (-0.1, 1.5, "0.1", None, True, float("nan"))),
    *(("ngram", "posterior_alpha", value) for value in (-0.1, "0.1", None, True, float("nan"))),
    *(("draft_model", "draft_sample_method", value) for value in ("sampled", 5, ["greedy"])),
    *(("ngram", "prepack_weights", value) for value in (1, "yes")),
    *(("ngram", "async_scheduling", value) for value in (0, "on")),
    ("ngram", "recurrent_states", "both"),
    *(("suffix", "suffix_decoding_max_tree_depth", value) for value in (1, 0, "24", 3.5, True, None)),
    *(("suffix", "suffix_decoding_max_cached_requests", value) for value in (-2, 1.5, "all")),
    *(("suffix", "suffix_decoding_max_spec_factor", value) for value in (-0.1, "1", None, True, float("nan"))),
    *(("suffix", "suffix_decoding_max_spec_offset", value) for value in ("1", None, float("nan"))),
    *(("suffix", "suffix_decoding_min_token_prob", value) for value in (-0.1, 1.1, "0", float("nan"))),
    *(("suffix", "suffix_decoding_use_tree", value) for value in (1, "yes", None)),
    *(("draft_model", "early_exit", value) for value in NOT_POSITIVE),
    *(("draft_model", "branching_factors", value) for value in ([], [0], [2, -1], [1.5], [True], 3, "32", ["2"])),
    *(("draft_model", "vocabulary_bridge", value) for value in ("words", 3)),
    *(("draft_model", "revision", value) for value in (3,)),
]


@pytest.mark.parametrize(("method", "key", "value"), BAD, ids=lambda v: str(v))
def test_bad_value(method, key, value):
    """One clear error that names the key, the method and the value."""
    message = error({"method": method, key: value})
    assert repr(key) in message and repr(method) in message and repr(value) in message


@pytest.mark.parametrize("value", [3, ["tiny"], ""])
def test_a_model_is_named_by_text(value):
    message = error({"method": "draft_model", "model": value})
    assert "'model'" in message and repr(value) in message


@pytest.mark.parametrize("given", [{}, {"method": "draft_model"}, {"method": "eagle3"}, {"method": "auto"}])
def test_a_model_may_be_a_path(given):
    folder = hf_specdec.bundled("tiny-eagle3")
    config = parse_config({**given, "model": Path(folder)})
    assert config.model == folder and config.method == given.get("method", "eagle3")


def test_a_near_miss_of_a_choice_is_suggested():
    assert "did you mean 'coupled'" in error({"method": "ngram", "rejection_sample_method": "couple"})
    assert "did you mean 'probabilistic'" in error({"method": "draft_model", "draft_sample_method": "probabilstic"})


@pytest.mark.parametrize("key", ["posterior_threshold", "posterior_alpha"])
def test_a_key_of_another_rule(key):
    message = error({"method": "ngram", key: 0.2})
    assert repr(key) in message and "only with rejection_sample_method 'typical'" in message
    assert error({"method": "ngram", "rejection_sample_method": "block", key: 0.2}) == message


@pytest.mark.parametrize(("given", "meant"), [("blok", "block"), ("tipical", "typical"), ("synthetc", "synthetic")])
def test_a_near_miss_of_a_rule_is_suggested(given, meant):
    assert f"did you mean {meant!r}" in error({"method": "ngram", "rejection_sample_method": given})


def test_values_that_contradict_each_other():
    assert "prompt_lookup_min" in error({"method": "ngram", "prompt_lookup_min": 5, "prompt_lookup_max": 3})
    assert "2 depths" in error({"method": "draft_model", "branching_factors": [2, 1], "num_speculative_tokens": 3})
    assert "early_exit" in error({"method": "draft_model", "model": "tiny-draft", "early_exit": 2})


@pytest.mark.parametrize("value", [None, 3, ["ngram"], ("method", "ngram"), object()])
def test_not_a_configuration(value):
    assert type(value).__name__ in error(value)


@pytest.mark.parametrize("text", ['{"method": "ngram"', "{method: ngram}", "{'method': 'ngram'}"])
def test_broken_json(text):
    assert "not valid JSON" in error(text)


def test_files_that_cannot_be_read(tmp_path):
    assert "neither JSON text nor an existing file" in error(str(tmp_path / "missing.json"))
    assert "neither JSON text nor an existing file" in error(str(tmp_path))  # a folder
    assert "neither JSON text nor an existing file, and no method has this name (did you mean 'ngram'?)" in error(
        "ngrm"
    )
    broken, listed, binary = tmp_path / "broken.json", tmp_path / "list.json", tmp_path / "binary.json"
    broken.write_text("method: ngram")
    assert "not valid JSON" in error(broken)
    listed.write_text('["ngram"]')
    assert "not list" in error(listed)
    binary.write_bytes(b"\xff\xfe\x00\x81")
    assert "not valid JSON" in error(binary)


def test_an_instance_checks_itself():
    config_class = available_methods()["ngram"]
    with pytest.raises(SpeculativeConfigError, match="is the configuration of 'ngram', not 'suffix'"):
        config_class(method="suffix")
    with pytest.raises(SpeculativeConfigError, match="num_speculative_tokens"):
        config_class(num_speculative_tokens=0)
    assert issubclass(SpeculativeConfigError, ValueError)
    assert config_class().method == "ngram"


def test_registering_a_name_twice_is_an_error():
    @dataclasses.dataclass
    class Impostor(SpeculativeConfig):
        name = "ngram"

    with pytest.raises(ValueError, match="already registered"):
        hf_specdec.register(Impostor)(type("Impostor", (), {}))
    with pytest.raises(ValueError, match="empty"):
        hf_specdec.register(SpeculativeConfig)(type("Nameless", (), {}))
