"""Which rows a step of the engine has: how many, which wait, which lose their blocks, and that prompts share it with rows that decode."""

import pytest
from cache_checks import check_blocks

from hf_specdec.serve import LLM, SamplingParams

NGRAM = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 1}
LONG = SamplingParams(temperature=0, max_tokens=60, ignore_eos=True)


@pytest.fixture
def make(tiny_model, tiny_tokenizer):
    made = []

    def make(**more):
        config = {**NGRAM, **{key: more.pop(key) for key in ("block_size", "num_blocks") if key in more}}
        made.append(LLM(tiny_model, tiny_tokenizer, config, max_model_len=256, **more).engine)
        return made[-1]

    yield make
    for engine in made:
        engine.run()
        pool = engine.decoder.cache.pool
        check_blocks(pool)
        assert pool.num_used == 0
        engine.close()


def stepped(engine, count):
    with engine.decoder.active():
        for _ in range(count):
            engine.step()


def ids(choices):
    return [choice.request.id for choice in choices]


def test_256_rows_run_and_the_next_ones_wait(make):
    engine = make(max_num_batched_tokens=2048)
    prompts = {str(i): [5 + i % 7] * (1 + i % 3) for i in range(300)}
    requests = {
        name: engine.add(name, None, prompt, SamplingParams(temperature=0, max_tokens=4, ignore_eos=True))
        for name, prompt in prompts.items()
    }
    stepped(engine, 1)
    names = list(prompts)
    assert ids(engine.scheduler.running) == names[:256] and ids(engine.scheduler.waiting) == names[256:]
    engine.run()
    answers = [request.result().outputs[0].token_ids for request in requests.values()]
    assert all(len(answer) == 4 for answer in answers)
    assert len({(tuple(prompts[name]), tuple(answer)) for name, answer in zip(names, answers, strict=True)}) == len(
        {tuple(prompt) for prompt in prompts.values()}
    )  # equal prompts have equal answers, whenever they ran


def test_a_prompt_waits_until_all_of_it_fits(make):
    """Also if its first chunk would fit, and no smaller one overtakes it."""
    engine = make(block_size=4, num_blocks=24, max_num_batched_tokens=16)
    engine.add("first", None, [5] * 20, LONG)
    stepped(engine, 4)
    engine.add("large", None, [6] * 72, LONG.copy(max_tokens=2))
    engine.add("small", None, [7], LONG.copy(max_tokens=2))
    stepped(engine, 3)
    assert ids(engine.scheduler.running) == ["first"] and ids(engine.scheduler.waiting) == ["large", "small"]
    engine.abort(next(choice.request for choice in engine.scheduler.running))
    stepped(engine, 1)
    assert ids(engine.scheduler.running)[0] == "large"


def test_prompts_are_read_in_the_forward_in_which_others_decode(make, monkeypatch):
    engine = make(max_num_batched_tokens=24)
    first = engine.add("first", None, [5, 6, 7, 8] * 3, LONG)
    stepped(engine, 4)
    engine.add("second", None, list(range(10, 110)), LONG.copy(max_tokens=2))
    forward, calls = engine.decoder.target.forward, []

    def watched(rows, *args, **kwargs):
        calls.append([row.num_tokens for row in rows])
        return forward(rows, *args, **kwargs)

    monkeypatch.setattr(engine.decoder.target, "forward", watched)
    for _ in range(4):
        before = len(first.choices[0].output.token_ids)
        calls.clear()
        stepped(engine, 1)
        ((decoding, chunk),) = calls  # one forward with both
        assert len(first.choices[0].output.token_ids) > before and 1 <= decoding <= 4 and chunk > 4
        assert decoding + chunk <= 24


@pytest.mark.parametrize("priorities", [(0, 0, 0), (0, 5, 1), (3, -1, 0)])
def test_the_last_by_priority_and_arrival_loses_its_blocks(make, priorities, monkeypatch):
    engine = make(block_size=4, num_blocks=30)
    lost, preempt = [], engine.scheduler.preempt
    monkeypatch.setattr(engine.scheduler, "preempt", lambda choice: (lost.append(choice.request.id), preempt(choice)))
    requests = [
        engine.add(str(i), None, [5 + i] * 20, LONG.copy(priority=priority)) for i, priority in enumerate(priorities)
    ]
    while not lost:
        stepped(engine, 1)
    assert lost == [str(max(range(3), key=lambda i: (priorities[i], i)))]
    engine.run()
    assert engine.scheduler.num_preemptions == len(lost)
    plain = make()
    for request in requests:
        alone = plain.add("x", None, request.prompt_token_ids, LONG)
        plain.run()
        assert request.result().outputs[0].token_ids == alone.result().outputs[0].token_ids


def test_a_bar_shows_progress(tiny_model, tiny_tokenizer, capsys):
    llm = LLM(tiny_model, tiny_tokenizer, NGRAM, max_model_len=256)
    llm.generate([[5], [6]], SamplingParams(max_tokens=2))
    assert "Prompts: 100%" in (shown := capsys.readouterr().err) and "2/2" in shown
    llm.generate([[5], [6]], SamplingParams(max_tokens=2), use_tqdm=False)
    assert capsys.readouterr().err == ""
    llm.close()
