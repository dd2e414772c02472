"""Two drafters as one: lossless, each keeps a consistent cache whoever's draft was verified, and the rules that choose."""

import pytest
import torch
from combinations import covering
from hypothesis import given, settings
from hypothesis import strategies as st
from oracle import assert_clean, drafter_of, ragged, tiny_llama
from scipy import stats

from hf_specdec import SpeculativeConfigError, integration, parse_config
from hf_specdec.candidate_generators.hybrid import HybridGenerator
from hf_specdec.core.draft_trees import DraftTrees
from hf_specdec.core.sequence import Sequence

NGRAM = {"method": "ngram", "prompt_lookup_min": 1, "prompt_lookup_max": 3}


@pytest.fixture(scope="module")
def draft(model, tmp_path_factory):
    path = tmp_path_factory.mktemp("drafter")
    drafter_of(model).save_pretrained(path)
    return {"method": "draft_model", "model": str(path)}


def hybrids(draft):
    chain = {**draft, "num_speculative_tokens": 3}
    tree = {**draft, "branching_factors": [2, 2]}
    return {
        "fallback": {"first": {**NGRAM, "num_speculative_tokens": 4}, "second": chain},
        "fallback, tree": {"first": tree, "second": NGRAM, "score_threshold": 2.5},
        "extend": {"first": chain, "second": NGRAM, "strategy": "extend", "num_speculative_tokens": 7},
        "never the first": {"first": chain, "second": {**draft, "branching_factors": [3, 1]}, "score_threshold": 99},
    }


NAMES = ["fallback", "fallback, tree", "extend", "never the first"]


@pytest.mark.parametrize(("name", "lengths"), covering(NAMES, [[5, 17, 9, 2], [9]]), ids=str)
def test_lossless(model, draft, name, lengths):
    config, inputs = {"method": "hybrid", **hybrids(draft)[name]}, ragged(lengths)
    plain = model.generate(**inputs, max_new_tokens=40)
    output = model.generate(**inputs, max_new_tokens=40, speculative_config=config, return_dict_in_generate=True)
    assert torch.equal(output.sequences, plain)
    assert output.speculation.mean_accepted_length > 1.3
    sampled = [
        model.generate(**inputs, max_new_tokens=30, do_sample=True, speculative_config={**c, "seed": 5})
        for c in (config, {"method": "none"})
    ]
    assert torch.equal(*sampled)
    assert_clean(model)


@pytest.mark.parametrize("name", NAMES)
def test_both_drafters_know_the_text(model, draft, name, monkeypatch):
    """After every step a drafter's cached keys are those of a drafter that read the text alone."""
    config = {"method": "hybrid", **hybrids(draft)[name]}
    checked, observe = [], HybridGenerator.observe

    def checking(self, outcome):
        observe(self, outcome)
        for part in self.parts:
            if not hasattr(part, "drafter"):
                continue
            for seq in outcome.sequences:
                length = part.cache.tables[seq.id].length
                assert length < len(seq.tokens)
                if length:
                    with torch.no_grad():
                        reference = drafter_of(model)(
                            torch.tensor([seq.tokens[:length]]), use_cache=True
                        ).past_key_values
                    for layer in range(len(part.cache.layers)):
                        keys, values = part.cache.read(seq.id)[layer]
                        torch.testing.assert_close(
                            keys.transpose(0, 1), reference.layers[layer].keys[0], atol=1e-4, rtol=1e-4
                        )
                        torch.testing.assert_close(
                            values.transpose(0, 1), reference.layers[layer].values[0], atol=1e-4, rtol=1e-4
                        )
                    checked.append(length)

    monkeypatch.setattr(HybridGenerator, "observe", checking)
    model.generate(**ragged([5, 17, 9]), max_new_tokens=25, speculative_config=config)
    assert len(checked) > 10
    integration.release(model)


def test_fallback_takes_each_row_from_the_better_drafter(model, draft):
    """A row whose text repeats is drafted for by n-gram, the other by the model; both in one step."""
    config = parse_config(
        {"method": "hybrid", "first": {**NGRAM, "num_speculative_tokens": 4}, "second": {**draft, "num_speculative_tokens": 2},
         "score_threshold": 3}
    )  # fmt: skip
    decoder = integration.get_decoder(model, config)
    generator = decoder.generator
    sequences = []
    for tokens in ([7, 8, 9, 10, 11, 7, 8], [20, 21, 22, 23]):
        sequences.append(Sequence(tokens, max_length=40))
    decoder.allocate(200, 2)
    with decoder.active():
        for seq in sequences:
            decoder.add(seq)
        trees = generator.propose(sequences, [4, 4])
    assert trees.lengths == [4, 2]
    assert trees.tokens[0].tolist() == [9, 10, 11, 7]
    for seq in sequences:
        decoder.remove(seq)
    decoder.release()
    assert_clean(model)


DRAWS = 3000  # a hybrid that kept all of the second's drafts would shift cells by more than ten standard deviations


@pytest.mark.parametrize("strategy", ["extend", pytest.param("fallback", marks=pytest.mark.slow)])
def test_rejection_has_the_targets_distribution(strategy):
    """Chains with probabilities continued by points; rows with and without probabilities in one batch."""
    model = tiny_llama(vocab_size=7, initializer_range=0.2, pad_token_id=None, bos_token_id=None)
    exits = {"method": "draft_model", "early_exit": 1, "num_speculative_tokens": 2 - (strategy == "extend")}
    parts = {"first": exits, "second": NGRAM} if strategy == "extend" else {"first": NGRAM, "second": exits}
    config = {"method": "hybrid", "strategy": strategy, "rejection_sample_method": "rejection", "seed": 1, **parts}
    ids = torch.tensor([[5, 6, 5, 6, 5]]).expand(DRAWS, -1)
    output = model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=2, do_sample=True, top_k=0, speculative_config=config
    )
    counts = torch.bincount(output[:, 5] * 7 + output[:, 6], minlength=49).numpy()
    with torch.no_grad():
        first = model(ids[:1]).logits[0, -1].softmax(0)
        after = [model(torch.cat([ids[:1], torch.tensor([[t]])], 1)).logits[0, -1].softmax(0) for t in range(7)]
    expected = torch.stack([p * q for p, q in zip(first, after, strict=True)]).double().flatten().numpy()
    assert stats.chisquare(counts, expected / expected.sum() * DRAWS).pvalue > 1e-3
    assert_clean(model)


def test_parts_draft_for_the_rule_of_each_call():
    """A decoder is kept from call to call, whatever the rule."""
    model = tiny_llama(vocab_size=7, initializer_range=0.2, pad_token_id=None, bos_token_id=None)
    parts = {"first": NGRAM, "second": {"method": "draft_model", "early_exit": 1}}
    ids = torch.tensor([[5, 6, 5, 6, 5]]).expand(64, -1)
    arguments = {"max_new_tokens": 6, "do_sample": True, "top_k": 0, "return_dict_in_generate": True}

    def accepted(rule):
        config = {"method": "hybrid", **parts, "rejection_sample_method": rule, "seed": 1}
        return model.generate(ids, **arguments, speculative_config=config).speculation["num_accepted_tokens"]

    kept = [accepted(rule) for rule in ("coupled", "rejection", "coupled")]
    integration.release(model)
    assert kept == [kept[0], accepted("rejection"), kept[0]]
    assert_clean(model)


def test_synthetic_rule(model):
    parts = {"first": NGRAM, "second": {"method": "draft_model", "early_exit": 1, "num_speculative_tokens": 5}}
    config = {"method": "hybrid", **parts, "rejection_sample_method": "synthetic", "synthetic_acceptance_length": 6}
    output = model.generate(
        **ragged([9]), max_new_tokens=20, do_sample=True, speculative_config=config, return_dict_in_generate=True
    )
    assert output.speculation["num_accepted_tokens"] == output.speculation["num_draft_tokens"] > 0


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({}, "'first'.* is missing"),
        ({"first": NGRAM}, "'second'.* is missing"),
        ({"first": NGRAM, "second": {"method": "hybrid", "first": NGRAM, "second": NGRAM}}, "has parts itself"),
        ({"first": NGRAM, "second": {"method": "ngrm"}}, "did you mean 'ngram'"),
        ({"first": NGRAM, "second": NGRAM, "strategy": "extended"}, "did you mean 'extend'"),
        ({"first": NGRAM, "second": NGRAM, "score_threshold": -1}, "at least 0"),
        ({"first": {**NGRAM, "deterministic": True}, "second": NGRAM}, "'first'.* 'deterministic', .* move it there"),
        ({"first": NGRAM, "second": {**NGRAM, "seed": 5}}, "'second'.* has 'seed', .* move it there"),
        ({"first": NGRAM, "second": {"method": "eagle3", "model": "x", "learn": True}}, "'second'.* has 'learn'"),
    ],
)
def test_bad_configurations(values, message):
    with pytest.raises(SpeculativeConfigError, match=message):
        parse_config({"method": "hybrid", **values})


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (
            {"first": NGRAM, "second": {"method": "draft_model", "early_exit": 1}, "strategy": "extend"},
            "does not continue",
        ),
        (
            {"first": {"method": "extract_hidden_states", "output_dir": "x"}, "second": NGRAM},
            "cannot be combined with others",
        ),
        ({"first": NGRAM, "second": {"method": "lookahead"}}, "cannot be combined with others"),
        (
            {
                "first": {"method": "draft_model", "early_exit": 1, "branching_factors": [2]},
                "second": NGRAM,
                "strategy": "extend",
            },
            "cannot be extended",
        ),
    ],
)
def test_combinations_that_cannot_work(model, values, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SpeculativeConfigError, match=message):
        model.generate(**ragged([7]), max_new_tokens=4, speculative_config={"method": "hybrid", **values})
    assert_clean(model)


def test_round_trip(draft):
    config = parse_config({"method": "hybrid", "first": NGRAM, "second": draft, "strategy": "extend"})
    assert parse_config(config.to_json()) == config
    assert config.num_speculative_tokens == 10


# per row: tokens of one proposal, and whether the row is taken from the second
TREES = st.lists(st.tuples(st.lists(st.integers(0, 9), max_size=5), st.booleans()), min_size=1, max_size=4)


@settings(max_examples=60, deadline=None)
@given(TREES, st.data())
def test_choose(rows, data):
    def proposal(branching, probs):
        tokens = [[(t + branching) % 10 for t in row] for row, _ in rows]
        parents = (
            [[data.draw(st.integers(-1, i - 1)) for i in range(len(row))] for row in tokens] if branching else None
        )
        trees = DraftTrees.from_lists(tokens, parents)
        if probs:
            trees.probs = torch.rand(len(rows), max(trees.tokens.shape[1], 1), 10)
        return trees

    first = proposal(data.draw(st.integers(0, 1)), data.draw(st.booleans()))
    second = proposal(data.draw(st.integers(0, 1)), data.draw(st.booleans()))
    chosen = DraftTrees.choose(first, second, [use for _, use in rows])
    chosen.check()
    for i, (_, use) in enumerate(rows):
        source = second if use else first
        n = source.lengths[i]
        assert chosen.lengths[i] == n
        assert chosen.tokens[i, :n].tolist() == source.tokens[i, :n].tolist()
        assert chosen.parent_index[i, :n].tolist() == source.parent_index[i, :n].tolist()
        if chosen.probs is not None and chosen.prob_index is not None:
            for node in range(n):
                own = chosen.probs[i, chosen.prob_index[i, node]]
                token = int(source.tokens[i, node])
                expected = source.probs[i, node] if source.probs is not None else torch.eye(10)[token]
                assert torch.equal(own, expected)
