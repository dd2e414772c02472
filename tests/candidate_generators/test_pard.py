"""PARD: one causal forward of the text's new tokens and masks drafts what a plain forward of the whole text says."""

import copy

import pytest
import torch
from cache_checks import check_blocks
from families import make as make_family
from helpers_dflash import Watched
from oracle import drafter_of, ragged, tiny_llama
from replayed_graphs import defined_attention, graphs_in_python  # noqa: F401
from scheduling import run_scenario, small_llama

import hf_specdec
from hf_specdec.candidate_generators import parse_config
from hf_specdec.config import SpeculativeConfigError
from hf_specdec.integration import get_decoder, kept_decoders

MASK = 7
PROMPTS = [5, 17, 9, 3]
SHAPES = {"chain": {}, "short chain": {"num_speculative_tokens": 3}, "tree": {"branching_factors": [3, 2, 1]}}


@pytest.fixture(scope="module")
def target():
    return tiny_llama()


@pytest.fixture(scope="module")
def drafter(target, tmp_path_factory):
    """A drafter's folder; its configuration names the mask token as AMD's do."""
    folder = tmp_path_factory.mktemp("pard")
    model = drafter_of(target)
    model.config.pard_token = MASK
    model.save_pretrained(folder)
    return str(folder)


def plain_logits(model, text, depth):
    """Logits [depth, V]: of the last token and depth - 1 masks behind it, in one plain float64 forward."""
    with torch.no_grad():
        return model(torch.tensor([text + [MASK] * (depth - 1)])).logits[0, -depth:]


def compare(target, drafter, config):
    """Run a watched generation; compare every draft logit and the cache with plain forwards."""
    reference = copy.deepcopy(drafter_of(target)).double()

    def check_cache(generator, sequences):
        for seq in sequences:
            assert generator.cache.tables[seq.id].length == len(seq.tokens)
            with torch.no_grad():
                cache = reference(torch.tensor([seq.tokens]), use_cache=True).past_key_values
            for layer in range(3):
                for got, expected in zip(
                    generator.cache.read(seq.id)[layer],
                    (cache.layers[layer].keys, cache.layers[layer].values),
                    strict=True,
                ):
                    torch.testing.assert_close(got.double(), expected[0].transpose(0, 1), atol=1e-4, rtol=1e-4)

    watched = Watched(target, {"method": "pard", "model": drafter, **config}, check_cache)
    watched.run(ragged(PROMPTS))
    expected = {}
    for text, path, logits in watched.records:
        if tuple(text) not in expected:
            expected[tuple(text)] = plain_logits(reference, text, 8)
        torch.testing.assert_close(logits.double(), expected[tuple(text)][len(path)], atol=1e-4, rtol=1e-4)
    depth = watched.generator.shape.depth
    assert 0 in watched.accepted and depth in watched.accepted and len(set(watched.accepted)) > 2


@pytest.mark.parametrize("shape", SHAPES)
def test_drafts_and_cache_are_those_of_a_plain_forward(target, drafter, shape):
    compare(target, drafter, SHAPES[shape])


def test_captured_forwards_are_plain_ones(target, drafter, graphs_in_python, defined_attention):  # noqa: F811
    compare(target, drafter, {**SHAPES["chain"], "cuda_graphs": True})
    for each in graphs_in_python:
        assert not each.refused and 1 <= each.capture.count <= 9
    assert len(graphs_in_python) == 2  # target and drafter
    hf_specdec.release(target)


def test_method_is_inferred(target, drafter):
    assert parse_config({"model": drafter}).method == "pard"
    out = target.generate(**ragged([9]), max_new_tokens=8, do_sample=False, speculative_config={"model": drafter})
    assert torch.equal(out, target.generate(**ragged([9]), max_new_tokens=8, do_sample=False))


def test_long_prompts_and_own_depths(target, drafter):
    """Prompts in chunks; rows whose drafts end at different depths keep their own logits."""
    reference = copy.deepcopy(drafter_of(target)).double()
    config = {"prefill_chunk_size": 4, "block_size": 4, "num_speculative_tokens": 6, "draft_confidence_threshold": 0.3}
    watched = Watched(target, {"method": "pard", "model": drafter, **config})
    watched.run(ragged([40, 17, 3, 9]), max_new_tokens=10)
    for text, path, logits in watched.records:
        torch.testing.assert_close(logits.double(), plain_logits(reference, text, 6)[len(path)], atol=1e-4, rtol=1e-4)
    assert {len(path) for _, path, _ in watched.records} >= {0, 1, 2}


@pytest.mark.parametrize("family", ["Llama", "Qwen3", "Gemma2"])
def test_nothing_is_lost(family):
    model = make_family(family)
    drafter = make_family(family, seed=0)
    for shape in SHAPES.values():
        config = {"method": "pard", "mask_token_id": MASK, "seed": 5, **shape}
        for lengths in ([11], PROMPTS):
            inputs = ragged(lengths, vocab_size=128)
            for sampling in ({"do_sample": False}, {"do_sample": True, "top_k": 20}):
                plain = {"method": "none", "seed": 5}
                expected = model.generate(**inputs, max_new_tokens=10, speculative_config=plain, **sampling)
                got = model.generate(
                    **inputs, max_new_tokens=10, speculative_config=config, assistant_model=drafter, **sampling
                )
                assert torch.equal(got, expected)


def test_a_perfect_first_token(target, tmp_path):
    """A drafter that is the target always gets its first token accepted."""
    target.config.pard_token = MASK
    target.save_pretrained(tmp_path)
    watched = Watched(target, {"method": "pard", "model": str(tmp_path), "num_speculative_tokens": 2})
    watched._choose = lambda *args: None
    watched.run(ragged(PROMPTS), max_new_tokens=25)
    # Before a processor has been called, and where one token is left, nothing is drafted.
    first_and_last_rounds = 2 * len(PROMPTS)
    assert sum(n == 0 for n in watched.accepted) <= first_and_last_rounds and len(watched.accepted) > 24


def test_draft_probabilities_are_those_drawn_from(target, drafter):
    """Under the rule "rejection", q of each drafted token is the softmax of its own mask."""
    reference = copy.deepcopy(drafter_of(target)).double()
    config = {"method": "pard", "model": drafter, "rejection_sample_method": "rejection", "num_speculative_tokens": 3}
    watched, drawn = Watched(target, config), []
    watched._choose = lambda *args: None
    propose = watched.generator.propose

    def check(sequences, limits):
        trees = propose(sequences, limits)
        for row, seq in enumerate(sequences):
            expected = plain_logits(reference, seq.tokens, 3).softmax(-1)
            for node in range(trees.lengths[row]):
                torch.testing.assert_close(trees.probs[row, node].double(), expected[node], atol=1e-5, rtol=1e-4)
                drawn.append(trees.tokens[row, node].item() == int(expected[node].argmax()))
        return trees

    watched.generator.propose = check
    target.generate(
        **ragged([9, 4]), max_new_tokens=20, do_sample=True, temperature=1.0, top_k=0, speculative_config=config
    )
    assert 0 < sum(drawn) < len(drawn)


def test_scarce_memory_and_release(target, drafter):
    """With few blocks, rows wait, are evicted or draft nothing; the text is the same, and nothing is left."""
    plain = target.generate(**ragged(PROMPTS), max_new_tokens=16, do_sample=False)
    for num_blocks in (14, 20):
        config = {"method": "pard", "model": drafter, "block_size": 4, "num_blocks": num_blocks}
        assert torch.equal(
            target.generate(**ragged(PROMPTS), max_new_tokens=16, do_sample=False, speculative_config=config), plain
        )
        generator = kept_decoders(target)[-1].generator
        assert generator.cache.tables == {} and generator.kept_nodes == {}
        check_blocks(generator.cache.pool)


@pytest.mark.slow  # test_scheduling_heads.py has a shorter one
def test_requests_that_come_and_go():
    """The scheduler's scenario: 100 requests with chunks, waits, preemption, own limits and cancellation."""
    model = small_llama(0)
    config = {"method": "pard", "mask_token_id": MASK, "num_speculative_tokens": 4}
    run_scenario(model, small_llama(1, noise_on=model), config)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({}, "names no mask token"),
        ({"mask_token_id": 61}, "is 61, but the drafter has 61 tokens"),
        ({"mask_token_id": -1}, "at least 0"),
        ({"early_exit": 1}, "not trained to draft in parallel"),
    ],
)
def test_bad_configurations(target, tmp_path_factory, config, message):
    folder = tmp_path_factory.mktemp("plain")
    drafter_of(tiny_llama()).save_pretrained(folder)
    config = {"method": "pard"} | ({} if "early_exit" in config else {"model": str(folder)}) | config
    with pytest.raises(SpeculativeConfigError, match=message):
        target.generate(**ragged([5]), max_new_tokens=4, speculative_config=config)


@pytest.mark.parametrize("key", ["pard_token", "ptd_token_id", "mask_token_id"])
def test_names_of_the_mask_token(target, tmp_path, key):
    model = drafter_of(tiny_llama())
    setattr(model.config, key, 11)
    model.save_pretrained(tmp_path)
    for own, expected in (({}, 11), ({"mask_token_id": 12}, 12)):
        config = parse_config({"method": "pard", "model": str(tmp_path), **own})
        assert get_decoder(target, config).generator.mask_token_id == expected
