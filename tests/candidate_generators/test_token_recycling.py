"""Token Recycling against a plain-Python model of it, step by step, and its outputs against plain `generate()`."""

import itertools
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
from oracle import VOCAB, assert_clean, ragged, tiny_llama

import hf_specdec
from hf_specdec import SpeculativeConfigError, integration, parse_config
from hf_specdec.candidate_generators.token_recycling import SuccessorMatrices, TokenRecyclingGenerator, best_tokens
from hf_specdec.core.outcome import StepOutcome
from hf_specdec.core.output import PackedOutput
from hf_specdec.core.sequence import Sequence

TREE = {"method": "token_recycling"}
CHAIN = {"method": "token_recycling", "use_tree": False, "num_speculative_tokens": 4}
SMALL = {
    "method": "token_recycling",
    "speculative_token_tree": [[0], [1], [0, 0], [0, 2], [1, 0], [0, 0, 1]],
    "num_successors": 3,
}


class Recycler:
    """Token Recycling with lists, dicts and float64: no code shared with the package."""

    def __init__(self, paths, k):
        self.k, self.rows = k, {}
        self.paths = sorted({tuple(p[:n]) for p in paths for n in range(1, len(p) + 1)}, key=lambda p: (len(p), p))

    def draft(self, last, limit):
        """(tokens, parents) of the tree below `last`."""
        found, tokens, parents = {(): last}, [], []
        number = {(): -1}
        for path in self.paths:
            row = self.rows.get(found.get(path[:-1]), [])
            if len(path) <= limit and path[-1] < len(row):
                number[path], found[path] = len(tokens), row[path[-1]]
                tokens.append(found[path])
                parents.append(number[path[:-1]])
        return tokens, parents

    def fed(self, token, logits):
        self.rows[token] = sorted(range(len(logits)), key=lambda t: -float(logits[t]))[: self.k]

    def read(self, text):
        for a, b in itertools.pairwise(text):
            self.rows[a] = ([b] + [t for t in self.rows.get(a, []) if t != b])[: self.k]

    def copy(self):
        copy = Recycler(self.paths, self.k)
        copy.rows = dict(self.rows)
        return copy

    def table(self, vocab_size):
        """As the matrix should hold it."""
        rows = [self.rows.get(token, []) for token in range(vocab_size)]
        return [row + [vocab_size] * (self.k - len(row)) for row in rows]


class Recyclers:
    """Everybody's matrix and those of the sequences."""

    def __init__(self, config):
        self.config = config = parse_config(config)
        paths = config.paths if config.use_tree else [(0,) * config.num_speculative_tokens]
        self.shared, self.own = Recycler(paths, config.num_successors), {}

    def meet(self, sequences):
        """Sequences take part from here on."""
        for seq in sequences:
            if seq.id not in self.own:
                self.own[seq.id] = self.shared.copy() if self.config.matrix_per_sequence else self.shared
                if self.config.recycle_prompt == "text":
                    self.own[seq.id].read(seq.tokens)
                    self.shared.read(seq.tokens)

    def draft(self, seq, limit):
        return self.own[seq.id].draft(seq.tokens[-1], limit)

    def fed(self, pairs, logits):
        self.meet([seq for seq, _ in pairs])
        for (seq, token), row in zip(pairs, logits, strict=True):
            self.own[seq.id].fed(token, row)
            self.shared.fed(token, row)

    def check(self, generator, vocab_size):
        tables = generator.matrices.rows[:, :-1]
        assert tables[0].tolist() == self.shared.table(vocab_size)
        for seq_id, matrix in generator.matrix_of.items():
            assert tables[matrix].tolist() == self.own[seq_id].table(vocab_size)
        assert (generator.matrices.rows[:, -1] == vocab_size).all()


# ---- the data structure -----------------------------------------------------------------------------------------------


def test_the_published_tree():
    config = parse_config(TREE)
    assert parse_config({**TREE, "speculative_token_tree": "token_recycling_80"}).paths == config.paths
    sizes = [len(list(level)) for _, level in itertools.groupby(config.paths, key=len)]
    assert sizes == [8, 21, 25, 15, 8, 3] and config.num_speculative_tokens == 6
    nodes = set(map(tuple, config.paths))
    assert len(nodes) == 80
    for *above, rank in nodes:  # with every node its parent and its better siblings
        assert not above or tuple(above) in nodes
        assert rank == 0 or (*above, rank - 1) in nodes


@settings(max_examples=100, deadline=None)
@given(st.data())
def test_matrix_equals_lists(data):
    """Writes with repeated tokens, text, look-ups of what was never written: as sequential lists do it."""
    vocab_size = data.draw(st.integers(2, 9))
    k = data.draw(st.integers(1, min(4, vocab_size)))
    matrices = SuccessorMatrices(vocab_size, k, "cpu")
    models = {matrices.new(): Recycler([], k)}
    ids = st.integers(0, vocab_size - 1)
    for _ in range(data.draw(st.integers(1, 6))):
        if data.draw(st.booleans()):
            models[matrices.copy()] = models[0].copy()
        numbers = st.sampled_from(sorted(models))
        tokens = data.draw(st.lists(ids, min_size=1, max_size=12))
        if data.draw(st.booleans()):
            where = [data.draw(numbers) for _ in tokens]
            rows = [data.draw(st.permutations(range(vocab_size)))[:k] for _ in tokens]
            matrices.write(torch.tensor(where), torch.tensor(tokens), torch.tensor(rows))
            for number, token, row in zip(where, tokens, rows, strict=True):  # the later one wins
                models[number].rows[token] = row
        else:
            distinct, number = sorted(set(tokens)), data.draw(numbers)
            followers = [data.draw(ids) for _ in distinct]
            matrices.move_to_front(number, torch.tensor(distinct), torch.tensor(followers))
            for pair in zip(distinct, followers, strict=True):
                models[number].read(pair)
        for number, model in models.items():
            assert matrices.rows[number].tolist() == [*model.table(vocab_size), [vocab_size] * k]
        if len(models) > 1 and data.draw(st.booleans()):
            matrices.free.append(max(models))
            del models[max(models)]
    matrices.free = list(range(1, len(matrices.rows)))
    matrices.resize(1)
    assert matrices.rows.tolist() == [[*models[0].table(vocab_size), [vocab_size] * k]] and matrices.free == []


@settings(max_examples=60, deadline=None)
@given(rows=st.integers(0, 5), vocab_size=st.integers(1, 2000), k=st.integers(1, 9), seed=st.integers(0, 999))
def test_best_tokens_equal_a_full_sort(rows, vocab_size, k, seed):
    k = min(k, vocab_size)
    logits = torch.from_numpy(
        np.random.default_rng(seed).permutation(rows * vocab_size).reshape(rows, vocab_size) - 7.5
    )
    expected = logits.argsort(dim=1, descending=True)[:, :k]
    assert torch.equal(best_tokens(logits.float(), k), expected)


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_generator_equals_the_model_of_it(data):
    """Any batch, limits and outputs: every proposal and the matrix after every step, with rows that come and go."""
    settings_of = data.draw(st.sampled_from([TREE, CHAIN, SMALL, {**SMALL, "num_speculative_tokens": 2}]))
    settings_of = {
        **settings_of, "recycle_prompt": data.draw(st.sampled_from(["text", None])), "matrix_per_sequence": data.draw(st.booleans()),
    }  # fmt: skip
    vocab_size = data.draw(st.integers(8, 14))
    models, config = Recyclers(settings_of), parse_config(settings_of)
    generator = TokenRecyclingGenerator(config, SimpleNamespace(device=torch.device("cpu"), vocab_size=vocab_size))
    ids = st.integers(0, vocab_size - 1)
    rows = []
    random = np.random.default_rng(data.draw(st.integers(0, 999)))
    for _ in range(4):
        if not rows or data.draw(st.booleans()):
            rows.append(Sequence(data.draw(st.lists(ids, min_size=1, max_size=8)), 1000))
            generator.start(rows[-1])
        limits = [data.draw(st.integers(0, config.num_speculative_tokens)) for _ in rows]
        trees = generator.propose(rows, limits)
        trees.check()
        if any(limits):
            models.meet(rows)
        fed = []
        for i, (seq, limit) in enumerate(zip(rows, limits, strict=True)):
            assert drafted(trees, i) == (models.draft(seq, limit) if limit else ([], []))
            fed += [(seq, token) for token in [seq.tokens[-1], *drafted(trees, i)[0]]]
        logits = random.permutation(len(fed) * vocab_size).reshape(len(fed), vocab_size) / 10
        new = [data.draw(st.lists(ids, min_size=1, max_size=4)) for _ in rows]
        for seq, tokens in zip(rows, new, strict=True):
            seq.tokens += tokens
        output = PackedOutput(torch.from_numpy(logits).float(), None, {})
        generator.observe(StepOutcome(rows, trees, [[] for _ in rows], new, output))
        models.fed(fed, logits)
        models.check(generator, vocab_size)
        if data.draw(st.booleans()):
            generator.evict(rows[-1])  # goes on later, with its text
            del models.own[rows[-1].id]
        if len(rows) > 1 and data.draw(st.booleans()):
            generator.stop(rows.pop(0))
    for seq in rows:
        generator.stop(seq)
    generator.release()
    assert generator.matrix_of == {} and len(generator.matrices.rows) == 1


# ---- in the loop ------------------------------------------------------------------------------------------------------


@pytest.fixture
def model():
    yield (made := tiny_llama())
    for decoder in integration.kept_decoders(made):
        if decoder.config.method == "token_recycling":
            assert decoder.generator.matrix_of == {} and len(decoder.generator.matrices.rows) == 1
    assert_clean(made)


CONFIGS = [
    TREE,
    CHAIN,
    SMALL,
    {**TREE, "recycle_prompt": "logits"},
    {**CHAIN, "recycle_prompt": None},
    {**TREE, "matrix_per_sequence": False},
]


@pytest.mark.parametrize(("config", "lengths"), covering(CONFIGS, [[5, 23, 1], [9]]), ids=str)
def test_greedy_output_is_plain(model, config, lengths):
    # The last call knows what the one before it learned.
    assert_greedy_is_plain(model, config, lengths, chunks=(2048, 4, 4))


@pytest.mark.parametrize(
    "config", [SMALL, {**SMALL, "recycle_prompt": "logits"}, {**CHAIN, "matrix_per_sequence": False}], ids=json.dumps
)
def test_every_step_equals_the_model_of_it(model, config):
    """Inside `generate()`, prompts in chunks, ragged rows that end at different times: each proposal and each update."""
    config = {**config, "prefill_chunk_size": 7}
    by_hand, generator = Recyclers(config), integration.get_decoder(model, parse_config(config)).generator
    propose, observe, steps = generator.propose, generator.observe, []
    whole_prompts = config.get("recycle_prompt") == "logits"

    def checked_propose(sequences, limits):
        trees = propose(sequences, limits)
        by_hand.meet(sequences)
        for i, (seq, limit) in enumerate(zip(sequences, limits, strict=True)):
            assert drafted(trees, i) == by_hand.draft(seq, limit)
        steps.append(trees.num_nodes)
        return trees

    def checked_observe(outcome):
        nodes = {seq.id: drafted(outcome.trees, i)[0] for i, seq in enumerate(outcome.sequences)}
        fed = []
        for (seq, end), own in zip(outcome.chunks, outcome.num_own, strict=True):
            if whole_prompts:
                fed += [(seq, token) for token in seq.tokens[end - own : end] + nodes.get(seq.id, [])]
            elif seq.id in nodes:
                fed += [(seq, token) for token in [seq.tokens[end - 1], *nodes[seq.id]]]
        logits = outcome.output.all_logits if whole_prompts else outcome.output.logits
        assert logits.shape == (len(fed), VOCAB) and (outcome.output.all_logits is None) != whole_prompts
        by_hand.fed(fed, logits.double().tolist())
        observe(outcome)
        by_hand.check(generator, VOCAB)

    generator.propose, generator.observe = checked_propose, checked_observe
    inputs = ragged([5, 23, 12])
    plain = model.generate(**inputs, max_new_tokens=30, eos_token_id=[7, 11])
    assert torch.equal(
        model.generate(**inputs, max_new_tokens=30, eos_token_id=[7, 11], speculative_config=config), plain
    )
    assert len(steps) > 5 and max(steps) > 6


@pytest.mark.long
def test_sampling_does_not_depend_on_drafts(model):
    """Coupled: the tokens of decoding without drafts; by rejection: padded and pruned trees are served too."""
    assert_sampling_does_not_depend_on_drafts(model, CONFIGS, temperature=0.7, top_p=0.9)


def test_it_remembers_between_calls_until_released(model):
    def call():
        out = model.generate(**ragged([9]), max_new_tokens=40, return_dict_in_generate=True, speculative_config=TREE)
        return out.speculation.mean_accepted_length

    first, second = call(), call()
    assert second > first
    hf_specdec.release(model)
    assert call() == first


def test_nothing_known_nothing_drafted(model):
    """No row is written before the first step, so its draft is empty; later trees hold only what is known."""
    config = {**TREE, "recycle_prompt": None}
    out = model.generate(**ragged([9]), max_new_tokens=2, return_dict_in_generate=True, speculative_config=config)
    assert out.speculation.num_draft_tokens == 0
    generator = integration.get_decoder(model, parse_config(config)).generator
    known = (generator.matrices.rows[0, :-1] < VOCAB).any(1).nonzero().flatten().tolist()
    assert known == sorted(set(ragged([9])["input_ids"][0, -1:].tolist() + out.sequences[0, 9:-1].tolist()))
    assert generator.matrices.num_bytes == (VOCAB + 1) * (8 + 1) * 4


def test_bundled_model(tiny_model, tiny_tokenizer):
    assert accepted_length_on_bundled(tiny_model, tiny_tokenizer, TREE) > 1.5


@pytest.mark.parametrize(
    "config", [TREE, pytest.param({**CHAIN, "recycle_prompt": "logits"}, marks=pytest.mark.slow)], ids=json.dumps
)
def test_transformers_own_loop(tiny_model, tiny_tokenizer, config):
    """It verifies one chain, and shows the scores behind it: some drafts are accepted, more in the second text."""
    inputs = tiny_tokenizer("<|user|>Write a story about a fox.<|end|><|assistant|>", return_tensors="pt")
    plain = tiny_model.generate(**inputs, max_new_tokens=96)
    rounds = []
    with hf_specdec.assisted_loop(tiny_model, config) as drafter:
        for _ in range(2):
            drafts = []
            drafter.get_candidates = lambda ids, drafts=drafts: (
                drafts.append(ids) or type(drafter).get_candidates(drafter, ids)
            )
            assert torch.equal(tiny_model.generate(**inputs, max_new_tokens=96, prompt_lookup_num_tokens=1), plain)
            rounds.append(len(drafts))
    assert 85 > rounds[0] > rounds[1], rounds


# ---- its keys ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("changes", "message"), [
    ({"speculative_token_tree": []}, "child-rank paths"),
    ({"speculative_token_tree": [[0], [-1]]}, "child-rank paths"),
    ({"speculative_token_tree": [[0], []]}, "child-rank paths"),
    ({"speculative_token_tree": [0, 1]}, "child-rank paths"),
    ({"speculative_token_tree": "[(0,), "}, "cannot be read"),
    ({"speculative_token_tree": "token_recycling_8"}, "did you mean 'token_recycling_80'"),
    ({"speculative_token_tree": "medusa_mc_sim_7b_63"}, "rank 9, but num_successors is 8"),
    ({"speculative_token_tree": [[0], [8]]}, "rank 8, but num_successors is 8"),
    ({"speculative_token_tree": [[3, 0]], "num_successors": 3}, "rank 3, but num_successors is 3"),
    ({"speculative_token_tree": [[0]], "use_tree": False}, "drafts a chain"),
    ({"num_speculative_tokens": 7}, "6 tokens deep"),
    ({"num_successors": 0}, "'num_successors'.*at least 1"),
    ({"num_successors": True}, "'num_successors'"),
    ({"use_tree": 1}, "'use_tree'.*true or false"),
    ({"matrix_per_sequence": "no"}, "'matrix_per_sequence'.*true or false"),
    ({"recycle_prompt": "logit"}, "did you mean 'logits'"),
    ({"recycle_prompts": "text"}, "did you mean 'recycle_prompt'"),
])  # fmt: skip
def test_bad_keys(changes, message):
    with pytest.raises(SpeculativeConfigError, match=message):
        parse_config({**TREE, **changes})


def test_more_successors_than_tokens(model):
    with pytest.raises(SpeculativeConfigError, match="more than the target's 61 tokens"):
        model.generate(**ragged([3]), max_new_tokens=2, speculative_config={**TREE, "num_successors": 62})


@pytest.mark.parametrize("config", [
    *CONFIGS, {**TREE, "num_speculative_tokens": 5}, {**TREE, "num_speculative_tokens": "auto"}, {**TREE, "num_successors": 4},
    {**TREE, "speculative_token_tree": "[(0,), (1,), (0, 0)]"}, {**CHAIN, "num_speculative_tokens": 5},
    {**TREE, "num_speculative_tokens_per_batch_size": {1: 4, 9: 0}},
], ids=json.dumps)  # fmt: skip
def test_configurations_survive_a_round_trip(config):
    config = assert_round_trips(config)
    if config.use_tree and config.draft_length == "auto":
        assert config.num_speculative_tokens == config.depth
