"""The token budget of a step: it holds for every method, and long drafts do not keep other rows from joining."""

import random
from types import SimpleNamespace

import pytest

from hf_specdec import LLM
from hf_specdec.kernels.native import library
from hf_specdec.model.native.program import MOST_TOKENS
from hf_specdec.serve import SamplingParams
from hf_specdec.serve.engine.scheduler import Scheduler

METHODS = {
    "none": {"method": "none"},
    "copies": {"method": "ngram", "num_speculative_tokens": 8, "prompt_lookup_min": 1},
    "chain": {"method": "draft_model", "model": "tiny-draft", "num_speculative_tokens": 5},
    "tree": {"method": "eagle3", "model": "tiny-eagle3", "num_speculative_tokens": 4, "top_k": 4, "total_tokens": 20},
    "recycled": {"method": "token_recycling"},
    "auto": {"method": "ngram", "num_speculative_tokens": 24, "draft_length": "auto", "prompt_lookup_min": 1},
}


class Run:
    """What the steps of an engine did: target tokens of each, rows that were running, and nodes drafted."""

    def __init__(self, model, tokenizer, name, budget, rows, count, longest=40, seed=0):
        llm = LLM(model, tokenizer, METHODS[name], max_model_len=128, max_num_batched_tokens=budget, max_num_seqs=rows)
        self.tokens, self.running = [], []
        target, forward = llm.engine.decoder.target, llm.engine.decoder.target.forward

        def counting(inputs, *args, **kwargs):
            self.tokens.append(sum(row.num_tokens for row in inputs))
            self.running.append(len(llm.engine.scheduler.running))
            return forward(inputs, *args, **kwargs)

        target.forward = counting
        rng = random.Random(seed)
        prompts = [[rng.randrange(10, 2000)] * rng.randint(1, longest) for _ in range(count)]
        lengths = [rng.randint(2, 24) for _ in prompts]
        params = [SamplingParams(temperature=0, max_tokens=length, ignore_eos=True) for length in lengths]
        try:
            outputs = llm.generate(prompts, params, use_tqdm=False)
        finally:
            del target.forward
            llm.close()
        self.answers = [output.outputs[0].token_ids for output in outputs]
        self.drafted = sum(output.speculation["num_draft_tokens"] for output in outputs)


@pytest.mark.parametrize("name", METHODS)
def test_no_step_exceeds_the_budget(tiny_model, tiny_tokenizer, name):
    for longest in (40, 1):  # prompts of one token join all at once
        run = Run(tiny_model, tiny_tokenizer, name, budget=48, rows=12, count=30, longest=longest)
        assert max(run.tokens) <= 48 and max(run.running) > 8, run.tokens
        plain = Run(tiny_model, tiny_tokenizer, "none", budget=2048, rows=30, count=30, longest=longest)
        assert run.answers == plain.answers
        assert run.drafted == 0 if name == "none" else run.drafted > 0 or name == "auto"  # which drafts where that pays


@pytest.mark.parametrize("name", ["copies", "chain", "tree", "auto"])
def test_long_drafts_leave_prompts_their_part(tiny_model, tiny_tokenizer, name):
    """With drafts that could fill the budget, requests take no more steps than without: rows that wait for each other's drafts would cost
    a multiple, where a step of many tokens costs what one of few does, as on a GPU."""
    plain, run = (Run(tiny_model, tiny_tokenizer, each, budget=96, rows=32, count=64) for each in ("none", name))
    assert (run.drafted > 100 or name == "auto") and max(
        run.running
    ) > 20  # auto drafts where that pays on this machine
    most = len(plain.tokens)
    assert len(run.tokens) <= most, (len(run.tokens), len(plain.tokens))


@pytest.mark.skipif(library() is None, reason="the native library is not compiled")
def test_without_a_budget_steps_are_as_large_as_one_native_call(tiny_model, tiny_tokenizer, monkeypatch):
    """As many tokens as one call runs, while few rows decode; for models without such calls, the usual number."""
    size = {"budget": None, "rows": 12, "count": 40, "longest": 100}
    run = Run(tiny_model, tiny_tokenizer, "copies", **size)
    assert max(run.tokens) == MOST_TOKENS and max(run.running) == 12
    monkeypatch.setitem(METHODS, "none", {"method": "none", "native": False})
    plain = Run(tiny_model, tiny_tokenizer, "none", **size)
    assert max(plain.tokens) > 1.5 * MOST_TOKENS and run.answers == plain.answers


def test_the_budget_leaves_prompts_at_least_half():
    target = SimpleNamespace(most_tokens_of_one_call=256)
    scheduler = Scheduler(SimpleNamespace(target=target), 256, None)
    assert [scheduler._budget(rows) for rows in (0, 128, 129, 256)] == [256, 256, 2048, 2048]
    target.most_tokens_of_one_call = 0
    assert scheduler._budget(0) == 2048
    assert Scheduler(SimpleNamespace(target=target), 256, 7)._budget(0) == 7
