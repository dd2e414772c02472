"""Method "per_request": every sequence drafts with the drafter it chose, beside sequences that chose another."""

import random

import pytest
import torch
from cache_checks import check_blocks
from oracle import assert_clean

from hf_specdec import LLM, SamplingParams, SpeculativeConfigError, parse_config
from hf_specdec.core.draft_trees import DraftTrees

METHODS = {
    "copy": {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_min": 1},
    "tree": {"method": "eagle3", "model": "tiny-eagle3", "top_k": 3, "total_tokens": 8, "num_speculative_tokens": 3},
    "model": {"method": "draft_model", "model": "tiny-draft", "num_speculative_tokens": 2},
    "off": {"method": "none"},
}
TEXTS = [
    "Once upon a time",
    "Tom and Lily went to the park. Tom and Lily",
    "The dog was happy. The dog was",
    "One day, a",
]


@pytest.fixture(scope="module")
def llm(tiny_model, tiny_tokenizer):
    config = {"method": "per_request", "methods": METHODS, "block_size": 4, "num_blocks": 60}
    made = LLM(tiny_model, tiny_tokenizer, config, max_model_len=128, max_num_seqs=6, max_num_batched_tokens=48)
    yield made
    check_blocks(made.engine.decoder.cache.pool)
    assert made.engine.decoder.cache.pool.num_used == 0
    made.close()


@pytest.mark.parametrize("temperature", [0, 1.0])
def test_each_request_gets_its_own_drafter_and_the_same_text(llm, tiny_model, temperature, monkeypatch):
    """Blocks for a few texts only, so that requests wait and are preempted."""
    rng, drafted = random.Random(1), {name: set() for name in METHODS}
    for name, part in llm.engine.decoder.generator.by_name.items():

        def noting(sequences, limits, name=name, propose=part.propose):
            drafted[name].update(seq.drafter for seq in sequences)
            return propose(sequences, limits)

        monkeypatch.setattr(part, "propose", noting)
    prompts = [rng.choice(TEXTS) for _ in range(16)]
    names = [rng.choice([None, *METHODS]) for _ in prompts]
    params = [
        SamplingParams(temperature=temperature, max_tokens=rng.randint(4, 16), seed=7, drafter=name) for name in names
    ]
    outputs = llm.generate(prompts, params, use_tqdm=False)
    without = llm.generate(prompts, [each.copy(drafter="off") for each in params], use_tqdm=False)
    assert [out.outputs[0].token_ids for out in outputs] == [out.outputs[0].token_ids for out in without]
    assert drafted == {"copy": {None, "copy"}, "tree": {"tree"}, "model": {"model"}, "off": {"off"}}


def test_generate_uses_the_first(tiny_model):
    ids = torch.tensor([[5, 6, 7, 5, 6, 7, 5, 6]])
    plain = tiny_model.generate(ids, max_new_tokens=12, do_sample=False)
    config = {"method": "per_request", "methods": [METHODS["tree"], METHODS["copy"]]}
    out = tiny_model.generate(
        ids, max_new_tokens=12, do_sample=False, speculative_config=config, return_dict_in_generate=True
    )
    assert torch.equal(out.sequences, plain) and out.speculation.num_steps < 12
    assert_clean(tiny_model)


def test_the_length_is_that_of_the_longest_part(llm):
    assert llm.engine.decoder.config.num_speculative_tokens == 4
    again = parse_config(parse_config({"method": "per_request", "methods": METHODS}).to_dict())
    assert list(again.methods) == list(METHODS) and not again.length_given


@pytest.mark.parametrize(
    ("methods", "message"),
    [
        ({}, "at least one"),
        (None, "at least one"),
        ("ngram", "at least one"),
        ([{"method": "ngram"}, {"method": "ngram"}], "twice"),
        ({"a": {"method": "per_request", "methods": METHODS}}, "has parts itself"),
        ({"a": {"method": "nosuch"}}, "nosuch"),
    ],
)
def test_bad_configurations(methods, message):
    with pytest.raises(SpeculativeConfigError, match=message):
        parse_config({"method": "per_request", "methods": methods})


def test_an_unknown_drafter_is_refused(llm):
    with pytest.raises(ValueError, match=r"nosuch.*copy, tree, model, off"):
        llm.generate(["Once"], SamplingParams(drafter="nosuch"), use_tqdm=False)


def test_trees_spread_over_a_batch():
    probs = torch.rand(2, 3, 5)
    trees = DraftTrees(
        torch.tensor([[1, 2, 3], [4, 0, 0]]), [3, 1], torch.tensor([[-1, -1, 0], [-1, 0, 0]]).numpy(), probs,
        torch.tensor([[0, 0, 1], [2, 0, 0]]).numpy(),
    )  # fmt: skip
    found = trees.spread([3, 1], 4)
    assert found.lengths == [0, 1, 0, 3]
    back = found.select([3, 1])
    assert torch.equal(back.tokens, trees.tokens) and torch.equal(back.probs, probs)
    assert (back.parents == trees.parents).all() and (back.prob_index == trees.prob_index).all()
