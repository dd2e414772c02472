"""Typical acceptance against Medusa's rule in plain Python."""

import logging
import math

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from helpers_verification import verdict_of as verify
from hypothesis import given, settings

from hf_specdec.config import SpeculativeConfig
from hf_specdec.core.draft_trees import DraftTrees
from hf_specdec.core.sequence import Sequence
from hf_specdec.kernels import random_bits as rb
from hf_specdec.kernels.verification.reference import typical_thresholds
from hf_specdec.verification import rules

VOCAB = 6


def rule(**keys):
    return SpeculativeConfig(rejection_sample_method="typical", **keys)


def limit(p, threshold, alpha):
    entropy = -sum(x * math.log(x + 1e-5) for x in p)
    return min(threshold, alpha * math.exp(-entropy))


def plain_typical(tokens, parents, p, threshold, alpha):
    """All accepted paths, the longest and then the likeliest first; and how near any comparison was to a tie."""
    near, paths = 1.0, {-1: ([], 0.0)}
    for node, (token, parent) in enumerate(zip(tokens, parents, strict=True)):
        here = p[parent + 1]
        bound = limit(here, threshold, alpha)
        near = min(near, abs(here[token] - bound))
        if parent in paths and here[token] > bound:
            above, likelihood = paths[parent]
            paths[node] = ([*above, node], likelihood + math.log(here[token]))
    ranked = sorted(paths.values(), key=lambda path: (-len(path[0]), -path[1]))
    if len(ranked) > 1 and len(ranked[0][0]) == len(ranked[1][0]):
        near = min(near, ranked[0][1] - ranked[1][1])
    return ranked[0][0], near


@st.composite
def problems(draw):
    rows = []
    for _ in range(draw(st.integers(1, 4))):
        count = draw(st.integers(0, 9))
        parents = [draw(st.integers(-1, i - 1)) for i in range(count)]
        rows.append((draw(st.lists(st.integers(0, VOCAB - 1), min_size=count, max_size=count)), parents))
    return rows, draw(st.integers(0, 2**20)), draw(st.sampled_from([0.3, 1.0, 3.0])), draw(st.booleans())


@settings(max_examples=200, deadline=None)
@given(
    problems(), st.sampled_from([{}, {"posterior_threshold": 0.3, "posterior_alpha": 0.9}, {"posterior_alpha": 0.05}])
)
def test_medusas_rule(problem, keys):
    """Trees (also as chains where they are), probabilities of zero included; the token after the path is coupled noise's."""
    rows, seed, spread, cut = problem
    g = torch.Generator().manual_seed(seed)
    scores = torch.randn(sum(len(t) + 1 for t, _ in rows), VOCAB, generator=g) * spread
    if cut:  # as top-k leaves it
        scores[scores < scores.topk(3).values[:, -1:]] = float("-inf")
    sequences = [Sequence([1] * (3 + i), 99, do_sample=True, seed=seed + i, num_steps=i) for i in range(len(rows))]
    config = rule(**keys)
    made = [DraftTrees.from_lists([t for t, _ in rows], [p for _, p in rows])]
    if all(p == list(range(-1, len(p) - 1)) for _, p in rows):
        made.append(DraftTrees.from_lists([t for t, _ in rows]))
    for trees in made:
        verdict = verify(trees, scores, sequences, config)
        for i, part in enumerate(scores.split([len(t) + 1 for t, _ in rows])):
            tokens, parents = rows[i]
            p = part.double().softmax(-1).tolist()
            path, near = plain_typical(tokens, parents, p, config.posterior_threshold, config.posterior_alpha)
            if near < 1e-5:
                continue
            assert np.flatnonzero(verdict.accepted[i]).tolist() == path
            key = (torch.tensor([k]) for k in (sequences[i].seed, 3 + i + len(path), 0))
            noise = rb.gumbel(*key, rb.TOKEN_STREAM, VOCAB)[0]
            assert verdict.next_tokens[i] == int((part[[-1, *path][-1] + 1] + noise).argmax())


def test_worked_examples():
    """Four equal tokens: the limit is 0.3 / 4; a sure target: it is the threshold; a long path beats a likely one."""
    row = [Sequence([0], 99, do_sample=True, seed=5)]
    flat, sure = torch.zeros(4), torch.tensor([0.96, 0.02, 0.01, 0.01]).log()
    one = DraftTrees.from_lists([[1]])
    thresholds, _ = typical_thresholds(torch.stack([flat, sure]), 0.09, 0.3)
    assert thresholds.tolist() == pytest.approx([0.3 / 4, 0.09], abs=1e-5)
    assert verify(one, torch.stack([flat, flat]), row, rule()).accepted.all()  # 0.25 > 0.075
    assert not verify(one, torch.stack([sure, flat]), row, rule()).accepted.any()  # 0.02 < 0.09
    assert verify(one, torch.stack([sure, flat]), row, rule(posterior_threshold=0.015)).accepted.all()
    tree = DraftTrees.from_lists([[0, 1, 2, 3]], [[-1, -1, 1, 1]])  # 0 is likelier than 1, but 1 has children
    scores = torch.tensor([[0.6, 0.3, 0.05, 0.05], [0.25] * 4, [0.1, 0.1, 0.3, 0.5], [0.25] * 4, [0.25] * 4]).log()
    assert verify(tree, scores, row, rule()).accepted.tolist() == [[False, True, False, True]]  # 3 is likelier than 2


def test_greedy_rows_match_exactly():
    """Temperature 0: the argmax alone counts, however typical the others are."""
    scores = torch.tensor([[0.0, 0.1, 0.0], [0.2, 0.1, 0.0], [0.0, 0.1, 0.3]])
    rows = [Sequence([0], 99)]
    assert verify(DraftTrees.from_lists([[1, 0]]), scores, rows, rule()).accepted.all()
    verdict = verify(DraftTrees.from_lists([[1, 1]]), scores, rows, rule())
    assert verdict.accepted.tolist() == [[True, False]] and verdict.next_tokens[0] == 0


def test_it_says_once_that_it_is_lossy(caplog):
    rules._warn.cache_clear()
    trees, scores = DraftTrees.from_lists([[1]]), torch.zeros(2, 4)
    with caplog.at_level(logging.WARNING, logger="hf_specdec"):
        verify(trees, scores, [Sequence([0], 99)], rule())
        assert not caplog.records  # greedy rows lose nothing
        for _ in range(3):
            verify(trees, scores, [Sequence([0], 99, do_sample=True)], rule())
    assert [r.levelname for r in caplog.records] == ["WARNING"] and "lossy" in caplog.text


def test_it_is_lossy():
    """Four equal tokens and a drafter that always says 1: every row says 1. (If this fails, the docs are wrong.)"""
    rows = [Sequence([0], 99, do_sample=True, seed=i) for i in range(50)]
    verdict = verify(DraftTrees.from_lists([[1]] * 50), torch.zeros(100, 4), rows, rule())
    assert verdict.accepted.all() and len(set(verdict.next_tokens.tolist())) == 4
