"""Nothing is sized by what is asked for alone: drafts are bounded by what can be written, and what no step can verify is refused."""

import pytest
import torch
from cache_checks import check_blocks
from oracle import ragged
from test_memory import MEBI, Watch, resident
from transformers.generation.stopping_criteria import StoppingCriteriaList

import hf_specdec
from hf_specdec import SpeculativeConfigError, integration, parse_config
from hf_specdec.candidate_generators.growing.tree_shapes import TreeTemplate
from hf_specdec.config import MOST_DRAFT_NODES

HUGE = [10**5, 10**12]
CHAINS = {
    "none": {},
    "ngram": {"prompt_lookup_min": 1, "prompt_lookup_max": 3},
    "suffix": {},
    "token_recycling": {"use_tree": False},
    "pard": {"mask_token_id": 5},
    "draft_model": {},
    "hybrid": {"first": {"method": "ngram"}, "second": {"method": "ngram"}},
    "eagle": {"model": "tiny-eagle"},
    "eagle3": {"model": "tiny-eagle3"},
    "mtp": {"model": "tiny-mtp"},
}


def check(model, config):
    """A few tokens, greedy; the memory that was taken meanwhile."""
    inputs = ragged([6, 9], vocab_size=model.config.vocab_size)
    model.generate(
        **inputs, max_new_tokens=2, do_sample=False, speculative_config={**config, "num_speculative_tokens": 2}
    )
    before, watch = resident(), Watch(8)
    out = model.generate(
        **inputs, max_new_tokens=8, do_sample=False, speculative_config=config,
        stopping_criteria=StoppingCriteriaList([watch]),
    )  # fmt: skip
    assert torch.equal(out, model.generate(**inputs, max_new_tokens=8, do_sample=False))
    assert watch.most < 96 * MEBI and resident() - before < 96 * MEBI
    for decoder in integration.kept_decoders(model):
        check_blocks(decoder.cache.pool)
        assert decoder.cache.pool.num_used == 0
    hf_specdec.release(model)


@pytest.mark.parametrize("k", HUGE)
@pytest.mark.parametrize("method", CHAINS)
def test_a_draft_length_is_a_bound(tiny_model, model, drafter_path, method, k):
    if method == "suffix":
        pytest.importorskip("arctic_inference.suffix_decoding")
    model = tiny_model if "model" in CHAINS[method] else model
    config = {"method": method, **CHAINS[method], "num_speculative_tokens": k}
    if method in ("draft_model", "pard"):
        config["model"] = drafter_path
    check(model, config)


@pytest.mark.parametrize("k", HUGE)
def test_learnt_lengths_and_dynamic_trees_are_bounded_too(tiny_model, model, drafter_path, k):
    drafts = {"method": "draft_model", "model": drafter_path, "num_speculative_tokens": k}
    check(model, {**drafts, "draft_length": "auto"})
    check(model, {**drafts, "top_k": 3, "total_tokens": MOST_DRAFT_NODES})
    check(tiny_model, {"method": "eagle3", "model": "tiny-eagle3", "top_k": 3, "num_speculative_tokens": k})
    check(model, {"method": "hybrid", "strategy": "extend", "num_speculative_tokens": k, **CHAINS["hybrid"]})


EAGLE = {"method": "eagle3", "model": "tiny-eagle3"}
REFUSED = [
    ({**EAGLE, "branching_factors": [600, 600]}, "branching_factors", "[600, 600]"),
    ({**EAGLE, "branching_factors": [2] * 10**5}, "branching_factors", "a list of 100000"),
    ({**EAGLE, "branching_factors": [1, 10**12]}, "branching_factors", "more than 4096 nodes"),
    ({**EAGLE, "branching_factors": [1] * 5000}, "branching_factors", "more than 4096 nodes"),
    ({**EAGLE, "speculative_token_tree": [[0] * 10**5]}, "speculative_token_tree", "paths of up to 100000 tokens"),
    ({**EAGLE, "speculative_token_tree": [[i] for i in range(5000)]}, "speculative_token_tree", "5000 paths"),
    ({**EAGLE, "total_tokens": 10**9}, "total_tokens", "at most 4096"),
    ({**EAGLE, "top_k": 10**6}, "top_k", "at most 1048576"),
    ({**EAGLE, "top_k": 600, "num_speculative_tokens": 10**12}, "top_k", "trees 1024 deep"),
    ({"method": "medusa", "model": "tiny-medusa", "branching_factors": [600, 600]}, "branching_factors", "4096 nodes"),
    ({"method": "hydra", "model": "tiny-hydra", "branching_factors": [600, 600]}, "branching_factors", "4096 nodes"),
    (
        {"method": "mlp_speculator", "model": "tiny-mlp_speculator", "top_k_tokens_per_head": [600, 600]},
        "top_k_tokens_per_head",
        "4096 nodes",
    ),
    (
        {"method": "token_recycling", "speculative_token_tree": [[0] * 3000]},
        "speculative_token_tree",
        "paths of up to 3000 tokens",
    ),
    ({"method": "lookahead", "window_size": 10**6}, "window_size", "at most 4096"),
    ({"method": "lookahead", "ngram_size": 10**12}, "window_size", "ngram_size = 1000000000000"),
    ({"method": "lookahead", "guess_set_size": 10**12}, "window_size", "guess_set_size = 1000000000000"),
    ({"method": "ngram", "prompt_lookup_max": 10**9}, "prompt_lookup_max", "at most 64"),
    ({"method": "ngram", "block_size": 10**9}, "block_size", "at most 4096"),
    ({"method": "suffix", "suffix_decoding_max_tree_depth": 10**12}, "suffix_decoding_max_tree_depth", "2147483647"),
]


@pytest.mark.parametrize(
    "length", [{"accept_policy": "accept_all"}, {"rejection_sample_method": "synthetic", "synthetic_acceptance_length": 10**9}]
)  # fmt: skip
def test_a_synthetic_length_is_a_bound(tiny_model, length):
    before = resident()
    config = {"method": "ngram", "num_speculative_tokens": 10**12, **length}
    assert len(parse_config(config).acceptance_rates) <= 1025
    tiny_model.generate(torch.arange(5, 25)[None], max_new_tokens=8, do_sample=False, speculative_config=config)
    assert resident() - before < 64 * MEBI


@pytest.mark.parametrize(("config", "key", "what"), REFUSED, ids=lambda value: value if isinstance(value, str) else "")
def test_what_no_step_can_verify_is_refused_by_its_key(config, key, what):
    before = resident()
    with pytest.raises(SpeculativeConfigError) as caught:
        parse_config(config)
    message = str(caught.value)
    assert f"speculative_config[{key!r}]" in message and what in message and len(message) < 400
    assert resident() - before < 32 * MEBI


def test_a_blocks_length_is_the_most_there_is(tiny_model):
    with pytest.raises(SpeculativeConfigError, match=r"asks for drafts of 1000000000000 tokens.* use at most"):
        check_config = {"method": "dflash", "model": "tiny-dflash", "num_speculative_tokens": 10**12}
        tiny_model.generate(**ragged([5]), max_new_tokens=4, speculative_config=check_config)


def test_trees_within_the_bounds_are_as_they_were():
    tree = TreeTemplate.from_widths([16, 15, 16])
    assert len(tree.parents) == 16 + 240 + 3840 == MOST_DRAFT_NODES
    with pytest.raises(ValueError, match="more than 4096 nodes"):
        TreeTemplate.from_widths([16, 16, 16])
    chain = TreeTemplate.from_widths([1] * 1024)
    assert chain.is_chain and chain.depth == 1024 and chain.ancestors.sum() == 1024 * 1025 // 2
    parents = TreeTemplate.from_paths([[0], [1], [0, 0], [0, 1], [1, 0, 0]])
    expected = torch.zeros(6, 6, dtype=torch.bool)
    for node in range(len(parents.parents)):
        at = node
        while at >= 0:
            expected[node, at] = True
            at = parents.parents[at]
    assert (parents.ancestors == expected.numpy()).all()
