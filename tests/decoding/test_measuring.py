"""What is measured when a decoder is made: costs, and nothing of texts."""

import json
from pathlib import Path

import pytest
from cache_checks import check_cache
from oracle import ragged

import hf_specdec
from hf_specdec import LLM, SamplingParams, parse_config
from hf_specdec.candidate_generators.base import DrafterContext
from hf_specdec.decoding import measuring
from hf_specdec.integration import get_decoder
from hf_specdec.model.native import program_cache

METHODS = [
    "ngram",
    "token_recycling",
    {"method": "eagle3", "model": "tiny-eagle3"},
    {"method": "draft_model", "model": "tiny-draft"},
]


@pytest.fixture
def made(tiny_model, monkeypatch):
    """A function of keys: the decoder that they make, on a machine that is never too slow to finish measuring."""
    monkeypatch.setattr(measuring, "SECONDS", 1e9)
    yield lambda **keys: get_decoder(
        tiny_model, parse_config({"method": "auto", "methods": METHODS, "memory": False, **keys}), DrafterContext()
    )
    hf_specdec.release(tiny_model)


def test_costs_are_known_and_texts_are_not(made):
    decoder = made()
    policy, sizes = decoder.policy, {tuple(size) for size, *_ in decoder.policy.cost.target.state()}
    assert {(0, 1, 1), (0, 1, 2), (0, 1, 8), (0, 8, 8), (0, 8, 32), (0, 8, 64)} <= sizes
    assert all(policy.drafting[index] for index in policy.models) and policy.seconds[-1] > 0
    report = policy.report()["drafters"]
    assert {name: (each["acceptance"], each["steps"]) for name, each in report.items()} == dict.fromkeys(
        report, (None, 0)
    )
    assert policy.acceptance.num_rows == 0 and (policy.acceptance.counts == 0).all()


def test_nothing_is_left_of_it(made):
    decoder = made()
    check_cache(decoder.cache)
    assert not decoder.statistics and not decoder.generator.chosen and not decoder.generator._followed
    assert decoder.cache.pool.num_blocks == 1  # pools are freed
    assert all(not part.spaces._running for part in decoder.generator.parts if hasattr(part, "spaces"))


def test_the_first_call_records_no_program(made, tiny_model, tiny_tokenizer, monkeypatch):
    llm, built = (
        LLM(tiny_model, tiny_tokenizer, {"method": "auto", "methods": METHODS, "memory": False}, max_model_len=96),
        [],
    )
    monkeypatch.setattr(program_cache, "build", lambda subject, *args: built.append(subject.name))
    params = [SamplingParams(temperature=0, max_tokens=12, drafter=name) for name in ("eagle3", "draft_model")]
    outputs = llm.generate(["The dog. The dog."] * 2, params, use_tqdm=False)
    assert {name for output in outputs for name in output.speculation["drafters"]} == {
        "eagle3",
        "draft_model",
    } and not built


@pytest.mark.parametrize("keys", [{"num_blocks": 4}, {"max_model_len": 24}, {"max_model_len": 8}, {"block_size": 32}])
def test_small_pools_and_short_texts(made, tiny_model, keys):
    """Where a measurement has no room, or little, the first call works all the same."""
    made(**keys)
    inputs = ragged([5], seed=3)
    plain = tiny_model.generate(**inputs, max_new_tokens=3, do_sample=False)
    config = {"method": "auto", "methods": METHODS, "memory": False, **keys}
    assert (
        tiny_model.generate(**inputs, max_new_tokens=3, do_sample=False, speculative_config=config).tolist()
        == plain.tolist()
    )


def test_what_is_kept_is_not_measured_again(made, tmp_path, tiny_model, monkeypatch):
    made(memory=str(tmp_path))
    assert not list(Path(tmp_path).iterdir())  # a measurement alone writes nothing
    config = {"method": "auto", "methods": METHODS, "memory": str(tmp_path)}
    tiny_model.generate(**ragged([6], seed=1), max_new_tokens=30, do_sample=False, speculative_config=config)
    (file,) = Path(tmp_path).iterdir()
    assert [8, 64] in [size[1:] for size, *_ in json.loads(file.read_text())["target"]]
    hf_specdec.release(tiny_model)
    monkeypatch.setattr(hf_specdec.decoding.decoder.SpeculativeDecoder, "step", None)
    assert made(memory=str(tmp_path)).policy.cost.target


def test_a_drafter_that_fails_leaves_nothing(made, tiny_model, monkeypatch):
    from hf_specdec.candidate_generators.draft_model.generator import DraftModelGenerator

    def fail(*args):
        raise RuntimeError("no draft today")

    monkeypatch.setattr(DraftModelGenerator, "propose", fail)
    with pytest.raises(RuntimeError, match="no draft today"):
        made()
    assert not list(hf_specdec.integration.kept_decoders(tiny_model))
