"""Rows that go on from step to step in arrays: whatever joins, leaves or loses its blocks between steps, texts are those of rows alone."""

import random

import pytest
import torch
from cache_checks import check_blocks

from hf_specdec.model.onward_rows import OnwardRows
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
        temperature=rng.choice([0, 0, hottest]), seed=rng.randrange(3), max_tokens=rng.choice([1, 2, 7, 30, 50]), ignore_eos=True,
        stop_token_ids=rng.choice([[], [13], [20, 33]]), stop=rng.choice([[], [], [" the"]]), min_tokens=rng.choice([0, 0, 0, 1]),
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
    """Compares every batch of rows that go on with what the rows are packed to one by one; counts them by size."""
    pack, sizes = PackedBatch.pack.__func__, []

    def compared(cls, inputs, *args, **more):
        batch = pack(cls, inputs, *args, **more)
        if isinstance(inputs, OnwardRows):
            sizes.append(len(inputs))
            full = (inputs.starts + 1) // inputs.block_size
            assert [len(table.hashes) for table in inputs.tables] == full.tolist(), "full blocks are declared at once"
            other = pack(cls, list(inputs), *args, **more)
            for name in ("input_ids", "position_ids", "write_slots"):
                assert torch.equal(getattr(batch, name), getattr(other, name)), name
            assert (batch.native_rows().table == other.native_rows().table).all()
            assert (batch.starts, batch.num_keys, batch.logit_index) == (
                other.starts,
                other.num_keys,
                other.logit_index,
            )
        return batch

    monkeypatch.setattr(PackedBatch, "pack", classmethod(compared))
    return sizes


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("seed", range(4))
def test_whatever_happens_between_steps_texts_are_those_of_rows_alone(
    seed, method, tiny_model, tiny_tokenizer, alone, packed
):
    rng = random.Random(seed)
    config = {**METHODS[method], "block_size": rng.choice([1, 4, 16])}
    config["num_blocks"] = 480 // config["block_size"]  # about six texts: some lose their blocks
    engine = LLM(tiny_model, tiny_tokenizer, config, max_model_len=256, max_num_seqs=rng.choice([4, 12])).engine
    pool, requests, aborted = engine.decoder.cache.pool, [], set()
    with engine.decoder.active():
        for step in range(220):
            running = list(engine.scheduler.running)
            if rng.random() < (0.25 if step < 160 else 0):
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
    assert len(packed) > 50 and max(packed) > 3 and engine.scheduler.num_preemptions and aborted
    assert pool.num_used == 0
    engine.close()
