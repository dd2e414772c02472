"""Steps that begin before the last one's tokens are known: tokens, steps and memory are those of one step at a time."""

import pytest
import torch
from cache_checks import check_blocks
from families import make
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from oracle import assert_clean, ragged
from replayed_graphs import defined_attention, graphs_in_python  # noqa: F401
from scheduling import make_decoder
from transformers import StoppingCriteria, StoppingCriteriaList

import hf_specdec
from hf_specdec.candidate_generators.ngram import NGramGenerator
from hf_specdec.core.sequence import UNKNOWN, Sequence
from hf_specdec.decoding import SpeculativeDecoder


class StopAt(StoppingCriteria):
    """Ends rows whose last token is in a set, which rows do not know of."""

    def __init__(self, ids):
        self.ids = torch.tensor(ids)

    def __call__(self, input_ids, scores, **kwargs):
        return torch.isin(input_ids[:, -1], self.ids)


CASE = {
    "method": st.sampled_from(["none", "none", "ngram", "chain", "no drafts"]),
    "rule": st.sampled_from(["coupled", "rejection", "block", "typical"]),
    "knobs": st.fixed_dictionaries(
        {"block_size": st.sampled_from([1, 4, 8])},
        optional={"prefill_chunk_size": st.sampled_from([3, 7]), "spare_blocks": st.integers(0, 12)},
    ),
    "lengths": st.lists(st.integers(1, 14), min_size=1, max_size=5),
    "arguments": st.fixed_dictionaries(
        {"max_new_tokens": st.integers(1, 20), "eos_token_id": st.sampled_from([None, 5, list(range(10, 25))])},
        optional={
            "do_sample": st.booleans(),
            "top_k": st.sampled_from([0, 5]),
            "temperature": st.just(0.7),
            "min_new_tokens": st.integers(1, 10),
            "repetition_penalty": st.just(1.3),
            "suppress_tokens": st.just([6, 7]),
        },
    ),
    "stop": st.sampled_from([None, None, list(range(30, 40))]),
    "seed": st.integers(0, 1000),
}
OPTIONS = dict(deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))


def check_against_one_at_a_time(model, configs, method, rule, knobs, lengths, arguments, stop, seed, **more):
    """Tokens and steps taken; and that nothing is left."""
    knobs = dict(knobs)
    config = {"rejection_sample_method": rule, "seed": seed, **more}
    config |= {"method": "none"} if method == "none" else configs["chain" if method == "no drafts" else method]
    if method == "no drafts":
        config |= {"num_speculative_tokens_per_batch_size": [[1, 2, 2], [3, 9, 0]]}
    if "spare_blocks" in knobs:  # on top of what the longest row needs
        knobs["num_blocks"] = knobs.pop("spare_blocks") + -(-(14 + 20 + 5) // knobs["block_size"])
    outputs = [
        model.generate(
            **ragged(lengths, seed=seed), **arguments, pad_token_id=0, return_dict_in_generate=True,
            stopping_criteria=StoppingCriteriaList([StopAt(stop)] if stop else []),
            speculative_config={**config, **knobs, "async_scheduling": wanted},
        )
        for wanted in (False, True)
    ]  # fmt: skip
    assert torch.equal(outputs[0].sequences, outputs[1].sequences)
    if "num_blocks" not in knobs:
        assert outputs[0].speculation["rows"] == outputs[1].speculation["rows"]
    assert_clean(model)


@settings(max_examples=40, **OPTIONS)
@given(**CASE)
def test_random_batches(model, configs, method, rule, knobs, lengths, arguments, stop, seed):
    check_against_one_at_a_time(model, configs, method, rule, knobs, lengths, arguments, stop, seed)


@pytest.mark.slow
@settings(max_examples=800, **(OPTIONS | {"derandomize": False}))
@given(**CASE)
def test_many_random_batches(model, configs, method, rule, knobs, lengths, arguments, stop, seed):
    check_against_one_at_a_time(model, configs, method, rule, knobs, lengths, arguments, stop, seed)


@pytest.mark.long
@settings(max_examples=10, **OPTIONS)
@given(**(CASE | {"method": st.sampled_from(["none", "no drafts"]), "rule": st.just("coupled")}))
def test_random_batches_as_graphs(
    model,
    configs,
    graphs_in_python,  # noqa: F811
    defined_attention,  # noqa: F811
    method,
    rule,
    knobs,
    lengths,
    arguments,
    stop,
    seed,
):
    """What a graph returns holds until the next forward, which here has begun before it is read."""
    check_against_one_at_a_time(model, configs, method, rule, knobs, lengths, arguments, stop, seed, cuda_graphs=True)
    assert not any(each.refused for each in graphs_in_python)


def test_a_row_that_is_removed_while_two_steps_are_pending(model):
    """Its blocks are free at once, and the others' tokens are what they would be."""
    prompts = [[5, 6, 7], [8, 9, 10, 11], [12, 13]]
    decoder: SpeculativeDecoder = make_decoder(model, {"method": "none", "block_size": 4})
    decoder.allocate(100, 3)
    rows = [Sequence(list(prompt), 20) for prompt in prompts]
    with decoder.active():
        for seq in rows:
            decoder.add(seq)
        first = decoder.begin(rows)
        assert decoder.can_begin_after(rows, first)
        second = decoder.begin(rows, after=first)
        decoder.remove(rows[1])
        results = [decoder.finish(first), decoder.finish(second)]
        left = [rows[0], rows[2]]
        third = decoder.begin(left)
        assert not decoder.can_begin_after(rows, third), "a row that is not in the pending step"
        decoder.finish(third)
        for seq in left:
            decoder.remove(seq)
    assert [[len(each.new_tokens) for each in step] for step in results] == [[1, 0, 1]] * 2
    check_blocks(decoder.cache.pool)
    assert decoder.cache.pool.num_used == 0
    for seq, prompt in zip(left, (prompts[0], prompts[2]), strict=True):
        plain = model.generate(torch.tensor([prompt]), max_new_tokens=3, do_sample=False)
        assert seq.tokens == plain[0].tolist()
    assert rows[1].tokens == prompts[1]


def test_a_prefix_is_registered_by_tokens_that_are_known(model):
    decoder: SpeculativeDecoder = make_decoder(model, {"method": "none", "block_size": 2})
    decoder.allocate(100, 1)
    seq = Sequence([5, 6, 7], 20)
    with decoder.active():
        decoder.add(seq)
        pending = decoder.begin([seq])
        for _ in range(6):
            following = decoder.begin([seq], after=pending)
            decoder.finish(pending)
            pending = following
        decoder.finish(pending)
        hashes = decoder.cache.tables[seq.id].hashes
        assert hashes and hashes == decoder.cache._block_hashes(seq.tokens, len(hashes), [])
        decoder.remove(seq)
    hf_specdec.release(model)


def test_no_draft_follows_a_token_that_is_not_known(model, monkeypatch):
    """Three rows do not draft. One of them waits for blocks, and two would draft."""
    inputs, drafted_after = ragged([14, 3, 6]), []
    plain = model.generate(**inputs, max_new_tokens=20)
    propose = NGramGenerator.propose

    def looking(self, sequences, limits):
        drafted_after.extend(seq.tokens[-1] for seq in sequences)
        return propose(self, sequences, limits)

    monkeypatch.setattr(NGramGenerator, "propose", looking)
    few = {"block_size": 4, "num_blocks": 16, "disable_by_batch_size": 2, "async_scheduling": True}
    config = {"method": "ngram", "prompt_lookup_min": 1, **few}
    assert torch.equal(model.generate(**inputs, max_new_tokens=20, speculative_config=config), plain)
    assert drafted_after and UNKNOWN not in drafted_after
    assert_clean(model)


def test_the_only_row_that_found_room_has_ended():
    """Two rows, of which the second waits for blocks when the next step begins, and the first turns out to have ended before."""
    model = make("Llama")
    ids = torch.tensor([[5, 6, 7, 8, 9, 6, 7], [3, 4, 3, 4, 3, 4, 3]])
    options = {"max_new_tokens": 24, "do_sample": False}
    model.generation_config.eos_token_id = int(model.generate(ids, **options)[0, 8])
    plain = model.generate(ids, **options)
    config = {"method": "none", "async_scheduling": True, "block_size": 8, "num_blocks": 5}
    assert torch.equal(model.generate(ids, **options, speculative_config=config), plain)
