"""DSpark and Domino: heads over a DFlash block that look back along each path, and the one that says when to stop."""

import itertools
import math

import pytest
import torch
from helpers_dflash import Reference, Watched, compare, make
from oracle import ragged, tiny_llama

from hf_specdec.candidate_generators.checkpoints.files import CheckpointError
from hf_specdec.config import SpeculativeConfigError

PROMPTS = [5, 17, 9, 3]
SHAPES = {
    "chain": {},
    "tree": {"branching_factors": [2, 2, 2, 1]},
    "dynamic tree": {"top_k": 3, "total_tokens": 12, "depth": 4},
}
HEADS = {
    "vanilla": {},
    "gated": {"markov": "gated"},
    "rnn": {"markov": "rnn"},
    "old names": {"prefix": "logit_head.", "markov": "gated"},
    "no confidence": {"confidence": False},
    "confidence alone": {"rank": 0, "confidence_markov": False},
    "speculators": {"style": "speculators"},
    "speculators, draft vocabulary": {"style": "speculators", "draft_ids": [*range(1, 60, 2), 60], "markov": "gated"},
    "speculators, rnn": {"style": "speculators", "markov": "rnn"},
    "speculators, rnn, mask slots": {"style": "speculators", "markov": "rnn", "from_anchor": False},
    "speculators, mask slots": {"style": "speculators", "from_anchor": False},
}


@pytest.fixture(scope="module")
def target():
    return tiny_llama()


@pytest.mark.parametrize("head", HEADS)
def test_dspark_drafts_what_its_formula_says(target, tmp_path, head):
    made = make(tmp_path, target, head="dspark", block=5, **HEADS[head])
    accepted = compare(target, made, {}, ragged([6, 12]), slots=5, max_new_tokens=20)
    assert 0 in accepted and max(accepted) == 5 - (not made.options["from_anchor"])


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("head", ["gated", "rnn"])
def test_dspark_trees(target, tmp_path, shape, head):
    """Every node of a tree has its own path, state and logits, in a ragged batch."""
    made = make(tmp_path, target, head="dspark", block=5, **HEADS[head])
    slots = 5 if shape == "chain" else 4
    accepted = compare(target, made, SHAPES[shape], ragged(PROMPTS), slots, max_new_tokens=10)
    assert 0 in accepted and max(accepted) >= 3


@pytest.mark.parametrize("from_anchor", [True, False])
@pytest.mark.parametrize("pure", [0, 1, 2])
def test_domino_drafts_what_its_formula_says(target, tmp_path, from_anchor, pure):
    made = make(tmp_path, target, head="domino", block=5, from_anchor=from_anchor, pure=pure)
    slots = 4 if from_anchor else 5
    config = {"num_speculative_tokens": 4} if pure else SHAPES["tree"]
    accepted = compare(target, made, config, ragged([6, 12]), slots, max_new_tokens=20)
    assert 0 in accepted and max(accepted) == 4


@pytest.mark.parametrize("pure", [0, 1, 2])
def test_domino_of_speculators(target, tmp_path, pure):
    """Its labels are shifted unless it says otherwise."""
    extra = {} if pure else {"sample_from_anchor": None, "speculators_config": None}
    options = {"style": "speculators", "prefix": "domino_head.", "pure": pure, "extra": extra}
    made = make(tmp_path, target, head="domino", block=5, **options)
    accepted = compare(target, made, {}, ragged([6, 12]), slots=5, max_new_tokens=20)
    assert 0 in accepted and max(accepted) == 5


@pytest.mark.parametrize("shape", SHAPES)
def test_confidence_ends_drafts(target, tmp_path, shape):
    """A draft is as deep as the confidence head's product along its best path stays above the threshold."""
    made = make(tmp_path, target, head="dspark", block=5, markov="gated")
    threshold, keys = 0.2, SHAPES[shape]
    if "total_tokens" in keys:
        keys = keys | {"total_tokens": 60}  # more than there are: none is dropped for another reason
    config = {"method": "dflash", "model": made.folder, "draft_confidence_threshold": threshold, **keys}
    watched, reference, depths = Watched(target, config), Reference(target, made), set()
    propose, longest = watched.generator.propose, watched.generator.shape.depth

    def check(sequences, limits):
        before = len(watched.records)
        trees = propose(sequences, limits)
        drafted = watched.records[before:]
        for row, seq in enumerate(sequences):
            own = [path for text, path, _ in drafted if text == seq.tokens]
            block = reference.block(seq.tokens, slots=longest)
            expected = 0
            for depth, paths in itertools.groupby(sorted(own, key=len), key=len):
                best = max(_survival(reference, block, seq.tokens, path) for path in paths)
                if best < threshold:
                    break
                expected = depth + 1
            deepest = max(_depths(trees, row), default=0)
            assert deepest == min(expected, limits[row])
            depths.add(deepest)
        return trees

    watched.generator.propose = check
    watched.run(ragged(PROMPTS), max_new_tokens=16)
    assert len(depths) >= 3


def _survival(reference, block, text, path):
    return math.prod(float(reference.logits(block, text, path[:i])[1]) for i in range(len(path) + 1))


def _depths(trees, row):
    depths = []
    for node in range(trees.lengths[row]):
        parent = node - 1 if trees.parents is None else trees.parents[row, node]
        depths.append(1 if parent < 0 else depths[parent] + 1)
    return depths


@pytest.mark.parametrize("head", ["dspark", "domino"])
def test_nothing_is_lost(target, tmp_path, head):
    made = make(tmp_path, target, head=head, block=5)
    for shape in SHAPES.values():
        config = {"method": "dflash", "model": made.folder, "draft_confidence_threshold": 0.05, "seed": 3, **shape}
        for sampling in ({"do_sample": False}, {"do_sample": True}):
            plain = {"method": "none", "seed": 3}
            expected = target.generate(**ragged(PROMPTS), max_new_tokens=10, speculative_config=plain, **sampling)
            got = target.generate(**ragged(PROMPTS), max_new_tokens=10, speculative_config=config, **sampling)
            assert torch.equal(got, expected)


def test_bfloat16(tmp_path):
    model = tiny_llama().to(torch.bfloat16)
    for head, options in (("dspark", {"markov": "rnn"}), ("domino", {})):
        made = make(tmp_path / head, model, head=head, **options)
        config = {"method": "dflash", "model": made.folder, "draft_confidence_threshold": 0.01}
        assert model.generate(**ragged(PROMPTS), max_new_tokens=8, speculative_config=config).shape[1] == 25


BAD = {
    "kind": ("dspark", {}, {"dflash_config": {"markov_head_type": "lstm"}}, "markov_head_type = 'lstm'; it must be 'vanilla' or 'gated'"),
    "rank": ("dspark", {}, {"dflash_config": {"markov_rank": 7}}, r"markov_w1.weight has shape \[61, 6\]"),
    "no gate": ("dspark", {}, {"dflash_config": {"markov_head_type": "gated"}}, "missing markov_head.gate_proj"),
    "confidence of nothing": ("dspark", {}, {"dflash_config": {"markov_rank": 0}}, "no Markov head"),
    "width": ("domino", {}, {"dflash_config": {"gru_hidden_dim": None}}, "gru_hidden_dim = None"),
    "labels not shifted": ("domino", {"style": "speculators", "prefix": "domino_head."},
                           {"shift_label": False, "sample_from_anchor": False}, "was shown the tokens it predicts"),
    "heads nobody asked for": ("dspark", {}, {"architectures": ["DFlashDraftModel"], "dflash_config": {"projector_type": None}},
                               "markov_rank = 6, but it is no drafter with"),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD)
def test_bad_checkpoints(target, tmp_path, case):
    from test_dflash import _edit

    head, options, changes, message = BAD[case]
    made = make(tmp_path, target, head=head, **options)

    def change(config):
        for key, value in changes.items():
            config[key] = config[key] | value if isinstance(value, dict) else value

    _edit(made, change)
    with pytest.raises(CheckpointError, match=message):
        target.generate(**ragged([5]), max_new_tokens=4, speculative_config={"method": "dflash", "model": made.folder})


def test_block_lengths(target, tmp_path):
    """From the anchor's slot on, a block of 5 drafts 5 tokens."""
    made = make(tmp_path, target, head="dspark", block=5)
    with pytest.raises(SpeculativeConfigError, match=r"asks for drafts of 6 tokens.* use at most 5"):
        config = {"method": "dflash", "model": made.folder, "num_speculative_tokens": 6}
        target.generate(**ragged([5]), max_new_tokens=4, speculative_config=config)
