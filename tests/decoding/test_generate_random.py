"""Random combinations of `generate()`'s arguments: sequences, calls of criteria and puts of streamers are plain decoding's."""

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from oracle import RecentTokensPenalty, Recorder, ragged
from transformers import LogitsProcessorList, StoppingCriteria, StoppingCriteriaList

METHODS = ["none", "ngram", "chain", "tree"]


class Recorded(StoppingCriteria):
    """Calls a rule and keeps the ids it was called with."""

    def __init__(self, rule):
        self.rule, self.calls = rule, []

    def __call__(self, input_ids, scores, **kwargs):
        self.calls.append(input_ids.clone())
        return self.rule(input_ids)


RULES = {
    "per row": lambda ids: ids[:, -1] % 7 == 5,
    "scalar": lambda ids: ids.shape[1] > 20,
    "across rows": lambda ids: torch.full((len(ids),), bool((ids[:, -1] % 5 == 2).sum() >= 2 or ids.shape[1] > 24)),
}
EOS = st.sampled_from([5, [5, 9, 11], list(range(10, 25))])
ARGUMENTS = st.fixed_dictionaries(
    {},
    optional={
        "repetition_penalty": st.just(1.3),
        "no_repeat_ngram_size": st.sampled_from([2, 3]),
        "bad_words_ids": st.just([[7], [8, 9]]),
        "sequence_bias": st.just([[[10], 2.0], [[11, 12], -4.0]]),
        "suppress_tokens": st.just([6, 7]),
        "begin_suppress_tokens": st.just([6, 7, 8]),
        "forced_eos_token_id": st.just(5),
        "encoder_repetition_penalty": st.just(1.4),
        "encoder_no_repeat_ngram_size": st.just(2),
        "prefix_allowed_tokens_fn": st.just(lambda row, ids: [4 + (int(ids[-1]) + row + k) % 50 for k in (1, 5, 9)]),
        "logits_processor": st.just(LogitsProcessorList([RecentTokensPenalty()])),
        "renormalize_logits": st.booleans(),
        "use_cache": st.booleans(),
    },
)
WITH_EOS = st.fixed_dictionaries(
    {"eos_token_id": EOS},
    optional={
        "min_new_tokens": st.integers(1, 10),
        "min_length": st.integers(1, 20),
        "exponential_decay_length_penalty": st.just((3, 1.2)),
    },
)
LENGTHS = st.one_of(
    st.just({}),
    st.fixed_dictionaries({"max_new_tokens": st.integers(1, 30)}),
    st.fixed_dictionaries({"max_length": st.integers(15, 40)}),
)
KNOBS = st.fixed_dictionaries(
    {}, optional={"block_size": st.sampled_from([1, 3, 8]), "prefill_chunk_size": st.sampled_from([1, 4, 7])}
)


def check_against_plain(model, config, lengths, seed, arguments, rule, streams):
    inputs, results = ragged(lengths, seed=seed), []
    for speculative_config in (None, config):
        criterion, streamer = Recorded(RULES[rule]) if rule else None, Recorder() if streams else None
        output = model.generate(
            **inputs, **arguments, speculative_config=speculative_config, streamer=streamer,
            stopping_criteria=StoppingCriteriaList([criterion] if criterion else []),
        )  # fmt: skip
        results.append((output, criterion.calls if criterion else [], streamer.puts if streamer else []))
    (plain, plain_calls, plain_puts), (ours, calls, puts) = results
    assert torch.equal(ours, plain)
    assert len(calls) == len(plain_calls) and all(torch.equal(a, b) for a, b in zip(calls, plain_calls, strict=True))
    assert len(puts) == len(plain_puts) and all(torch.equal(a, b) for a, b in zip(puts, plain_puts, strict=True))


CASE = {
    "method": st.sampled_from(METHODS),
    "knobs": KNOBS,
    "lengths": st.lists(st.integers(1, 14), min_size=1, max_size=5),
    "seed": st.integers(0, 1000),
    "arguments": st.builds(lambda a, b, c: {**a, **b, **c}, ARGUMENTS, st.one_of(st.just({}), WITH_EOS), LENGTHS),
    "rule": st.sampled_from([None, None, *RULES]),
    "streams": st.booleans(),
}
OPTIONS = dict(deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))


@pytest.mark.long
@settings(max_examples=40, **OPTIONS)
@given(**CASE)
def test_random_combinations(model, configs, method, knobs, lengths, seed, arguments, rule, streams):
    check_against_plain(model, {**configs[method], **knobs}, lengths, seed, arguments, rule, streams)


@pytest.mark.slow
@settings(max_examples=500, **(OPTIONS | {"derandomize": False}))
@given(**CASE)
def test_many_random_combinations(model, configs, method, knobs, lengths, seed, arguments, rule, streams):
    check_against_plain(model, {**configs[method], **knobs}, lengths, seed, arguments, rule, streams)
