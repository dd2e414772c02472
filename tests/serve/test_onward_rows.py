"""Rows that go on from step to step in arrays: whatever joins, leaves or loses its blocks between steps, texts are those of rows alone."""

import random

import pytest
import torch
from cache_checks import check_blocks

from hf_specdec.core.rows import groups_of
from hf_specdec.model.native import bind
from hf_specdec.model.onward_rows import StepRows
from hf_specdec.model.packed_batch import PackedBatch
from hf_specdec.serve import LLM, SamplingParams

PROMPTS = [[5 + (i * k) % 23 for k in range(1, 2 + i % 19)] for i in range(8)]
PROMPTS += [PROMPTS[7] + [40 + i] * (i % 5) for i in range(4)]  # they begin alike
METHODS = {
    "none": {"method": "none"},
    "ngram": {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 2},
}


def params_of(rng, hottest):
    """Ends by length, by an id that is common in these texts, or by a text; some rows are watched token by token."""
    return SamplingParams(
        temperature=rng.choice([0, 0, hottest]), seed=rng.randrange(3), max_tokens=rng.choice([1, 2, 20, 50, 60]), ignore_eos=True,
        stop_token_ids=rng.choice([[], [], [303, 632], [21, 23]]), stop=rng.choice([[], [], [" the"]]), min_tokens=rng.choice([0, 0, 0, 1]),
        logprobs=rng.choice([None, None, None, 1]), num_speculative_tokens=rng.choice([None, 0, 0]),
    )  # fmt: skip


def answer(request):
    (output,) = request.result().outputs
    return output.token_ids, output.text, output.finish_reason, output.stop_reason


@pytest.fixture(scope="module")
def alone(tiny_model, tiny_tokenizer):
    engine, known = LLM(tiny_model, tiny_tokenizer, METHODS["none"], max_model_len=256).engine, {}

    def alone(prompt, params):
        key = tuple(prompt), repr(params)
        if key not in known:
            request = engine.add("alone", None, prompt, params)
            engine.run()
            known[key] = answer(request)
        return known[key]

    yield alone
    engine.close()


@pytest.fixture
def packed(monkeypatch):
    """The sizes of batches of rows that go on, and what differs from rows that are packed one by one. An engine would survive errors."""
    pack, sizes, wrong = PackedBatch.pack.__func__, [], []

    def compared(cls, inputs, *args, **more):
        batch = pack(cls, inputs, *args, **more)
        for row in inputs:
            full = (row.start + len(row.tokens)) // batch.cache.block_size
            if len(batch.cache.tables[row.seq_id].hashes) < full:
                wrong.append("full blocks are declared at once")
        if isinstance(inputs, StepRows):
            sizes.append((len(inputs.onward.inputs), len(inputs) - len(inputs.onward.inputs)))
            both = (batch, pack(cls, list(inputs), *args, **more))
            tensors = zip(*([b.input_ids, b.position_ids, b.write_slots] for b in both), strict=True)
            wrong.extend(pair for pair in tensors if not torch.equal(*pair))
            chosen = [b.logit_index if b.logit_index is None else b.logit_index.tolist() for b in both]
            records = [
                (b.native_rows().table.tolist(), b.starts, b.num_keys, ids) for b, ids in zip(both, chosen, strict=True)
            ]
            wrong.extend(records if records[0] != records[1] else [])
        return batch

    monkeypatch.setattr(PackedBatch, "pack", classmethod(compared))
    return sizes, wrong


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("seed", range(4))
def test_whatever_happens_between_steps_texts_are_those_of_rows_alone(
    seed, method, tiny_model, tiny_tokenizer, alone, packed, monkeypatch
):
    rng = random.Random(seed)
    if seed % 2:  # steps of many tokens are several calls of the native library
        monkeypatch.setattr(bind, "groups_of", lambda rows, most: groups_of(rows, 16))
    config = {**METHODS[method], "block_size": rng.choice([1, 4, 16])}
    config["num_blocks"] = 480 // config["block_size"]  # about six texts: some lose their blocks
    engine = LLM(tiny_model, tiny_tokenizer, config, max_model_len=256, max_num_seqs=rng.choice([4, 12])).engine
    pool, requests, aborted = engine.decoder.cache.pool, [], set()
    with engine.decoder.active():
        for step in range(220):
            running = list(engine.scheduler.running)
            if rng.random() < (0.3 if step < 160 else 0):
                prompt, params = rng.choice(PROMPTS), params_of(rng, 0.8 if method == "none" else 0)
                requests.append((engine.add(str(step), None, prompt, params), prompt, params))
            if running and rng.random() < 0.04:
                aborted.add(rng.choice(running).request)
                for request in aborted:
                    engine.abort(request)
            elif running and rng.random() < 0.06:
                engine.scheduler.preempt(rng.choice(running))
            if rng.random() < 0.01:
                engine.decoder.forget_prefixes()
            engine.step()
            check_blocks(pool)
    engine.run()
    for request, prompt, params in requests:
        ids, text, *end = alone(prompt, params)
        written, shown, *how = answer(request)
        if request in aborted and how[0] == "abort":
            assert written == ids[: len(written)]
        else:
            assert (written, shown, how) == (ids, text, end)
    sizes, wrong = packed
    assert not wrong
    assert sum(count > 2 for count, _ in sizes) > 15 and sum(count > 2 and more > 0 for count, more in sizes) > 3
    assert engine.scheduler.num_preemptions and aborted
    assert pool.num_used == 0
    engine.close()
