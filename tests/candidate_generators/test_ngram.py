"""Prompt lookup: equal to a naive rescan, at 50 µs a row on a 100k-token context."""

import statistics
import time
from types import SimpleNamespace

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given, settings

from hf_specdec import parse_config
from hf_specdec.candidate_generators.ngram import NGramGenerator, NGramIndex
from hf_specdec.core.outcome import StepOutcome
from hf_specdec.core.sequence import Sequence

TARGET = SimpleNamespace(device="cpu", vocab_size=1 << 20)


def rescan(tokens, shortest, longest, k):
    """vLLM's meaning: the longest n-gram ending the text that occurs earlier, its earliest occurrence, what followed."""
    for n in range(longest, shortest - 1, -1):
        if n >= len(tokens):
            continue
        for start in range(len(tokens) - n):
            if tokens[start : start + n] == tokens[-n:]:
                return tokens[start + n : start + n + k]
    return []


def test_the_rescan_itself():
    assert rescan([1, 2, 3, 9, 1, 2, 3], 1, 3, 2) == [9, 1]
    assert rescan([1, 2, 7, 1, 2, 8, 1, 2], 1, 3, 1) == [7]  # the earliest
    assert rescan([2, 5, 1, 2, 6, 1, 2], 1, 2, 1) == [6]  # the longest n first
    assert rescan([4, 4, 4], 1, 2, 5) == [4]  # occurrences may overlap the end of the text
    assert rescan([1, 2, 3], 1, 3, 5) == rescan([1], 1, 1, 5) == []


@settings(max_examples=300, deadline=None)
@given(
    pieces=st.lists(st.lists(st.integers(0, 2), max_size=6), min_size=1, max_size=8),
    low=st.integers(1, 4),
    more=st.integers(0, 3),
    k=st.integers(1, 6),
)
def test_index_equals_rescan(pieces, low, more, k):
    """However the text arrives: whole, in pieces, or with empty pieces between."""
    index, tokens = NGramIndex(low, low + more), []
    for piece in pieces:
        tokens += piece
        index.extend(tokens)
        assert index.continuation(tokens, k) == rescan(tokens, low, low + more, k)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=12), min_size=1, max_size=4), st.data())
def test_generator(prompts, data):
    """Rows of a batch, over rounds, with limits; rows join and leave."""
    low, high = data.draw(st.sampled_from([(1, 1), (1, 3), (2, 4), (5, 5)]))
    config = parse_config(
        {"method": "ngram", "prompt_lookup_min": low, "prompt_lookup_max": high, "num_speculative_tokens": 4}
    )
    generator = NGramGenerator(config, TARGET)
    rows = [Sequence(list(prompt), 1000) for prompt in prompts]
    for seq in rows:
        generator.start(seq)
    for _ in range(3):
        limits = [data.draw(st.integers(0, 4)) for _ in rows]
        trees = generator.propose(rows, limits)
        assert trees.is_chain
        for i, (seq, limit) in enumerate(zip(rows, limits, strict=True)):
            expected = rescan(seq.tokens, low, high, limit) if limit else []
            assert trees.tokens[i, : trees.lengths[i]].tolist() == expected
        new = [data.draw(st.lists(st.integers(0, 2), min_size=1, max_size=5)) for _ in rows]
        for seq, tokens in zip(rows, new, strict=True):
            seq.tokens += tokens
        generator.observe(StepOutcome(rows, trees, [[] for _ in rows], new))
    for seq in rows:
        generator.stop(seq)
    assert generator.indices == {}


def microseconds_per_row(generator, rows, rounds, rng, vocab):
    """Median over rounds of (propose + observe) per row; rows grow by what was drafted and one more."""
    times = []
    for _ in range(rounds):
        begin = time.perf_counter()
        trees = generator.propose(rows, [5] * len(rows))
        taken = time.perf_counter() - begin
        drafted = trees.tokens.tolist()
        new = [[*drafted[i][: trees.lengths[i]], int(rng.integers(vocab))] for i in range(len(rows))]
        for seq, tokens in zip(rows, new, strict=True):
            seq.tokens += tokens
        outcome = StepOutcome(rows, trees, [[] for _ in rows], new)
        begin = time.perf_counter()
        generator.observe(outcome)
        times.append((taken + time.perf_counter() - begin) / len(rows) * 1e6)
    return statistics.median(times)


def speed(generator, bound, what):
    """Eight rows of 100k tokens that repeat themselves, as code and chats do."""
    rng = np.random.default_rng(0)
    phrase = rng.integers(2000, size=(50, 200))
    rows = []
    for _ in range(8):
        text = phrase[rng.integers(50, size=500)].flatten()
        text[rng.random(text.size) < 0.02] = 7
        rows.append(Sequence(text.tolist(), 10**6))
        generator.start(rows[-1])
    per_row = microseconds_per_row(generator, rows, 200, rng, 2000)
    for seq in rows:
        generator.stop(seq)
    print(f"{what}: {per_row:.1f} µs a row on a context of 100,000 tokens")
    assert per_row <= bound


@pytest.mark.slow  # a stopwatch
@pytest.mark.parametrize("bound", [200, 50])
def test_speed(bound):
    """The aim is 50 µs; a machine that is shared and busy gets four times that."""
    speed(
        NGramGenerator(parse_config({"method": "ngram", "prompt_lookup_min": 2, "prompt_lookup_max": 5}), TARGET),
        bound,
        "ngram",
    )


@pytest.mark.parametrize(
    ("keys", "range_"),
    [({}, (5, 5)), ({"min": 2}, (2, 2)), ({"max": 3}, (3, 3)), ({"min": 2, "max": 4}, (2, 4))],
)
def test_a_missing_length_equals_the_other(keys, range_):
    config = parse_config({"method": "ngram", **{f"prompt_lookup_{name}": value for name, value in keys.items()}})
    assert config.ngram_range == range_


def test_the_work_does_not_grow_with_the_text():
    """One entry per token and n, once: indexing 100k tokens token by token is no slower per token at the end."""
    index, tokens = NGramIndex(2, 4), list(np.random.default_rng(0).integers(50, size=100_000))
    index.extend(tokens)
    assert index.num_indexed == 100_000
    seen = []

    class Counting(dict):
        def setdefault(self, key, value):
            seen.append(key)
            return super().setdefault(key, value)

    index.first_end = [Counting(each) for each in index.first_end]
    tokens += [1, 2, 3]
    index.extend(tokens)
    assert len(seen) == 3 * 3
