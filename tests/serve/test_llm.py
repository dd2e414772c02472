"""LLM: continuous batching gives every request what it would get alone, and leaves nothing behind."""

import random

import peft
import pytest
import torch
from cache_checks import check_blocks
from oracle import tiny_llama

import hf_specdec
from hf_specdec.core.errors import UnsupportedModel
from hf_specdec.sampling.warpers import TokenBiasLogitsProcessor
from hf_specdec.serve import LLM, SamplingParams, metrics

METHODS = [
    None,
    {"method": "ngram", "num_speculative_tokens": 4},
    {"method": "eagle3", "model": "tiny-eagle3", "top_k": 3, "total_tokens": 8, "num_speculative_tokens": 3},
    {"method": "draft_model", "model": "tiny-draft", "num_speculative_tokens": 3},
]
TEXTS = [
    "Once upon a time", "Tom and Lily went to the park. Tom and Lily", "The dog was happy. The dog was", "One day, a",
    "Once upon a time there was a little girl. Once upon a time there was a", "Lily",
]  # fmt: skip
GREEDY = SamplingParams(temperature=0, max_tokens=20)


def generated(model, ids, params, config=None):
    """What `generate()` writes after one prompt."""
    out = model.generate(
        torch.tensor([ids]), attention_mask=torch.ones(1, len(ids), dtype=torch.long), max_new_tokens=params.max_tokens,
        do_sample=params.do_sample, **({"temperature": params.temperature, "top_k": 0} if params.do_sample else {}),
        speculative_config=config,
    )  # fmt: skip
    return out[0, len(ids) :].tolist()


@pytest.fixture
def make(tiny_model, tiny_tokenizer):
    made = []

    def make(config=None, **arguments):
        made.append(LLM(tiny_model, tiny_tokenizer, config, **{"max_model_len": 256, **arguments}))
        return made[-1]

    yield make
    for llm in made:
        check_empty(llm)
        llm.close()


def check_empty(llm):
    pool = llm.engine.decoder.cache.pool
    check_blocks(pool)
    assert pool.num_used == 0 and not llm.engine.has_work and not llm.engine._choices
    assert not llm.engine.decoder.statistics and not llm.engine.decoder.cache.tables


@pytest.mark.parametrize("config", METHODS, ids=lambda config: config["method"] if config else "plain")
@pytest.mark.parametrize("tight", [False, True])
def test_greedy_answers_are_those_of_generate(make, tiny_model, config, tight):
    """Requests of all lengths beside one another; tight: few tokens a step, and blocks for about two texts."""
    rng = random.Random(0)
    limits = {"max_num_batched_tokens": 24, "max_num_seqs": 4} if tight else {}
    config = config and {**config, "block_size": 4, **({"num_blocks": 14} if tight else {})}
    llm = make(config or ({"method": "none", "block_size": 4, "num_blocks": 14} if tight else None), **limits)
    prompts = [llm.tokenizer(rng.choice(TEXTS))["input_ids"] for _ in range(12)]
    params = [GREEDY.copy(max_tokens=rng.randint(1, 24)) for _ in prompts]
    outputs = llm.generate(prompts, params, use_tqdm=False)
    for ids, own, output in zip(prompts, params, outputs, strict=True):
        assert output.outputs[0].token_ids == generated(tiny_model, ids, own), output
        assert output.finished and output.prompt_token_ids == ids
    if tight:
        assert llm.engine.scheduler.num_preemptions > 0


@pytest.mark.parametrize("config", METHODS[:3], ids=["plain", "ngram", "eagle3"])
def test_a_seed_gives_the_same_tokens_whatever_else_runs(make, tiny_model, config):
    params = SamplingParams(temperature=0.8, seed=11, max_tokens=16, n=3)
    llm = make(config)
    (alone,) = llm.generate([TEXTS[0]], params, use_tqdm=False)
    others = [SamplingParams(temperature=1.0, max_tokens=n, n=2) for n in (5, 9, 30)]
    crowd = llm.generate([TEXTS[1], TEXTS[2], TEXTS[0], TEXTS[3]], [*others[:2], params, others[2]], use_tqdm=False)
    written = [choice.token_ids for choice in alone.outputs]
    assert [choice.token_ids for choice in crowd[2].outputs] == written
    llm.update_weights(hf_specdec.bundled("tiny"))
    (reloaded,) = llm.generate([TEXTS[0]], params, use_tqdm=False)
    assert [choice.token_ids for choice in reloaded.outputs] == written
    assert len({tuple(each) for each in written}) == 3
    config = {**(config or {"method": "none"}), "seed": 11}
    assert written[0] == generated(tiny_model, alone.prompt_token_ids, params, config)


@pytest.mark.parametrize("rule", ["rejection", "typical", "block"])
def test_a_seed_is_refused_where_it_promises_nothing(make, rule):
    """With these rules tokens depend on the drafts, and these on the load. Without drafts, or greedily, a seed is kept."""
    llm = make({"method": "ngram", "num_speculative_tokens": 3, "rejection_sample_method": rule})
    sampled = SamplingParams(temperature=1.0, seed=3, max_tokens=6)
    plain = make({"method": "none", "rejection_sample_method": rule})  # but the request brings drafts
    with pytest.raises(ValueError, match="seed: with"):
        plain.generate(TEXTS[0], sampled.copy(prediction="x"), use_tqdm=False)
    with pytest.raises(ValueError, match=f"seed: with rejection_sample_method '{rule}'"):
        llm.generate(TEXTS[0], sampled, use_tqdm=False)
    assert not llm.engine.has_work
    for allowed in ({"temperature": 0}, {"num_speculative_tokens": 0}, {"seed": None}):
        (output,) = llm.generate(TEXTS[0], sampled.copy(**allowed), use_tqdm=False)
        assert output.outputs[0].token_ids
    plain = [llm.generate(TEXTS[0], sampled.copy(num_speculative_tokens=0), use_tqdm=False) for _ in range(2)]
    assert plain[0][0].outputs[0].token_ids == plain[1][0].outputs[0].token_ids


def test_logprobs_are_the_models_own(make, tiny_model):
    llm = make(METHODS[1])
    params = SamplingParams(temperature=0.7, seed=3, max_tokens=8, logprobs=4, repetition_penalty=1.3)
    (output,) = llm.generate([TEXTS[1]], params, use_tqdm=False)
    choice = output.outputs[0]
    ids = torch.tensor([output.prompt_token_ids + choice.token_ids])
    expected = tiny_model(ids).logits[0].float().log_softmax(-1)[len(output.prompt_token_ids) - 1 : -1]
    assert len(choice.logprobs) == len(choice.token_ids)
    total = 0.0
    for row, token, found in zip(expected, choice.token_ids, choice.logprobs, strict=True):
        best = row.topk(4)
        assert set(best.indices.tolist()) | {token} == set(found)
        assert all(abs(each.logprob - float(row[other])) < 1e-4 for other, each in found.items())
        assert found[token].rank == 1 + int((row > row[token]).sum())
        total += found[token].logprob
    assert choice.cumulative_logprob == pytest.approx(total)


def test_penalties_and_biases_by_their_definitions(make, tiny_model):
    """Against a loop of plain forwards that applies each as OpenAI and vLLM define it."""
    params = SamplingParams(
        temperature=0, max_tokens=20, presence_penalty=0.6, frequency_penalty=0.4, repetition_penalty=1.2,
        logit_bias={20: 1.5, 40: -3.0}, min_tokens=4,
    )  # fmt: skip
    llm = make(METHODS[1])
    (output,) = llm.generate([TEXTS[1]], params, use_tqdm=False)
    prompt, written = output.prompt_token_ids, []
    while len(written) < params.max_tokens:
        scores = tiny_model(torch.tensor([prompt + written])).logits[0, -1].float()
        for token, bias in params.logit_bias.items():
            scores[token] += bias
        if len(written) < params.min_tokens:
            scores[list(llm.engine.eos_token_ids)] = float("-inf")
        for token in set(prompt + written):
            scores[token] = scores[token] / 1.2 if scores[token] > 0 else scores[token] * 1.2
        for token in set(written):
            scores[token] -= 0.6 + 0.4 * written.count(token)
        written.append(int(scores.argmax()))
        if written[-1] in llm.engine.eos_token_ids:
            break
    assert output.outputs[0].token_ids == written


def test_allowed_ids_and_bad_words(make):
    llm = make(METHODS[1])
    (plain,) = llm.generate([TEXTS[0]], GREEDY, use_tqdm=False)
    allowed = sorted(set(plain.outputs[0].token_ids))[:5]
    (few,) = llm.generate([TEXTS[0]], GREEDY.copy(allowed_token_ids=allowed, ignore_eos=True), use_tqdm=False)
    assert set(few.outputs[0].token_ids) <= set(allowed) and len(few.outputs[0].token_ids) == 20
    word = plain.outputs[0].text.split()[1]
    (without,) = llm.generate([TEXTS[0]], GREEDY.copy(bad_words=[word]), use_tqdm=False)
    assert word not in without.outputs[0].text.split()


def test_stop_texts_and_ids(make):
    llm = make(METHODS[1])
    (plain,) = llm.generate([TEXTS[0]], GREEDY, use_tqdm=False)
    text, ids = plain.outputs[0].text, plain.outputs[0].token_ids
    assert plain.outputs[0].finish_reason == "length" and len(text) > 20
    stop = text[8:11]
    first = text.index(stop)
    (cut,) = llm.generate([TEXTS[0]], GREEDY.copy(stop=[stop, "never written"]), use_tqdm=False)
    choice = cut.outputs[0]
    assert (choice.text, choice.finish_reason, choice.stop_reason) == (text[:first], "stop", stop)
    assert choice.token_ids == ids[: len(choice.token_ids)]
    (whole,) = llm.generate([TEXTS[0]], GREEDY.copy(stop=stop, include_stop_str_in_output=True), use_tqdm=False)
    assert whole.outputs[0].text == text[: first + len(stop)]
    end = ids.index(ids[6])
    (by_id,) = llm.generate([TEXTS[0]], GREEDY.copy(stop_token_ids=[ids[6]]), use_tqdm=False)
    assert by_id.outputs[0].token_ids == ids[: end + 1] and by_id.outputs[0].stop_reason == ids[6]


@pytest.mark.parametrize("config", METHODS[:2], ids=["plain", "ngram"])
def test_prefixes_are_read_once(make, config):
    llm = make({**(config or {"method": "none"}), "block_size": 4})
    long = TEXTS[4] + " " + TEXTS[1]
    (first,) = llm.generate([long], GREEDY, use_tqdm=False)
    (again,) = llm.generate([long], GREEDY, use_tqdm=False)
    assert first.num_cached_tokens == 0
    assert again.num_cached_tokens == (len(again.prompt_token_ids) - 1) // 4 * 4
    assert again.outputs[0].token_ids == first.outputs[0].token_ids


def test_prefixes_of_other_weights_are_forgotten():
    model = tiny_llama()
    llm = LLM(model, speculative_config={"method": "none", "block_size": 4}, max_model_len=64)
    prompt = list(range(3, 23))
    llm.generate([prompt], GREEDY, use_tqdm=False)
    model.model.layers[0].mlp.up_proj.weight.data.mul_(-3)  # leaves no trace but the contents
    (after,) = llm.generate([prompt], GREEDY, use_tqdm=False)
    assert after.outputs[0].token_ids == generated(model, prompt, GREEDY) and after.num_cached_tokens == 0
    (again,) = llm.generate([prompt], GREEDY, use_tqdm=False)
    assert again.num_cached_tokens == 16
    llm.close()


@pytest.mark.parametrize(
    "config", [{**METHODS[1], "prompt_lookup_min": 1}, METHODS[3]], ids=lambda config: config["method"]
)
def test_requests_may_draft_less_or_not_at_all(make, config):
    llm = make(config)
    params = [GREEDY.copy(num_speculative_tokens=k) for k in (None, 1, 0, 99)]
    outputs = llm.generate([TEXTS[4]] * 4, params, use_tqdm=False)
    assert len({tuple(each.outputs[0].token_ids) for each in outputs}) == 1
    drafted = [each.speculation.num_draft_tokens for each in outputs]
    assert drafted[3] == drafted[0] > drafted[1] > drafted[2] == 0  # but not more
    assert len(outputs[0].speculation.acceptance_per_position) == config["num_speculative_tokens"]
    assert len(outputs[1].speculation.acceptance_per_position) == 1


def test_lower_numbers_run_first(make):
    llm = make(None, max_num_seqs=1)
    ended = []
    for name, priority in (("late", 5), ("first", -1), ("middle", 0)):
        llm.engine.add(name, None, [3, 4, 5], GREEDY.copy(priority=priority))
    llm.engine.run(lambda touched: ended.extend(request.id for request in touched if request.finished))
    assert ended == ["first", "middle", "late"]


def test_an_aborted_request_gives_its_blocks_back_at_once(make):
    llm = make(METHODS[2])
    with llm.engine.decoder.active():
        kept = llm.engine.add("kept", None, [3, 4, 5], GREEDY)
        gone = llm.engine.add("gone", None, [6, 7, 8, 9], GREEDY.copy(max_tokens=200))
        for _ in range(3):
            llm.engine.step()
        llm.engine.abort(gone)
        assert gone.finished and gone.choices[0].output.finish_reason == "abort"
        assert set(llm.engine.decoder.cache.tables) == {kept.choices[0].sequence.id}
    llm.engine.run()
    assert kept.result().outputs[0].finish_reason in ("stop", "length")


def test_a_step_that_raises_leaves_an_engine_that_works(make, tiny_model, monkeypatch):
    llm = make(METHODS[1])
    with monkeypatch.context() as patch:
        patch.setattr(llm.engine.decoder.target, "forward", lambda *a, **k: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            llm.generate([TEXTS[0], TEXTS[1]], GREEDY, use_tqdm=False)
    check_empty(llm)
    (output,) = llm.generate([TEXTS[0]], GREEDY, use_tqdm=False)
    assert output.outputs[0].token_ids == generated(tiny_model, output.prompt_token_ids, GREEDY)


def test_the_model_generates_as_before_between_calls(make, tiny_model):
    llm = make(METHODS[1])
    ids = llm.tokenizer(TEXTS[0])["input_ids"]
    before = generated(tiny_model, ids, GREEDY)
    llm.generate([TEXTS[0]], GREEDY, use_tqdm=False)
    assert generated(tiny_model, ids, GREEDY) == before == generated(tiny_model, ids, GREEDY, METHODS[1])


def test_a_model_that_others_change_is_not_the_one_it_was_made_for(make, tiny_model):
    llm = make(METHODS[1])
    (before,) = llm.generate([TEXTS[0]], GREEDY, use_tqdm=False)
    handle = tiny_model.model.layers[0].register_forward_hook(lambda module, args, output: output + 1)
    try:
        with pytest.raises(UnsupportedModel, match="hooks or adapters have changed"):
            llm.generate([TEXTS[0]], GREEDY, use_tqdm=False)
    finally:
        handle.remove()
    (after,) = llm.generate([TEXTS[0]], GREEDY, use_tqdm=False)
    assert after.outputs[0].token_ids == before.outputs[0].token_ids


@pytest.mark.parametrize("given", [{"stop": ["a"]}, {"bad_words": ["a"]}, {"prediction": "a"}])
def test_texts_need_a_tokenizer(tiny_model, given):
    llm = LLM(tiny_model, None, METHODS[1], max_model_len=32)
    with pytest.raises(ValueError, match=f"{next(iter(given))}.* needs? a tokenizer"):
        llm.generate([[5, 6]], GREEDY.copy(**given), use_tqdm=False)
    llm.close()


def test_names_and_older_spellings():
    with pytest.warns(FutureWarning, match="pass speculative_config="):
        llm = LLM(
            model="tiny", speculative_model="[ngram]", num_speculative_tokens=3, ngram_prompt_lookup_max=4,
            dtype="float32", enforce_eager=True, max_model_len=128,
        )  # fmt: skip
    assert llm.engine.decoder.config.method == "ngram" and llm.engine.decoder.config.prompt_lookup_max == 4
    outputs = llm.generate(["Once upon", {"prompt": "Lily"}, {"prompt_token_ids": [5, 6]}], GREEDY, use_tqdm=False)
    assert [len(each.outputs) for each in outputs] == [1, 1, 1] and all(each.outputs[0].text for each in outputs)
    template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    (chat,) = llm.chat([{"role": "user", "content": "Once upon"}], GREEDY, False, chat_template=template)
    assert llm.chat([], GREEDY, False, chat_template=template) == []
    assert chat.outputs[0].token_ids == outputs[0].outputs[0].token_ids
    llm.tokenizer.chat_template = None
    with pytest.raises(ValueError, match="no chat template"):
        llm.chat([{"role": "user", "content": "Hi"}])
    llm.close()


@pytest.mark.parametrize(
    ("prompts", "params", "message"),
    [
        ([""], None, "empty|at least one token"),
        ([[]], GREEDY, "empty"),
        ([[1, 2, 10**6]], GREEDY, "ids 0 to"),
        ([list(range(3, 300))], GREEDY, "max_model_len 256"),
        ([{"text": "x"}], GREEDY, "a key 'text'"),
        ([{}], GREEDY, "A prompt is a text"),
        (["a"], GREEDY.copy(prediction=[10**6]), "prediction holds the id 1000000"),
        (["a"], GREEDY.copy(prediction=[5] * 257), "prediction has 257 tokens; max_model_len is 256"),
        (["a"], GREEDY.copy(thinking_token_budget=5), "thinking_token_budget: no response template"),
        (["a", "b"], [GREEDY], "2 prompts and 1 sampling_params"),
    ],
)
def test_bad_prompts_are_one_clear_error(make, prompts, params, message):
    llm = make(METHODS[1])
    prompts = [[]] if prompts == [""] else prompts
    with pytest.raises(ValueError, match=message):
        llm.generate(["Once", *prompts] if not isinstance(params, list) else prompts, params, use_tqdm=False)
    check_empty(llm)


@pytest.mark.parametrize(
    "wrong",
    [
        {"n": 0}, {"temperature": -1}, {"temperature": float("nan")}, {"top_p": 0}, {"top_k": 1.5}, {"min_p": 2},
        {"max_tokens": 0}, {"min_tokens": 9, "max_tokens": 3}, {"stop": [""]}, {"logprobs": 21}, {"seed": "x"},
        {"allowed_token_ids": []}, {"logit_bias": {3: 1000}}, {"presence_penalty": 3}, {"repetition_penalty": 0},
        {"stop": ["x"], "detokenize": False}, {"prediction": 5}, {"prediction": ["x"]}, {"thinking_token_budget": -2},
        {"prediction": "x", "num_speculative_tokens": 0},
    ],
)  # fmt: skip
def test_bad_parameters_name_the_field(wrong):
    with pytest.raises(ValueError, match=next(iter(wrong))):
        SamplingParams(**wrong)


def test_numbers_at_the_ends_of_their_ranges():
    assert SamplingParams(logit_bias={3: 100, 4: -100}).logit_bias == {3: 100.0, 4: -100.0}
    with pytest.raises(ValueError, match="from 0 to 9, not 10"):
        TokenBiasLogitsProcessor(10, {10: 1.0})
    with pytest.raises(ValueError, match="from 0 to 9, not -1"):
        TokenBiasLogitsProcessor(10, allowed=[-1])


def test_a_bias_allows_no_token_that_is_not_allowed():
    biased = TokenBiasLogitsProcessor(4, {1: 2.0, 2: 50.0}, allowed=[0, 1])
    assert biased(torch.tensor([[0]]), torch.ones(1, 4)).tolist() == [[1.0, 3.0, float("-inf"), float("-inf")]]


def test_arguments_that_do_not_exist():
    with pytest.raises(TypeError, match=r"LLM\(\) has no argument 'modle' \(did you mean 'model'\?\)"):
        LLM(model="tiny", modle=1)
    with pytest.raises(TypeError, match=r"no argument 'cpu_offload_gb', 'pipeline_parallel_size'.*vllm.md"):
        LLM(model="tiny", cpu_offload_gb=1, pipeline_parallel_size=2)
    with pytest.raises(TypeError, match=r"SamplingParams.* 'temprature' .did you mean 'temperature'"):
        SamplingParams(temprature=0.5)
    with pytest.raises(ValueError, match="did you mean 'tiny'"):
        LLM(model="tniy")
    with pytest.raises(ValueError, match=r"\['trace'\].* is for generate"):
        LLM(model="tiny", speculative_config={"method": "ngram", "trace": True})
    with pytest.raises(ValueError, match=r"\['prediction'\].* is for generate"):
        LLM(model="tiny", speculative_config={"method": "ngram", "prediction": "x"})
    with pytest.raises(ValueError, match="tensor_parallel_size"):
        LLM(model="tiny", tensor_parallel_size=0)


def test_metrics_of_speculation_as_vllms_example_reads_them(tiny_model):
    """Over several calls, under vLLM's names, in vLLM's classes, and as the outputs say."""
    llm = LLM(tiny_model, speculative_config="ngram")
    prompts, params = [[5, 6, 7, 5, 6, 7, 5], [9, 4]], SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
    outputs = [*llm.generate(prompts, params, use_tqdm=False), *llm.generate(prompts[:1], params, use_tqdm=False)]
    found = {each.name: each for each in llm.get_metrics()}
    drafted = sum(output.speculation["num_draft_tokens"] for output in outputs)
    assert found["vllm:spec_decode_num_draft_tokens"].value == drafted > 0
    accepted, by_position = (found[f"vllm:spec_decode_num_accepted_tokens{end}"] for end in ("", "_per_pos"))
    assert isinstance(accepted, metrics.Counter) and isinstance(by_position, metrics.Vector)
    assert accepted.value == sum(by_position.values) == sum(o.speculation["num_accepted_tokens"] for o in outputs)
    assert 0 < found["vllm:spec_decode_num_drafts"].value <= found["hf_specdec_verification_steps"].value
    assert found["hf_specdec_requests"].value == 3 and found["hf_specdec_generation_tokens"].value == 60
    shares = [output.speculation["acceptance_per_position"] for output in outputs]
    read = llm._metrics.registry.get_sample_value
    lengths, name = [output.speculation["mean_accepted_length"] for output in outputs], "hf_specdec_accepted_length"
    labels = {"model_name": llm._metrics._model}
    assert read(f"{name}_count", labels) == 3 and read(f"{name}_sum", labels) == pytest.approx(sum(lengths))
    for bound in ("1.0", "1.5", "16.0"):
        assert read(f"{name}_bucket", labels | {"le": bound}) == sum(length <= float(bound) for length in lengths)
    for position in range(max(map(len, shares))):
        at, name = [each[position] for each in shares if position < len(each)], "hf_specdec_acceptance_ratio"
        labels = {"model_name": llm._metrics._model, "position": str(position)}
        assert read(f"{name}_count", labels) == len(at) and read(f"{name}_sum", labels) == pytest.approx(sum(at))
        for bound in ("0.0", "0.5", "1.0"):
            assert read(f"{name}_bucket", labels | {"le": bound}) == sum(share <= float(bound) for share in at)
    llm.close()


def test_it_is_the_packages_own():
    assert hf_specdec.LLM is LLM and hf_specdec.SamplingParams is SamplingParams


@pytest.mark.parametrize("config", METHODS[:2], ids=["plain", "ngram"])
def test_logprobs_of_the_prompt(make, tiny_model, config):
    """Also where it is read in chunks, beside other rows, and its prefix is cached."""
    llm = make({**(config or {"method": "none"}), "block_size": 4}, max_num_batched_tokens=24)
    llm.generate([TEXTS[4]], GREEDY, use_tqdm=False)
    params = GREEDY.copy(prompt_logprobs=2, n=2)
    outputs = llm.generate([TEXTS[1], TEXTS[4], TEXTS[0]], [GREEDY, params, GREEDY], use_tqdm=False)
    prompt, found = outputs[1].prompt_token_ids, outputs[1].prompt_logprobs
    expected = tiny_model(torch.tensor([prompt])).logits[0].detach().float().log_softmax(-1)
    assert outputs[0].prompt_logprobs is None and found[0] is None and len(found) == len(prompt)
    for row, token, each in zip(expected, prompt[1:], found[1:], strict=False):
        assert set(row.topk(2).indices.tolist()) | {token} == set(each)
        assert all(abs(logprob.logprob - float(row[other])) < 1e-4 for other, logprob in each.items())
    for output in outputs:
        assert output.outputs[0].token_ids == generated(tiny_model, output.prompt_token_ids, GREEDY)


def test_only_the_request_that_makes_the_model_raise_ends(make, tiny_model, monkeypatch):
    """Found among the rows of a step; the others' answers are what they would have been."""
    llm = make({**METHODS[1], "block_size": 4})
    ids = [llm.tokenizer(text)["input_ids"] for text in TEXTS]
    poison = 4000
    assert all(poison not in each for each in ids)
    original = tiny_model.model.embed_tokens.forward

    def raising(input_ids):
        if (input_ids == poison).any():
            raise RuntimeError("poisoned")
        return original(input_ids)

    monkeypatch.setattr(tiny_model.model.embed_tokens, "forward", raising)
    engine = llm.engine
    requests = [engine.add(str(i), None, each, GREEDY) for i, each in enumerate(ids)]
    with engine.decoder.active():
        for _ in range(3):
            engine.step()
        bad = engine.add("bad", None, [3, poison, 5], GREEDY)
        while engine.has_work:
            engine.step()
    assert isinstance(bad.error, RuntimeError) and bad.choices[0].output.token_ids == []
    for request in requests:
        assert request.error is None
        assert request.choices[0].output.token_ids == generated(tiny_model, request.prompt_token_ids, GREEDY)


def test_logprobs_of_a_prompt_that_is_preempted_while_it_is_read(make, tiny_model):
    """Its tokens are read again from the first one; each gets its own log-probability, once."""
    llm = make({"method": "none", "block_size": 4}, max_num_batched_tokens=8)
    prompt = llm.tokenizer(TEXTS[4])["input_ids"]
    request = llm.engine.add("it", None, prompt, GREEDY.copy(prompt_logprobs=0))
    with llm.engine.decoder.active():
        llm.engine.step()
        llm.engine.step()
        assert 1 < len(request.prompt_logprobs) < len(prompt)
        llm.engine.scheduler.preempt(request.choices[0])
    llm.engine.run()
    expected = tiny_model(torch.tensor([prompt])).logits[0].detach().float().log_softmax(-1)
    assert len(request.prompt_logprobs) == len(prompt)
    for row, token, found in zip(expected, prompt[1:], request.prompt_logprobs[1:], strict=False):
        assert found[token].logprob == pytest.approx(float(row[token]), abs=1e-4)


@pytest.mark.slow
def test_memory_is_flat_over_ten_thousand_requests(make):
    """After the first 2,000, which fill the pools and every cache once, 8,000 more add nothing that stays."""
    import ctypes
    from pathlib import Path

    resource = pytest.importorskip("resource")
    llm = make({**METHODS[2], "block_size": 4, "num_blocks": 400}, max_num_seqs=64)
    rng = random.Random(0)

    libc = ctypes.CDLL(None)

    def answered(count):
        prompts = [[rng.randrange(5, 2000) for _ in range(rng.randint(1, 24))] for _ in range(count)]
        params = [GREEDY.copy(max_tokens=rng.randint(1, 4)) for _ in prompts]
        llm.generate(prompts, params, use_tqdm=False)
        if hasattr(libc, "malloc_trim"):
            libc.malloc_trim(0)  # what the allocator holds back is not in use
        resident = int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()
        return resident, len(list(Path("/proc/self/fd").iterdir())), len(list(Path("/proc/self/task").iterdir()))

    before, *held = answered(2000)
    for _ in range(4):
        after, *found = answered(2000)
        assert all(now <= then for now, then in zip(found, held, strict=True))  # an earlier test's engine may end now
    assert after - before < 16 << 20, f"{(after - before) / 2**20:.1f} MiB more"


def test_adapters_of_peft():
    """A wrapped model answers with its adapter; virtual tokens are refused."""
    model = tiny_llama()
    adapted = peft.get_peft_model(model, peft.LoraConfig(task_type="CAUSAL_LM", target_modules=["q_proj", "v_proj"]))
    with torch.no_grad():
        for name, weight in adapted.named_parameters():
            if "lora_B" in name:
                weight.normal_(std=0.2, generator=torch.Generator().manual_seed(len(name)))
    ids = list(range(20, 32))
    expected = generated(adapted, ids, GREEDY)
    llm = LLM(adapted, None, METHODS[1])
    assert llm.generate([ids], GREEDY)[0].outputs[0].token_ids == expected
    with adapted.disable_adapter():
        assert generated(adapted, ids, GREEDY) != expected
    virtual = peft.get_peft_model(tiny_llama(), peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2))
    with pytest.raises(ValueError, match="virtual tokens"):
        LLM(virtual)
