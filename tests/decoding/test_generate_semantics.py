"""Everything a caller passes to `generate()` keeps its meaning: plain `generate()` in float32 is the oracle."""

import json
import subprocess
import sys

import pytest
import torch
import transformers
from oracle import VOCAB, RecentTokensPenalty, Recorder, assert_clean, ragged, tiny_llama
from paths import BUILDERS, ROOT
from transformers import (
    DynamicCache,
    GenerationConfig,
    LogitsProcessor,
    LogitsProcessorList,
    MistralConfig,
    MistralForCausalLM,
    StoppingCriteria,
    StoppingCriteriaList,
    WatermarkingConfig,
)
from transformers.generation.utils import GenerateDecoderOnlyOutput

import hf_specdec
from hf_specdec.core.names import CACHE
from hf_specdec.decoding.profile import PHASES, profiled

METHODS = ["none", "ngram", "chain", "tree"]
SHAPES = {"single": [9], "ragged": [6, 13, 1, 9]}


@pytest.fixture(params=METHODS)
def config(request, configs):
    return configs[request.param]


@pytest.fixture(params=SHAPES)
def inputs(request):
    return ragged(SHAPES[request.param])


class RowBias(LogitsProcessor):
    """A user's processor that tells rows apart by their place in the batch, and works in place."""

    def __init__(self, batch_size):
        self.bias = torch.randn(batch_size, VOCAB, generator=torch.Generator().manual_seed(3))

    def __call__(self, input_ids, scores):
        scores += self.bias
        return scores


PROCESSORS = {
    "min_new_tokens": {"min_new_tokens": 6, "eos_token_id": list(range(10, 40))},
    "min_length": {"min_length": 17, "eos_token_id": list(range(10, 40))},
    "repetition_penalty": {"repetition_penalty": 1.5},
    "no_repeat_ngram": {"no_repeat_ngram_size": 2},
    "bad_words": {"bad_words_ids": [[7], [58, 30], [24, 7, 49]]},
    "sequence_bias": {"sequence_bias": [[[10], 2.0], [[11, 12], -4.0]]},
    "suppress": {"suppress_tokens": [6, 7], "begin_suppress_tokens": [8, 9, 30]},
    "forced": {"forced_bos_token_id": 9, "forced_eos_token_id": 5},
    "exponential_decay": {"exponential_decay_length_penalty": (3, 1.3), "eos_token_id": 5},
    "encoder_repetition": {"encoder_repetition_penalty": 1.4},
    "encoder_ngram": {"encoder_no_repeat_ngram_size": 1},
    "prefix_allowed": {
        "prefix_allowed_tokens_fn": lambda row, ids: [4 + (int(ids[-1]) + row + k) % 50 for k in (1, 5, 9)]
    },
    "renormalize": {"renormalize_logits": True, "remove_invalid_values": True},
    "watermark": {"watermarking_config": WatermarkingConfig(bias=3.0)},
    "user": {"logits_processor": LogitsProcessorList([RecentTokensPenalty()])},
    "user row-wise": {"logits_processor": LogitsProcessorList([RowBias(4), RecentTokensPenalty()])},
    "several": {
        "repetition_penalty": 1.2,
        "no_repeat_ngram_size": 3,
        "bad_words_ids": [[9, 8]],
        "min_new_tokens": 3,
        "eos_token_id": [5, 6, 7],
    },
}


@pytest.mark.parametrize("name", PROCESSORS)
def test_processors(model, configs, name):
    arguments, inputs = PROCESSORS[name], ragged(SHAPES["ragged"])
    plain = model.generate(**inputs, max_new_tokens=16, **arguments)
    free = model.generate(**inputs, max_new_tokens=16)
    assert name in ("renormalize", "encoder_ngram") or not torch.equal(plain, free), "the processor must matter"
    for method in METHODS:
        assert torch.equal(
            model.generate(**inputs, max_new_tokens=16, speculative_config=configs[method], **arguments), plain
        ), method


@pytest.mark.parametrize(
    "limits",
    [
        {"max_new_tokens": 1}, {"max_new_tokens": 23}, {"max_length": 20}, {"max_new_tokens": 12, "eos_token_id": 5},
        {"max_new_tokens": 30, "eos_token_id": list(range(10, 25))}, {"max_new_tokens": 9, "use_cache": False}, {},
    ],
    ids=str,
)  # fmt: skip
def test_lengths_and_eos(model, config, inputs, limits):
    plain = model.generate(**inputs, **limits)
    assert torch.equal(model.generate(**inputs, speculative_config=config, **limits), plain)


@pytest.mark.parametrize("eos", [None, list(range(10, 25))], ids=["no eos", "eos"])
def test_streamers_get_the_same_puts(model, config, inputs, eos):
    recorders = [Recorder(), Recorder()]
    model.generate(**inputs, max_new_tokens=14, eos_token_id=eos, streamer=recorders[0])
    model.generate(**inputs, max_new_tokens=14, eos_token_id=eos, streamer=recorders[1], speculative_config=config)
    assert [each.ends for each in recorders] == [1, 1]
    assert len(recorders[0].puts) == len(recorders[1].puts)
    assert all(torch.equal(a, b) for a, b in zip(recorders[0].puts, recorders[1].puts, strict=True))


def finished_before(sequences, width, eos):
    """bool [n, B]: rows that had ended before each generated token; plain decoding's tensors mean nothing there."""
    is_eos = torch.isin(sequences[:, width:], torch.tensor(eos or [-1]))
    return (is_eos.long().cumsum(1) - is_eos.long()).T > 0


@pytest.mark.parametrize("eos", [None, list(range(10, 25))], ids=["no eos", "eos"])
def test_returned_tensors(model, config, inputs, eos):
    arguments = dict(
        max_new_tokens=12, eos_token_id=eos, repetition_penalty=1.2, return_dict_in_generate=True, output_scores=True,
        output_logits=True, output_hidden_states=True,
    )  # fmt: skip
    plain = model.generate(**inputs, **arguments)
    ours = model.generate(**inputs, **arguments, speculative_config=config)
    assert isinstance(ours, GenerateDecoderOnlyOutput) and torch.equal(ours.sequences, plain.sequences)
    width = inputs["input_ids"].shape[1]
    num_new = plain.sequences.shape[1] - width
    alive = ~finished_before(plain.sequences, width, eos)
    assert num_new == len(ours.scores) == len(ours.logits) == len(ours.hidden_states)
    for key in ("scores", "logits"):
        for step, (a, b) in enumerate(zip(getattr(plain, key), getattr(ours, key), strict=True)):
            assert a.shape == b.shape and a.dtype == b.dtype
            assert torch.allclose(a[alive[step]], b[alive[step]], atol=1e-4), (key, step)
    mask = inputs["attention_mask"].bool()
    for step, (a, b) in enumerate(zip(plain.hidden_states, ours.hidden_states, strict=True)):
        assert len(a) == len(b) == model.config.num_hidden_layers + 1
        for x, y in zip(a, b, strict=True):
            assert x.shape == y.shape
            rows = alive[step]
            real = mask[rows] if step == 0 else torch.ones(int(rows.sum()), 1, dtype=torch.bool)
            assert torch.allclose(x[rows][real], y[rows][real], atol=1e-4)
            if step == 0:
                assert not y[~mask].any()  # docs/limits.md
    transition = model.compute_transition_scores(ours.sequences, ours.scores, normalize_logits=True)
    expected = model.compute_transition_scores(plain.sequences, plain.scores, normalize_logits=True)
    assert torch.allclose(transition[alive.T], expected[alive.T], atol=1e-4)


@pytest.mark.skipif(
    transformers.__version__.startswith("5.17."), reason="transformers 5.17 numbers the layers of a list otherwise"
)
def test_some_hidden_states(model, configs):
    arguments = dict(max_new_tokens=4, return_dict_in_generate=True, output_hidden_states=[1, 2])
    plain = model.generate(**ragged([5]), **arguments)
    ours = model.generate(**ragged([5]), **arguments, speculative_config=configs["chain"])
    for a, b in zip(plain.hidden_states, ours.hidden_states, strict=True):
        a, b = ([x for x in each if x is not None] for each in (a, b))  # 5.17 has one place fewer
        assert len(b) == 2 and all(torch.allclose(x, y, atol=1e-4) for x, y in zip(a, b, strict=True))
    last = model.generate(
        **ragged([5]), **(arguments | {"output_hidden_states": [-1]}), speculative_config=configs["chain"]
    )
    every = model.generate(**ragged([5]), **(arguments | {"output_hidden_states": True}))
    assert torch.allclose(last.hidden_states[0][-1], every.hidden_states[0][-1], atol=1e-4)


def test_tensors_not_asked_for_are_absent(model, configs):
    for config in (None, configs["chain"]):
        output = model.generate(
            **ragged([5]), max_new_tokens=3, return_dict_in_generate=True, speculative_config=config
        )
        assert (
            output.scores is None
            and output.logits is None
            and output.hidden_states is None
            and output.attentions is None
        )
        assert type(output.past_key_values) is DynamicCache
        assert torch.is_tensor(
            model.generate(**ragged([5]), max_new_tokens=3, output_scores=True, speculative_config=config)
        )
    output = model.generate(
        **ragged([5]),
        max_new_tokens=3,
        return_dict_in_generate=True,
        use_cache=False,
        speculative_config=configs["chain"],
    )
    assert output.past_key_values is None


# ---- caches ---------------------------------------------------------------------------------------------------------


def assert_same_cache(a, b, mask):
    """Equal at the unmasked positions [B, length]."""
    assert a.get_seq_length() == b.get_seq_length() == mask.shape[1]
    for x, y in zip(a.layers, b.layers, strict=True):
        assert x.keys.shape == y.keys.shape and x.values.shape == y.values.shape
        for p, q in ((x.keys, y.keys), (x.values, y.values)):
            assert torch.allclose(p.transpose(1, 2)[mask], q.transpose(1, 2)[mask], atol=1e-4)


@pytest.mark.parametrize("given_back", ["returned", "own"])
def test_chat_goes_on_from_the_cache(model, config, inputs, given_back):
    """Two turns; each side continues from its own cache, and ours also from plain decoding's."""
    turn = torch.randint(4, VOCAB, (inputs["input_ids"].shape[0], 5), generator=torch.Generator().manual_seed(2))
    results = []
    for first, second in ((None, None), (config, config), (None, config), (config, None)):
        cache = DynamicCache() if given_back == "own" else None
        output = model.generate(
            **inputs, max_new_tokens=8, return_dict_in_generate=True, **{CACHE: cache}, speculative_config=first
        )
        assert cache is None or output.past_key_values is cache
        ids = torch.cat([output.sequences, turn], 1)
        mask = torch.cat([inputs["attention_mask"], torch.ones(ids.shape[0], 13, dtype=torch.long)], 1)
        real = mask[:, : output.sequences.shape[1] - 1].bool()
        if results:
            assert torch.equal(output.sequences, results[0][0])
        else:
            kept = [(layer.keys.clone(), layer.values.clone()) for layer in output.past_key_values.layers]
        assert output.past_key_values.get_seq_length() == real.shape[1]
        for (keys, values), layer in zip(kept, output.past_key_values.layers, strict=True):
            for p, q in ((keys, layer.keys), (values, layer.values)):
                assert torch.allclose(p.transpose(1, 2)[real], q.transpose(1, 2)[real], atol=1e-4)
        again = model.generate(
            input_ids=ids, attention_mask=mask, max_new_tokens=9, **{CACHE: output.past_key_values}, return_dict_in_generate=True,
            output_hidden_states=True, speculative_config=second,
        )  # fmt: skip
        assert again.past_key_values is output.past_key_values
        results.append((output.sequences, again.sequences, again.past_key_values, again.hidden_states))
        assert torch.equal(again.sequences, results[0][1])
        assert_same_cache(
            again.past_key_values, results[0][2], torch.cat([mask, mask[:, :0].new_ones(len(ids), 8)], 1).bool()
        )
        for a, b in zip(again.hidden_states, results[0][3], strict=True):
            assert [x.shape for x in a] == [x.shape for x in b]
            assert torch.allclose(a[-1], b[-1], atol=1e-4)


def test_own_cache_is_filled_without_a_dict(model, config):
    caches = [DynamicCache(config=model.config), DynamicCache(config=model.config)]
    model.generate(**ragged([6, 6]), max_new_tokens=7, **{CACHE: caches[0]})
    model.generate(**ragged([6, 6]), max_new_tokens=7, **{CACHE: caches[1]}, speculative_config=config)
    assert_same_cache(*caches, torch.ones(2, 12, dtype=torch.bool))


def test_cache_that_holds_all_of_the_prompt(model, configs):
    inputs = ragged([9])
    cache = model(**inputs, use_cache=True).past_key_values
    plain = model.generate(**inputs, max_new_tokens=6)
    assert torch.equal(
        model.generate(**inputs, max_new_tokens=6, **{CACHE: cache}, speculative_config=configs["chain"]), plain
    )


def test_sliding_window_cache(configs):
    """It can be returned and filled, and then no longer holds the text: going on from it is refused."""
    torch.manual_seed(0)
    mistral = MistralForCausalLM(
        MistralConfig(
            vocab_size=VOCAB, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
            sliding_window=8, max_position_embeddings=128, initializer_range=0.4, eos_token_id=None, pad_token_id=0,
        )
    ).eval()  # fmt: skip
    inputs, config = ragged([11]), configs["ngram"]
    plain = mistral.generate(**inputs, max_new_tokens=10, return_dict_in_generate=True)
    ours = mistral.generate(**inputs, max_new_tokens=10, return_dict_in_generate=True, speculative_config=config)
    assert torch.equal(plain.sequences, ours.sequences)
    for x, y in zip(plain.past_key_values.layers, ours.past_key_values.layers, strict=True):
        assert x.keys.shape == y.keys.shape and torch.allclose(x.keys, y.keys, atol=1e-4)
    with pytest.raises(ValueError, match="sliding-window"):
        mistral.generate(ours.sequences, max_new_tokens=3, **{CACHE: ours.past_key_values}, speculative_config=config)
    assert_clean(mistral)


# ---- statistics -----------------------------------------------------------------------------------------------------


def speculation_is_consistent(output, width, eos=None):
    figures, rows = output.speculation, output.speculation.rows
    ended = finished_before(output.sequences, width, eos)
    assert [row.num_new_tokens for row in rows] == (~ended).sum(0).tolist()
    assert figures.kv_cache_bytes > 0
    for key in ("num_steps", "num_draft_tokens", "num_accepted_tokens", "num_new_tokens"):
        assert getattr(figures, key) == sum(getattr(row, key) for row in rows)
    for each in (figures, *rows):
        assert each.num_accepted_tokens <= each.num_draft_tokens and each.num_accepted_tokens <= each.num_new_tokens
        assert each.num_new_tokens <= each.num_accepted_tokens + each.num_steps
        assert each.mean_accepted_length == each.num_new_tokens / each.num_steps
        assert each.acceptance_rate == (
            each.num_accepted_tokens / each.num_draft_tokens if each.num_draft_tokens else 0
        )
        rates = each.acceptance_per_position
        assert all(1 >= a >= 0 for a in rates)
    return figures


@pytest.mark.parametrize("eos", [None, list(range(10, 25))], ids=["no eos", "eos"])
def test_speculation_figures(model, config, inputs, eos):
    output = model.generate(
        **inputs, max_new_tokens=17, eos_token_id=eos, return_dict_in_generate=True, speculative_config=config
    )
    figures = speculation_is_consistent(output, inputs["input_ids"].shape[1], eos)
    if config["method"] == "draft_model" and eos is None:
        assert figures.mean_accepted_length > 1.2 and figures["acceptance_per_position"][0] > 0
    if config["method"] == "none":
        assert figures.num_draft_tokens == 0 and figures.mean_accepted_length == 1


@pytest.mark.parametrize("name", ["chain", "tree"])
def test_a_trace_accounts_for_every_token(model, configs, name):
    """Each step's drafts are accepted or rejected, what it wrote makes up the text, and the text is that of the call without a trace."""
    inputs = ragged([9, 4])
    plain = model.generate(**inputs, max_new_tokens=17, do_sample=False)
    output = model.generate(
        **inputs, max_new_tokens=17, do_sample=False, return_dict_in_generate=True,
        speculative_config={**configs[name], "trace": True, "async_scheduling": True},
    )  # fmt: skip
    assert torch.equal(output.sequences, plain)
    trace = output.speculation.trace
    for row, figures in enumerate(output.speculation.rows):
        steps = [step for step in trace if step["row"] == row]
        assert len(steps) == figures.num_steps and [step["step"] for step in steps] == sorted(
            step["step"] for step in steps
        )
        assert [token for step in steps for token in step["written"]] == output.sequences[row, 9:].tolist()
        assert sum(len(step["drafted"]) for step in steps) == figures.num_draft_tokens
        assert sum(len(step["accepted"]) for step in steps) == figures.num_accepted_tokens
        for step in steps:
            assert sorted(step["accepted"] + step["rejected"]) == sorted(step["drafted"])
            assert step["accepted"] == step["written"][: len(step["accepted"])]
            assert step["forward_ms"] > 0 and step["verify_ms"] > 0 and (not step["drafted"] or step["propose_ms"] > 0)


def test_phases_are_ranges_of_the_profiler(model, configs, capsys):
    with profiled() as found:
        out = model.generate(
            **ragged([9]), max_new_tokens=12, return_dict_in_generate=True, speculative_config=configs["chain"]
        )
    counts = {event.key: event.count for event in found.key_averages() if event.key.startswith("specdec.")}
    steps = out.speculation.num_steps
    assert counts == {f"specdec.{phase}": steps * (1 + (phase == "verify")) for phase in PHASES}
    assert "specdec.forward" in capsys.readouterr().out
    with torch.profiler.profile() as later:
        model.generate(**ragged([9]), max_new_tokens=4, speculative_config=configs["chain"])
    assert not any(event.key.startswith("specdec.") for event in later.key_averages())


def test_the_trace_as_text(tiny_model, tiny_tokenizer):
    inputs = tiny_tokenizer("One day. One day.", return_tensors="pt")
    config = {"method": "ngram", "trace": True}
    output = tiny_model.generate(
        **inputs, max_new_tokens=8, do_sample=False, return_dict_in_generate=True, speculative_config=config
    )
    hf_specdec.release(tiny_model)
    trace = output.speculation.trace
    lines = [json.loads(line) for line in trace.to_json(tiny_tokenizer).splitlines()]
    written = "".join(text for line in lines for text in line["written"])
    assert written == tiny_tokenizer.decode(output.sequences[0, inputs["input_ids"].shape[1] :])
    table = trace.table(tiny_tokenizer).splitlines()
    assert len(table) == len(lines) + 1 and "propose ms" in table[0] and "rejected" in table[0]


def test_tokens_dropped_by_a_criterion_do_not_count(model, configs):
    class Third(StoppingCriteria):
        def __call__(self, input_ids, scores, **kwargs):
            return torch.full((input_ids.shape[0],), input_ids.shape[1] >= 9 + 3)

    output = model.generate(
        **ragged([9, 4]), max_new_tokens=30, return_dict_in_generate=True, speculative_config=configs["chain"],
        stopping_criteria=StoppingCriteriaList([Third()]),
    )  # fmt: skip
    assert [row.num_new_tokens for row in output.speculation.rows] == [3, 3]
    speculation_is_consistent(output, 9)


# ---- sampling -------------------------------------------------------------------------------------------------------


def test_sampling_is_reproducible_and_comes_from_the_model_defaults(model, config, inputs):
    def run(**kwargs):
        return model.generate(**inputs, max_new_tokens=12, speculative_config=kwargs.pop("config", config), **kwargs)

    greedy = run()
    model.generation_config.do_sample = True
    try:
        torch.manual_seed(1)
        first, second = run(), run()
        torch.manual_seed(1)
        again = run()
    finally:
        model.generation_config.do_sample = None
    assert torch.equal(first, again) and not torch.equal(first, second) and not torch.equal(first, greedy)
    seeded = {**config, "seed": 7}
    state = torch.get_rng_state()
    assert torch.equal(run(do_sample=True, config=seeded), run(do_sample=True, config=seeded))
    run()
    assert torch.equal(torch.get_rng_state(), state), "neither a seeded nor a greedy call draws from torch's generator"


def test_coupled_sampling_is_the_same_for_every_method(model, configs):
    arguments = dict(
        max_new_tokens=14, do_sample=True, temperature=0.8, top_k=20, top_p=0.95, min_p=0.01, repetition_penalty=1.1
    )
    outputs = [
        model.generate(**ragged([6, 3, 8]), **arguments, speculative_config={**configs[m], "seed": 3}) for m in METHODS
    ]
    assert all(torch.equal(outputs[0], each) for each in outputs[1:])
    alone = model.generate(**ragged([6]), **arguments, speculative_config={**configs["tree"], "seed": 3})
    assert torch.equal(alone[0, 6:], outputs[0][0, 8:]), "a row's stream does not depend on who else is in the batch"


def test_num_return_sequences(model, config):
    arguments = dict(max_new_tokens=10, do_sample=True, num_return_sequences=3)
    output = model.generate(**ragged([5, 8]), **arguments, speculative_config={**config, "seed": 2})
    assert output.shape == (6, 18)
    assert len({tuple(row[8:].tolist()) for row in output[:3]}) == 3, "copies of one prompt get different streams"
    with pytest.raises(ValueError, match="num_return_sequences"):
        model.generate(**ragged([5]), max_new_tokens=3, num_return_sequences=2, speculative_config=config)


# ---- synced_gpus ----------------------------------------------------------------------------------------------------

_RANK = """
import os, sys, torch, torch.distributed as dist
sys.path[:0] = sys.argv[1:3]
from oracle import ragged, tiny_llama
import hf_specdec
dist.init_process_group("gloo")
rank, model = dist.get_rank(), tiny_llama()
inputs, new = ragged([6, 9], seed=rank), (5, 17)[rank]
plain = model.generate(**inputs, max_new_tokens=new)
forwards = []
model.register_forward_pre_hook(lambda *_: forwards.append(1))
for config in ({"method": "none"}, {"method": "ngram", "prompt_lookup_min": 1}):
    del forwards[:]
    assert torch.equal(model.generate(**inputs, max_new_tokens=new, synced_gpus=True, speculative_config=config), plain)
    counts = [torch.zeros(1), torch.zeros(1)]
    dist.all_gather(counts, torch.tensor([float(len(forwards))]))
    assert counts[0] == counts[1] >= 1, counts
dist.destroy_process_group()  # or gloo's threads may still run when the interpreter ends, which aborts it
"""


@pytest.mark.slow
def test_synced_gpus_on_two_ranks():
    """The rank that finishes first keeps calling forward until the other has finished too."""
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--nproc-per-node=2",
        "--standalone",  # a free port: two test runs on one machine do not meet
        "--no-python",
    ]
    done = subprocess.run(
        [*command, sys.executable, "-c", _RANK, str(BUILDERS), str(ROOT)],
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr


def test_generation_config_instead_of_arguments(model, config, inputs):
    settings = GenerationConfig(max_new_tokens=11, eos_token_id=[5, 9, 11], repetition_penalty=1.2, min_new_tokens=4)
    plain = model.generate(**inputs, generation_config=settings)
    assert torch.equal(model.generate(**inputs, generation_config=settings, speculative_config=config), plain)


class EndsAt(StoppingCriteria):
    """Ends the whole batch at a length."""

    def __init__(self, length):
        self.length = length

    def __call__(self, input_ids, scores, **kwargs):
        return torch.full((input_ids.shape[0],), input_ids.shape[1] >= self.length, dtype=torch.bool)


@pytest.mark.parametrize("num_blocks", [13, 14, 15, 16])
def test_the_cache_of_rows_that_end_together_in_a_full_pool(num_blocks):
    """The last token of each needs a block while a third row waits: one gives way and is read again."""
    model = tiny_llama()
    ids = ragged([4, 4, 4])["input_ids"]
    call = {"max_new_tokens": 4, "do_sample": False, "pad_token_id": 0, "return_dict_in_generate": True}
    plain = model.generate(ids, **call)
    small = {"method": "none", "block_size": 1, "num_blocks": num_blocks}
    out = model.generate(ids, **call, speculative_config=small)
    assert torch.equal(out.sequences, plain.sequences)
    for ours, theirs in zip(out.past_key_values.layers, plain.past_key_values.layers, strict=True):
        torch.testing.assert_close(ours.keys, theirs.keys, atol=1e-4, rtol=1e-4)
        torch.testing.assert_close(ours.values, theirs.values, atol=1e-4, rtol=1e-4)
    assert_clean(model)


@pytest.mark.parametrize("stop", [3, 8, 11])
@pytest.mark.parametrize(
    "config", [{"method": "none"}, {"method": "ngram", "prompt_lookup_min": 1}], ids=["none", "ngram"]
)
def test_the_cache_of_a_row_that_is_preempted_when_the_batch_ends(config, stop):
    """It was ahead, lost its blocks to rows that caught up, and a criterion ended the batch before it had them again."""
    model, inputs = tiny_llama(), ragged([9, 7, 8])
    criteria = StoppingCriteriaList([EndsAt(inputs["input_ids"].shape[1] + stop)])
    call = {"max_new_tokens": 20, "do_sample": False, "pad_token_id": 0, "return_dict_in_generate": True}
    plain = model.generate(**inputs, **call, stopping_criteria=criteria)
    for num_blocks in (5, 6):
        small = {**config, "block_size": 4, "num_blocks": num_blocks}
        out = model.generate(**inputs, **call, stopping_criteria=criteria, speculative_config=small)
        assert torch.equal(out.sequences, plain.sequences)
        for row, length in enumerate(inputs["attention_mask"].sum(1).tolist()):
            for ours, theirs in zip(out.past_key_values.layers, plain.past_key_values.layers, strict=True):
                first = -(length + stop - 1)  # left padding is not compared
                torch.testing.assert_close(ours.keys[row, :, first:], theirs.keys[row, :, first:], atol=1e-4, rtol=1e-4)
                torch.testing.assert_close(
                    ours.values[row, :, first:], theirs.values[row, :, first:], atol=1e-4, rtol=1e-4
                )
    assert_clean(model)


@pytest.mark.parametrize("method", ["none", "ngram", "chain", "tree"])
def test_where_every_token_is_forbidden_plain_decoding_goes_on_with_token_0(model, configs, method):
    inputs, options = ragged([3, 5, 1]), {"suppress_tokens": [6], "max_new_tokens": 24}
    options["prefix_allowed_tokens_fn"] = lambda row, ids: (
        [4 + (int(ids[-1]) + k) % 50 for k in (1, 5)] if len(ids) % 4 else [6]
    )
    plain = model.generate(**inputs, **options, speculative_config=None)
    assert (plain[:, 5:] == 0).any(1).all()
    assert torch.equal(model.generate(**inputs, **options, speculative_config=configs[method]), plain)
