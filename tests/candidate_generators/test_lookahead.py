"""Lookahead decoding against a plain-Python model of it, step by step, and its outputs against plain `generate()`."""

import json
from types import SimpleNamespace

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from combinations import covering
from helpers_drafters import (
    accepted_length_on_bundled,
    assert_greedy_is_plain,
    assert_round_trips,
    assert_sampling_does_not_depend_on_drafts,
    drafted,
)
from hypothesis import given, settings
from oracle import assert_clean, ragged, tiny_llama

import hf_specdec
from hf_specdec import SpeculativeConfigError, integration, parse_config
from hf_specdec.candidate_generators.lookahead import LookaheadGenerator, NGramPool, Window
from hf_specdec.core.draft_trees import DraftTrees
from hf_specdec.core.outcome import StepOutcome
from hf_specdec.core.sequence import Sequence

DEFAULT = {"method": "lookahead"}
SMALL = {"method": "lookahead", "window_size": 3, "ngram_size": 3, "guess_set_size": 2}
OWN = {**SMALL, "share_pool": False, "pool_from_prompt": False}
TARGET = SimpleNamespace(device=torch.device("cpu"), vocab_size=61)


class Pool:
    """N-grams in one list, oldest first."""

    def __init__(self, size):
        self.size, self.ngrams = size, []

    def add(self, ngram):
        self.ngrams = [each for each in self.ngrams if each != ngram] + [ngram]
        own = [each for each in self.ngrams if each[0] == ngram[0]]
        if len(own) > self.size:
            self.ngrams.remove(own[0])

    def add_text(self, text, n):
        for i in range(len(text) - n + 1):
            self.add(tuple(text[i : i + n]))

    def after(self, token):
        return [ngram[1:] for ngram in reversed(self.ngrams) if ngram[0] == token]


def paths_of(tokens, parents):
    """Every node's path of tokens from the root, in the nodes' order."""
    paths = []
    for token, parent in zip(tokens, parents, strict=True):
        paths.append((*(paths[parent] if parent >= 0 else ()), token))
    return paths


def lookahead_by_hand(root, levels, columns):
    """What the paper's mask lets each window token see, itself last, level by level: level 0 up to its column, then its
    own column. The first is the root itself: ()."""
    first = [root, *levels[0][1:]]
    return [
        tuple(first[1 : c + 1] + [levels[above][c] for above in range(1, level + 1)])
        for level in range(len(levels))
        for c in range(columns)
    ]


def guesses_by_hand(followers, limit):
    """Distinct non-empty beginnings, cut to the limit, in the order in which they are met."""
    beginnings = {}
    for ngram in followers:
        for end in range(1, min(len(ngram), limit) + 1):
            beginnings[ngram[:end]] = None
    return list(beginnings)


class Watch:
    """Checks a generator's proposals and state against lists, in every step it takes part in."""

    def __init__(self, generator):
        self.generator, self.config = generator, generator.config
        self.shared = Pool(self.config.guess_set_size)
        self.pools, self.drafts = {}, {}
        self.num_ngrams = self.num_guesses = self.num_narrow = 0
        self.generator_start, self.generator_propose = generator.start, generator.propose
        self.generator_observe = generator.observe
        generator.start, generator.propose, generator.observe = self.start, self.propose, self.observe

    def start(self, seq):
        self.generator_start(seq)
        pool = self.pools[seq.id] = self.shared if self.config.share_pool else Pool(self.config.guess_set_size)
        if self.config.pool_from_prompt:
            pool.add_text(seq.tokens, self.config.ngram_size)
        window = self.generator.rows[seq.id].window.tokens
        assert window.shape == (1, self.config.window_size + self.config.ngram_size - 2)
        assert set(window.ravel().tolist()) <= set(seq.tokens)

    def propose(self, sequences, limits):
        trees = self.generator_propose(sequences, limits)
        trees.check()
        for i, (seq, limit) in enumerate(zip(sequences, limits, strict=True)):
            paths = paths_of(*drafted(trees, i))
            assert len(paths) <= self.generator.max_draft_nodes and all(len(path) <= limit for path in paths)
            guesses = guesses_by_hand(self.pools[seq.id].after(seq.tokens[-1]), limit)
            levels = self.generator.rows[seq.id].window.tokens.tolist()
            columns = sum(c + len(levels) - 1 <= limit for c in range(len(levels[0]))) if limit else 0
            window = lookahead_by_hand(seq.tokens[-1], levels, columns)
            assert paths == guesses + window[1:]
            self.drafts[seq.id] = levels, columns, len(guesses)
            self.num_guesses += len(guesses)
            self.num_narrow += 0 < columns < len(levels[0])
        return trees

    def observe(self, outcome):
        root, advanced = 0, []
        for seq, count in zip(outcome.sequences, outcome.trees.lengths, strict=True):
            levels, columns, num_guesses = self.drafts.pop(seq.id, ([], 0, 0))
            if columns and count == num_guesses + len(levels) * columns - 1:
                outputs = []
                for c in range(columns):  # the column's top cell; the window's first cell is the root itself
                    cell = (len(levels) - 1) * columns + c
                    logits = outcome.output.logits[root + num_guesses + cell if cell else root].tolist()
                    outputs.append(logits.index(max(logits)))
                advanced.append((seq, levels, outputs))
            root += count + 1
        self.generator_observe(outcome)
        for seq, levels, outputs in advanced:
            self.check_window(seq, levels, outputs, self.generator.rows[seq.id].window.tokens.tolist())
        n = self.config.ngram_size
        for seq, new in zip(outcome.sequences, outcome.new_tokens, strict=True):
            if self.config.pool_from_prompt:
                self.pools[seq.id].add_text(seq.tokens[max(0, len(seq.tokens) - len(new) - n + 1) :], n)
        for seq in outcome.sequences:
            for token in {ngram[0] for ngram in self.pools[seq.id].ngrams}:
                assert self.generator.rows[seq.id].pool.starting_with(token) == self.pools[seq.id].after(token)

    def check_window(self, seq, levels, outputs, after):
        if len(levels) == self.config.ngram_size - 1:  # full: the oldest level goes, columns are n-grams
            for c, output in enumerate(outputs):
                self.pools[seq.id].add((*(level[c] for level in levels), output))
            self.num_ngrams += len(outputs)
            assert after[:-1] == levels[1:]
        else:  # being filled: a column goes, a level comes
            assert after[:-1] == [level[1:] for level in levels]
            outputs = outputs[1:]
        assert len(after[-1]) == len(after[0])
        for c, token in enumerate(after[-1]):
            if c < len(outputs) and outputs[c] not in seq.eos_token_ids:
                assert token == outputs[c]
            else:
                assert token in seq.tokens[: seq.prompt_length]


# ---- the data structures ----------------------------------------------------------------------------------------------


@settings(max_examples=200, deadline=None)
@given(size=st.integers(1, 3), n=st.integers(2, 3), texts=st.lists(st.lists(st.integers(0, 2), max_size=9), max_size=5))
def test_pool_equals_a_list(size, n, texts):
    pool, model = NGramPool(size), Pool(size)
    for text in texts:
        pool.add_text(text, n)
        model.add_text(text, n)
        for token in range(3):
            assert pool.starting_with(token) == model.after(token)
            assert len(pool.starting_with(token)) <= size


@settings(max_examples=100, deadline=None)
@given(st.data())
def test_generator_equals_the_model_of_it(data):
    """Any window, batch, limits and outputs, over rounds; drafts that were cut for want of memory; rows that leave."""
    config = parse_config({
        "method": "lookahead", "window_size": data.draw(st.integers(1, 4)), "ngram_size": data.draw(st.integers(2, 4)),
        "guess_set_size": data.draw(st.integers(1, 3)), "pool_from_prompt": data.draw(st.booleans()),
        "share_pool": data.draw(st.booleans()),
    })  # fmt: skip
    generator = LookaheadGenerator(config, TARGET)
    Watch(generator)
    ids, rows = st.integers(0, 4), []
    random = np.random.default_rng(data.draw(st.integers(0, 999)))
    for _ in range(5):
        if not rows or data.draw(st.booleans()):
            ends = frozenset(data.draw(st.lists(ids, max_size=1)))
            prompt = data.draw(st.lists(ids, min_size=1, max_size=8))
            rows.append(Sequence(prompt, 1000, eos_token_ids=ends, seed=data.draw(st.sampled_from([0, -3, 2**63 - 1]))))
            generator.start(rows[-1])
        limits = [data.draw(st.integers(0, config.depth)) for _ in rows]
        if any(limits):  # the loop does not ask for proposals of nothing
            trees = generator.propose(rows, limits)
            cut = [data.draw(st.sampled_from([n, n, n // 2])) for n in trees.lengths]
            trees = DraftTrees(trees.tokens, cut, trees.parents)
        else:
            trees = DraftTrees.empty(len(rows))
        new = [data.draw(st.lists(ids, min_size=1, max_size=3)) for _ in rows]
        for seq, tokens in zip(rows, new, strict=True):
            seq.tokens += tokens
        num_logits = trees.num_nodes + len(rows)
        logits = torch.from_numpy(random.permutation(num_logits * 5).reshape(num_logits, 5)).float()
        outcome = StepOutcome(rows, trees, [[] for _ in rows], new, SimpleNamespace(logits=logits))
        generator.observe(outcome)
        if len(rows) > 1 and data.draw(st.booleans()):
            generator.evict(rows[0])
            generator.stop(rows.pop(0))
    for seq in rows:
        generator.stop(seq)
    assert generator.rows == {}
    assert config.share_pool or generator.spaces.shared[""].followers == {}


def test_a_row_that_left_takes_its_logits_with_it():
    """A row may end while its step is pending: those behind it read their own logits, not its."""

    def windows(gone: bool) -> list[list[int]]:
        config = parse_config({**DEFAULT, "ngram_size": 3})
        generator = LookaheadGenerator(config, TARGET)
        rows = [Sequence([1, 2, 3], 100, seed=1), Sequence([3, 4], 100, seed=2)]
        for seq in rows:
            generator.start(seq)
        random = np.random.default_rng(0)
        for _ in range(3):
            trees = generator.propose(rows, [config.depth] * 2)
            for seq in rows:
                seq.tokens.append(1)
            roots = [0, trees.lengths[0] + 1]
            logits = torch.from_numpy(random.random((trees.num_nodes + 2, 50))).float()
            there = [1] if gone else [0, 1]
            outcome = StepOutcome(
                [rows[i] for i in there], trees.select(there), [[] for _ in there], [[1] for _ in there],
                SimpleNamespace(logits=logits), root_rows=[roots[i] for i in there],
            )  # fmt: skip
            generator.observe(outcome)
            if gone:  # it goes on in the other one
                twin = StepOutcome(
                    rows[:1], trees.select([0]), [[]], [[1]], SimpleNamespace(logits=logits), root_rows=[0]
                )
                generator.observe(twin)
        return generator.rows[rows[1].id].window.tokens.tolist()

    assert windows(gone=True) == windows(gone=False)


def test_window_of_the_papers_size():
    """W = 7 and N = 5: after three steps four levels of seven columns, 27 nodes beside the last token."""
    window = Window(parse_config(DEFAULT), Sequence([1, 2, 3], 100))
    shapes = [window.tokens.shape]
    for step in range(5):
        window.advance(np.full(window.num_columns(9), 10 + step))
        shapes.append(window.tokens.shape)
    assert shapes == [(1, 10), (2, 9), (3, 8), (4, 7), (4, 7), (4, 7)]
    assert [set(level[1:]) for level in window.tokens.tolist()] == [{11}, {12}, {13}, {14}]
    generator = LookaheadGenerator(parse_config(DEFAULT), TARGET)
    assert generator.max_draft_nodes == 27 + 7 * 4 and generator.config.num_speculative_tokens == 9


# ---- in the loop ------------------------------------------------------------------------------------------------------


@pytest.fixture
def model():
    yield (made := tiny_llama())
    for decoder in integration.kept_decoders(made):
        assert not getattr(decoder.generator, "rows", None)
    assert_clean(made)


CONFIGS = [
    DEFAULT,
    SMALL,
    OWN,
    {**DEFAULT, "window_size": 1},
    {**DEFAULT, "ngram_size": 2, "num_speculative_tokens": 3},
]


@pytest.mark.parametrize(("config", "lengths"), covering(CONFIGS, [[5, 23, 1], [9]]), ids=str)
def test_greedy_output_is_plain(model, config, lengths):
    assert_greedy_is_plain(model, config, lengths, chunks=(2048, 4))


@pytest.mark.parametrize("config", [DEFAULT, SMALL, OWN], ids=json.dumps)
def test_every_step_equals_the_model_of_it(model, config):
    """Inside `generate()`: ragged rows, prompts in chunks, end tokens, drafts shortened near the end."""
    config = {**config, "prefill_chunk_size": 7}
    watch = Watch(integration.get_decoder(model, parse_config(config)).generator)
    arguments = dict(**ragged([5, 23, 12]), max_new_tokens=30, eos_token_id=[7, 11])
    out = model.generate(**arguments, speculative_config=config)
    assert torch.equal(out, model.generate(**arguments))
    assert watch.num_ngrams > 40 and watch.num_guesses > 20 and watch.num_narrow > 0


def test_pages_run_out(model):
    """Drafts cut for want of blocks, and rows preempted: the text stays plain and the windows stay right."""
    inputs = ragged([12, 12, 12, 12])
    plain = model.generate(**inputs, max_new_tokens=30)
    config = {**DEFAULT, "num_blocks": 30, "block_size": 4, "prefill_chunk_size": 8}
    Watch(integration.get_decoder(model, parse_config(config)).generator)
    assert torch.equal(model.generate(**inputs, max_new_tokens=30, speculative_config=config), plain)


def test_sampling_does_not_depend_on_drafts(model):
    """Coupled: the tokens of decoding without drafts; by rejection: siblings that repeat a token are served too."""
    assert_sampling_does_not_depend_on_drafts(model, CONFIGS, temperature=0.5, top_p=0.9)


def test_one_pool_for_all_calls_or_one_per_sequence(model):
    def call(config):
        out = model.generate(**ragged([9]), max_new_tokens=40, return_dict_in_generate=True, speculative_config=config)
        return out.speculation.mean_accepted_length

    own = {**DEFAULT, "share_pool": False}
    assert call(own) == call(own)
    first, second = call(DEFAULT), call(DEFAULT)
    assert second > first
    hf_specdec.release(model)
    assert call(DEFAULT) == first


def test_bundled_model(tiny_model, tiny_tokenizer):
    assert accepted_length_on_bundled(tiny_model, tiny_tokenizer, DEFAULT) > 1.2


def test_transformers_own_loop(model):
    """It verifies one chain: the window stays at home, and the pool learns from the text alone."""
    with hf_specdec.assisted_loop(model, {**OWN, "ngram_size": 2}) as drafter:
        inputs, drafts = ragged([20]), []
        drafter.get_candidates = lambda ids: drafts.append(type(drafter).get_candidates(drafter, ids)) or drafts[-1]
        out = model.generate(**inputs, max_new_tokens=60, prompt_lookup_num_tokens=1)
        assert torch.equal(out, model.generate(**inputs, max_new_tokens=60))
        assert any(ids.shape[1] > before for (ids, _), before in zip(drafts, range(20, 80), strict=False))
        window = drafter.generator.rows[drafter.sequence.id].window
        assert window.tokens.shape[0] == 1, "never advanced"
    assert drafter.generator.rows == {}


# ---- its keys ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("changes", "message"), [
    ({"window_size": 0}, "'window_size'.*at least 1"),
    ({"ngram_size": 1}, "'ngram_size'.*at least 2"),
    ({"guess_set_size": 0}, "'guess_set_size'.*at least 1"),
    ({"guess_set_size": 2.0}, "'guess_set_size'"),
    ({"pool_from_prompt": "yes"}, "'pool_from_prompt'.*true or false"),
    ({"share_pool": None}, "'share_pool'.*true or false"),
    ({"num_speculative_tokens": 10}, "9 tokens deep"),
    ({"level": 5}, "no key 'level'"),
    ({"guess_size": 5}, "did you mean 'guess_set_size'"),
])  # fmt: skip
def test_bad_keys(changes, message):
    with pytest.raises(SpeculativeConfigError, match=message):
        parse_config({**DEFAULT, **changes})


@pytest.mark.parametrize("config", [
    *CONFIGS, {**DEFAULT, "num_speculative_tokens": 5}, {**DEFAULT, "num_speculative_tokens": "auto"},
    {**DEFAULT, "num_speculative_tokens_per_batch_size": {1: 9, 9: 0}},
], ids=json.dumps)  # fmt: skip
def test_configurations_survive_a_round_trip(config):
    config = assert_round_trips(config)
    if config.draft_length == "auto":
        assert config.num_speculative_tokens == config.depth
