"""Sequences join and leave between steps, in the little scheduler of builders/scheduling.py."""

import random

import pytest
import torch
from cache_checks import check_blocks
from scheduling import VOCAB, make_decoder, run_scenario, small_llama

from hf_specdec.core.sequence import Sequence


@pytest.fixture(scope="module")
def models():
    target = small_llama(0)
    return target, small_llama(1, noise_on=target)


METHODS = [
    {"method": "none"},
    {"method": "ngram", "prompt_lookup_min": 1, "prompt_lookup_max": 3},
    {"method": "suffix"},
    {"method": "draft_model", "num_speculative_tokens": 4},
    {"method": "draft_model", "branching_factors": [3, 2, 1]},
]


@pytest.mark.parametrize(
    "method",
    [
        pytest.param(m, marks=pytest.mark.slow) if m in (METHODS[0], METHODS[1], METHODS[2], METHODS[-1]) else m
        for m in METHODS
    ],
    ids=lambda m: "-".join(map(str, m.values())),
)
def test_requests_join_leave_wait_and_are_preempted(models, method):
    """Every output equals its own single-request `generate()`, greedy and coupled, and the pool ends clean."""
    if method["method"] == "suffix":
        pytest.importorskip("arctic_inference.suffix_decoding")
    run_scenario(*models, method, num_requests=60)


def test_generate_waits_and_preempts_in_a_small_pool(models):
    """A batch that does not fit `num_blocks` is decoded all the same."""
    target, drafter = models
    torch.manual_seed(3)
    ids = torch.randint(2, VOCAB, (6, 20))
    expected = target.generate(ids, max_new_tokens=40, do_sample=False, pad_token_id=0)
    for method in METHODS:
        if method["method"] == "suffix":
            pytest.importorskip("arctic_inference.suffix_decoding")
        kwargs = {"assistant_model": drafter} if method["method"] == "draft_model" else {}
        out = target.generate(
            ids, max_new_tokens=40, do_sample=False, pad_token_id=0, **kwargs,
            speculative_config={**method, "num_blocks": 40, "block_size": 4, "prefill_chunk_size": 8},
        )  # fmt: skip
        assert torch.equal(out, expected), method


def test_prefixes_are_shared(models):
    """Equal prompts share their full blocks and are computed once."""
    target, _ = models
    decoder = make_decoder(target, {"method": "none", "block_size": 4})
    decoder.allocate(400, 4)
    prompt = [random.Random(1).randrange(2, VOCAB) for _ in range(33)]
    rows = [Sequence(list(prompt), 40) for _ in range(4)]
    with decoder.active():
        for seq in rows:
            decoder.add(seq)
        decoder.step(rows)
        used = decoder.cache.pool.num_used
        assert len(decoder.last.logit_rows) == 4
        assert decoder.last.logit_rows[-1] == 33 + 3 * 1 - 1, "copies feed only what is not shared"
        tables = [decoder.cache.tables[seq.id].blocks for seq in rows]
        assert all(t[:8] == tables[0][:8] for t in tables)
        assert used == 8 + 4
        assert len({seq.tokens[-1] for seq in rows}) == 1
        for seq in rows:
            decoder.remove(seq)
    check_blocks(decoder.cache.pool)
    assert decoder.cache.pool.num_used == 0
