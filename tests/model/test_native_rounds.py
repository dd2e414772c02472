"""Rounds of drafts as one native call: the very drafts that are made depth by depth."""

import copy
import itertools
import random
from typing import Any

import numpy as np
import pytest
import torch

import hf_specdec
from hf_specdec import LLM, SamplingParams
from hf_specdec.candidate_generators import parse_config
from hf_specdec.candidate_generators.growing import own_cache, tree_growth
from hf_specdec.candidate_generators.growing.grower import GrowsDrafts
from hf_specdec.candidate_generators.growing.tree_growth import growth_of
from hf_specdec.candidate_generators.growing.tree_shapes import TreeDraftingConfig, TreeTemplate
from hf_specdec.integration import get_decoder
from hf_specdec.kernels.native import library

pytestmark = pytest.mark.skipif(library() is None, reason="the native library is not compiled")

DRAFTERS = {
    "draft_model": {"model": "tiny-draft"},
    "eagle": {"model": "tiny-eagle"},
    "eagle3": {"model": "tiny-eagle3"},
    "mtp": {"model": "tiny-mtp"},
    "an mtp state before its norm": {"method": "mtp", "model": "tiny-mtp", "recycle_normed": False},
    "a draft vocabulary": {"method": "eagle3", "model": "tiny-eagle3", "draft_vocabulary": 1500},
    "a window": {"method": "draft_model", "model": "tiny-draft", "draft_window": 12},
    "two sinks": {"method": "eagle", "model": "tiny-eagle", "draft_window": 9, "draft_sinks": 2},
    "a tree": {"method": "draft_model", "model": "tiny-draft", "branching_factors": [2, 2, 1, 1]},
    "a dynamic tree": {"method": "eagle3", "model": "tiny-eagle3", "top_k": 4, "total_tokens": 12},
}
TEXTS = [
    "Once upon a time there was a little dog", "Tom and Lily went to the", "One day,", "The cat sat on the mat and looked at",
    "A bird",
]  # fmt: skip


@pytest.fixture
def calls(monkeypatch):
    """The number of rows of every round that has been drafted at once."""
    seen = []
    original = own_cache.draft_round

    def counted(forward, head, cache, seq_ids, *rest):
        seen.append(len(seq_ids))
        return original(forward, head, cache, seq_ids, *rest)

    monkeypatch.setattr(own_cache, "draft_round", counted)
    return seen


def drafts_of(model, tokenizer, config, texts, **more):
    """The text, and every round's drafts as lists of ids."""
    rounds, propose = [], GrowsDrafts.propose

    def noted(self, sequences, limits):
        trees = propose(self, sequences, limits)
        rounds.append(
            [
                (ids[:n], above[:n])
                for ids, above, n in zip(trees.tokens.tolist(), trees.parent_index.tolist(), trees.lengths, strict=True)
            ]
        )
        return trees

    inputs = tokenizer(texts, return_tensors="pt", padding=True, padding_side="left")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(GrowsDrafts, "propose", noted)
        out = model.generate(**inputs, max_new_tokens=30, speculative_config=config, **{"do_sample": False, **more})
    hf_specdec.release(model)
    return out, rounds


@pytest.mark.parametrize("texts", [TEXTS[:1], TEXTS], ids=["one row", "ragged"])
@pytest.mark.parametrize("name", list(DRAFTERS))
def test_drafts_are_those_made_depth_by_depth(name, texts, tiny_model, tiny_tokenizer, calls, monkeypatch):
    config = {"method": name, "num_speculative_tokens": 4} | DRAFTERS[name]
    text, drafts = drafts_of(tiny_model, tiny_tokenizer, config, texts)
    assert calls and max(calls) == len(texts)
    assert len(texts) == 1 or any(len({len(ids) for ids, _ in rows if ids}) > 1 for rows in drafts)
    monkeypatch.setattr(own_cache.OwnsCache, "at_once", GrowsDrafts.at_once)
    expected, step_by_step = drafts_of(tiny_model, tiny_tokenizer, config, texts)
    assert torch.equal(text, expected)
    assert drafts == step_by_step


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_logits_of_two_bytes(dtype, tiny_model, tiny_tokenizer, calls, monkeypatch):
    """Of equal logits, which are common, the first is chosen."""
    config = {"method": "draft_model", "model": "tiny-draft", "num_speculative_tokens": 4}
    model = copy.deepcopy(tiny_model).to(dtype)
    text, drafts = drafts_of(model, tiny_tokenizer, config, TEXTS)
    assert calls
    monkeypatch.setattr(own_cache.OwnsCache, "at_once", GrowsDrafts.at_once)
    expected, step_by_step = drafts_of(model, tiny_tokenizer, config, TEXTS)
    assert torch.equal(text, expected)
    assert drafts == step_by_step


def test_a_token_whose_logits_are_nan_is_the_likeliest(tiny_model, tiny_tokenizer, calls, monkeypatch):
    """As in torch, also where draft tokens have other numbers than the target's."""
    config = parse_config({"model": "tiny-eagle3", "draft_vocabulary": 1500, "num_speculative_tokens": 3})

    def drafts():
        generator: Any = get_decoder(tiny_model, config).generator
        generator.lm_head.weight[generator.vocabulary.target_ids.argmax()] = torch.nan
        return drafts_of(tiny_model, tiny_tokenizer, config, TEXTS)

    text, made = drafts()
    assert calls
    monkeypatch.setattr(own_cache.OwnsCache, "at_once", GrowsDrafts.at_once)
    expected, step_by_step = drafts()
    assert torch.equal(text, expected)
    assert made == step_by_step


PARAMETERS = {
    "noise": {"top_k": 0},
    "temperature": {"temperature": 0.8, "top_k": 0},
    "top-k": {"temperature": 1.3, "top_k": 20},
    "top-p": {"top_k": 0, "top_p": 0.9},
    "min-p": {"top_k": 0, "min_p": 0.05},
    "all": {"temperature": 0.7, "top_k": 50, "top_p": 0.8, "min_p": 0.02},
}


SAMPLED = [
    *itertools.product(["draft_model"], PARAMETERS),
    *itertools.product(["eagle3", "a draft vocabulary"], ["noise", "all"]),
]


@pytest.mark.parametrize(("name", "sampling"), SAMPLED)
def test_sampled_chains(name, sampling, tiny_model, tiny_tokenizer, calls, monkeypatch):
    """They are those made depth by depth, and those that transformers' processors give."""
    config = {"method": name, "num_speculative_tokens": 4} | DRAFTERS[name]
    arguments = [({**config, "seed": seed}, TEXTS[:rows]) for seed, rows in ((2**40 + 3, 1), (5, 5), (6, 3))]

    def drafted():
        return [
            drafts_of(
                tiny_model, tiny_tokenizer, *each, do_sample=True, **PARAMETERS[sampling], return_dict_in_generate=True
            )
            for each in arguments
        ]

    at_once, count = drafted(), len(calls)
    assert count
    monkeypatch.setattr(own_cache.OwnsCache, "at_once", GrowsDrafts.at_once)
    step_by_step = drafted()
    monkeypatch.setattr(tree_growth, "is_fused", lambda *_: False)
    processed = drafted()
    assert len(calls) == count
    for (output, drafts), *others in zip(at_once, step_by_step, processed, strict=True):
        for other, expected in others:
            assert torch.equal(output.sequences, other.sequences)
            assert drafts == expected


def test_rows_that_sample_differently(tiny_model, tiny_tokenizer, calls, monkeypatch):
    """Greedy rows and rows of other parameters share the calls; a row alone gets the same text."""
    params = [
        SamplingParams(max_tokens=20, seed=7, **each)
        for each in ({"temperature": 0}, {"temperature": 0.7, "top_k": 30}, {"top_p": 0.8}, {"min_p": 0.1})
    ]
    llm = LLM(
        tiny_model,
        tiny_tokenizer,
        {"method": "draft_model", "model": "tiny-draft", "num_speculative_tokens": 3},
        max_model_len=128,
    )
    together = llm.generate(TEXTS[:4], params)
    assert max(calls) == 4
    alone = [llm.generate(text, each)[0] for text, each in zip(TEXTS, params, strict=False)]
    monkeypatch.setattr(own_cache.OwnsCache, "at_once", GrowsDrafts.at_once)
    step_by_step = llm.generate(TEXTS[:4], params)
    for output, *others in zip(together, alone, step_by_step, strict=True):
        assert [output.outputs[0].token_ids] * 2 == [other.outputs[0].token_ids for other in others]
        assert output.speculation["num_draft_tokens"] == others[1].speculation["num_draft_tokens"]


SHAPES = [
    {"num_speculative_tokens": 5}, {"branching_factors": [3, 1, 2]}, {"top_k": 3, "total_tokens": 9, "depth": 4},
    {"speculative_token_tree": [[0], [1], [0, 0], [0, 2], [1, 0], [0, 2, 1], [0, 2, 1, 0]]}, {"top_k": 5, "total_tokens": 60, "depth": 3},
    {"branching_factors": [3, 2, 2], "keep_paths": 2},
]  # fmt: skip


def random_case(seed):
    """A configuration, the number of texts, and arguments of `generate`."""
    pick = random.Random(seed)
    drafter = pick.choice(list(DRAFTERS.values())[:8])
    config = {"method": "draft_model"} | drafter | SHAPES[seed % len(SHAPES)] | {"seed": seed}
    if pick.random() < 0.3:
        config["draft_confidence_threshold"] = pick.choice([0.02, 0.1, 0.3])
    more = {"do_sample": False}
    if pick.random() < 0.7:
        config["rejection_sample_method"] = pick.choice(["coupled", "rejection", "rejection"])
        # a static tree's children may be more than the tokens that others leave, and which of the removed ones follow is arbitrary
        leave_enough = ["noise", "temperature", "top-k"] if "top_k" not in config else list(PARAMETERS)
        more = {"do_sample": True} | PARAMETERS[pick.choice(leave_enough)]
    return config, pick.choice([1, 3, 5]), more


@pytest.mark.parametrize("seed", [*range(8), *[pytest.param(seed, marks=pytest.mark.slow) for seed in range(8, 18)]])
def test_random_rounds_twice(seed, tiny_model, tiny_tokenizer, calls, monkeypatch):
    """From the same logits and states, one call and the definition make the same nodes, distributions and expanded nodes."""
    config, rows, more = random_case(seed)
    paths = config.pop("keep_paths", None)
    if paths is not None:
        keeps = TreeTemplate.from_widths(config["branching_factors"], paths)
        monkeypatch.setattr(TreeDraftingConfig, "shape", lambda self: keeps)

    def twice(self, sequences, limits):
        limits = self.begin_round(sequences, limits)
        drafting = [i for i, limit in enumerate(limits) if limit]
        if not drafting:
            return hf_specdec.DraftTrees.empty(len(sequences), self.target.device)
        logits = self.root_logits([sequences[i] for i in drafting], [limits[i] for i in drafting])
        state, drafts = self.state, []
        for at_once in (GrowsDrafts.at_once, type(self).at_once):
            self.state, growth = None if state is None else state.clone(), growth_of(self, sequences, limits)
            with monkeypatch.context() as patch:
                patch.setattr(self, "at_once", at_once.__get__(self))
                drafts.append(growth.draft(*growth.levels(logits.clone())))
        expected, ours = drafts
        assert ours.trees.lengths == expected.trees.lengths
        for i, count in enumerate(ours.trees.lengths):
            assert torch.equal(ours.trees.tokens[i, :count], expected.trees.tokens[i, :count])
            for name in ("parent_index", "prob_index"):
                mine, other = getattr(ours.trees, name), getattr(expected.trees, name)
                assert mine is other is None or np.array_equal(mine[i, :count], other[i, :count])
            assert np.array_equal(ours.expanded[i, :count], expected.expanded[i, :count])
        if expected.trees.probs is not None:
            torch.testing.assert_close(ours.trees.probs, expected.trees.probs)
        self.drafted(sequences, ours)
        return ours.trees

    monkeypatch.setattr(GrowsDrafts, "propose", twice)
    inputs = tiny_tokenizer(TEXTS[:rows], return_tensors="pt", padding=True, padding_side="left")
    tiny_model.generate(**inputs, max_new_tokens=16, speculative_config=config, **more)
    hf_specdec.release(tiny_model)
    assert calls


@pytest.mark.parametrize(
    ("config", "more"),
    [
        ({}, {"repetition_penalty": 1.2}),
        ({"num_speculative_tokens": 1}, {}),
        ({"draft_vocabulary": 3, "top_k": 4, "total_tokens": 9}, {}),
    ],
    ids=["processed", "one token", "more children than tokens"],
)
def test_other_drafts_are_made_depth_by_depth(config, more, tiny_model, tiny_tokenizer, calls):
    config = {"method": "draft_model", "model": "tiny-draft", "num_speculative_tokens": 3, "seed": 3} | config
    drafts_of(tiny_model, tiny_tokenizer, config, TEXTS[:2], **more)
    assert not calls
