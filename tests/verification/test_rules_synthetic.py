"""Synthetic acceptance: the asked rates, whatever the model says; and never by accident."""

import logging

import numpy as np
import pytest
import torch
from helpers_verification import verdict_of as verify

from hf_specdec import SpeculativeConfigError, parse_config
from hf_specdec.config import SpeculativeConfig
from hf_specdec.core.draft_trees import DraftTrees
from hf_specdec.core.sequence import Sequence
from hf_specdec.kernels import random_bits as rb
from hf_specdec.verification import rules

VOCAB = 5
RATES = [0.9, 0.6, 0.6, 0.1]


def rule(**keys):
    return SpeculativeConfig(rejection_sample_method="synthetic", num_speculative_tokens=4, **keys)


def rows_of(count, sampled=True, step=0):
    return [Sequence([1] * (1 + i % 5), 99, do_sample=sampled, seed=i, num_steps=step) for i in range(count)]


def within(observed, expected, n):
    """Four standard deviations of a share of n independent trials: at n = 40,000, an error of 1 % shows at any rate."""
    return abs(observed - expected) <= 4 * (expected * (1 - expected) / n) ** 0.5 + 1e-12


@pytest.mark.parametrize("sampled", [False, True])
@pytest.mark.parametrize("shape", ["chain", "tree"])
def test_the_asked_rates(sampled, shape):
    """Drafts and scores are noise; the share of rounds in which i drafts are accepted is the i-th rate."""
    n = 40_000
    parents = [[-1, -1, 1, 0, 2, 4]] * n if shape == "tree" else None  # nodes 1, 2, 4, 5 are the deepest line
    line = [1, 2, 4, 5] if shape == "tree" else [0, 1, 2, 3]
    width = 6 if shape == "tree" else 4
    g = torch.Generator().manual_seed(2)
    trees = DraftTrees.from_lists(torch.randint(0, VOCAB, (n, width), generator=g).tolist(), parents)
    scores = torch.randn(n * (width + 1), VOCAB, generator=g)
    rows = rows_of(n, sampled)
    accepted = verify(trees, scores, rows, rule(synthetic_acceptance_rates=RATES)).accepted
    for node, rate in zip(line, RATES, strict=True):
        assert within(accepted[:, node].mean(), rate, n)
    assert not np.delete(accepted, line, axis=1).any()
    assert (np.diff(accepted[:, line].astype(int), axis=1) <= 0).all()  # from the root on
    again = verify(trees, scores, [Sequence(s.tokens, 99, do_sample=sampled, seed=s.seed, num_steps=1) for s in rows],
                   rule(synthetic_acceptance_rates=RATES)).accepted  # fmt: skip
    both = (accepted[:, line[0]] & again[:, line[0]]).mean()
    assert within(both, RATES[0] ** 2, n)  # rounds are independent


@pytest.mark.parametrize(
    ("length", "rates"), [(1, [0.0]), (2.5, [1.0, 0.5]), (3.4, [1.0, 1.0, 0.4]), (5, [1.0] * 4 + [0.0])]
)
def test_the_asked_length(length, rates):
    config = rule(synthetic_acceptance_length=length)
    assert config.acceptance_rates == pytest.approx(rates)
    n = 20_000
    trees = DraftTrees.from_lists([[0, 1, 2, 3]] * n)
    accepted = verify(trees, torch.zeros(n * 5, VOCAB), rows_of(n), config).accepted.sum(1)
    assert within(accepted.mean() + 1 - int(length), length - int(length), n)
    assert set(accepted.tolist()) <= {int(length) - 1, min(int(length), 4)}  # least variance


def test_a_row_does_not_depend_on_the_batch():
    """Ragged rows; the next token is the target's own choice after the path, greedy or coupled."""
    g = torch.Generator().manual_seed(3)
    lengths = [4, 0, 2, 3, 1]
    tokens = torch.randint(0, VOCAB, (5, 4), generator=g)
    scores = torch.randn(sum(lengths) + 5, VOCAB, generator=g)
    config = rule(synthetic_acceptance_rates=RATES)
    seen = set()
    for seed in range(20):
        rows = [Sequence([1] * (i + 1), 99, do_sample=i % 2 == 0, seed=seed * 10 + i, num_steps=seed) for i in range(5)]
        verdict = verify(DraftTrees(tokens, lengths), scores, rows, config)
        for i, part in enumerate(scores.split([n + 1 for n in lengths])):
            alone = verify(DraftTrees(tokens[i : i + 1, : lengths[i]], lengths[i : i + 1]), part, [rows[i]], config)
            assert alone.accepted[0].tolist() == verdict.accepted[i, : lengths[i]].tolist()
            assert not verdict.accepted[i, lengths[i] :].any()
            count = int(verdict.accepted[i].sum())
            seen.add((i, count))
            choice = part[count]
            if rows[i].do_sample:
                key = (torch.tensor([k]) for k in (rows[i].seed, i + 1 + count, 0))
                choice = choice + rb.gumbel(*key, rb.TOKEN_STREAM, VOCAB)[0]
            assert alone.next_tokens[0] == verdict.next_tokens[i] == int(choice.argmax())
    assert len(seen) > 10


def test_batches_without_drafts():
    config = rule(synthetic_acceptance_length=3)
    empty = DraftTrees.from_lists([[], []], [[], []])
    assert verify(empty, torch.eye(2, VOCAB), [Sequence([1], 9), Sequence([1], 9)], config).next_tokens.tolist() == [
        0,
        1,
    ]


def test_it_is_never_silent(caplog):
    rules._warn.cache_clear()
    with caplog.at_level(logging.WARNING, logger="hf_specdec"):
        for _ in range(3):
            verify(
                DraftTrees.from_lists([[1]]),
                torch.zeros(2, VOCAB),
                [Sequence([0], 9)],
                rule(synthetic_acceptance_length=2),
            )
    assert len(caplog.records) == 1 and "MEANINGLESS" in caplog.text


# ---- configuration --------------------------------------------------------------------------------------------------

SYNTHETIC = {"method": "ngram", "num_speculative_tokens": 3, "rejection_sample_method": "synthetic"}


@pytest.mark.parametrize(
    ("keys", "what"),
    [
        ({}, "needs exactly one of synthetic_acceptance_rates and synthetic_acceptance_length, not none"),
        ({"synthetic_acceptance_rates": [1, 1, 1], "synthetic_acceptance_length": 2}, "needs exactly one of"),
        ({"synthetic_acceptance_length": 0.5}, "at least 1 and at most 4"),
        ({"synthetic_acceptance_length": 4.1}, "at least 1 and at most 4"),
        ({"synthetic_acceptance_length": float("nan")}, "at least 1 and at most 4"),
        ({"synthetic_acceptance_length": "2"}, "must be a number"),
        ({"synthetic_acceptance_rates": [0.5, 0.4]}, "must be 3 numbers in [0, 1]"),
        ({"synthetic_acceptance_rates": [0.5, 0.6, 0.4]}, "that never increase"),
        ({"synthetic_acceptance_rates": [1.1, 0.6, 0.4]}, "must be 3 numbers in [0, 1]"),
        ({"synthetic_acceptance_rates": [0.9, float("nan"), 0.4]}, "must be 3 numbers in [0, 1]"),
        ({"synthetic_acceptance_rates": [True, True, True]}, "must be 3 numbers in [0, 1]"),
        ({"synthetic_acceptance_rates": 0.5}, "must be 3 numbers in [0, 1]"),
    ],
    ids=str,
)  # fmt: skip
def test_bad_keys(keys, what):
    with pytest.raises(SpeculativeConfigError) as caught:
        parse_config({**SYNTHETIC, **keys})
    assert what in str(caught.value) and "synthetic" in str(caught.value)


@pytest.mark.parametrize("method", [None, "coupled", "rejection", "block", "typical"])
@pytest.mark.parametrize(
    "keys", [{"synthetic_acceptance_rates": [1, 1, 1]}, {"synthetic_acceptance_length": 2}], ids=str
)
def test_keys_of_another_rule(method, keys):
    with pytest.raises(SpeculativeConfigError, match="only with rejection_sample_method 'synthetic'"):
        parse_config({**SYNTHETIC, "rejection_sample_method": method, **keys})
