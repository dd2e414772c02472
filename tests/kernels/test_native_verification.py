"""Verification in the native library: the definition's accepted paths, next tokens, and rows with nothing to sample."""

import math

import numpy as np
import pytest
import torch

from hf_specdec.config import SpeculativeConfig
from hf_specdec.core.draft_trees import DraftTrees
from hf_specdec.core.sequence import Sequence
from hf_specdec.kernels.native import library
from hf_specdec.kernels.verification import greedy_tokens
from hf_specdec.verification.verify import begin_verification

pytestmark = pytest.mark.skipif(library() is None, reason="the native library is not installed")


def problem(seed, vocab, is_chain):
    """Trees that repeat siblings, drafted from few tokens, of greedy rows and rows that sample; scores with NaN, infinity and nothing."""
    random = np.random.default_rng(seed)
    sizes = random.integers(0, 9, random.integers(1, 6))
    tokens = [random.integers(0, min(vocab, 5), size).tolist() for size in sizes]
    parents = None if is_chain else [[int(random.integers(-1, i)) for i in range(size)] for size in sizes]
    trees = DraftTrees.from_lists(tokens, parents)
    scores = torch.from_numpy(random.normal(size=(int(sizes.sum()) + len(sizes), vocab))).float()
    scores[:, :5] += 4
    for value, count in ((math.nan, 1), (math.inf, 1), (-math.inf, vocab)):
        scores[random.integers(len(scores)), :count] = value
    rows = [
        Sequence(
            [1] * int(random.integers(1, 9)), 50, do_sample=bool(random.integers(2)), seed=int(random.integers(2**40))
        )
        for _ in sizes
    ]
    return trees, scores, rows


@pytest.mark.parametrize("is_chain", [True, False], ids=["chain", "tree"])
@pytest.mark.parametrize("vocab", [6, 300])
def test_verdicts_are_those_of_the_definition(vocab, is_chain, monkeypatch):
    accepted = broken = 0
    for seed in range(150):
        arguments = *problem(seed, vocab, is_chain), SpeculativeConfig(method="")
        monkeypatch.setenv("HF_SPECDEC_KERNELS", "reference")
        expected = begin_verification(*arguments)
        monkeypatch.setenv("HF_SPECDEC_KERNELS", "native")
        found = begin_verification(*arguments)
        assert torch.equal(found.next_tokens, expected.next_tokens)
        table, width = expected._table, arguments[0].tokens.shape[1]
        assert torch.equal(found._table[:, : table.shape[1]], table)
        accepted, broken = accepted + int(table[:, :width].sum()), broken + int(found._table[:, -1].sum())
    assert accepted > 50 and broken > 20


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("vocab", [1, 7, 17, 300, 4097])
def test_greedy_tokens_are_those_of_torch(vocab, dtype, monkeypatch):
    """The lowest id among equals; a NaN wins; rows of nothing but -inf."""
    generator = torch.Generator().manual_seed(vocab)
    monkeypatch.setenv("HF_SPECDEC_KERNELS", "native")
    for count in (1, 8, 33):
        scores = torch.randint(-3, 4, (count, vocab), generator=generator).to(dtype)
        assert torch.equal(greedy_tokens(scores), scores.argmax(1))
        for value in (math.nan, -math.inf, math.inf):
            scores[torch.rand(count, vocab, generator=generator) < 0.3] = value
            assert torch.equal(greedy_tokens(scores), scores.argmax(1))
        scores[0] = -math.inf
        assert torch.equal(greedy_tokens(scores[:, ::2]), scores[:, ::2].argmax(1))
